"""The result of planning: plans that run, as data and as JSON."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from meshwright.cost.breakdown import Breakdown, PricedOverlap
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate, price_strategy
from meshwright.plan.plan_file import Plan
from meshwright.plan.run_budget import chip_time
from meshwright.plan.space import USUAL, Choices
from meshwright.spec.strategy import Strategy


class PlanResult(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Plans, best first, for the job of ``setting``; the setting of each plan has the chips that the plan uses.

    ``axes``, ``overrides`` and ``choices`` are the arguments of the search: `why_not` and `what_if` search again with
    them. ``shortfall`` says why chips are left over and what would use them. Only then ``nearest_batch`` may be set:
    the plan with the fastest step per token on all chips, of the batches within a quarter of the job's.
    """

    setting: Setting
    plans: tuple[Plan, ...]
    notes: tuple[str, ...]
    shortfall: tuple[str, ...] = ()
    nearest_batch: Plan | None = None
    axes: Mapping[str, int] = {}
    overrides: Mapping[str, Any] = {}
    choices: Choices = USUAL

    @cached_property
    def overlap(self) -> PricedOverlap:
        """The communication of the best plan that overlap hides, as it is priced."""
        best_plan = self.plans[0]
        return Breakdown(price_strategy(best_plan.setting, best_plan.strategy)).overlap()

    def to_json(self) -> dict[str, Any]:
        """Returns the result as plain data, the object of `plan --json`."""
        near_plan, setting = self.nearest_batch, self.setting
        return {
            "model": setting.model.name,
            "cluster": setting.cluster.short_name,
            "job": msgspec.to_builtins(setting.job),
            "strategies": [plan.to_json() for plan in self.plans],
            "overlap": msgspec.to_builtins(self.overlap),
            "memory_margin": setting.memory_margin,
            "notes": [*self.shortfall, *self.notes],
            "nearest_batch": None
            if near_plan is None
            else {
                "batch_seqs": near_plan.job.batch_seqs,
                "tokens_per_step": near_plan.job.tokens_per_step,
                "strategy": near_plan.to_json(),
            },
        }


def plan_in(setting: Setting, strategy: Strategy, predicted: Estimate) -> Plan:
    """Returns the plan of a strategy in a setting with a given prediction."""
    return Plan(**Plan.fields_of(setting), job=setting.job, strategy=strategy, predicted=predicted)


def planned(setting: Setting, batch_seqs: int, strategy: Strategy) -> Plan:
    """Prices a strategy for a batch of ``batch_seqs`` and returns its plan. For a job with ``train_tokens`` the
    prediction has the days and dollars (None without a price) of all of them."""
    setting = msgspec.structs.replace(setting, job=msgspec.structs.replace(setting.job, batch_seqs=batch_seqs))
    job, estimate = setting.job, price_strategy(setting, strategy).estimate
    if job.train_tokens is not None:
        train_s = estimate.step_s * job.train_tokens / job.tokens_per_step
        run_time = chip_time(train_s, setting.cluster.chip, setting.cluster.num_chips)
        estimate = msgspec.structs.replace(estimate, train_days=run_time.days, cost_usd=run_time.cost_usd)
    return plan_in(setting, strategy, estimate)
