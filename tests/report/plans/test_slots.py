"""Slots over time: who is drawn where, and which pictures are refused."""

import pytest

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import traffic_of
from meshwright.core.errors import InputError
from meshwright.report.plans.timeline import MAX_SLOTS, slots_figure
from tests.batching.mock import AffineClock
from tests.charts import marks


def test_a_static_batch_holds_the_slots_of_requests_that_ended():
    """Steps of a second: both prompts in the first, then one token for the first request and three for the second."""
    limits = SchedulerLimits(policy="static", max_requests=2, token_budget=8, num_pages=100)
    pool = ReplicaPool(limits=limits, clock=AffineClock(1.0))
    record = simulate(traffic_of([0.0, 0.0], [4, 4], [2, 4]), pool, spans=True)
    free, boxes, numbers = marks(slots_figure({"engine": record.spans[0]}, title="static"))
    drawn = {(box["slot"], box["what"], box["start"], box["end"]) for box in boxes["rows"]}
    assert drawn == {
        ("engine, slot 1", "prefill", 0, 1),
        ("engine, slot 1", "decode", 1, 2),
        ("engine, slot 1", "ended, held", 2, 4),
        ("engine, slot 2", "prefill", 0, 1),
        ("engine, slot 2", "decode", 1, 4),
    }
    assert {row["text"] for row in numbers["rows"]} == {"1", "2"}
    assert [row["slot"] for row in free["rows"]] == ["engine, slot 1", "engine, slot 2"]


def test_more_slots_than_can_be_seen():
    limits = SchedulerLimits(max_requests=MAX_SLOTS + 1, num_pages=1000)
    count = MAX_SLOTS + 1
    record = simulate(
        traffic_of([0.0] * count, [4] * count, [3] * count),
        ReplicaPool(limits=limits, clock=AffineClock(1.0)),
        spans=True,
    )
    with pytest.raises(InputError, match=r"129 slots; a picture shows"):
        slots_figure({"engine": record.spans[0]}, title="too many")
    with pytest.raises(InputError, match="0 spans"):
        slots_figure({"engine": ()}, title="none")
