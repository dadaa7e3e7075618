"""The result of planning: strategies that run with their predictions, as data, as JSON and as a plan file."""

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
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy


class InSetting(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What is planned in a setting."""

    setting: Setting

    @property
    def model(self) -> Model:
        return self.setting.model

    @property
    def cluster(self) -> Cluster:
        return self.setting.cluster

    @property
    def job(self) -> Job:
        return self.setting.job


class PlannedStrategy(InSetting, frozen=True, kw_only=True):
    """One strategy that runs, with its prediction; its setting has the chips that it uses."""

    strategy: Strategy
    estimate: Estimate

    @property
    def num_chips(self) -> int:
        return self.cluster.num_chips

    @property
    def usd_per_token(self) -> float | None:
        """Dollars that all chips cost for one token; None without a price."""
        price = self.cluster.chip.price_usd_per_hour
        if price is None:
            return None
        return price * self.num_chips / 3600 * self.estimate.step_s / self.job.tokens_per_step

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of the strategy and of its prediction as plain data, with the keys of `plan --json`."""
        fields = msgspec.to_builtins(self.strategy) | msgspec.to_builtins(self.estimate)
        facts = {"zero": self.strategy.zero, "precision": self.strategy.matmul_dtype, "num_chips": self.num_chips}
        return {"axes": fields.pop("mesh"), **fields, **facts}


class PlanResult(InSetting, frozen=True, kw_only=True):
    """Strategies, best first, for the job as given.

    ``axes``, ``overrides`` and ``choices`` are what the search was given: `why_not` and `what_if` search again with
    them. ``shortfall`` says why chips are left over and what would use them. Only then ``nearest_batch`` may be set:
    the fastest strategy per token on all chips, of the batches within a quarter of the wanted one.
    """

    strategies: tuple[PlannedStrategy, ...]
    notes: tuple[str, ...]
    shortfall: tuple[str, ...] = ()
    nearest_batch: PlannedStrategy | None = None
    axes: Mapping[str, int] = {}
    overrides: Mapping[str, Any] = {}
    choices: Choices = USUAL

    @cached_property
    def overlap(self) -> PricedOverlap:
        """What overlap hides in the price of the best strategy."""
        best = self.strategies[0]
        return Breakdown(price_strategy(best.setting, best.strategy)).overlap()

    def to_json(self) -> dict[str, Any]:
        """Returns one object for `plan --json`."""
        near_plan = self.nearest_batch
        return {
            "model": self.model.name,
            "cluster": self.cluster.short_name,
            "job": msgspec.to_builtins(self.job),
            "strategies": [strategy.to_json() for strategy in self.strategies],
            "overlap": msgspec.to_builtins(self.overlap),
            "memory_margin": self.setting.memory_margin,
            "notes": [*self.shortfall, *self.notes],
            "nearest_batch": None
            if near_plan is None
            else {
                "batch_seqs": near_plan.job.batch_seqs,
                "tokens_per_step": near_plan.job.tokens_per_step,
                "strategy": near_plan.to_json(),
            },
        }

    def plan(self, chosen: PlannedStrategy | None = None) -> Plan:
        """Returns the plan file of one of the strategies; by default of the best."""
        picked_plan = chosen or self.strategies[0]
        return plan_in(picked_plan.setting, picked_plan.strategy, picked_plan.estimate)


def plan_in(setting: Setting, strategy: Strategy, predicted: Estimate) -> Plan:
    """Returns the plan of a strategy in its setting."""
    return Plan(
        model=setting.model,
        cluster=setting.cluster,
        job=setting.job,
        strategy=strategy,
        assumptions=setting.assumptions,
        calibration=setting.rates,
        predicted=predicted,
    )


def planned(setting: Setting, batch_seqs: int, strategy: Strategy) -> PlannedStrategy:
    """Returns the strategy for a batch, with its prediction, which has days and dollars (None without a price) for all
    tokens of the job."""
    setting = msgspec.structs.replace(setting, job=msgspec.structs.replace(setting.job, batch_seqs=batch_seqs))
    job, estimate = setting.job, price_strategy(setting, strategy).estimate
    if job.train_tokens is not None:
        seconds = estimate.step_s * job.train_tokens / job.tokens_per_step
        run_time = chip_time(seconds, setting.cluster.chip, setting.cluster.num_chips)
        estimate = msgspec.structs.replace(estimate, train_days=run_time.days, cost_usd=run_time.cost_usd)
    return PlannedStrategy(setting=setting, strategy=strategy, estimate=estimate)
