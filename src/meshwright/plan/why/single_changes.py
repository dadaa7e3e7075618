"""Prices a plan with one choice changed at a time, to find the change that saves most."""

from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.algebra.schedules.registry import default_chunks
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate, estimate_step
from meshwright.plan.legal import DEVICES_RULE, SCHEDULE_RULE, size_rules, strategy_sizes
from meshwright.plan.rules import check_rules
from meshwright.plan.space import FULL, axes_to_try
from meshwright.spec.strategy import RERUN_POLICIES, USUAL_POLICIES, Strategy, standard_assignment

Change = tuple[str, dict[str, Any]]
"""One change in words, and the fields of the strategy that it sets."""

MIN_GAIN = 1e-3
"""Smallest share of a step's time that a change must save to be reported."""


class TriedChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change that runs: its words, and the strategy and prediction with it."""

    words: str
    strategy: Strategy
    estimate: Estimate


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all single changes of a plan: ``num_legal`` of ``num_tried`` changes run; ``best`` is the fastest,
    None if no change saves `MIN_GAIN`. ``gain_s`` are the seconds of a step that ``best`` saves."""

    num_tried: int
    num_legal: int
    best: TriedChange | None = None
    gain_s: float = 0.0


def estimate_in(setting: Setting, strategy: Strategy) -> Estimate | None:
    """Returns the prediction of a strategy; None if its sizes do not divide or it does not fit in memory."""
    try:
        island_setting, inner = setting.of_island(strategy), strategy.inner()
        island_setting.require_runnable(inner)
        rules = (DEVICES_RULE, *size_rules(island_setting.derived(inner)), SCHEDULE_RULE)
        if check_rules(rules, strategy_sizes(island_setting, inner)):
            return None
        estimate = estimate_step(setting, strategy)
    except (InputError, CannotRunError):
        return None
    return estimate if estimate.hbm_bytes_per_chip <= setting.memory_room else None


def try_changes(setting: Setting, strategy: Strategy, now_s: float) -> Tried:
    """Prices every single change; the best that fits must be faster than ``now_s``, the step of the plan."""
    num_tried, changes_that_fit = 0, []
    for words, changed_strategy in single_changes(setting, strategy):
        num_tried += 1
        estimate = estimate_in(setting, changed_strategy)
        if estimate is not None:
            changes_that_fit.append(TriedChange(words=words, strategy=changed_strategy, estimate=estimate))
    best = min(changes_that_fit, key=lambda change: change.estimate.step_s, default=None)
    if best is None or best.estimate.step_s > (1 - MIN_GAIN) * now_s:
        return Tried(num_tried=num_tried, num_legal=len(changes_that_fit))
    return Tried(num_tried=num_tried, num_legal=len(changes_that_fit), best=best, gain_s=now_s - best.estimate.step_s)


def single_changes(setting: Setting, strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yields each change in words, and the strategy with it, which need not run."""
    for words, value_by_field in _changes(setting, strategy):
        yield words, msgspec.structs.replace(strategy, **value_by_field)


def _changes(setting: Setting, strategy: Strategy) -> Iterator[Change]:
    """Yields each change in words, with the fields of the strategy that it sets."""
    old_count, num_chunks = strategy.num_microbatches, strategy.chunks
    policies = (*USUAL_POLICIES, *RERUN_POLICIES)
    if strategy.remat in policies:
        # one policy lighter and one heavier
        policy_index = policies.index(str(strategy.remat))
        for remat in (*policies[:policy_index][-1:], *policies[policy_index + 1 :][:1]):
            yield f"remat {remat} for {strategy.remat}", {"remat": remat}
    for new_count in (2 * old_count, *([old_count // 2] if old_count % 2 == 0 else [])):
        yield f"{counted(new_count, 'microbatch')} for {old_count}", {"num_microbatches": new_count}
    yield from _swaps(setting, strategy)
    if strategy.mesh.get("pipeline", 1) > 1:
        for name in FULL.schedules:
            if name != strategy.schedule:
                yield f"schedule {name}", {"schedule": name, "chunks": default_chunks(name)}
        if strategy.schedule == "interleaved":
            for new_count in (2 * num_chunks, *([num_chunks // 2] if num_chunks > 1 else [])):
                yield f"{counted(new_count, 'chunk')} for {num_chunks}", {"chunks": new_count}
    zero_stage = strategy.zero
    if zero_stage is not None and strategy.mesh.get("fsdp", 1) > 1:
        is_sequence_parallel = strategy.assignment == standard_assignment(zero=zero_stage, sequence_parallel=True)
        for new_zero in (3, 2, 1):
            if new_zero != zero_stage:
                assignment = standard_assignment(zero=new_zero, sequence_parallel=is_sequence_parallel)
                yield f"ZeRO-{new_zero} for ZeRO-{zero_stage}", {"assignment": assignment}
    if strategy.mesh.get("context", 1) > 1:
        for mode in FULL.context_attention:
            if mode != strategy.context_attention:
                yield f"context attention by {mode}", {"context_attention": mode}


def _swaps(setting: Setting, strategy: Strategy) -> Iterator[Change]:
    """Yields changes that halve one mesh axis and double another; doubled stages double the microbatches too."""
    used_axes = strategy.inner().active_axes
    axes = axes_to_try(setting.cluster, used_axes)
    for giver in axes:
        giver_size = strategy.mesh.get(giver, 1)
        for taker in axes:
            if giver_size % 2 or taker == giver or (taker == "expert" and not setting.model.num_experts):
                continue
            mesh = {**strategy.mesh, giver: giver_size // 2, taker: strategy.mesh.get(taker, 1) * 2}
            words = f"{taker} {mesh[taker]} and {giver} {mesh[giver]} for {mesh[taker] // 2} and {giver_size}"
            num_microbatches = strategy.num_microbatches
            if taker == "pipeline":
                num_microbatches *= 2
                words += f", with {num_microbatches} microbatches"
            yield words, {"mesh": mesh, "placement": {}, "num_microbatches": num_microbatches}
