"""What if the chips, the network, their number or the batch were different: planned again, beside the plan of now."""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.core.errors import CannotRunError
from meshwright.cost.breakdown import Breakdown, Term
from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import plan
from meshwright.plan.result import PlannedStrategy, PlanResult
from meshwright.plan.space import USUAL, Choices
from meshwright.plan.why.setup_changes import Setup, changed_setup
from meshwright.plan.why.single_changes import Setting
from meshwright.spec.calibration import Calibration
from meshwright.spec.model import Model


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One question answered. ``changed`` says in words what is different, each from what to what.

    ``then`` is the best plan under the changes and ``terms`` what its step is made of, beside ``terms_now``. ``kept_s``
    is the step of the strategy of now if it is not changed, None where it no longer runs. ``note`` says why chips are
    left over, or, where ``then`` is None, why nothing runs.
    """

    asked: dict[str, float]
    changed: tuple[str, ...]
    now: PlannedStrategy
    terms_now: tuple[Term, ...]
    then: PlannedStrategy | None = None
    terms: tuple[Term, ...] = ()
    kept_s: float | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """Tokens per second then over those of now; None where nothing runs then."""
        if self.then is None:
            return None
        then = self.then.job.tokens_per_step / self.then.estimate.step_s
        return then * self.now.estimate.step_s / self.now.job.tokens_per_step


def what_if(
    result: PlanResult,
    asked: Mapping[str, float],
    *,
    axes: Mapping[str, int] | None = None,
    overrides: Mapping[str, Any] | None = None,
    choices: Choices = USUAL,
    calibration: Calibration | None = None,
) -> WhatIf:
    """A result's job planned again under the factors of ``asked``, all at once; the rest as it was planned before.

    Raises InputError where a change has no meaning for the cluster, such as half of 15 sequences.
    """
    now = result.strategies[0]
    setup = Setup(model=result.model, cluster=result.cluster, job=result.job, calibration=calibration)
    setup, changed = changed_setup(setup, asked)
    terms_now = _terms(result.model, now, calibration)
    found = WhatIf(asked=dict(asked), changed=changed, now=now, terms_now=terms_now)
    try:
        again = plan(
            setup.model,
            setup.cluster,
            setup.job,
            axes=axes,
            overrides=overrides,
            choices=choices,
            top=1,
            calibration=setup.calibration,
        )
    except CannotRunError as error:
        return msgspec.structs.replace(found, note=str(error))
    then = again.strategies[0]
    return msgspec.structs.replace(
        found,
        then=then,
        terms=_terms(setup.model, then, setup.calibration),
        kept_s=_kept(setup, now),
        note=" ".join(again.shortfall),
    )


def _terms(model: Model, one: PlannedStrategy, calibration: Calibration | None) -> tuple[Term, ...]:
    priced = price_strategy(model, one.cluster, one.job, one.strategy, calibration=calibration)
    return Breakdown(priced).terms


def _kept(setup: Setup, now: PlannedStrategy) -> float | None:
    """The step of an unchanged strategy, on its old placement where that is still there."""
    setting = Setting(model=setup.model, cluster=setup.cluster, job=setup.job, calibration=setup.calibration)
    if setup.cluster.num_chips != now.num_chips:
        return None
    priced = setting.priced(msgspec.structs.replace(now.strategy, placement={}))
    return float(priced.estimate.step_s) if priced and setting.fits(priced.estimate) else None
