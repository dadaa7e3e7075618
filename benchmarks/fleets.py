"""Published fleets beside their simulation, and how fast a large fleet is simulated.

python -m benchmarks.fleets                        both tables: what was published, and every input with its source
python -m benchmarks.fleets --page docs/fleets.md  writes them into the page
python -m benchmarks.fleets --speed                a year of 100,000 chips, four policies, 20 seeds

What a source does not give is a range. Both of its ends are simulated: an interval reaches from the 5th percentile over
seeds with every input at its worst end to the 95th with every one at its best. A published figure is reproduced if it
lies in an interval of at most 10 points. Run with OMP_NUM_THREADS=1 for one core.
"""

import argparse
import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from meshwright.core.toml_file import load_toml
from meshwright.report.answer import Heading, Table, as_markdown
from meshwright.simulate.fleet.fleet import POLICIES, FleetPolicy, TrainingFleet, checkpoint_steps
from meshwright.simulate.fleet.outcome import Spread, simulate_fleet
from meshwright.spec.faults.rates import FaultComponent, load_rates

FILE = Path(__file__).parent / "data" / "published_fleets.toml"
DAY_S = 86400.0
MOST_POINTS = 10.0
"""A wider simulated interval says nothing."""
SPARES = 0.1
"""None of the fleets says that it waited for a host beyond the times that are listed."""


class FleetInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number, or the best and worst of one that the source does not give; neither where the rates' file has it."""

    name: str
    source: str
    value: float | tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[float, ...]:
        """The value, the bounds, or nothing."""
        return self.value if isinstance(self.value, tuple) else () if self.value is None else (self.value,)


class PublishedFleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet with its ``figure``, as it was ``said`` and to the last digit, and the inputs of its simulation."""

    name: str
    figure: Literal["goodput", "uptime"]
    said: str
    published: tuple[float, float]
    source: str
    rates: str
    num_chips: int
    days: float
    interval: str
    inputs: tuple[FleetInput, ...]
    policy: FleetPolicy = "stop"
    chips_per_node: int = 8
    reason: str = ""

    def simulated(self, seeds: int) -> tuple[float, float]:
        """The simulated interval."""
        return self._figure(-1, seeds).p5, self._figure(0, seeds).p95

    def is_met(self, low: float, high: float) -> bool:
        """True if the published figure lies in a simulated interval that is narrow."""
        return low <= self.published[1] and self.published[0] <= high and 100 * (high - low) <= MOST_POINTS

    def fleet(self, end: int) -> TrainingFleet:
        """The fleet with all inputs at their best (0) or worst (-1) end."""
        values = {one.name: one.ends[end] for one in self.inputs if one.ends}
        step_s, per_node_hour = values.pop("step_s", 1.0), values.pop("per_node_hour", None)
        num_replicas = int(values.pop("num_replicas", 1))
        rates = load_rates(self.rates)
        if per_node_hour is not None:
            one = FaultComponent(name="node", kind="process", per_node_hour=per_node_hour)
            rates = replace(rates, components=(one,))
        times, hosts = rates.times_at(0.0, values), -(-self.num_chips // self.chips_per_node)
        mtbf_s = rates.mtbf_s(self.num_chips, hosts)
        return TrainingFleet(
            num_chips=self.num_chips,
            num_hosts=hosts,
            step_s=step_s,
            rates=rates,
            times=times,
            checkpoint_steps=checkpoint_steps(self.interval, step_s=step_s, save_s=times.save_s, mtbf_s=mtbf_s),
            num_replicas=num_replicas,
            spares=SPARES,
        )

    def _figure(self, end: int, seeds: int) -> Spread:
        [outcome] = simulate_fleet(self.fleet(end), [self.policy], duration_s=self.days * DAY_S, seeds=seeds)
        return outcome.goodput if self.figure == "goodput" else outcome.uptime


class FleetsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file."""

    fleets: tuple[PublishedFleet, ...]


def published_fleets() -> tuple[PublishedFleet, ...]:
    """The fleets of `FILE`."""
    return load_toml(FILE, FleetsFile).fleets


def tables(seeds: int = 20) -> dict[str, Table]:
    """The table of fleets and that of their inputs."""
    rows, inputs = [], []
    for fleet in published_fleets():
        low, high = fleet.simulated(seeds)
        verdict = "reproduced" if fleet.is_met(low, high) else f"not reproducible: {fleet.reason}"
        simulated = f"{low:.1%}-{high:.1%}"
        rows.append([fleet.name, fleet.figure, fleet.said, simulated, 100 * (high - low), verdict])
        inputs.append([fleet.name, "published", fleet.said, fleet.source])
        for one in fleet.inputs:
            shown = "-".join(f"{value:g}" for value in one.ends)
            inputs.append(["", one.name.replace("_", " ").removesuffix(" s"), shown, one.source])
    points = Heading("points", "{:.1f}".format)
    return {
        "fleets": Table(["fleet", "figure", "published", "simulated", points, ""], rows),
        "inputs": Table(["fleet", "input", "value", "source"], inputs),
    }


def written(page: str, seeds: int = 20) -> str:
    """The page with its tables as they come out now."""
    for name, table in tables(seeds).items():
        head, mark, rest = page.partition(f"<!-- table: {name} -->\n")
        page = f"{head}{mark}{as_markdown(table)}<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def speed(num_chips: int = 100_000, seeds: int = 20) -> None:
    """Prints the seconds of CPU for a year of a fleet under each policy."""
    rates, hosts = load_rates("llama3"), num_chips // 8
    times, mtbf_s = rates.times_at(), rates.mtbf_s(num_chips, hosts)
    fleet = TrainingFleet(
        num_chips=num_chips,
        num_hosts=hosts,
        step_s=10.0,
        rates=rates,
        times=times,
        checkpoint_steps=checkpoint_steps("auto", step_s=10.0, save_s=times.save_s, mtbf_s=mtbf_s),
        num_replicas=32,
        spares=0.02,
    )
    print(f"{num_chips:,} chips for 365 days, {seeds} seeds, a failure in {mtbf_s / 60:.0f} min, 32 replicas")
    started = time.process_time()
    for policy in POLICIES:
        before = time.process_time()
        [outcome] = simulate_fleet(fleet, [policy], duration_s=365 * DAY_S, seeds=seeds)
        goodput = outcome.goodput
        print(
            f"{policy:8} {time.process_time() - before:5.1f} s of CPU, {outcome.faults:,.0f} faults a run, "
            f"goodput {goodput.mean:.1%} ({goodput.p5:.1%} to {goodput.p95:.1%})"
        )
    print(f"all      {time.process_time() - started:5.1f} s of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--speed", action="store_true", help="time a large fleet instead")
    given = parser.parse_args()
    if given.speed:
        speed()
    elif given.page:
        given.page.write_text(written(given.page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(map(as_markdown, tables().values())))


if __name__ == "__main__":
    main()
