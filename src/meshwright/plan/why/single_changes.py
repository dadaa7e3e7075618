"""A plan with one choice changed at a time, each priced anew: what the cheapest change gains."""

from collections.abc import Iterator

import msgspec

from meshwright.algebra.schedules.registry import default_chunks
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate, PricedStrategy, price_strategy
from meshwright.plan.legal import SCHEDULE_RULE, check_rules, facts_of, size_rules
from meshwright.plan.space import FULL, axes_to_try
from meshwright.spec.strategy import REMAT_POLICIES, Strategy, standard_assignment

MIN_GAIN = 1e-3
"""Share of a step below which a change counts as no help."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change that runs: what it is in words, and the prediction with it."""

    words: str
    strategy: Strategy
    estimate: Estimate


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Every single change of a plan; ``best`` is the fastest that helps, None where none does.

    ``num_legal`` of ``num_tried`` changes run. ``gain_s`` is what the best saves of the plan's step.
    """

    num_tried: int
    num_legal: int
    best: Change | None = None
    gain_s: float = 0.0


def priced_in(setting: Setting, strategy: Strategy) -> PricedStrategy | None:
    """The strategy priced, whether it fits in memory or not; None where its sizes do not divide."""
    try:
        setting.require_runnable(strategy)
        derived = setting.derived(strategy)
        if check_rules((*size_rules(derived), SCHEDULE_RULE), facts_of(setting, strategy)):
            return None
        return price_strategy(setting, strategy)
    except (InputError, CannotRunError):
        return None


def fits(setting: Setting, estimate: Estimate) -> bool:
    """Whether a step's memory is there."""
    return bool(estimate.hbm_bytes_per_chip <= setting.memory_limit)


def try_changes(setting: Setting, strategy: Strategy, now_s: float) -> Tried:
    """Every single change priced; the best of those that fit beside a step of ``now_s``."""
    num_tried, found = 0, []
    for words, other in single_changes(setting, strategy):
        num_tried += 1
        priced = priced_in(setting, other)
        if priced is not None and fits(setting, priced.estimate):
            found.append(Change(words=words, strategy=other, estimate=priced.estimate))
    best = min(found, key=lambda one: one.estimate.step_s, default=None)
    if best is None or best.estimate.step_s > (1 - MIN_GAIN) * now_s:
        return Tried(num_tried=num_tried, num_legal=len(found))
    return Tried(num_tried=num_tried, num_legal=len(found), best=best, gain_s=now_s - best.estimate.step_s)


def single_changes(setting: Setting, strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Each change in words, and the strategy with it; whether it runs is not looked at."""
    yield from _other_remat(strategy)
    yield from _other_microbatches(strategy)
    yield from _swaps(setting, strategy)
    if strategy.mesh.get("pipeline", 1) > 1:
        yield from _other_schedules(strategy)
    yield from _other_zero(strategy)
    if strategy.mesh.get("context", 1) > 1:
        for mode in ("gather", "ring", "ulysses"):
            if mode != strategy.context_attention:
                yield f"context attention by {mode}", msgspec.structs.replace(strategy, context_attention=mode)


def _other_remat(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """One policy lighter and one heavier."""
    if strategy.remat not in REMAT_POLICIES:
        return
    at = REMAT_POLICIES.index(str(strategy.remat))
    for other in (at - 1, at + 1):
        if 0 <= other < len(REMAT_POLICIES):
            remat = REMAT_POLICIES[other]
            yield f"remat {remat} for {strategy.remat}", msgspec.structs.replace(strategy, remat=remat)


def _other_microbatches(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    count = strategy.num_microbatches
    for other in (2 * count, count // 2):
        if other and other in (2 * count, count / 2):
            words = f"{other} microbatch{'es' if other > 1 else ''} for {count}"
            yield words, msgspec.structs.replace(strategy, num_microbatches=other)


def _swaps(setting: Setting, strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """A factor 2 from one axis to another. A pipeline that gets more stages also gets twice the microbatches."""
    used = (axis for axis, size in strategy.mesh.items() if size > 1)
    axes = axes_to_try(setting.cluster, used)
    for giver in axes:
        size = strategy.mesh.get(giver, 1)
        for taker in axes:
            if size % 2 or taker == giver or (taker == "expert" and not setting.model.num_experts):
                continue
            mesh = {**strategy.mesh, giver: size // 2, taker: strategy.mesh.get(taker, 1) * 2}
            words = f"{taker} {mesh[taker]} and {giver} {mesh[giver]} for {mesh[taker] // 2} and {size}"
            count = strategy.num_microbatches
            if taker == "pipeline":
                count *= 2
                words += f", with {count} microbatches"
            yield words, msgspec.structs.replace(strategy, mesh=mesh, placement={}, num_microbatches=count)


def _other_schedules(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    for name in FULL.schedules:
        if name != strategy.schedule:
            yield f"schedule {name}", msgspec.structs.replace(strategy, schedule=name, chunks=default_chunks(name))
    if strategy.schedule == "interleaved":
        for chunks in (2 * strategy.chunks, strategy.chunks // 2):
            yield f"{chunks} chunks for {strategy.chunks}", msgspec.structs.replace(strategy, chunks=max(1, chunks))


def _other_zero(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    stage = strategy.zero
    if stage is None or strategy.mesh.get("fsdp", 1) == 1:
        return
    parallel = strategy.assignment == standard_assignment(zero=stage, sequence_parallel=True)
    for other in (3, 2, 1):
        if other != stage:
            assignment = standard_assignment(zero=other, sequence_parallel=parallel)
            yield f"ZeRO-{other} for ZeRO-{stage}", msgspec.structs.replace(strategy, assignment=assignment)
