"""The limits that a plan stands near: the book's closed forms, and what its chips can hold, beside its numbers."""

import math
from collections.abc import Iterator

import msgspec

from meshwright.algebra.notation import product
from meshwright.core.units import format_count, format_seconds
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.accounting import state_bytes
from meshwright.cost.formulas.training_budget import (
    DAY_S,
    global_batch,
    min_chips,
    num_microbatches,
    rescaled_days,
    tokens_per_device,
    train_seconds,
    training_flops,
)
from meshwright.cost.memory import memory_limit
from meshwright.cost.network.placement import Placement
from meshwright.cost.train_step import Estimate, PricedStrategy
from meshwright.plan.run_budget import RunBudget
from meshwright.plan.why.torus_limits import (
    Limit,
    dcn_limit,
    feed_forward_width,
    fsdp_limits,
    sparsity,
    tensor_limit,
    torus_limits,
)
from meshwright.spec.calibration import matmul_rate
from meshwright.spec.plan_file import Plan
from meshwright.spec.weights import num_active_params, num_params


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """How the sequences of a step are shared out: their product is ``sequences``."""

    sequences_per_microbatch: float
    data_parallel: int
    num_microbatches: int
    sequences: float
    positions_per_device: float


def batch_of(plan: Plan) -> Batch:
    """The bookkeeping of the plan's batch: a replica's microbatch x replicas x microbatches."""
    mesh, count = plan.strategy.mesh, plan.strategy.num_microbatches
    replicas = product(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    each = plan.job.batch_seqs / (replicas * count)
    return Batch(
        sequences_per_microbatch=each,
        data_parallel=replicas,
        num_microbatches=count,
        sequences=global_batch(each, data_parallel=replicas, num_microbatches=count),
        positions_per_device=tokens_per_device(plan.job.seq_len, context=mesh.get("context", 1)),
    )


class Symbols(msgspec.Struct, frozen=True, kw_only=True):
    """The letters of the closed forms, for one slice and stage: B tokens, N chips, X = data x fsdp x expert x context.

    B is one microbatch: weights are gathered anew for each, so its tokens have to hide them. ``num_slices`` are those
    that share out the batch, not the stages of a pipeline.

    ``alpha`` = C / W in FLOPs per byte, W of one torus axis both ways; None away from a torus. ``tensor_axes`` is M_Y,
    the physical axes' worth that tensor takes, and ``fsdp_axes`` is M_X, the others: whole numbers, each at least one.
    ``sparsity`` is E / k, experts over those that a token passes: so many more tokens hide the same weights.
    """

    batch_tokens: float
    num_microbatches: int
    num_chips: int
    num_stages: int
    num_slices: int
    d_ff: int
    data_ways: float
    peak_flops: float
    alpha: float | None
    num_axes: int
    fsdp_axes: int
    tensor_axes: int
    tensor: int
    sparsity: float


def symbols_of(plan: Plan, priced: PricedStrategy) -> Symbols:
    """The letters with this plan's numbers; C is the rate of products that its times rest on."""
    cluster, mesh = plan.cluster, plan.strategy.mesh
    model, at = plan.model, plan.calibration.efficiency
    peak = matmul_rate(cluster.chip, plan.calibration, plan.strategy.matmul_dtype)
    width = cluster.chip.ici_axis_bytes_per_s if cluster.kind == "torus" else None
    width = None if width is None else width * at.ici
    total = sum(size > 1 for size in cluster.shape)
    tensor = max(1, min(round(_axes_taken(priced.placement, "tensor")), total - 1))
    ways = product(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert", "context"))
    stages = mesh.get("pipeline", 1)
    slices = cluster.num_slices // math.gcd(stages, cluster.num_slices)
    return Symbols(
        batch_tokens=plan.job.tokens_per_step / slices / plan.strategy.num_microbatches,
        num_microbatches=plan.strategy.num_microbatches,
        num_chips=cluster.num_chips // (slices * stages),
        num_stages=stages,
        num_slices=slices,
        d_ff=feed_forward_width(model),
        data_ways=ways / slices,
        peak_flops=peak,
        alpha=None if width is None else limits.ici_intensity(peak, width),
        num_axes=total,
        fsdp_axes=max(1, total - tensor),
        tensor_axes=tensor,
        tensor=mesh.get("tensor", 1),
        sparsity=sparsity(model),
    )


def _axes_taken(placement: Placement, name: str) -> float:
    """Torus axes' worth of one mesh axis: 1 where it fills one, a half for 4 of an axis of 16."""
    shares = (
        math.log(factor) / math.log(link.size)
        for link in placement.links
        for axis, factor in link.parts
        if axis == name and factor > 1
    )
    return sum(shares)


def limits_of(plan: Plan, priced: PricedStrategy, budget: RunBudget | None = None) -> tuple[Limit, ...]:
    """Every limit that has a meaning for this plan's cluster: those of speed, then those of size."""
    at = symbols_of(plan, priced)
    found: list[Limit] = []
    if at.num_chips > 1 and at.alpha is not None:
        found += torus_limits(at, at.alpha)
    if at.num_chips > 1 and plan.cluster.kind == "switched":
        found += _switched(plan, at)
    if at.num_slices > 1:
        # gradients cross slices once per step, whatever the microbatches
        tokens = plan.job.tokens_per_step / at.num_slices
        found += dcn_limit(plan.cluster.chip, peak_flops=at.peak_flops, tokens_per_slice=tokens)
    return (*found, *_sizes(plan, priced.estimate, budget))


# -- speed, on switches and over the data-centre network ------------------------------------------------


def _switched(plan: Plan, at: Symbols) -> Iterator[Limit]:
    """The same bounds where the links are a switched domain and a network between domains."""
    chip, cluster = plan.cluster.chip, plan.cluster
    if not chip.nvlink_bytes_per_s:
        return
    shares = plan.calibration.efficiency
    nvlink = chip.nvlink_bytes_per_s * shares.nvlink
    rate, flat, of = nvlink, nvlink, "nvlink"
    if cluster.nodes > 1 and chip.nic_bytes_per_s:
        flat = chip.nic_bytes_per_s * shares.network
        rate, of = min(rate, flat * cluster.domain), "node"
    alpha = limits.ici_intensity(at.peak_flops, rate)
    yield from fsdp_limits(at, alpha, num_axes=1, bound=f"C / W_{of}", chips=f"B W_{of} / C")
    yield from _flat(plan, at, flat)
    most = limits.tensor_max_size(at.d_ff, limits.ici_intensity(at.peak_flops, nvlink))
    yield tensor_limit(at, most, "< F W_nvlink / C")


def _flat(plan: Plan, at: Symbols, rate: float) -> Iterator[Limit]:
    """FSDP as if each chip moved all weights three times at the slowest link's rate, whatever the hierarchy."""
    count = num_params(plan.model) / at.num_stages
    active = num_active_params(plan.model) / at.num_stages
    math_s = train_seconds(training_flops(active, at.batch_tokens), num_chips=at.num_chips, peak_flops=at.peak_flops)
    comms_s = limits.flat_fsdp_comms_s(count, rate)
    yield Limit(
        name="FSDP at one chip's rate", formula="3 x 2 bytes x params / W < T_math", limit=math_s, here=comms_s,
        holds=comms_s < math_s, unit="s",
    )  # fmt: skip
    most = limits.flat_fsdp_max_chips(at.batch_tokens * active / count, at.peak_flops, rate)
    yield Limit(
        name="chips, at one chip's rate",
        formula="< B W / C x active / params" if at.sparsity > 1 else "< B W / C",
        limit=most,
        here=at.num_chips,
        holds=at.num_chips < most,
    )


# -- size -----------------------------------------------------------------------------------------------


def _sizes(plan: Plan, estimate: Estimate, budget: RunBudget | None) -> Iterator[Limit]:
    job, strategy, chips = plan.job, plan.strategy, plan.cluster.num_chips
    batch, mesh = batch_of(plan), plan.strategy.mesh
    stages = mesh.get("pipeline", 1)
    most = stages * limits.sequence_limit_chips(
        job.tokens_per_step, job.seq_len, context=mesh.get("context", 1), tensor=mesh.get("tensor", 1)
    )
    yield Limit(
        name="chips, a sequence each",
        formula="<= sequences x context x tensor" + " x pipeline" * (stages > 1), limit=most, here=chips,
        holds=chips <= most, kind="size",
    )  # fmt: skip
    often = num_microbatches(job.batch_seqs, data_parallel=batch.data_parallel, microbatch_seqs=1)
    yield Limit(
        name="microbatches", formula="<= sequences / (data x fsdp)", limit=often, here=strategy.num_microbatches,
        holds=strategy.num_microbatches <= often, kind="size",
    )  # fmt: skip
    room = memory_limit(plan.cluster, plan.calibration)
    needed = float(estimate.hbm_bytes_per_chip)
    if math.isfinite(room):
        yield Limit(
            name="memory of a chip", formula="<= what programs may fill", limit=room, here=needed,
            holds=needed <= room, kind="size", unit="bytes",
        )  # fmt: skip
        yield _fewest_chips(plan, estimate, room, budget)


def _fewest_chips(plan: Plan, estimate: Estimate, room: float, budget: RunBudget | None) -> Limit:
    """Chips whose memory holds one copy of the training state, and the activations that all chips keep now."""
    chips = plan.cluster.num_chips
    kept = state_bytes(num_params(plan.model), state=plan.strategy.state) + estimate.memory["activations"] * chips
    fewest = min_chips(kept, room)
    note = ""
    if budget is not None:
        slow_s = rescaled_days(budget.days, chips_from=chips, chips_to=fewest) * DAY_S
        tokens = format_count(budget.train_tokens)
        note = f"there {tokens} tokens would take {format_seconds(slow_s)} at this utilisation"
    return Limit(
        name="chips, by memory", formula=">= (state + activations) / memory", limit=fewest, here=chips,
        holds=chips >= fewest, kind="size", note=note,
    )  # fmt: skip
