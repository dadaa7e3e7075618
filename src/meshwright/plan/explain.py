"""Why a plan is as it is: the numbered algorithm of a layer with its times, and the limits beside this plan."""

import math
from collections.abc import Sequence

import msgspec

from meshwright.algebra.steps import Step
from meshwright.cost import limits
from meshwright.cost.memory import memory_limit
from meshwright.cost.step_rates import matmul_dtype
from meshwright.cost.train_step import Estimate, PricedStrategy, StepCost, price_strategy
from meshwright.spec.calibration import matmul_rate
from meshwright.spec.plan_file import Plan

MAX_FREE_SHARE = 0.002
"""Local steps that take less of a pass than this are left out of the listing (they stay in every sum)."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One numbered line of an algorithm: a derived step, what it moves or computes, and whether it is waited for.

    ``num_bytes`` are the full array's for a collective, those through memory else.
    """

    number: int
    text: str
    op: str
    phase: str
    num_bytes: float
    flops: float
    time_s: float
    critical: bool
    overlaps: str


class Algorithm(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over a block: its lines, and the seconds of its parts."""

    title: str
    lines: tuple[Line, ...]
    compute_s: float
    hidden_s: float
    critical_s: float
    num_left_out: int


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A closed form of the book beside this plan's number. ``holds`` is None where it is a hint, not a bound."""

    name: str
    formula: str
    limit: float
    here: float
    holds: bool | None
    note: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `explain` shows of one plan; the estimate is computed anew from the plan's own rates."""

    plan: Plan
    estimate: Estimate
    forward: Algorithm
    backward: Algorithm
    once: Algorithm
    limits: tuple[Limit, ...]


def explain(plan: Plan) -> Explanation:
    """The algorithm of one layer and the limits. Raises CannotRunError when the plan cannot be laid out."""
    priced = price_strategy(plan.model, plan.cluster, plan.job, plan.strategy, calibration=plan.calibration)
    passes = _passes(priced)
    return Explanation(
        plan=plan,
        estimate=priced.estimate,
        forward=_algorithm("forward pass of one layer", passes["forward"]),
        backward=_algorithm("backward pass of one layer", passes["backward"]),
        once=_algorithm("once per step", passes["once"]),
        limits=tuple(_limits(plan, priced)),
    )


def _passes(priced: PricedStrategy) -> dict[str, list[StepCost]]:
    """Costs of the repeated block's two passes, and of what is done once per step."""
    left = iter(priced.costs)
    passes: dict[str, list[StepCost]] = {"forward": [], "backward": [], "once": []}
    for block in priced.derived.blocks:
        forward = [next(left) for _ in block.forward]
        backward = [next(left) for _ in block.backward]
        if block.block.carry:
            passes["forward"] = forward
            passes["backward"] = backward
    passes["once"] = list(left)
    return passes


def _algorithm(title: str, costs: Sequence[StepCost]) -> Algorithm:
    total = sum(float(c.time_s) for c in costs)
    shown = [c for c in costs if c.step.is_collective or float(c.time_s) > MAX_FREE_SHARE * total]
    return Algorithm(
        title=title,
        lines=tuple(_line(number, cost) for number, cost in enumerate(shown, 1)),
        compute_s=sum(float(c.local_s) for c in costs if not c.step.is_collective),
        hidden_s=sum(float(c.network_s) for c in costs if c.hides),
        critical_s=sum(float(c.network_s) for c in costs if c.step.is_collective and not c.hides),
        num_left_out=len(costs) - len(shown),
    )


def _line(number: int, cost: StepCost) -> Line:
    return Line(
        number=number,
        text=str(cost.step),
        op=cost.step.op,
        phase=cost.step.phase,
        num_bytes=float(cost.network_bytes if cost.step.is_collective else cost.hbm_bytes),
        flops=float(cost.flops),
        time_s=float(cost.time_s),
        critical=cost.step.is_collective and not cost.hides,
        overlaps=_overlap(cost.step, cost),
    )


def _overlap(step: Step, cost: StepCost) -> str:
    if not step.is_collective:
        return "recomputed" if step.phase == "recompute" else ""
    if cost.hides:
        once = ", once per step" if step.scope == "step" else ""
        ahead = "can be done ahead" if step.op == "all_gather" else "can be done behind"
        return f"{ahead}{once}"
    return "critical path"


# -- limits ---------------------------------------------------------------------------------------------


def _limits(plan: Plan, priced: PricedStrategy) -> list[Limit]:
    found = [*_torus_limits(plan, priced), *_switched_limits(plan), *_always(plan, priced)]
    chip = plan.cluster.chip
    if plan.cluster.num_slices > 1 and chip.dcn_bytes_per_s_per_host and chip.chips_per_host:
        least = limits.dcn_min_batch_per_pod(_peak(plan), chip.dcn_bytes_per_s_per_host, chip.chips_per_host)
        per_slice = plan.job.tokens_per_step / plan.cluster.num_slices
        found.append(
            Limit(
                name="tokens per slice, data parallel over DCN",
                formula="> C x chips per host / W_dcn",
                limit=least,
                here=per_slice,
                holds=per_slice > least,
            )
        )
    return found


def _peak(plan: Plan) -> float:
    return matmul_rate(plan.cluster.chip, plan.calibration, matmul_dtype(plan.strategy.state))


def _axes_used(plan: Plan, priced: PricedStrategy) -> tuple[int, int]:
    """(M_X, M_Y): physical axes left to FSDP, and those that tensor lies on; each at least one."""
    total = sum(size > 1 for size in plan.cluster.shape)
    tensor = sum(any(axis == "tensor" and n > 1 for axis, n in link.parts) for link in priced.placement.links)
    tensor = max(1, min(tensor, total - 1))
    return max(1, total - tensor), tensor


def _torus_limits(plan: Plan, priced: PricedStrategy) -> list[Limit]:
    """Section 5 of How to Scale Your Model with this plan's numbers, for chips on a torus."""
    chip, job, mesh = plan.cluster.chip, plan.job, plan.strategy.mesh
    if plan.cluster.kind != "torus" or not chip.ici_axis_bytes_per_s or plan.cluster.num_chips == 1:
        return []
    chips = plan.cluster.num_chips // plan.cluster.num_slices
    tokens = job.tokens_per_step / plan.cluster.num_slices
    alpha = limits.ici_intensity(_peak(plan), chip.ici_axis_bytes_per_s)
    all_axes = sum(size > 1 for size in plan.cluster.shape)
    fsdp_axes, tensor_axes = _axes_used(plan, priced)
    d_ff = plan.model.d_ff
    split = {"fsdp_axes": fsdp_axes, "tensor_axes": tensor_axes}
    least = limits.data_parallel_min_tokens_per_chip(alpha, all_axes)
    mixed = limits.mixed_min_tokens_per_chip(alpha, d_ff, **split)
    most_tensor = limits.tensor_max_size(d_ff, alpha, tensor_axes)
    roots = limits.fsdp_roots(tokens, d_ff, chips, alpha, **split)
    square = limits.mixed_discriminant(tokens, d_ff, chips, alpha, **split)
    best = limits.fsdp_best_size(tokens, d_ff, chips, **split)
    data_ways = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("context", 1) / plan.cluster.num_slices
    where = f"alpha = C / W_ici = {alpha:.4g}, M_X = {fsdp_axes}, M_Y = {tensor_axes}"
    between = "" if math.isnan(roots.lower) else f"compute-bound for X between {roots.lower:.4g} and {roots.upper:.4g}"
    return [
        Limit(
            name="tokens per chip, FSDP alone",
            formula=f"> alpha / {all_axes} axes",
            limit=least,
            here=tokens / chips,
            holds=tokens / chips > least,
            note=where,
        ),
        Limit(
            name="tokens per chip, FSDP with tensor",
            formula="> 4 alpha^2 / (M_X M_Y F)",
            limit=mixed,
            here=tokens / chips,
            holds=tokens / chips > mixed,
        ),
        Limit(
            name="discriminant of X",
            formula="(B F / alpha)^2 - 4 F B N / (M_X M_Y) > 0",
            limit=0.0,
            here=square,
            holds=square > 0,
            note=between,
        ),
        Limit(
            name="data x fsdp x context, X_opt",
            formula="sqrt(B / F x M_X / M_Y x N)",
            limit=best,
            here=data_ways,
            holds=None,
            note="least communication here, as if the axes were any number",
        ),
        Limit(
            name="tensor",
            formula="< M_Y F / alpha",
            limit=most_tensor,
            here=mesh.get("tensor", 1),
            holds=mesh.get("tensor", 1) < most_tensor,
        ),
    ]


def _switched_limits(plan: Plan) -> list[Limit]:
    """The same two bounds where the links are a switched domain and a network between domains."""
    chip, mesh = plan.cluster.chip, plan.strategy.mesh
    if plan.cluster.kind != "switched" or not chip.nvlink_bytes_per_s:
        return []
    found = []
    peak = _peak(plan)
    tokens = plan.job.tokens_per_step / plan.cluster.num_chips
    rate = chip.nvlink_bytes_per_s
    name = "NVLink"
    if plan.cluster.nodes > 1 and chip.nic_bytes_per_s:
        rate = min(rate, chip.nic_bytes_per_s * plan.cluster.domain)
        name = "the network of a node"
    least = limits.data_parallel_min_tokens_per_chip(limits.ici_intensity(peak, rate))
    found.append(
        Limit(
            name="tokens per chip, FSDP alone",
            formula=f"> C / W of {name}",
            limit=least,
            here=tokens,
            holds=tokens > least,
        )
    )
    most = limits.tensor_max_size(plan.model.d_ff, limits.ici_intensity(peak, chip.nvlink_bytes_per_s))
    tensor = mesh.get("tensor", 1)
    found.append(Limit(name="tensor", formula="< F W_nvlink / C", limit=most, here=tensor, holds=tensor < most))
    return found


def _always(plan: Plan, priced: PricedStrategy) -> list[Limit]:
    job, mesh = plan.job, plan.strategy.mesh
    data_ways = mesh.get("data", 1) * mesh.get("fsdp", 1)
    per_microbatch = job.batch_seqs // plan.strategy.num_microbatches
    chips = limits.sequence_limit_chips(
        job.tokens_per_step, job.seq_len, context=mesh.get("context", 1), tensor=mesh.get("tensor", 1)
    )
    room = memory_limit(plan.cluster, plan.calibration)
    needed = float(priced.estimate.hbm_bytes_per_chip)
    return [
        Limit(
            name="data x fsdp",
            formula="<= sequences of a microbatch",
            limit=per_microbatch,
            here=data_ways,
            holds=data_ways <= per_microbatch,
            note=f"at most {chips:,.0f} chips with this context and tensor",
        ),
        Limit(name="memory of a chip, bytes", formula="<= usable", limit=room, here=needed, holds=needed <= room),
    ]
