"""Failures of a fleet: how often, how often to save, and what part of the time is useful work."""

import math

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.cost.formulas.training_budget import DAY_S


def failures_per_day(num_nodes: Number, *, failures_per_node_day: Number) -> Number:
    """Returns failures of all nodes in a day, usually 10 per 1000 node-days (Kokolis et al., Revisiting Reliability,
    2024)."""
    return num_nodes * failures_per_node_day


def mtbf_s(num_nodes: Number, *, failures_per_node_day: Number) -> Number:
    """Returns seconds between failures of any node: 1 / (n r), 14.4 min for 10,000 nodes at 10 per 1000 node-days."""
    return DAY_S / failures_per_day(num_nodes, failures_per_node_day=failures_per_node_day)


def young_interval_s(checkpoint_s: float, mtbf: float) -> float:
    """Returns seconds of work between checkpoints that lose least: sqrt(2 delta M).

    A first-order result: right while a checkpoint takes much less than the time between failures.
    Source: Young, A first order approximation to the optimum checkpoint interval (1974).
    """
    return math.sqrt(2 * checkpoint_s * mtbf)


def daly_interval_s(checkpoint_s: float, mtbf: float) -> float:
    """Returns seconds of work between checkpoints, to higher order; M where a checkpoint takes 2 M or more.

    sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta. Source: Daly, A higher order estimate (2006).
    """
    if checkpoint_s >= 2 * mtbf:
        return mtbf
    ratio = checkpoint_s / (2 * mtbf)
    return math.sqrt(2 * checkpoint_s * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def recovery_interval_s(checkpoint_s: float, mtbf: float, restart_s: float) -> float:
    """Returns Young's interval with the time to recover: sqrt(2 delta (M + R)), all in seconds.

    Source: changlan.org, Optimal Checkpointing Frequency; Saxena et al., arXiv 2410.18124 (2024), for a short delta.
    """
    return math.sqrt(2 * checkpoint_s * (mtbf + restart_s))


def exact_steps(step_s: float, *, checkpoint_s: float, mtbf: float) -> int:
    """Returns the whole number of steps between checkpoints whose `expected_s` for each step is least.

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
    """Returns the expected seconds until a span passes without a failure: e^(R / M) M (e^(T / M) - 1).

    Failures come at random at a mean of M seconds, also during restarts, and each begins the span anew. Infinite where
    a failure is all but sure. Source: Daly, A higher order estimate (2006).
    """
    if (span_s + restart_s) / mtbf > 700:
        return math.inf
    return mtbf * math.exp(restart_s / mtbf) * math.expm1(span_s / mtbf)


def useful_share(interval_s: float, *, checkpoint_s: float, restart_s: float, mtbf: float) -> float:
    """Returns the share of the wall time that is work kept: tau over the `expected_s` of tau + delta."""
    if interval_s <= 0:
        raise InputError(f"an interval of {interval_s:g} s between checkpoints does no work. Give a positive number.")
    return interval_s / expected_s(interval_s + checkpoint_s, mtbf=mtbf, restart_s=restart_s)


def linear_share(interval_s: float, *, checkpoint_s: float, restart_s: float, mtbf: float) -> float:
    """Returns Meta's expected ETTR: (1 - (R + tau / 2) / M) / (1 + delta / tau), `useful_share` to first order.

    ``restart_s`` is the time to start, u0, and that in a queue. Within 5% while M is at least 0.1 day.
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
    """Returns failures, best intervals and useful share of a fleet; at Daly's interval where none is given.

    ``checkpoint_s`` is the time for which saving stops the run (little, where it is asynchronous), ``restart_s`` from a
    failure to the first new step; times in seconds. ``goodput`` and both shares that are lost add up to 1:
    ``lost_to_checkpoints`` is time in which these block the run, ``lost_to_failures`` work done again and restarts.
    """
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
