"""Steps of planned services, compiled for absent chips: memory and collectives beside the prediction.

``python -m benchmarks.verify_serving [--only PATTERN] [--out FILE]`` needs the extras tpu and gpu. `service`
chooses the engines: the first plan of each of `SERVED` with weights and caches in bf16 or int8 (fp8 is planned and not
executed), and the first in bf16 alone. `LAID_OUT` has engines of further layouts. The step of generation and the
prefill are proved at partition depth, each on the engine's own part and placement. "arrays" and "bytes" compare all
collectives, "unnamed" is the share of bytes whose difference has no name.
"""

import argparse
import datetime
import itertools
import re
from collections.abc import Callable, Iterator

import msgspec
from benchmarks.verify import TIMEOUT_S, versions

from meshwright.api.proving import ProofOptions, prove_strategy
from meshwright.api.rates import rates_for
from meshwright.cost.setting import Setting
from meshwright.plan.serving.engines import phase_setting
from meshwright.plan.serving.fleet import engine_strategy, engine_words
from meshwright.plan.serving.planner import AS_PUBLISHED, plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes, stored_dtypes
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy
from meshwright.verify.proof import Proof

SERVED = (
    ("llama3-70b", "v5e:8x8", "h100:8x4"),
    ("llama3-405b", "v5p:4x4x4", "h100:8x8"),
    ("qwen3-235b-a22b", "v6e:8x8", "h200:8x8"),
    ("deepseek-v3", "v5p:4x4x8", "h200:8x16"),
    ("gemma2-27b", "v6e:4x4", "b200:8x2"),
    ("gpt-oss-120b", "v5p:2x4x4", "h100:8x4"),
)
"""Model, TPUs, GPUs: dense with grouped heads, the same with heads repeated, experts, latent attention with experts,
windows and capped logits, windows and sinks with experts."""

SERVICE = Service(prompt_len=8192, output_len=512, tpot_s=0.1)

EXECUTED = (("bf16", "int8"), ("bf16",))
"""Dtypes that engines are chosen among: those of the first plan, and of the first with nothing quantised."""


LAID_OUT = (
    ("llama3-70b", "v5e:4x8", "sequences", {"context": 4, "tensor": 8}, "decode", 64),
    ("llama3-70b", "v5e:4x8", "positions", {"context": 4, "tensor": 8}, "decode", 16),
    ("llama3-70b", "v5e:4x8", "widths", {"context": 2, "tensor": 16}, "decode", 32),
    ("llama3-70b", "v5e:4x8", "widths", {"context": 2, "tensor": 16}, "prefill", 2),
    ("llama3-70b", "v5e:4x8", "gathered", {"context": 4, "tensor": 8}, "prefill", 4),
    ("llama3-70b", "h100:8x2", "sequences", {"context": 2, "tensor": 8}, "decode", 32),
    ("llama3-405b", "h100:8x2", "gathered", {"context": 4, "tensor": 4}, "prefill", 1),
    ("mixtral-8x7b", "v6e:2x4", "prompts", {"expert": 4, "tensor": 2}, "prefill", 8),
    ("qwen3-235b-a22b", "h200:8x1", "prompts", {"expert": 4, "tensor": 2}, "prefill", 16),
)
"""Model, part, layout, mesh, phase and sequences of engines in bf16 that no first plan above had."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a planned service: the engine, its dtypes, the phase and the positions of its cache."""

    model: str
    part: Cluster
    strategy: Strategy
    batch_seqs: int
    dtypes: StoredDtypes
    phase: str
    length: int

    @property
    def engine(self) -> str:
        """``"tp8, batch 32, int8"``."""
        return f"{engine_words(self.strategy)}, batch {self.batch_seqs}, {self.dtypes.words}"

    def prove(self) -> Proof:
        """Returns the proof at partition depth."""
        job, rates = Job(batch_seqs=1, seq_len=1), rates_for(self.part, None, fitted=True)
        setting = Setting(load_model(self.model), self.part, job, rates)
        step = phase_setting(setting, self.phase, self.dtypes, self.length, self.batch_seqs)
        return prove_strategy(step, self.strategy, ProofOptions(timeout_s=TIMEOUT_S))


def cases(model: str, cluster: str, stored: tuple[str, ...]) -> Iterator[Case]:
    """Yields both steps of the first plan of the service with weights and caches in some dtypes."""
    chips = parse_cluster(cluster)
    setting = service_setting(load_model(model), chips, rates_for(chips, None, fitted=True))
    best = plan_service(setting, SERVICE, stored=stored_dtypes(stored, stored, chip=chips.chip)).plans[0]
    dtypes = StoredDtypes(best.weights, best.cache)
    for phase, pool, length in (
        ("decode", best.generate, SERVICE.max_len),
        ("prefill", best.prefill, SERVICE.prompt_len),
    ):
        yield Case(
            model=model,
            part=pool.part,
            strategy=pool.strategy,
            batch_seqs=pool.batch_seqs,
            dtypes=dtypes,
            phase=phase,
            length=length,
        )


def laid_out() -> Iterator[Case]:
    """Yields the steps of `LAID_OUT`."""
    for model, part, layout, mesh, phase, batch_seqs in LAID_OUT:
        yield Case(
            model=model,
            part=parse_cluster(part),
            strategy=engine_strategy(mesh, "", layout),
            batch_seqs=batch_seqs,
            dtypes=AS_PUBLISHED,
            phase=phase,
            length=SERVICE.max_len if phase == "decode" else SERVICE.prompt_len,
        )


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of a proof: memory, number of collectives and their bytes, bytes without a name; and names."""

    memory: float
    arrays: float
    sent: float
    unnamed: float
    names: tuple[str, ...]


def found_in(proof: Proof) -> Found | None:
    """Returns the errors of a proof, None if nothing was compiled."""
    if proof.memory is None or proof.traffic is None:
        return None
    sent = proof.traffic
    derived, compiled = (sum(getattr(row, f"{what}_arrays") for row in sent.rows) for what in ("derived", "compiled"))
    return Found(
        memory=proof.memory.error,
        arrays=compiled / derived - 1 if derived else 0.0,
        sent=sent.compiled_bytes / sent.derived_bytes - 1 if sent.derived_bytes else 0.0,
        unnamed=sent.remainder,
        names=tuple(dict.fromkeys(one.name for one in sent.differences)),
    )


HEADING = ("model", "part", "phase", "engine", "GB", "memory", "arrays", "bytes", "unnamed", "names")
WIDTHS = (15, 11, 7, 30, 6, 7, 6, 6, 7, 0)


def line(cells: tuple[str, ...]) -> str:
    """Returns one row of the table."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def row_of(case: Case, proof: Proof) -> str:
    """Returns what was found in one line."""
    where = (case.model, case.part.short_name, case.phase, case.engine)
    found = found_in(proof)
    if found is None or proof.memory is None:
        return line((*where, "-", "-", "-", "-", "-", (proof.refusal or proof.traffic_error)[:200]))
    words = ", ".join((*found.names, *(() if proof.memory.fits else ("DOES NOT FIT",))))
    numbers = (f"{proof.memory.needed / 1e9:.1f}", f"{found.memory:+.1%}", f"{found.arrays:+.1%}", f"{found.sent:+.1%}")
    return line((*where, *numbers, f"{found.unnamed:.1%}", words))


def run(only: str, say: Callable[[str], None]) -> None:
    """Plans, compiles and says what was found."""
    results: list[Found | None] = []
    say(line(HEADING))
    served = (
        case
        for model, *clusters in SERVED
        for cluster, stored in itertools.product(clusters, EXECUTED)
        for case in cases(model, cluster, stored)
    )
    for case in itertools.chain(served, laid_out()):
        if re.search(only, f"{case.model} {case.part.short_name} {case.phase} {case.dtypes.words} {case.engine}"):
            proof = case.prove()
            results.append(found_in(proof))
            say(row_of(case, proof))
    good = [one for one in results if one is not None]
    say("")
    say(
        f"{len(good)} of {len(results)} compiled; memory within 5% on {sum(abs(one.memory) <= 0.05 for one in good)}, "
        f"collectives within 2% or named on {sum(one.unnamed <= 0.02 for one in good)} (bytes within 2% without names "
        f"on {sum(abs(one.sent) <= 0.02 for one in good)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help='a pattern found in "MODEL PART PHASE DTYPES ENGINE"')
    parser.add_argument("--out")
    asked = parser.parse_args()
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    say(
        f"{datetime.date.today().isoformat()}, {versions()}, partition depth, {SERVICE.prompt_len:,} tokens of prompt "
        f"and {SERVICE.output_len:,} of output, TPOT at most {SERVICE.tpot_s} s"
    )
    run(asked.only, say)
    if asked.out:
        with open(asked.out, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
