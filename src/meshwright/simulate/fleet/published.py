"""Published fleets beside their simulation: ``data/published.toml``."""

from pathlib import Path
from typing import Literal

import msgspec

from meshwright.core.toml_file import load_toml
from meshwright.cost.formulas.training_budget import DAY_S
from meshwright.simulate.fleet.fleet import TrainingFleet, checkpoint_steps
from meshwright.simulate.fleet.outcome import PolicyOutcome, simulate_fleet
from meshwright.spec.faults.rates import FaultComponent, FaultRates, load_rates

FILE = Path(__file__).parent / "data" / "published.toml"
MOST_POINTS = 10.0
"""A simulated interval that is wider says nothing."""
SPARES = 0.1
"""None of the fleets says that it waited for a host in these times."""

STARTS = ("detect_s", "swap_s", "init_s", "prep_s", "startup_s", "restore_s", "data_s")
"""Parts of ``restart_s``, the total, which is what is published."""


class FleetInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of one input: a number, bounds, or, with rates that have a file, the source alone."""

    name: str
    source: str
    value: float | tuple[float, float] | None = None

    def at(self, end: int) -> float:
        """Returns the low (0) or the high (1) bound."""
        assert self.value is not None
        return self.value[end] if isinstance(self.value, tuple) else self.value


class PublishedFleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet with its ``figure``, as it was ``said`` and to the last digit, and the inputs of its simulation."""

    name: str
    figure: Literal["goodput", "uptime"]
    said: str
    published: tuple[float, float]
    source: str
    num_chips: int
    days: float
    interval: str
    inputs: tuple[FleetInput, ...]
    rates: str = ""
    chips_per_node: int = 8
    reason: str = ""

    def simulate(self, seeds: int) -> tuple[float, float]:
        """Returns the 5th percentile with every input at its worst bound, and the 95th with every one at its best."""
        best, worst = (self._outcome(end, seeds) for end in (0, 1))
        return getattr(worst, f"{self.figure}_p5"), getattr(best, f"{self.figure}_p95")

    def is_met(self, low: float, high: float) -> bool:
        """True if the published figure lies in the simulated interval, and that is narrow."""
        return low <= self.published[1] and self.published[0] <= high and 100 * (high - low) <= MOST_POINTS

    def _outcome(self, end: int, seeds: int) -> PolicyOutcome:
        values = {given.name: given.at(end) for given in self.inputs if given.value is not None}
        step_s, per_node_hour = values.pop("step_s", 1.0), values.pop("per_node_hour", None)
        rates = load_rates(self.rates) if self.rates else FaultRates(source=self.source, components=(
            FaultComponent(name="node", kind="process", per_node_hour=per_node_hour),
        ))  # fmt: skip
        times = rates.times_at(0.0, {**dict.fromkeys(STARTS, 0.0), **values})
        hosts = -(-self.num_chips // self.chips_per_node)
        mtbf_s = rates.mtbf_s(self.num_chips, hosts)
        steps = checkpoint_steps(self.interval, step_s=step_s, save_s=times.save_s, mtbf_s=mtbf_s)
        fleet = TrainingFleet(
            num_chips=self.num_chips, num_hosts=hosts, step_s=step_s, rates=rates, times=times, checkpoint_steps=steps,
            spares=SPARES,
        )  # fmt: skip
        return simulate_fleet(fleet, ["stop"], duration_s=self.days * DAY_S, seeds=seeds)[0]


class _PublishedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fleets: tuple[PublishedFleet, ...]


def published_fleets() -> tuple[PublishedFleet, ...]:
    """Returns the fleets that come with the package."""
    return load_toml(FILE, _PublishedFile).fleets
