"""Nine plans compiled for hardware that is not there: time, memory and collectives beside the prediction.

``python benchmarks/verify.py [NAME ...] [--out FILE]`` needs the extras tpu and gpu; cases whose compiler is missing
are left out, and named. The plans are those that `plan` finds first for the axes given here.
"""

import argparse
import datetime
import statistics
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from meshwright.algebra.generation import Storage
from meshwright.api.proving import ProofOptions, prove_strategy
from meshwright.api.rates import rates_for
from meshwright.cli.asked import job_of_step
from meshwright.core.errors import CannotRunError
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import AS_RUN, Assumptions, Strategy, make_mesh, mesh_words
from meshwright.verify.proof import Proof
from meshwright.verify.targets import is_installed, target_of

TIMEOUT_S = 300.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One job on one cluster. ``axes`` are kept fixed; ``strategy`` is what else is given; a whole mesh is not planned
    where the step generates or is known not to fit."""

    name: str
    model: str
    cluster: str
    batch_seqs: int
    seq_len: int
    axes: dict[str, int] = {}
    strategy: dict[str, Any] = {}
    assumptions: Assumptions = AS_RUN
    step: str = "train"
    weights: str = "as they are"
    planned: bool = True
    fits: bool = True


CASES = (
    Case(name="8b-v5e", model="llama3-8b", cluster="v5e:4x4", batch_seqs=16, seq_len=4096),
    Case(name="70b-v5p", model="llama3-70b", cluster="v5p:16x16x32", batch_seqs=1024, seq_len=4096),
    Case(name="70b-v6e", model="llama3-70b", cluster="v6e:16x16", batch_seqs=256, seq_len=4096),
    Case(name="405b-v5p", model="llama3-405b", cluster="v5p:16x20x28", batch_seqs=1120, seq_len=4096),
    Case(
        name="405b-h100",
        model="llama3-405b",
        cluster="h100:8x2048",
        batch_seqs=2048,
        seq_len=8192,
        axes={"pipeline": 2, "tensor": 8},
    ),
    Case(name="mixtral-h100", model="mixtral-8x7b", cluster="h100:8x8", batch_seqs=256, seq_len=4096),
    Case(
        name="mixtral-bounded",
        model="mixtral-8x7b",
        cluster="h100:8x8",
        batch_seqs=256,
        seq_len=4096,
        assumptions=Assumptions(imbalance=1.25),
    ),
    Case(
        name="70b-h100-stages",
        model="llama3-70b",
        cluster="h100:8x32",
        batch_seqs=512,
        seq_len=4096,
        axes={"pipeline": 4},
    ),
    Case(name="8b-2v5e", model="llama3-8b", cluster="2*v5e:4x4", batch_seqs=32, seq_len=4096),
    Case(
        name="70b-int8-v5e",
        model="llama3-70b",
        cluster="v5e:4x4",
        batch_seqs=16,
        seq_len=8192,
        axes={"data": 2, "tensor": 8},
        step="generate",
        weights="int8",
        planned=False,
    ),
    Case(
        name="70b-v5e-refused",
        model="llama3-70b",
        cluster="v5e:4x4",
        batch_seqs=16,
        seq_len=4096,
        axes={"fsdp": 4, "tensor": 4},
        strategy={"remat": "full"},
        planned=False,
        fits=False,
    ),
    Case(
        name="70b-h100-refused",
        model="llama3-70b",
        cluster="h100:8x1",
        batch_seqs=8,
        seq_len=4096,
        axes={"fsdp": 8},
        strategy={"remat": "full"},
        planned=False,
        fits=False,
    ),
)


def prove_case(case: Case) -> Proof:
    """The proof of a case at partition depth."""
    model, cluster = load_model(case.model), parse_cluster(case.cluster)
    job = Job(batch_seqs=case.batch_seqs, seq_len=case.seq_len)
    calibration, assumptions = None, case.assumptions
    if case.planned:
        calibration = rates_for(cluster, None, fitted=True)
        setting = Setting(model, cluster, job, calibration, assumptions=assumptions)
        found = rank_plans(setting, axes=case.axes, overrides=case.strategy, top=1).strategies[0]
        strategy, cluster, job = found.strategy, found.cluster, found.job
    else:
        strategy = Strategy(mesh=make_mesh(case.axes), state="bf16-adam", **case.strategy)
    setting = Setting(
        model,
        cluster,
        job_of_step(job, case.step),
        calibration,
        Storage(quantised=case.weights == "int8"),
        assumptions,
    )
    return prove_strategy(setting, strategy, ProofOptions(timeout_s=TIMEOUT_S, asked=case.step))


def lines_of(case: Case, proof: Proof) -> list[str]:
    """Two lines: the plan; then what it took and what was found."""
    strategy, outcome = proof.request.strategy, proof.outcome
    how = f"{mesh_words(strategy.mesh)}; {strategy.num_microbatches} microbatches; remat {strategy.remat}"
    head = f"{case.name:17s} {case.cluster:13s} {how}"
    if proof.memory is None:
        return [head, f"{'':17s} {outcome.ended}: {proof.refusal}"]
    memory = proof.memory
    rest = (
        f"{'':17s} {outcome.cpu_s:5.1f} s CPU {outcome.max_rss_bytes / 1e9:5.2f} GB | "
        f"needs {memory.needed / 1e9:6.1f} GB, "
        f"predicted {memory.predicted / 1e9:6.1f} ({memory.error:+.1%}), has {memory.available / 1e9:5.1f}"
    )
    lines = [head, rest + ("" if memory.fits else " REFUSED")]
    if proof.traffic is not None:
        sent = proof.traffic
        lines.append(
            f"{'':17s} sends {sent.compiled_bytes / 1e9:.1f} GB, derived {sent.derived_bytes / 1e9:.1f}; "
            f"without a name {sent.remainder:.2%}"
        )
        lines += [f"{'':19s}{one.name}: {one.extra_bytes / 1e9:+.2f} GB, {one.where}" for one in sent.differences[:4]]
    return lines + ([f"{'':17s} {proof.traffic_error}"] if proof.traffic_error else [])


def versions() -> str:
    """What compiled."""
    found = []
    for name in ("jax", "libtpu", "jax-cuda13-plugin"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out")
    asked = parser.parse_args()
    lines = [f"{datetime.date.today().isoformat()}, {versions()}, partition depth", ""]
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for case in CASES:
        if asked.names and case.name not in asked.names:
            continue
        platform = target_of(parse_cluster(case.cluster)).platform
        if not is_installed(platform):
            lines.append(f"{case.name:17s} left out: no compiler for {platform}")
            print(lines[-1], flush=True)
            continue
        try:
            proof = prove_case(case)
        except CannotRunError as error:
            lines.append(f"{case.name:17s} not planned: {error}")
            wrong.append(case.name)
            print(lines[-1], flush=True)
            continue
        found = lines_of(case, proof)
        print("\n".join(found), flush=True)
        lines += found
        if proof.memory is None or proof.memory.fits is not case.fits:
            wrong.append(case.name)
        elif case.fits:
            errors[case.name] = abs(proof.memory.error)
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        lines += ["", f"predicted memory: median error {statistics.median(errors.values()):.1%}, "]
        lines[-1] += f"worst {errors[worst]:.1%} ({worst}), over {len(errors)} plans"
    lines.append(f"not as expected: {', '.join(wrong) or 'none'}")
    print("\n".join(lines[-2:]))
    if asked.out:
        with open(asked.out, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
