"""A fleet, its faults, and the rule by which it saves."""

import math
import re
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from meshwright.core.errors import InputError
from meshwright.core.units import parse_seconds
from meshwright.cost.formulas.failures import daly_interval_s, exact_steps, young_interval_s
from meshwright.spec.faults.rates import FaultKind, FaultRates, FaultTimes

FleetPolicy = Literal["stop", "elastic", "memory", "diloco"]
POLICIES: tuple[FleetPolicy, ...] = get_args(FleetPolicy)


class TrainingFleet(msgspec.Struct, frozen=True, kw_only=True):
    """``num_replicas`` equal parts of a cluster, and ``spares``, a share of its hosts, beside it.

    ``step_s`` is a step without faults. A checkpoint follows every ``checkpoint_steps``; the policy ``memory`` copies
    states to neighbours every ``memory_steps``, ``diloco`` makes an outer step every ``outer_every``.
    """

    num_chips: int
    num_hosts: int
    step_s: float
    rates: FaultRates
    times: FaultTimes
    checkpoint_steps: int
    num_replicas: int = 1
    spares: float = 0.0
    memory_steps: int = 10
    outer_every: int = 100

    @property
    def num_spares(self) -> int:
        """Hosts that wait to take a place."""
        return math.ceil(self.spares * self.num_hosts)

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between faults that stop something."""
        return self.rates.mtbf_s(self.num_chips, self.num_hosts)


class Fault(NamedTuple):
    """A fault at ``time_s`` in one replica; wrong numbers came ``latent_s`` before they are noticed then."""

    time_s: float
    replica: int
    kind: FaultKind
    host: int = 0
    latent_s: float = 0.0
    reboots: bool = False


def drawn_faults(fleet: TrainingFleet, duration_s: float, seed: int) -> list[Fault]:
    """Returns faults at random times (Poisson) in order, by component and on any host."""
    random, components = np.random.default_rng(seed), fleet.rates.components
    hourly = np.array(fleet.rates.per_hour(fleet.num_chips, fleet.num_hosts))
    count = random.poisson(hourly.sum() * duration_s / 3600)
    if not count:
        return []
    times = np.sort(random.random(count)) * duration_s
    indices = random.choice(len(components), count, p=hourly / hourly.sum())
    hosts = random.integers(fleet.num_hosts, size=count)
    replicas = hosts * fleet.num_replicas // fleet.num_hosts
    is_silent = np.array([c.kind == "corruption" for c in components])[indices]
    latents = np.where(is_silent, random.random(count) * fleet.times.check_s, 0.0)
    reboots = random.random(count) < np.array([c.reboots for c in components])[indices]
    order = np.argsort(times + latents, kind="stable")
    columns = [column[order].tolist() for column in (times + latents, replicas, indices, hosts, latents, reboots)]
    return [
        Fault(time_s, replica, components[index].kind, host, latent_s, rebooted)
        for time_s, replica, index, host, latent_s, rebooted in zip(*columns, strict=True)
    ]


def checkpoint_steps(rule: str, *, step_s: float, save_s: float, mtbf_s: float) -> int:
    """Returns the steps between checkpoints of a rule: auto (the exact optimum), young, daly, 30steps or 600s."""
    if match := re.fullmatch(r"(\d{1,9})\s*steps?", rule):
        return max(1, int(match[1]))
    if not math.isfinite(mtbf_s):
        mtbf_s = 1e12
    if rule in ("auto", "exact"):
        return exact_steps(step_s, checkpoint_s=save_s, mtbf=mtbf_s)
    formula = {"young": young_interval_s, "daly": daly_interval_s}.get(rule)
    try:
        interval_s = formula(save_s, mtbf_s) if formula else parse_seconds(rule)
    except InputError:
        raise InputError(f"--interval {rule!r} is not auto, exact, young, daly, 30steps or 600s.") from None
    return max(1, round(interval_s / step_s))
