"""Goodput and uptime of a fleet under recovery policies: over seeds of random faults, or for a given list of faults."""

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.core.errors import InputError
from meshwright.core.progress import tracked
from meshwright.simulate.fleet.fleet import Fault, FleetPolicy, TrainingFleet, drawn_faults
from meshwright.simulate.fleet.policies import Trained, run_policy
from meshwright.simulate.fleet.run import SAVE, WASTED, WORDS, WORK
from meshwright.spec.faults.rates import KINDS


class Spread(msgspec.Struct, frozen=True):
    """Mean, 5th and 95th percentile of a figure over seeds."""

    mean: float
    p5: float
    p95: float

    @staticmethod
    def of(values: np.ndarray) -> "Spread":
        """Returns the spread of an array with a value for each seed."""
        return Spread(*(float(value) for value in (values.mean(), *np.percentile(values, (5, 95)))))


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one policy over seeds; ``faults`` is the mean number of faults.

    ``goodput`` is the fraction of time spent on steps whose work is kept; ``uptime`` also counts steps whose work is
    lost, and saves. ``seconds`` are the fleet's mean seconds by category (`WORDS`); ``trained`` are the spans in which
    steps ran with the first seed."""

    policy: FleetPolicy
    faults: float
    goodput: Spread
    uptime: Spread
    seconds: dict[str, float]
    trained: Trained


def simulate_fleet(
    fleet: TrainingFleet, policies: Sequence[FleetPolicy], *, duration_s: float, seeds: int
) -> list[PolicyOutcome]:
    """Returns the outcome of each policy over ``seeds`` draws of random faults; all policies get the same draws."""
    draws = [drawn_faults(fleet, duration_s, seed) for seed in range(seeds)]
    return [_outcome(fleet, policy, draws, duration_s) for policy in policies]


def simulate_faults(
    fleet: TrainingFleet, policy: FleetPolicy, faults: Sequence[Fault], *, duration_s: float
) -> PolicyOutcome:
    """Returns the outcome of one policy for a given list of faults, for instance faults injected into a real run.

    Raises InputError for a fault of an unknown kind, at a negative time, or in a replica that the fleet does not have.
    """
    for fault in faults:
        if fault.kind not in KINDS or fault.time_s < 0 or not 0 <= fault.replica < fleet.num_replicas:
            raise InputError(
                f"fault {fault.kind!r} of replica {fault.replica} at {fault.time_s:g} s: give {' or '.join(KINDS)}, "
                f"a replica below {fleet.num_replicas} and a time of at least 0."
            )
    return _outcome(fleet, policy, [sorted(faults, key=lambda fault: fault.time_s)], duration_s)


def _outcome(
    fleet: TrainingFleet, policy: FleetPolicy, draws: Sequence[Sequence[Fault]], duration_s: float
) -> PolicyOutcome:
    trained: Trained = []
    runs = enumerate(tracked(draws, f"simulating {policy}"))
    spent = np.array([run_policy(fleet, policy, faults, duration_s, None if n else trained) for n, faults in runs])
    return PolicyOutcome(
        policy=policy,
        faults=float(np.mean([sum(fault.time_s < duration_s for fault in faults) for faults in draws])),
        goodput=Spread.of(spent[:, WORK] / duration_s),
        uptime=Spread.of(spent[:, [WORK, WASTED, SAVE]].sum(axis=1) / duration_s),
        seconds=dict(zip(WORDS, spent.mean(axis=0).tolist(), strict=True)),
        trained=trained,
    )
