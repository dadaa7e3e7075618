"""What policies keep of a fleet's time: over seeds with random faults, or with the faults of a real run."""

from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.core.errors import InputError
from meshwright.simulate.fleet.fleet import Fault, FleetPolicy, TrainingFleet, drawn_faults
from meshwright.simulate.fleet.policies import Trained, run_policy
from meshwright.simulate.fleet.run import SAVE, WASTED, WORDS, WORK
from meshwright.spec.faults.rates import KINDS

LOW, HIGH = 5, 95
"""Percentiles of the intervals over seeds."""


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds of one policy, and the 5th and 95th percentile of goodput.

    ``goodput`` is the share of the time that is work kept, ``uptime`` that in which steps run, kept or not, or are
    saved. ``seconds`` are those of the whole fleet by `WORDS`. ``trained`` has the first seed's `Trained`.
    """

    policy: FleetPolicy
    faults: float
    goodput: float
    goodput_p5: float
    goodput_p95: float
    uptime: float
    uptime_p5: float
    uptime_p95: float
    seconds: dict[str, float]
    trained: Trained


def simulate_fleet(
    fleet: TrainingFleet, policies: Sequence[FleetPolicy], *, duration_s: float, seeds: int
) -> list[PolicyOutcome]:
    """Returns the outcome of each policy with the same random faults, which differ by seed."""
    draws = [drawn_faults(fleet, duration_s, seed) for seed in range(seeds)]
    return [_outcome(fleet, policy, draws, duration_s) for policy in policies]


def simulate_faults(
    fleet: TrainingFleet, policy: FleetPolicy, faults: Sequence[Fault], *, duration_s: float
) -> PolicyOutcome:
    """Returns the outcome of faults that are known, such as those injected into a real run.

    Raises InputError for a fault of an unknown kind, before the start, or in a replica that the fleet does not have.
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
    spent = np.array(
        [run_policy(fleet, policy, faults, duration_s, None if n else trained) for n, faults in enumerate(draws)]
    )
    goodput, uptime = (spent[:, words].sum(axis=1) / duration_s for words in ([WORK], [WORK, WASTED, SAVE]))
    (good_p5, good_p95), (up_p5, up_p95) = (np.percentile(values, (LOW, HIGH)) for values in (goodput, uptime))
    return PolicyOutcome(
        policy=policy,
        faults=float(np.mean([sum(fault.time_s < duration_s for fault in faults) for faults in draws])),
        goodput=float(goodput.mean()),
        goodput_p5=float(good_p5),
        goodput_p95=float(good_p95),
        uptime=float(uptime.mean()),
        uptime_p5=float(up_p5),
        uptime_p95=float(up_p95),
        seconds=dict(zip(WORDS, spent.mean(axis=0).tolist(), strict=True)),
        trained=trained,
    )
