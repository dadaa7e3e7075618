"""The step that serves on one GPU, over the time in which HBM moves its bytes: the third part of `on_gpu.sh`.

A model of 8B dims in bf16, fp8 and int4, with 1, 8, 64 and 256 sequences that decode at 1,024 positions: the packed
step of the engine, dispatched again and again, with its pages in any order. The roofline is the bytes of weights and of
the cache that the step reads, by the derivation, over the datasheet's rate. Beside it transformers' `generate` with a
static cache and its compiled step, in bf16, in a process of its own: the seconds of a token after the first ones.
"""

import json
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from gpu_part import Part, contestant, model_of, this_chip, torch_llama

LENGTH, NEW_TOKENS = 1024, 64
GOAL = 1.25
JUDGED = (1, 8, 64)
STATE = "bf16-adam"
MOST_S = 90
"""Seconds of `generate` at one size, compilation included."""


class Case(NamedTuple):
    """How weights are stored ("": bf16), and sequences."""

    name: str
    weights: str
    sequences: int


WEIGHTS, SEQUENCES = ("", "fp8", "int4"), (8, 64, 1, 256)


def length(tiny: bool) -> int:
    """Positions of a sequence."""
    return 64 if tiny else LENGTH


class Served:
    """The weights of a model in one dtype, and steps with them."""

    def __init__(self, weights: str, tiny: bool, *, loads: bool = True) -> None:
        from meshwright.algebra.generation.program import Storage
        from meshwright.nn.weights import init_params
        from meshwright.serve.layout import with_usual
        from meshwright.serve.options import EngineOptions
        from meshwright.spec.strategy import Strategy, make_mesh

        self.tiny, self.model = tiny, model_of("llama3-8b", tiny=tiny)
        self.strategy = Strategy(mesh=make_mesh({}), state=STATE)
        usual = with_usual(EngineOptions(), jax.default_backend(), "bf16", self.strategy)
        self.storage: Any = Storage(weights=weights, page_len=usual.page_len)  # type: ignore[arg-type]
        if loads:
            step = self.step(1)
            self.params = step.place(jax.jit(partial(init_params, self.model, 0, dtype=step.dtype))())

    def step(self, sequences: int) -> Any:
        """The step with room for so many sequences."""
        from meshwright.parallel.generation.packed_step import PackedStep

        size = {"max_len": length(self.tiny), "max_seqs": sequences, "storage": self.storage}
        return PackedStep(self.model, self.strategy, **size)

    def decode_s(self, sequences: int) -> dict[str, Any]:
        """Seconds of a step, of many that are dispatched without a pause, and of the first one."""
        from meshwright.parallel.generation.packed_step import PackedRows, slots_of

        step, rng = self.step(sequences), np.random.default_rng(0)
        count, pages, last = np.arange(sequences), step.cache_sizes["Bp"], length(self.tiny) - 1
        tables = rng.permutation(sequences * pages).reshape(sequences, pages)
        positions = np.full(sequences, last)
        rows = PackedRows(
            tokens=rng.integers(0, self.model.vocab_size, sequences), sources=np.full(sequences, -1),
            positions=positions, slots=slots_of(positions, tables, count, step.storage.page_len), first=count,
            counts=np.ones_like(count), lengths=positions + 1, pages=tables, last=count,
        )  # fmt: skip
        latest, cache = jax.numpy.zeros(sequences, jax.numpy.int32), step.init_cache()
        started = time.perf_counter()
        logits, cache = jax.block_until_ready(step.step(self.params, cache, latest, rows, 1))
        first_s = time.perf_counter() - started
        found = []
        for times in (2, *[4 if self.tiny else 20] * 3):
            started = time.perf_counter()
            for _ in range(times):
                logits, cache = step.step(self.params, cache, latest, rows, 1)
            jax.block_until_ready((logits, cache))
            found.append((time.perf_counter() - started) / times)
        if not np.isfinite(np.asarray(logits, np.float32)).all():
            raise RuntimeError("logits are not finite")
        return {"seconds": sorted(found[1:])[1], "first_step_s": first_s}

    def priced(self, sequences: int, rates: Any = None) -> tuple[float, float]:
        """Seconds in which HBM moves what the step reads, and seconds that are predicted by ``rates``."""
        from meshwright.simulate.step_prices import StepPrices
        from meshwright.spec.cluster import parse_cluster

        step = self.step(sequences)
        prices = StepPrices(self.model, step.strategy, step.derived)
        prices.set_rates(parse_cluster(f"{this_chip().name}:1"), rates, step.storage)
        cached = sequences * (length(self.tiny) - 1)
        held = [sequences, cached, 0, 0, cached + sequences, sequences]
        ((seconds, weights, cache, _),) = prices.of([held])
        return float(weights + cache) / this_chip().hbm_bytes_per_s, float(seconds)


def generate(sequences: int, tiny: bool) -> dict[str, Any]:
    """Transformers' seconds of a token, every prompt in one batch."""
    import torch

    model, gpu = model_of("llama3-8b", tiny=tiny), torch.cuda.is_available()
    net = torch_llama(model, 2 * LENGTH).eval()
    new = 8 if tiny else NEW_TOKENS
    prompts = torch.randint(0, model.vocab_size, (sequences, length(tiny) - new), device=net.device)

    def seconds(num_tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            net.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                do_sample=False, cache_implementation="static", **({} if gpu else {"disable_compile": True}),
            )  # fmt: skip
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(new)
    found = sorted((seconds(new) - seconds(2)) / (new - 2) for _ in range(1 if tiny else 3))
    return {"seconds": found[len(found) // 2], "torch": torch.__version__}


def main() -> None:
    """Runs the cases, those of one dtype with the same weights, and the peer behind those of bf16."""
    if "--contend" in sys.argv:
        print(json.dumps(generate(int(sys.argv[-1]), "--tiny" in sys.argv)))
        return
    goal = f"within {GOAL}x of the HBM roofline at {', '.join(map(str, JUDGED))} sequences"
    part = Part("serve", goal, __doc__)
    judged: list[float] = []
    own: dict[int, float] = {}

    def decode(served: list[Served], case: Case) -> None:
        if not served:
            served.append(Served(case.weights, part.tiny))
        found = served[0].decode_s(case.sequences)
        roofline_s, _ = served[0].priced(case.sequences)
        times = found["seconds"] / roofline_s
        judged.extend([times] * (case.sequences in JUDGED))
        if not case.weights:
            own[case.sequences] = found["seconds"]
        part.keep(
            f"{case.name}: {found['seconds'] * 1e3:.2f} ms, {times:.2f}x the roofline of {roofline_s * 1e3:.2f} ms; "
            f"{case.sequences / found['seconds']:,.0f} tokens/s; first step {found['first_step_s']:.1f} s",
            case=case.name, weights=case.weights or "bf16", sequences=case.sequences, roofline_s=roofline_s, over=times,
            **found,
        )  # fmt: skip

    def beside(case: Case) -> None:
        name, _, sequences = case
        most_s = min(MOST_S, part.left_s)
        found = contestant(__file__, *["--tiny"] * part.tiny, "--contend", "torch", str(sequences), most_s=most_s)
        words, ratio = found.get("error", ""), None
        if "seconds" in found:
            ratio = found["seconds"] / own[sequences]
            words = f"{found['seconds'] * 1e3:.2f} ms a token, {ratio:.2f}x ours"
        part.keep(f"{name}: {words}", case=name, ratio=ratio, torch=found)

    peers = [Case(f"generate, bf16, {n} sequences", "", n) for n in SEQUENCES]
    for weights in WEIGHTS:
        sequences = SEQUENCES[:2] if part.tiny else SEQUENCES
        part.each([Case(f"{weights or 'bf16'}, {n} sequences", weights, n) for n in sequences], partial(decode, []))
        if not weights:
            part.each(peers[:1], beside)
    part.each([] if part.tiny else peers[1:3], beside)
    worst = max(judged, default=0.0)
    part.close(
        f"at most {worst:.2f}x" if judged else "nothing measured",
        len(judged) == len(WEIGHTS) * len(JUDGED) and worst <= GOAL,
    )


if __name__ == "__main__":
    main()
