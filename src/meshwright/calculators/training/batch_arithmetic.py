"""The bookkeeping of a batch: sequences per step = microbatch x accumulated microbatches x replicas.

Two limits stand beside it: a batch per chip below which chips wait for memory or for links, and the critical batch of
the optimiser (`scaling_laws`). Sources: Scaling and Parallelism (slides); How to Scale Your Model, sections 5.1 and 7,
whose B counts tokens.
"""

import itertools
import math

import msgspec

from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas.limits import data_parallel_min_tokens_per_chip, ici_intensity
from meshwright.cost.formulas.roofline import critical_batch
from meshwright.cost.network.links import torus_width
from meshwright.plan.legal import divisors
from meshwright.spec.chip import peak
from meshwright.spec.cluster import Cluster

MAX_SEQUENCES = 10**7
"""Bound on sequences whose divisors are listed."""


class BatchSolution(msgspec.Struct, frozen=True, kw_only=True):
    """One way to share out a step: whole numbers whose product is ``batch_seqs``."""

    microbatch_seqs: int
    num_microbatches: int
    data_parallel: int

    @property
    def batch_seqs(self) -> int:
        """Sequences of a step."""
        return self.microbatch_seqs * self.num_microbatches * self.data_parallel


class ComputeBoundTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a microbatch from which a chip is compute-bound; None where its figures are not known.

    ``per_replica_hbm``: tokens that meet one copy of the weights, C / W_hbm for 16-bit weights, half of it for int8.
    ``per_chip_link``: tokens per chip of plain FSDP, C / W of the links that its collectives use, over the torus axes.
    """

    per_replica_hbm: float | None
    per_chip_link: float | None
    link: str | None


def solve_batch(
    *,
    batch_seqs: int | None = None,
    microbatch_seqs: int | None = None,
    accumulation: int | None = None,
    data_parallel: int | None = None,
) -> tuple[BatchSolution, ...]:
    """Returns all whole-numbered splits that agree with what is given; the fewest accumulated microbatches first.

    The batch follows from the other three; a missing part is tried with every divisor. Raises CannotRunError when
    nothing divides, naming the nearest batch that would.
    """
    given = {"batch": batch_seqs, "micro": microbatch_seqs, "accumulate": accumulation, "replicas": data_parallel}
    for name, value in given.items():
        if value is not None and not 1 <= value <= MAX_SEQUENCES:
            raise InputError(f"{name}={value} must be between 1 and {MAX_SEQUENCES:,}.")
    parts = (microbatch_seqs, accumulation, data_parallel)
    if batch_seqs is None:
        if None in parts:
            raise InputError("the batch is unknown. Give one more of micro, accumulate and replicas, or the batch.")
        batch_seqs = math.prod(part or 1 for part in parts)
    micro, accumulate, replicas = ([part] if part else divisors(batch_seqs) for part in parts)
    found = [
        BatchSolution(microbatch_seqs=size, num_microbatches=count, data_parallel=batch_seqs // size // count)
        for size, count in itertools.product(micro, accumulate)
        if batch_seqs % (size * count) == 0 and batch_seqs // size // count in replicas
    ]
    if not found:
        raise CannotRunError(
            _nothing_divides(batch_seqs, {name: n for name, n in given.items() if n and name != "batch"})
        )
    return tuple(sorted(found, key=lambda one: (one.num_microbatches, -one.data_parallel)))


def _nothing_divides(batch: int, given: dict[str, int]) -> str:
    product = math.prod(given.values())
    words = " x ".join(f"{name} {part}" for name, part in given.items())
    below, above = batch // product * product, (batch // product + 1) * product
    near = f"{below:,} or {above:,}" if below else f"{above:,}"
    if len(given) == 3:
        return f"{words} = {product:,} sequences, not {batch:,}. Leave one of them out, or give --batch {product}seq."
    made = words if len(given) == 1 else f"{words} = {product:,}"
    return f"{made} does not divide {batch:,} sequences. Use {near} sequences a step."


def compute_bound_tokens(
    cluster: Cluster, *, dtype: str, weight_bytes: float = 2, sparsity: float = 1.0
) -> ComputeBoundTokens:
    """Returns the least tokens at which this cluster's chips do not wait for memory or for FSDP's collectives.

    ``weight_bytes`` are those of a stored weight; FSDP's own limit stays that of products as wide as its collectives.
    ``sparsity`` is E / k: with k of E experts a token, each expert's weights meet that much fewer tokens.
    Torus: alpha over the axes of more than one chip. Switches: the NVLink domain, or what a node's network cards carry
    together where there are several nodes. Source: How to Scale Your Model, sections 1.1 and 5.1.
    """
    rate, bandwidth, (link, speed, axes) = peak(cluster.chip, dtype), cluster.chip.hbm_bytes_per_s, _links(cluster)
    least = speed and data_parallel_min_tokens_per_chip(ici_intensity(rate, speed), axes) * sparsity
    return ComputeBoundTokens(
        per_replica_hbm=bandwidth and critical_batch(rate, bandwidth, weight_bytes=weight_bytes) * sparsity,
        per_chip_link=least,
        link=link if speed else None,
    )


def _links(cluster: Cluster) -> tuple[str | None, float | None, float]:
    """Returns the link that FSDP's collectives cross, its bytes/s, and its axes; (None, None, 1) without one."""
    unit, width = cluster.chip, torus_width(cluster)
    if width is not None:
        axes = f"{len(width.axes)} {'axis' if len(width.axes) == 1 else 'axes'}"
        return f"ICI, {axes}, W {width.words}", width.bytes_per_s, sum(width.axes)
    if cluster.num_chips > 1 and cluster.kind == "switched" and unit.nvlink_bytes_per_s:
        speed, link = unit.nvlink_bytes_per_s, "NVLink"
        if cluster.nodes > 1 and unit.nic_bytes_per_s:
            speed, link = min((speed, link), (unit.nic_bytes_per_s * cluster.domain, "network"))
        return link, speed, 1
    return None, None, 1
