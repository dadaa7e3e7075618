"""Times of a pipeline's passes on the command line: bare numbers or seconds, per device or per virtual stage."""

import re
from typing import Any

import msgspec

from meshwright.algebra.schedules.simulation import Simulation, simulate
from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import lockstep_seconds, tick_tables
from meshwright.core.errors import InputError
from meshwright.core.fields import LARGEST
from meshwright.core.units import format_seconds

UNITS = "units"
"""The unit of times that are written without one."""

_TIME = re.compile(r"((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(s|ms|us|ns|)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "": 1.0}


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a device's passes over one microbatch, or of each virtual stage where several are given.

    ``backward`` is the whole backward pass, ``weight`` the part of it that makes gradients of weights.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    send: float
    unit: str

    @property
    def per_device(self) -> bool:
        """True if each time is given once, for all devices."""
        return len(self.forward) == len(self.backward) == len(self.weight) == 1

    def simulate(self, schedule: Schedule) -> Simulation:
        """Returns one simulated step with these times."""
        forward, backward, weight = self._per_virtual_stage(schedule)
        return simulate(schedule, forward_s=forward, backward_s=backward, weight_s=weight, send_s=self.send)

    def in_lockstep(self, schedule: Schedule) -> dict[str, Any]:
        """Returns ticks, time of a step and peak stash if all devices run in lockstep, tick by tick."""
        tables = tick_tables(schedule)
        forward, backward, weight = self._per_virtual_stage(schedule)
        step = lockstep_seconds(tables, forward_s=forward, backward_s=backward, weight_s=weight, send_s=self.send)
        return {"ticks": tables.num_ticks, "step": step, "peak_stash": max(tables.peak_stash)}

    def scaled(self, ratio: float) -> "Times":
        """Returns the times of passes over ``ratio`` times as many layers."""
        forward, backward, weight = (
            tuple(ratio * time for time in times) for times in (self.forward, self.backward, self.weight)
        )
        return msgspec.structs.replace(self, forward=forward, backward=backward, weight=weight)

    def _per_virtual_stage(self, schedule: Schedule) -> tuple[list[float], list[float], list[float]]:
        """Returns times by virtual stage: forward, backward without weight gradients, weight gradients."""
        forward, whole, weight = (
            _spread(name, given, schedule)
            for name, given in (("forward", self.forward), ("backward", self.backward), ("weight", self.weight))
        )
        return forward, [one - part for one, part in zip(whole, weight, strict=True)], weight

    def show(self, time: float) -> str:
        """Returns a time with its unit."""
        return format_seconds(time) if self.unit == "s" else f"{time:,.6g} {self.unit}"

    def cell(self, time: float) -> str:
        """Returns a time for a table, without the word "units"."""
        return self.show(time).removesuffix(f" {UNITS}")


def _spread(name: str, given: tuple[float, ...], schedule: Schedule) -> list[float]:
    """Returns a time for each virtual stage: the given ones, or a device's one time divided among its stages."""
    count = schedule.num_virtual_stages
    if len(given) == 1:
        return [given[0] * schedule.piece_share] * count
    if len(given) != count:
        raise InputError(
            f"--{name} has {len(given)} times; {schedule.name} has {count} virtual stages here. "
            f"Give one time for all devices, or {count}, one for each virtual stage."
        )
    return list(given)


def read_times(*, forward: str, backward: str | None, weight: str | None, send: str) -> Times:
    """Returns the times of a command line. Raises InputError if they cannot be read or do not belong together.

    The default backward time is twice the forward time; the default weight time is half of the backward time.
    """
    units: set[str] = set()
    forwards, sends = _read("--forward", forward, units), _read("--send", send, units)
    backwards = _read("--backward", backward, units) if backward else tuple(2 * one for one in forwards)
    weights = _read("--weight", weight, units) if weight else tuple(0.5 * one for one in backwards)
    if units >= {UNITS, "s"}:
        raise InputError("some times have a unit and some have none. Write all of them as 1.2ms or all as 1.2.")
    if len(sends) > 1:
        raise InputError(f"--send {send!r} is more than one time. Give one; it holds at every boundary.")
    if min(forwards + backwards) <= 0:
        raise InputError("--forward and --backward must be more than 0.")
    longest = max(len(backwards), len(weights))
    wholes, parts = (given * longest if len(given) == 1 else given for given in (backwards, weights))
    unit = "s" if "s" in units else UNITS
    times = Times(forward=forwards, backward=backwards, weight=weights, send=sends[0], unit=unit)
    for whole, part in zip(wholes, parts, strict=False):
        if part > whole:
            given = f"--weight {times.cell(part)} is more than --backward {times.cell(whole)}"
            raise InputError(f"{given}, of which it is a part.")
    return times


def _read(option: str, text: str, units: set[str]) -> tuple[float, ...]:
    """Returns the times of a text such as ``1.2ms`` or ``1,1,1.5``; adds their unit to ``units``, none for a bare 0."""
    found = []
    for word in text.split(","):
        match = _TIME.fullmatch(word.strip())
        if match is None:
            raise InputError(f"{option} {text!r} is not a time. Write for example 1.2ms, 1.5 or 1,1,1.5.")
        number, unit = float(match[1]), match[2]
        if number > LARGEST:
            raise InputError(f"{option} {word!r} is too long. Give at most {LARGEST:g}.")
        if unit or number:
            units.add("s" if unit else UNITS)
        found.append(number * _SECONDS[unit])
    return tuple(found)
