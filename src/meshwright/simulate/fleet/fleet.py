"""Training fleets, randomly drawn faults, and the number of steps between checkpoints by a rule."""

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
    """A cluster that trains as ``num_replicas`` equal replicas, with ``spares`` times ``num_hosts`` spare hosts.

    ``step_s`` is a step without faults. Policy "stop" saves every ``checkpoint_steps``, "memory" copies states to
    neighbours every ``memory_steps`` (at most `disk_steps`), "diloco" makes an outer step every ``outer_every``."""

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
        """Number of idle spare hosts that can replace lost ones; rounded up."""
        return math.ceil(self.spares * self.num_hosts)

    @property
    def disk_steps(self) -> int:
        """Steps between saves to disk, one per ``times.disk_s``, of policies that recover without them."""
        return max(1, round(self.times.disk_s / self.step_s))

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between faults of the whole fleet, stragglers left out."""
        return self.rates.mtbf_s(self.num_chips, self.num_hosts)


class Fault(NamedTuple):
    """A fault of one replica and host. A "corruption" is noticed at ``time_s`` and began ``latent_s`` earlier."""

    time_s: float
    replica: int
    kind: FaultKind
    host: int = 0
    latent_s: float = 0.0


def drawn_faults(fleet: TrainingFleet, duration_s: float, seed: int) -> list[Fault]:
    """Returns random faults sorted by time: Poisson arrivals at each component's rate, on uniformly drawn hosts."""
    random, kinds = np.random.default_rng(seed), [component.kind for component in fleet.rates.components]
    hourly = np.array(fleet.rates.per_hour(fleet.num_chips, fleet.num_hosts))
    count = random.poisson(hourly.sum() * duration_s / 3600)
    indices = random.choice(len(kinds), count, p=hourly / hourly.sum()) if count else np.zeros(0, int)
    hosts = random.integers(fleet.num_hosts, size=count)
    latents = np.array([fleet.times.check_s * (kind == "corruption") for kind in kinds])[indices] * random.random(count)
    times = random.random(count) * duration_s + latents
    columns = (times, hosts * fleet.num_replicas // fleet.num_hosts, indices, hosts, latents)
    rows = zip(*(column[np.argsort(times)].tolist() for column in columns), strict=True)
    return [Fault(time_s, replica, kinds[index], host, latent_s) for time_s, replica, index, host, latent_s in rows]


def checkpoint_steps(rule: str, *, step_s: float, save_s: float, mtbf_s: float) -> int:
    """Returns the steps between checkpoints by ``rule``: auto (the optimum), young, daly, 30steps or 600s. Raises
    InputError for another rule."""
    if match := re.fullmatch(r"([1-9]\d{0,8})\s*steps?", rule):
        return int(match[1])
    if rule in ("auto", "exact"):
        return exact_steps(step_s, checkpoint_s=save_s, mtbf=mtbf_s)
    formula = {"young": young_interval_s, "daly": daly_interval_s}.get(rule)
    try:
        interval_s = formula(save_s, mtbf_s) if formula else parse_seconds(rule)
    except InputError:
        interval_s = 0.0
    if not (formula or interval_s > 0):
        raise InputError(f"--interval {rule!r} is not auto, exact, young, daly, 30steps or 600s.")
    return max(1, round(interval_s / step_s))
