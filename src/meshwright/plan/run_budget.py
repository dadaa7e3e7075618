"""The budget of the whole training run of a plan: FLOPs, days, chip-hours, money, energy."""

import msgspec

from meshwright.cost.formulas.failures import exact_steps, linear_share, useful_share
from meshwright.cost.formulas.training_budget import (
    cost_usd,
    days,
    energy_kwh,
    mfu_from_hours,
    petaflop_days,
    power_w,
    train_seconds,
    years,
)
from meshwright.cost.work.ops import token_flops
from meshwright.plan.plan_file import Plan
from meshwright.spec.calibration import reference_peak
from meshwright.spec.chip import Chip
from meshwright.spec.cluster import Cluster
from meshwright.spec.faults.rates import FaultRates, FaultTimes, load_rates, rates_for_chip


class ChipTime(msgspec.Struct, frozen=True, kw_only=True):
    """Days, chip-hours, money, power and energy of a run on equal chips; None if a price or a power is not known.

    Power and energy count the chips only, no hosts or cooling.
    """

    days: float
    chip_hours: float
    cost_usd: float | None
    power_w: float | None
    energy_kwh: float | None


class FailureOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """A synchronous run that a failure stops every ``mtbf_s`` on average, for ``restart_s``, in closed form.

    ``goodput`` is the share of the time whose work is kept (`useful_share`), ``ettr`` Meta's estimate of it
    (`linear_share`), with a checkpoint every ``checkpoint_steps``. ``rates`` names the failure rates; ``of_chip`` is
    False if they were published for another chip."""

    mtbf_s: float
    restart_s: float
    checkpoint_steps: int
    goodput: float
    ettr: float
    rates: str = ""
    of_chip: bool = True


class RunBudget(ChipTime, frozen=True, kw_only=True):
    """The budget of all tokens of a job at one step time.

    ``flops`` are 6 N D (`token_flops`), and ``one_chip_years`` is their time on one chip at peak.
    ``mfu_6nd`` is their share of the FLOPs at peak in the run's chip-hours: the utilisation that can be computed for
    published runs. The plan's own MFU also counts attention. Only ``failures`` and ``days_with_failures`` account for
    failures; both are None for the devices of one host.
    """

    train_tokens: int
    steps: float
    flops: float
    petaflop_days: float
    one_chip_years: float
    mfu_6nd: float
    failures: FailureOutlook | None
    days_with_failures: float | None


def failure_outlook(
    cluster: Cluster, step_s: float, rates: FaultRates, times: FaultTimes, num_steps: int | None = None
) -> FailureOutlook:
    """Returns the outlook of a run with failures, checkpointed every ``num_steps`` steps (None: the best interval)."""
    hourly = rates.per_hour(cluster.num_chips, cluster.num_hosts)
    mtbf_s = rates.mtbf_s(cluster.num_chips, cluster.num_hosts)
    kinds = [component.kind for component in rates.components]
    found_s = sum(rate * times.found_s(kind) for rate, kind in zip(hourly, kinds, strict=True)) / (sum(hourly) or 1)
    steps = num_steps or exact_steps(step_s, checkpoint_s=times.save_s, mtbf=mtbf_s)
    figures = {"checkpoint_s": times.save_s, "restart_s": found_s + times.start_s(times.restore_s), "mtbf": mtbf_s}
    return FailureOutlook(
        mtbf_s=mtbf_s,
        restart_s=figures["restart_s"],
        checkpoint_steps=steps,
        goodput=useful_share(steps * step_s, **figures),
        ettr=linear_share(steps * step_s, **figures),
    )


def chip_time(seconds: float, chip: Chip, num_chips: int) -> ChipTime:
    """Returns the days, chip-hours, money, power and energy of ``seconds`` on ``num_chips`` chips."""
    usd_per_hour, chip_watts = chip.price_usd_per_hour, chip.power_w
    return ChipTime(
        days=days(seconds),
        chip_hours=seconds / 3600 * num_chips,
        cost_usd=usd_per_hour and cost_usd(seconds, num_chips=num_chips, price_usd_per_hour=usd_per_hour),
        power_w=chip_watts and power_w(num_chips, chip_watts),
        energy_kwh=chip_watts and energy_kwh(seconds, num_chips=num_chips, watts_per_chip=chip_watts),
    )


def run_budget(plan: Plan, *, step_s: float) -> RunBudget | None:
    """Returns the budget of all training tokens of a plan at a step time; None if its job has no ``train_tokens``."""
    num_tokens = plan.job.train_tokens
    if num_tokens is None:
        return None
    chip = plan.cluster.chip
    num_steps = num_tokens / plan.job.tokens_per_step
    flops = token_flops(plan.model) * num_tokens
    peak_flops = reference_peak(chip, plan.calibration, plan.strategy.matmul_dtype)
    run_time = chip_time(step_s * num_steps, chip, plan.cluster.num_chips)
    failures = None
    if plan.cluster.kind != "host":
        name, of_chip = rates_for_chip(chip.name)
        rates = load_rates(name)
        failures = failure_outlook(plan.cluster, step_s, rates, rates.times_at())
        failures = msgspec.structs.replace(failures, rates=name, of_chip=of_chip)
    return RunBudget(
        train_tokens=num_tokens,
        steps=num_steps,
        flops=flops,
        petaflop_days=petaflop_days(flops),
        one_chip_years=years(train_seconds(flops, peak_flops=peak_flops)),
        mfu_6nd=mfu_from_hours(flops, run_time.chip_hours, peak_flops),
        failures=failures,
        days_with_failures=run_time.days / failures.goodput if failures and failures.goodput else None,
        **msgspec.structs.asdict(run_time),
    )
