"""The rates of faults in a fleet and the seconds that each takes: published fleets in ``data``, or a user's file.

A file has a ``source``, ``components``, and the known fields of `FaultTimes`, as numbers or as [low, high]. Fields that
it leaves out have the defaults of `FaultTimes`, which are assumptions.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from meshwright.core.errors import InputError, nearest
from meshwright.core.fields import check_figures, convert_fields
from meshwright.core.toml_file import decode_toml, read_toml

FaultKind = Literal["process", "link", "host", "reboot", "hang", "corruption", "straggler", "planned"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
"""Kinds of faults, in this order: a process dies, or loses its connections; its host is lost, or reboots; the process
hangs, computes wrong numbers, runs slowly, or is stopped on purpose."""

FOLDER = Path(__file__).parent / "data"
NEVER_S = 1e12
"""Seconds between failures, 32,000 years, where none are known: intervals are numbers."""
DEFAULT_RATES = "llama3"
"""Name of the rates for chips without published rates: the largest fleet that says what failed."""


class FaultTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of faults, of restarts and of protection against faults; ``slowdown`` is a straggler's factor.

    ``detect_s`` finds a dead process or host, ``hang_s`` a process that hangs (the timeout of a collective: 600 s is
    PyTorch's for NCCL), ``check_s`` is the time between comparisons that find wrong numbers, ``straggler_s`` how long a
    slow host stays. ``swap_s`` adds a spare, ``reboot_s`` and ``repair_s`` bring a host back. A start is ``init_s`` of
    devices, ``prep_s``, ``startup_s`` with compilation, ``restore_s`` and ``data_s``, or ``restart_s`` where only a
    total is known. Saving blocks steps for ``save_s``, a copy to a neighbour's memory for ``memory_s``, an outer step
    for ``outer_s``, a new group for ``regroup_s``; ``copy_s`` brings a state from memory to where it is needed.
    Policies that need no disk to recover save to it once per ``disk_s`` of work.
    """

    detect_s: float = 10.0
    hang_s: float = 600.0
    check_s: float = 3600.0
    straggler_s: float = 3600.0
    slowdown: float = 1.5
    swap_s: float = 60.0
    reboot_s: float = 900.0
    repair_s: float = 172800.0
    restart_s: float = 0.0
    init_s: float = 30.0
    prep_s: float = 10.0
    startup_s: float = 120.0
    restore_s: float = 60.0
    data_s: float = 10.0
    save_s: float = 10.0
    memory_s: float = 1.0
    copy_s: float = 30.0
    regroup_s: float = 1.0
    outer_s: float = 1.0
    disk_s: float = 3600.0

    def __post_init__(self) -> None:
        check_figures(self, "times:", may_be_zero=[name for name in self.__struct_fields__ if name != "disk_s"])
        if self.slowdown < 1:
            raise InputError(f"times: slowdown is {self.slowdown:g}, give a factor of at least 1")

    def noticed_s(self, kind: FaultKind) -> float:
        """Returns the seconds from a fault until it is noticed; 0 for planned stops, and corruption (when found)."""
        return {"hang": self.hang_s, "corruption": 0.0, "planned": 0.0}.get(kind, self.detect_s)

    def found_s(self, kind: FaultKind) -> float:
        """Returns the seconds from a fault until training can start again, on the old host or a spare."""
        return self.noticed_s(kind) + (self.swap_s if kind in ("host", "reboot") else 0.0) + self.restart_s

    def start_s(self, restore_s: float) -> float:
        """Returns the seconds of a start, from a host to the first step; ``restore_s`` of them restore the state."""
        return self.init_s + self.prep_s + self.startup_s + restore_s + self.data_s


class FaultComponent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause of faults: its ``kind``, and either its ``count`` in the observed fleet or a rate per hour."""

    name: str
    kind: FaultKind
    count: float | None = None
    per_chip_hour: float | None = None
    per_node_hour: float | None = None

    def __post_init__(self) -> None:
        rates = ("count", "per_chip_hour", "per_node_hour")
        check_figures(self, f"component {self.name!r}:", may_be_zero=rates)
        if [getattr(self, name) for name in rates].count(None) != 2:
            raise InputError(f"component {self.name!r} needs one of {', '.join(rates)}")


class FaultRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often each component fails. Counts become rates by ``num_chips``, observed for ``days``."""

    source: str
    components: tuple[FaultComponent, ...]
    chips: tuple[str, ...] = ()
    num_chips: float | None = None
    days: float | None = None
    times: dict[str, float | tuple[float, float]] = {}

    def __post_init__(self) -> None:
        check_figures(self, "rates:", may_be_zero=("times",))
        if not self.components:
            raise InputError("rates have no components. Give at least one [[components]]")
        if (self.num_chips is None or self.days is None) and any(c.count is not None for c in self.components):
            raise InputError("a component with a count needs num_chips and days of the observed fleet")
        for name, (low, high) in self.ranges.items():
            if low > high:
                raise InputError(f"times: {name} is [{low:g}, {high:g}], give the lower bound first")
        self.times_at()

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The times that are given as [low, high], by name."""
        return {name: time for name, time in self.times.items() if isinstance(time, tuple)}

    def per_hour(self, num_chips: int, num_hosts: int) -> tuple[float, ...]:
        """Returns the mean number of faults of each component in an hour of a fleet."""
        watched_hours = (self.num_chips or 1) * (self.days or 1) * 24
        return tuple(
            num_chips * c.count / watched_hours
            if c.count is not None
            else num_chips * (c.per_chip_hour or 0.0) + num_hosts * (c.per_node_hour or 0.0)
            for c in self.components
        )

    def mtbf_s(self, num_chips: int, num_hosts: int) -> float:
        """Returns the mean seconds between faults that stop a synchronous run; `NEVER_S` where nothing fails."""
        hourly = zip(self.components, self.per_hour(num_chips, num_hosts), strict=True)
        total = sum(rate for component, rate in hourly if component.kind != "straggler")
        return min(NEVER_S, 3600 / total) if total else NEVER_S

    def times_at(self, share: float = 0.5, changes: Mapping[str, float] = {}) -> FaultTimes:
        """Returns the times: low + ``share`` x (high - low) where there are bounds; ``changes`` replaces times."""
        known = {name: time for name, time in self.times.items() if not isinstance(time, tuple)}
        between = {name: low + share * (high - low) for name, (low, high) in self.ranges.items()}
        return convert_fields({**known, **between, **changes}, FaultTimes, section="times")


@functools.cache
def published_rates() -> tuple[str, ...]:
    """Returns the names of the fleets whose rates are in the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load_rates(name: str) -> FaultRates:
    """Returns the rates of a published fleet, or of a file if ``name`` ends in .toml. Raises InputError if neither."""
    if not name.endswith(".toml") and name not in published_rates():
        known = nearest(name, published_rates())
        raise InputError(f"rates {name!r} are not known.{known} Or name a file that ends in .toml.")
    return decode_toml(read_toml(Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"), FaultRates)


@functools.cache
def rates_for_chip(chip: str) -> tuple[str, bool]:
    """Returns the name of the published rates to use for a chip, and whether they were observed on that chip."""
    names = [name for name in published_rates() if chip in load_rates(name).chips]
    return (names[0], True) if names else (DEFAULT_RATES, False)
