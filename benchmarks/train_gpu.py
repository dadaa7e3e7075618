"""Training steps of llamas of 1B and 8B dims on one GPU, beside the same in torch: the second part of `on_gpu.sh`.

Contestants are processes of their own, one after the other: `TrainStep`, weights in bf16 and Adam's moments in float32;
and transformers' Llama under torch.compile with its fused attention and torch's fused AdamW, all in bf16, moments too:
it moves fewer bytes. Without torch a case has no ratio.

MFU is against the datasheet's dense bf16 peak, with 6 FLOPs per matrix parameter and token and 12 B T T N H per layer,
the masked half of attention included (How to Scale Your Model, section 4); "causal" counts half of attention. Training
with products in fp8 is planned, not executed, in this version: `kernels` and `bench` have products in fp8 alone.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from gpu_part import Part, contestant, model_of, this_chip, torch_llama

STATE = "bf16-adam"
STEPS, WARM = 10, 3
GOAL_RATIO, GOAL_MFU = 1.0, 0.5
MOST_S, MARGIN_S = 120, 15
"""Seconds of a contestant in a case, compilation included, and by which it may pass the part's."""


class Case(msgspec.Struct, frozen=True):
    """A model by its dims, how many layers of it, and the rows of a batch."""

    name: str
    model: str
    layers: int
    batch_seqs: int
    seq_len: int
    remat: str = "none"


CASES = (Case("1b-4096", "llama3.2-1b", 16, 8, 4096), Case("8b-4096", "llama3-8b", 8, 8, 4096))
TINY = tuple(msgspec.structs.replace(case, layers=2, batch_seqs=2, seq_len=64) for case in CASES)


def batches(case: Case, vocab_size: int) -> list[np.ndarray]:
    """The same random rows for both."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, (case.batch_seqs, case.seq_len + 1), dtype=np.int32) for _ in range(4)]


# -- the contestants ---------------------------------------------------------------------------------------


def timed(step: Callable[[int], float]) -> dict[str, Any]:
    """Runs steps, each of which returns its loss: seconds of the first, the times of those that count, and losses."""
    seconds, losses = [], []
    for number in range(WARM + STEPS):
        started = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - started)
    return {"first_step_s": seconds[0], "seconds": seconds[WARM:], "losses": losses}


def ours(case: Case, *, tiny: bool) -> dict[str, Any]:
    """The product's step."""
    import jax

    from meshwright.parallel.train_step import TrainStep
    from meshwright.spec.strategy import Strategy, make_mesh
    from meshwright.train.optimizers.table import make_optimizer
    from meshwright.train.settings import TrainSettings

    model = model_of(case.model, layers=case.layers, tiny=tiny)
    settings = TrainSettings(learning_rate=3e-4, schedule="constant", warmup_steps=0)
    one = TrainStep(
        model,
        Strategy(mesh=make_mesh({}), remat=case.remat, state=STATE),
        optimizer=make_optimizer(model, settings, STATE),
    )
    state = one.init(0)
    given = [one.place({"tokens": rows[:, :-1], "labels": rows[:, 1:]}) for rows in batches(case, model.vocab_size)]

    def step(number: int) -> float:
        nonlocal state
        state, metrics = one.step(state, given[number % len(given)])
        return float(metrics.loss)

    times = timed(step)
    return times | {"peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)}


def theirs(case: Case, *, tiny: bool) -> dict[str, Any]:
    """Transformers' Llama under torch.compile; on other devices than GPUs without inductor."""
    import torch
    from torch.nn.functional import cross_entropy

    model, gpu = model_of(case.model, layers=case.layers, tiny=tiny), torch.cuda.is_available()
    net = torch_llama(model, case.seq_len).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=gpu)
    given = [torch.from_numpy(rows).long().to(net.device) for rows in batches(case, model.vocab_size)]

    @torch.compile(backend="inductor" if gpu else "eager")
    def loss_of(rows: Any) -> Any:
        logits = net(input_ids=rows[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def step(number: int) -> float:
        loss = loss_of(given[number % len(given)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    times = timed(step)
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    return times | {"peak_bytes": peak, "torch": torch.__version__}


CONTESTANTS: dict[str, Callable[..., dict[str, Any]]] = {"meshwright": ours, "torch": theirs}


# -- beside each other -------------------------------------------------------------------------------------


def predicted_bytes(case: Case, *, tiny: bool) -> float:
    """The memory that the product predicts for the chip."""
    from meshwright.cost.memory.chip import total_bytes
    from meshwright.cost.setting import Setting
    from meshwright.spec.cluster import parse_cluster
    from meshwright.spec.strategy import Strategy, make_mesh

    model = model_of(case.model, layers=case.layers, tiny=tiny)
    setting = Setting(model, parse_cluster(f"{this_chip().name}:1"), job_of(case))
    return float(total_bytes(setting.memory(Strategy(mesh=make_mesh({}), remat=case.remat, state=STATE))))


def job_of(case: Case) -> Any:
    """The case as a job."""
    from meshwright.spec.job import Job

    return Job(batch_seqs=case.batch_seqs, seq_len=case.seq_len)


def main() -> None:
    """Runs the cases one after the other."""

    def more(parser: Any) -> None:
        parser.add_argument("--case", choices=[case.name for case in CASES])
        parser.add_argument("--contend", choices=CONTESTANTS, help="run one contestant of --case, and print JSON")

    if "--contend" in sys.argv:
        found = sys.argv[sys.argv.index("--contend") + 1], sys.argv[sys.argv.index("--case") + 1]
        tiny = "--tiny" in sys.argv
        case = next(one for one in (TINY if tiny else CASES) if one.name == found[1])
        print(json.dumps(CONTESTANTS[found[0]](case, tiny=tiny)))
        return
    part = Part("train", "at least 1.00x torch, and 50% MFU", __doc__, more=more)
    judged: list[tuple[float | None, float]] = []

    def run(case: Case) -> None:
        from meshwright.cost.work.ops import model_flops

        model, job = model_of(case.model, layers=case.layers, tiny=part.tiny), job_of(case)
        tiny = ["--tiny"] * part.tiny
        found = {
            kind: contestant(
                __file__, "--case", case.name, "--contend", kind, *tiny, most_s=min(MOST_S, part.left_s + MARGIN_S)
            )
            for kind in CONTESTANTS
        }
        if "error" in found["meshwright"]:
            raise RuntimeError(found["meshwright"]["error"])
        for one in found.values():
            if "error" not in one:
                one["step_s"] = statistics.median(one["seconds"])
                one["tokens_per_s"] = job.tokens_per_step / one["step_s"]
        mine, other = found["meshwright"], found["torch"]
        peak = this_chip().peak_flops["bf16"]
        mfu, causal = (float(model_flops(model, job, causal=c)) / mine["step_s"] / peak for c in (False, True))
        ratio = other["step_s"] / mine["step_s"] if "step_s" in other else None
        expected = predicted_bytes(case, tiny=part.tiny)
        beside = f"{ratio:.2f}x torch ({other['tokens_per_s']:,.0f})" if ratio else f"torch: {other['error']}"
        peak_memory = f"{mine['peak_bytes'] / 1e9:.3g} GB" if mine["peak_bytes"] else "not told by this backend"
        judged.append((ratio, mfu))
        part.keep(
            f"{case.name}, {model.num_layers} layers, {case.batch_seqs} x {case.seq_len}: "
            f"{mine['step_s'] * 1e3:.1f} ms, {mine['tokens_per_s']:,.0f} tokens/s, MFU {mfu:.1%} ({causal:.1%} causal)"
            f"; {beside}; memory {peak_memory}, predicted {expected / 1e9:.3g} GB",
            case=case.name, layers=model.num_layers, batch_seqs=case.batch_seqs, seq_len=case.seq_len, ratio=ratio,
            remat=case.remat, state=STATE, mfu=mfu, mfu_causal=causal, predicted_bytes=expected, **found,
        )  # fmt: skip

    cases = TINY if part.tiny else CASES
    part.each([case for case in cases if part.options.case in (None, case.name)], run)
    ratios, shares = [ratio for ratio, _ in judged if ratio], [mfu for _, mfu in judged]
    least = f"at least {min(ratios):.2f}x torch" if ratios else "no torch to compare with"
    met = len(ratios) == len(judged) and min(ratios, default=0) >= GOAL_RATIO and min(shares, default=0) >= GOAL_MFU
    part.close(f"{least}, MFU {min(shares):.1%} at least" if shares else "nothing measured", met)


if __name__ == "__main__":
    main()
