"""Answers `plan --what-if`: plans again with other chips, links or work, and compares with the current plan."""

from collections.abc import Mapping

import msgspec

from meshwright.core.errors import CannotRunError
from meshwright.cost.breakdown import Breakdown, Term
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.plan_file import Plan
from meshwright.plan.planner import rank_plans
from meshwright.plan.result import PlanResult
from meshwright.plan.why.setup_changes import changed_setting
from meshwright.plan.why.single_changes import estimate_in


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question. ``changed`` has each change in words, with the values before and after.

    ``then`` is the best plan under the changes; ``terms`` add up to its step, ``terms_now`` to the step of ``now``.
    ``kept_s`` are the seconds of a step of the current strategy in the changed setting, None if it does not run there.
    ``note`` says why chips are left over or, if ``then`` is None, why nothing runs.
    """

    asked: dict[str, float]
    changed: tuple[str, ...]
    now: Plan
    terms_now: tuple[Term, ...]
    then: Plan | None = None
    terms: tuple[Term, ...] = ()
    kept_s: float | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """Ratio of the tokens per second of ``then`` to those of ``now``; None if nothing runs under the changes."""
        if self.then is None:
            return None
        tokens_per_s = self.then.job.tokens_per_step / self.then.predicted.step_s
        return tokens_per_s * self.now.predicted.step_s / self.now.job.tokens_per_step


def what_if(result: PlanResult, asked: Mapping[str, float]) -> WhatIf:
    """Plans a result's job again under all factors of ``asked`` together, with the axes and choices of the result.

    Raises InputError for a change that the setting cannot have, such as half of 15 sequences.
    """
    old_plan = result.plans[0]
    setting, change_texts = changed_setting(result.setting, asked)
    answer = WhatIf(asked=dict(asked), changed=change_texts, now=old_plan, terms_now=_terms(old_plan))
    try:
        new_result = rank_plans(setting, axes=result.axes, overrides=result.overrides, choices=result.choices, top=1)
    except CannotRunError as error:
        return msgspec.structs.replace(answer, note=str(error))
    new_plan = new_result.plans[0]
    return msgspec.structs.replace(
        answer,
        then=new_plan,
        terms=_terms(new_plan),
        kept_s=None if "chips" in asked else _kept(changed_setting(old_plan.setting, asked)[0], old_plan),
        note=". ".join(new_result.shortfall),
    )


def _terms(plan: Plan) -> tuple[Term, ...]:
    return Breakdown(price_strategy(plan.setting, plan.strategy)).terms


def _kept(setting: Setting, plan: Plan) -> float | None:
    """Returns the step seconds of an unchanged strategy in the changed setting; None if it does not run there."""
    estimate = estimate_in(setting, msgspec.structs.replace(plan.strategy, placement={}))
    return estimate.step_s if estimate else None
