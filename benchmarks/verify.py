"""Plans drawn at random, compiled for hardware that is not there: memory and collectives beside the prediction.

``python benchmarks/verify.py [--seed N] [--plans N] [--out FILE]`` needs the extras tpu and gpu. A draw is a model of
the catalogue, a chip with a compiler, a cluster, a batch, and one of the strategies that `plan` lists: none is chosen
by hand and none is left out. A draw for which `plan` finds nothing is drawn again, counted and named.
"""

import argparse
import datetime
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import msgspec

from meshwright.api.proving import ProofOptions, prove_strategy
from meshwright.api.rates import rates_for
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.setting import Setting
from meshwright.plan.plan_file import Plan
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import mesh_words
from meshwright.verify.proof import Proof
from meshwright.verify.targets import is_installed, target_of

SEED = 16
"""Seed of the published draw; the memory model was made with others."""

TIMEOUT_S = 300.0

SHAPES = {
    "v4p": ("4x4x4", "4x8x8", "8x8x16"),
    "v5e": ("4x4", "8x8", "16x16"),
    "v5p": ("4x4x4", "8x8x8", "16x16x16"),
    "v6e": ("4x4", "8x8", "16x16"),
    "tpu7x": ("2x4x4", "4x4x8", "8x8x16"),
    "a100": ("8x2", "8x16", "8x128"),
    "h100": ("8x2", "8x32", "8x256"),
    "h200": ("8x2", "8x16", "8x128"),
    "b200": ("8x1", "8x8", "8x64"),
    "gb200": ("72x1", "72x4", "72x16"),
}
"""Clusters of a chip: small, medium, large. TPUs are drawn as two slices too."""

SEQ_LENS = (2048, 4096, 8192, 32768)
CHIP_TOKENS = (1024, 4096, 16384)
"""Tokens of a step over the chips: a batch has so many, and at least one sequence."""


class Draw(msgspec.Struct, frozen=True):
    """What `plan` is asked, and the number (from 0 to 1) that picks among what it lists."""

    model: str
    cluster: str
    batch_seqs: int
    seq_len: int
    pick: float

    @property
    def words(self) -> str:
        return f"{self.model} on {self.cluster}, {self.batch_seqs} sequences of {self.seq_len}"


def draws(seed: int) -> Iterator[Draw]:
    """Yields draws without end, the same for the same seed."""
    drawn = random.Random(seed)
    names = sorted(models())
    while True:
        model, chip = drawn.choice(names), drawn.choice(list(SHAPES))
        shape = drawn.choice(SHAPES[chip])
        slices = "2*" if target_of(parse_cluster(f"{chip}:{shape}")).platform == "tpu" and drawn.random() < 0.25 else ""
        seq_len, tokens = drawn.choice(SEQ_LENS), drawn.choice(CHIP_TOKENS)
        cluster = f"{slices}{chip}:{shape}"
        batch_seqs = max(1, tokens * parse_cluster(cluster).num_chips // seq_len)
        yield Draw(model, cluster, batch_seqs, seq_len, drawn.random())


def plan_of(draw: Draw) -> Plan:
    """One of the strategies that `plan` lists. Raises CannotRunError or InputError if it lists none."""
    cluster = parse_cluster(draw.cluster)
    job = Job(batch_seqs=draw.batch_seqs, seq_len=draw.seq_len)
    setting = Setting(load_model(draw.model), cluster, job, rates_for(cluster, None, fitted=True))
    listed = rank_plans(setting).plans
    return listed[int(draw.pick * len(listed))]


def prove_plan(plan: Plan) -> Proof:
    """The proof of a plan at partition depth."""
    return prove_strategy(plan.setting, plan.strategy, ProofOptions(timeout_s=TIMEOUT_S))


def lines_of(plan: Plan, proof: Proof) -> list[str]:
    """What was compiled; what it took; what was found."""
    strategy, outcome = plan.strategy, proof.outcome
    zero = "" if strategy.zero == 3 else f"; ZeRO-{strategy.zero}"
    more = "".join(f"; {one} offloaded" for one in strategy.offload)
    if strategy.mesh.get("pipeline", 1) > 1:
        more += f"; {strategy.schedule}, {strategy.chunks} chunks"
    if strategy.mesh.get("context", 1) > 1:
        more += f"; {strategy.context_attention}"
    lines = [
        f"    {plan.cluster.short_name}: {mesh_words(strategy.mesh)}; {strategy.num_microbatches} microbatches; "
        f"remat {strategy.remat}{zero}{more}"
    ]
    if proof.memory is None:
        return [*lines, f"    {outcome.ended}: {proof.refusal}"]
    memory, sent = proof.memory, proof.traffic
    lines.append(
        f"    memory needed {memory.needed / 1e9:.2f} GB of {memory.available / 1e9:.1f}, predicted "
        f"{memory.predicted / 1e9:.2f} ({memory.error:+.1%}), {'fits' if memory.fits else 'DOES NOT FIT'}; "
        f"{outcome.cpu_s:.1f} s of CPU"
    )
    if sent is None:
        return [*lines, f"    {proof.traffic_error}"]
    lines.append(
        f"    sends {sent.compiled_bytes / 1e9:.2f} GB, derived {sent.derived_bytes / 1e9:.2f} "
        f"({ratio(proof):.3f}); without a name {sent.remainder:.2%}"
    )
    names = dict.fromkeys(one.name for one in sent.differences)
    for name in names:
        found = [one for one in sent.differences if one.name == name]
        extra = sum(one.extra_bytes for one in found)
        lines.append(f"      {name} {extra / 1e9:+.2f} GB: {found[0].where}")
    return lines


def ratio(proof: Proof) -> float:
    """Compiled over derived bytes; 1 where nothing is sent."""
    sent = proof.traffic
    assert sent is not None
    return sent.compiled_bytes / sent.derived_bytes if sent.derived_bytes else 1.0 + (sent.compiled_bytes > 0)


def goals(proofs: Sequence[Proof]) -> list[str]:
    """A line for each goal: what it asks, and what was reached."""
    total, lines = len(proofs), [f"goals over {len(proofs)} plans"]
    memories = [proof.memory for proof in proofs if proof.memory is not None]
    errors = sorted(abs(memory.error) for memory in memories) or [1.0]
    sent = [proof for proof in proofs if proof.traffic is not None]

    def add(what: str, reached: str, holds: bool) -> None:
        lines.append(f"  {what:52s} {reached:24s} {'reached' if holds else 'MISSED'}")

    def share(limit: float, least: float) -> tuple[str, bool]:
        count = sum(error <= limit for error in errors)
        return f"{count} of {total}", count >= least * total

    median = statistics.median(errors)
    add("compiled at all", f"{len(memories)} of {total}", len(memories) == total)
    add("memory error, median at most 2%", f"{median:.1%}", median <= 0.02)
    add("memory error within 5% on nine in ten", *share(0.05, 0.9))
    add("memory error, worst at most 10%", f"{errors[-1]:.1%}", errors[-1] <= 0.1)
    fit = sum(memory.fits for memory in memories)
    add("fit as compiled, at least 39 of 40", f"{fit} of {total}", fit >= 39 / 40 * total)
    near = sum(abs(ratio(proof) - 1) <= 0.1 for proof in sent)
    add("bytes within 10% of derived, at least 36 of 40", f"{near} of {total}", near >= 36 / 40 * total)
    unnamed = [proof.traffic.remainder for proof in sent if proof.traffic is not None]
    few = sum(one <= 0.02 for one in unnamed)
    add("at most 2% of bytes without a name, on each", f"{few} of {total}, worst {max(unnamed):.1%}", few == total)
    whole = sum(any(one.name == "full all-reduce" for one in p.traffic.differences) for p in sent if p.traffic)
    add("no full all-reduce in place of a scatter", f"on {whole} of {total}", whole == 0)
    return lines


def versions() -> str:
    """What compiled."""
    found = []
    for name in ("jax", "libtpu", "jax-cuda13-plugin"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def run(seed: int, plans: int, say: Callable[[str], None]) -> None:
    """Draws, compiles and says what was found."""
    proofs: list[Proof] = []
    again = 0
    for draw in draws(seed):
        if len(proofs) == plans:
            break
        try:
            plan = plan_of(draw)
        except (CannotRunError, InputError) as error:
            again += 1
            say(f"drawn again: {draw.words}: {error}"[:200])
            continue
        say(f"{len(proofs) + 1}: {draw.words}")
        proofs.append(prove_plan(plan))
        for line in lines_of(plan, proofs[-1]):
            say(line)
    say("")
    say(f"{again} draws for which plan lists nothing were drawn again")
    for line in goals(proofs):
        say(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--out")
    asked = parser.parse_args()
    for chip in SHAPES:
        platform = target_of(parse_cluster(f"{chip}:{SHAPES[chip][0]}")).platform
        if not is_installed(platform):
            raise SystemExit(f"no compiler for {platform}: every chip takes part, so nothing is drawn")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say(f"{datetime.date.today().isoformat()}, {versions()}, partition depth, seed {asked.seed}")
    run(asked.seed, asked.plans, say)
    if asked.out:
        with open(asked.out, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
