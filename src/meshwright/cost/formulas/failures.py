"""Failures of a fleet: their rate, the best checkpoint interval, and the share of time that is useful work."""

import math

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.cost.formulas.training_budget import DAY_S


def failures_per_day(num_nodes: Number, *, failures_per_node_day: Number) -> Number:
    """Returns failures per day of all nodes; 10 per 1000 node-days are usual (Kokolis et al., Revisiting Reliability,
    2024)."""
    return num_nodes * failures_per_node_day


def mtbf_s(num_nodes: Number, *, failures_per_node_day: Number) -> Number:
    """Returns seconds between failures of any node: 1 / (n r), 14.4 min for 10,000 nodes at 10 per 1000 node-days."""
    return DAY_S / failures_per_day(num_nodes, failures_per_node_day=failures_per_node_day)


def young_interval_s(checkpoint_s: float, mtbf: float) -> float:
    """Returns the seconds of work between checkpoints that lose the least time: sqrt(2 delta M).

    A first-order result: right while a checkpoint takes much less than the time between failures. Source: Young, A
    first order approximation to the optimum checkpoint interval (1974).
    """
    return math.sqrt(2 * checkpoint_s * mtbf)


def daly_interval_s(checkpoint_s: float, mtbf: float) -> float:
    """Returns the best seconds of work between checkpoints, to higher order; M if a checkpoint takes 2 M or more.

    sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta. Source: Daly, A higher order estimate (2006).
    """
    if checkpoint_s >= 2 * mtbf:
        return mtbf
    ratio = checkpoint_s / (2 * mtbf)
    return math.sqrt(2 * checkpoint_s * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def recovery_interval_s(checkpoint_s: float, mtbf: float, restart_s: float) -> float:
    """Returns Young's interval with the time R to recover: sqrt(2 delta (M + R)), all in seconds.

    Source: changlan.org, Optimal Checkpointing Frequency; Saxena et al., arXiv 2410.18124 (2024), for a short delta.
    """
    return math.sqrt(2 * checkpoint_s * (mtbf + restart_s))


def exact_steps(step_s: float, *, checkpoint_s: float, mtbf: float) -> int:
    """Returns the number of steps between checkpoints with the least `expected_s` per step.

    Where (1 - x) e^x = e^(-delta / M), with x = tau / M, the derivative of (e^((tau + delta) / M) - 1) / tau is zero;
    the time to recover does not move it.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if (1 - x) * math.exp(x) > math.exp(-checkpoint_s / mtbf) else (low, x)
    fewest = max(1, math.floor(low * mtbf / step_s))
    return max(
        (fewest, fewest + 1), key=lambda n: useful_share(n * step_s, checkpoint_s=checkpoint_s, restart_s=0, mtbf=mtbf)
    )


def expected_s(span_s: float, *, mtbf: float, restart_s: float = 0.0) -> float:
    """Returns the expected seconds until a span of work passes without a failure: e^(R / M) M (e^(T / M) - 1).

    Failures come at random every M seconds on average, also during restarts, and each starts the span again. Infinite
    if (T + R) / M > 700. Source: Daly, A higher order estimate (2006).
    """
    if (span_s + restart_s) / mtbf > 700:
        return math.inf
    return mtbf * math.exp(restart_s / mtbf) * math.expm1(span_s / mtbf)


def useful_share(interval_s: float, *, checkpoint_s: float, restart_s: float, mtbf: float) -> float:
    """Returns useful work over wall time: tau / `expected_s` of tau + delta. Raises InputError unless tau > 0."""
    if interval_s <= 0:
        raise InputError(f"an interval of {interval_s:g} s between checkpoints does no work. Give a positive number.")
    return interval_s / expected_s(interval_s + checkpoint_s, mtbf=mtbf, restart_s=restart_s)


def linear_share(interval_s: float, *, checkpoint_s: float, restart_s: float, mtbf: float) -> float:
    """Returns Meta's expected ETTR: (1 - (R + tau / 2) / M) / (1 + delta / tau), `useful_share` to first order.

    ``restart_s`` includes the time to start, u0, and the time in a queue. Within 5% while M is at least 0.1 day.
    Source: Kokolis et al., Revisiting Reliability, arXiv 2410.21680v2 (2025), section on expected ETTR.
    """
    return max(0.0, 1 - (restart_s + interval_s / 2) / mtbf) / (1 + checkpoint_s / interval_s)


def goodput(
    num_nodes: float,
    *,
    failures_per_node_day: float,
    checkpoint_s: float,
    restart_s: float,
    interval_s: float | None = None,
) -> dict[str, float]:
    """Returns failures, best intervals and goodput of a fleet, by default at Daly's interval. Raises InputError for bad
    numbers.

    ``checkpoint_s`` is the time for which saving stops the run (short if it is asynchronous), ``restart_s`` the time
    from a failure to the first new step; all in seconds. ``goodput`` and two lost shares add up to 1:
    ``lost_to_checkpoints`` (saving stops the run) and ``lost_to_failures`` (work done again, restarts)."""
    for name, value in (("nodes", num_nodes), ("failure rate", failures_per_node_day), ("checkpoint", checkpoint_s)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} {value:g} must be a positive number.")
    if not (restart_s >= 0 and math.isfinite(restart_s)):
        raise InputError(f"restart {restart_s:g} s must be 0 or more.")
    mean_between_s = mtbf_s(num_nodes, failures_per_node_day=failures_per_node_day)
    young_s, daly_s = young_interval_s(checkpoint_s, mean_between_s), daly_interval_s(checkpoint_s, mean_between_s)
    chosen_interval_s = daly_s if interval_s is None else interval_s
    goodput_share = useful_share(chosen_interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf=mean_between_s)
    checkpoint_share = goodput_share * checkpoint_s / chosen_interval_s
    return {
        "mtbf_s": mean_between_s,
        "failures_per_day": failures_per_day(num_nodes, failures_per_node_day=failures_per_node_day),
        "checkpoint_s": checkpoint_s,
        "restart_s": restart_s,
        "young_interval_s": young_s,
        "daly_interval_s": daly_s,
        "interval_s": chosen_interval_s,
        "goodput": goodput_share,
        "lost_to_checkpoints": checkpoint_share,
        "lost_to_failures": 1 - goodput_share - checkpoint_share,
    }
