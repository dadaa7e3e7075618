"""Worked answers on failures: how often a fleet of nodes is interrupted."""

from meshwright.cost.formulas.failures import failures_per_day, mtbf_s
from tests.oracles.worked import Answers, Inputs


def between(i: Inputs) -> float:
    """Seconds between failures of any of the row's nodes."""
    return mtbf_s(i["nodes"], failures_per_node_day=i["rate_per_node_day"])


ANSWERS: Answers = {
    "s003-fail-100": between,
    "s003-fail-10000": between,
    "s003-nodes-day": lambda i: failures_per_day(i["nodes"], failures_per_node_day=i["rate_per_node_day"]),
}


def test_a_tenfold_fleet_fails_ten_times_as_often():
    assert mtbf_s(100, failures_per_node_day=0.01) == 10 * mtbf_s(1000, failures_per_node_day=0.01)
