"""Time, energy, money and floor that a number of FLOPs takes on chips at an assumed utilisation.

Where a plan exists its own step time is better (`plan.run_budget`); this is the estimate before there is one.
"""

import msgspec

from meshwright.core.fields import check_figures
from meshwright.cost.formulas.training_budget import (
    facility_energy_kwh,
    floor_area_m2,
    flops_per_dollar,
    flops_per_joule,
    train_seconds,
    years,
)
from meshwright.plan.run_budget import ChipTime, chip_time
from meshwright.spec.chip import Chip, peak


class CostAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Assumed figures: the share of the peak, and others that data sheets lack.

    ``pue`` is the building's energy over that of its machines, ``host_share`` the power of hosts and network over that
    of the chips; ``price_usd_per_hour`` and ``watts_per_chip`` replace the catalogue's.
    """

    mfu: float = 0.4
    pue: float = 1.0
    host_share: float = 0.0
    price_usd_per_hour: float | None = None
    watts_per_chip: float | None = None
    chips_per_rack: int | None = None
    m2_per_rack: float = 1.0

    def __post_init__(self) -> None:
        check_figures(self, "the budget's", may_be_zero=("host_share",), shares=("mfu",))


class RunCost(ChipTime, frozen=True, kw_only=True):
    """A number of FLOPs on equal chips; ``None`` where a price, a power or a rack is not known."""

    chip: str
    num_chips: int
    dtype: str
    peak_flops: float
    mfu: float
    years: float
    facility_energy_kwh: float | None
    flops_per_dollar: float | None
    flops_per_joule: float | None
    floor_area_m2: float | None


def run_cost(
    flops: float, chip: Chip, *, num_chips: int = 1, dtype: str, given: CostAssumptions, useful_share: float = 1.0
) -> RunCost:
    """Returns time, energy and money of these FLOPs; ``useful_share`` is the goodput that failures leave.

    Source: How to Scale Your Model, section 6.2; Scaling systems for LLMs (slides) for years, power and floor.
    """
    rate, racks = peak(chip, dtype), given.chips_per_rack
    reached = given.mfu * useful_share
    seconds = train_seconds(flops, num_chips=num_chips, peak_flops=rate, mfu=reached)
    price = given.price_usd_per_hour or chip.price_usd_per_hour
    watts = given.watts_per_chip or chip.power_w
    priced = msgspec.structs.replace(chip, price_usd_per_hour=price, power_w=watts)
    time = chip_time(seconds, priced, num_chips)
    energy = time.energy_kwh
    return RunCost(
        chip=chip.name,
        num_chips=num_chips,
        dtype=dtype,
        peak_flops=rate,
        mfu=given.mfu,
        years=years(seconds),
        facility_energy_kwh=energy and facility_energy_kwh(energy, pue=given.pue, host_share=given.host_share),
        flops_per_dollar=price and flops_per_dollar(rate, price_usd_per_hour=price, mfu=reached),
        flops_per_joule=watts and flops_per_joule(rate, watts_per_chip=watts, mfu=reached),
        floor_area_m2=racks and floor_area_m2(num_chips, chips_per_rack=racks, m2_per_rack=given.m2_per_rack),
        **msgspec.structs.asdict(time),
    )
