"""Why a plan is as it is: the numbered algorithm of a layer with its times, and the limits beside this plan."""

from collections.abc import Sequence

import msgspec

from meshwright.algebra.steps import Step
from meshwright.core.errors import CannotRunError
from meshwright.cost.step_costs import StepCost
from meshwright.cost.train_step import Estimate, PricedStrategy, price_strategy
from meshwright.plan.bounds import Batch, Limit, Symbols, batch_of, limits_of, symbols_of
from meshwright.plan.legal import MEMORY_RULE, legal
from meshwright.plan.run_budget import RunBudget, run_budget
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


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `explain` shows of one plan; the estimate is computed anew from the plan's own rates."""

    plan: Plan
    estimate: Estimate
    forward: Algorithm
    backward: Algorithm
    once: Algorithm
    batch: Batch
    symbols: Symbols
    limits: tuple[Limit, ...]
    training: RunBudget | None


def explain(plan: Plan) -> Explanation:
    """The algorithm of one layer and the limits.

    Raises CannotRunError when the sizes do not divide or the mesh cannot be laid out; a plan that needs more memory
    than there is gets explained, with that limit broken.
    """
    for refusal in legal(plan.model, plan.cluster, plan.job, plan.strategy, calibration=plan.calibration):
        if refusal.rule != MEMORY_RULE.name:
            raise CannotRunError(refusal.message)
    priced = price_strategy(plan.model, plan.cluster, plan.job, plan.strategy, calibration=plan.calibration)
    passes = _passes(priced)
    budget = run_budget(plan, step_s=priced.estimate.step_s)
    return Explanation(
        plan=plan,
        estimate=priced.estimate,
        forward=_algorithm("forward pass of one layer", passes["forward"]),
        backward=_algorithm("backward pass of one layer", passes["backward"]),
        once=_algorithm("once per step", passes["once"]),
        batch=batch_of(plan),
        symbols=symbols_of(plan, priced),
        limits=limits_of(plan, priced, budget),
        training=budget,
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
