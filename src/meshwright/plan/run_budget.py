"""The budget of the whole training run of a plan: FLOPs, days, chip-hours, money, energy."""

import msgspec

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


class ChipTime(msgspec.Struct, frozen=True, kw_only=True):
    """Days, chip-hours, money, power and energy of a time on equal chips; None if a price or a power is not known.

    Power and energy are those of the chips alone.
    """

    days: float
    chip_hours: float
    cost_usd: float | None
    power_w: float | None
    energy_kwh: float | None


class RunBudget(ChipTime, frozen=True, kw_only=True):
    """The budget of all tokens of a job at one step time.

    ``flops`` are 6 N D (`token_flops`), and ``one_chip_years`` is their time on one chip at peak.
    ``mfu_6nd`` is their share of the FLOPs at peak in the run's chip-hours: the utilisation that can be computed for
    published runs. The plan's own MFU also counts attention.
    """

    train_tokens: int
    steps: float
    flops: float
    petaflop_days: float
    one_chip_years: float
    mfu_6nd: float


def chip_time(seconds: float, chip: Chip, num_chips: int) -> ChipTime:
    """Returns the days, chip-hours, money and energy of seconds on equal chips, at the chip's price and power."""
    usd_per_hour, chip_watts = chip.price_usd_per_hour, chip.power_w
    return ChipTime(
        days=days(seconds),
        chip_hours=seconds / 3600 * num_chips,
        cost_usd=usd_per_hour and cost_usd(seconds, num_chips=num_chips, price_usd_per_hour=usd_per_hour),
        power_w=chip_watts and power_w(num_chips, chip_watts),
        energy_kwh=chip_watts and energy_kwh(seconds, num_chips=num_chips, watts_per_chip=chip_watts),
    )


def run_budget(plan: Plan, *, step_s: float) -> RunBudget | None:
    """Returns the budget of a plan at a step time; None if its job has no number of tokens."""
    num_tokens = plan.job.train_tokens
    if num_tokens is None:
        return None
    chip = plan.cluster.chip
    num_steps = num_tokens / plan.job.tokens_per_step
    flops = token_flops(plan.model) * num_tokens
    peak_flops = reference_peak(chip, plan.calibration, plan.strategy.matmul_dtype)
    run_time = chip_time(step_s * num_steps, chip, plan.cluster.num_chips)
    return RunBudget(
        train_tokens=num_tokens,
        steps=num_steps,
        flops=flops,
        petaflop_days=petaflop_days(flops),
        one_chip_years=years(train_seconds(flops, peak_flops=peak_flops)),
        mfu_6nd=mfu_from_hours(flops, run_time.chip_hours, peak_flops),
        **msgspec.structs.asdict(run_time),
    )
