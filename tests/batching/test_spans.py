from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import traffic_of
from tests.batching.mock import AffineClock

TRAFFIC = traffic_of([0.0, 0.0, 0.5], [4, 4, 4], [2, 4, 2])


def spans(policy, **bounds):
    limits = SchedulerLimits(policy=policy, num_pages=100, **{"max_requests": 2, "token_budget": 4, **bounds})
    found = simulate(TRAFFIC, ReplicaPool(limits=limits, clock=AffineClock(1.0)), spans=True).spans
    return [(one.slot, one.request, one.start_s, one.end_s, one.phase) for one in found[0]]


def test_a_static_batch_keeps_slots_of_requests_that_ended():
    assert spans("static") == [
        (0, 0, 0.0, 1.0, "prefill"),
        (1, 1, 0.0, 1.0, "prefill"),
        (0, 0, 1.0, 2.0, "decode"),
        (1, 1, 1.0, 4.0, "decode"),
        (0, 0, 2.0, 4.0, "ended"),
        (0, 2, 4.0, 5.0, "prefill"),
        (0, 2, 5.0, 6.0, "decode"),
    ]


def test_interleaved_prefills_stall_decoding():
    assert spans("interleaved") == [
        (0, 0, 0.0, 1.0, "prefill"),
        (1, 1, 1.0, 2.0, "prefill"),
        (0, 0, 2.0, 3.0, "decode"),
        (1, 1, 2.0, 3.0, "decode"),
        (0, 2, 3.0, 4.0, "prefill"),
        (1, 1, 4.0, 6.0, "decode"),
        (0, 2, 4.0, 5.0, "decode"),
    ]


def test_chunks_run_beside_decoding():
    assert spans("chunked") == [
        (0, 0, 0.0, 1.0, "prefill"),
        (1, 1, 1.0, 3.0, "prefill"),
        (0, 0, 1.0, 2.0, "decode"),
        (0, 2, 2.0, 4.0, "prefill"),
        (1, 1, 3.0, 6.0, "decode"),
        (0, 2, 4.0, 5.0, "decode"),
    ]


def test_disaggregated_pools_have_spans_of_their_own():
    pool = ReplicaPool(limits=SchedulerLimits(num_pages=100, max_requests=2), clock=AffineClock(1.0))
    record = simulate(traffic_of([0.0], 4, 3), pool, pool, transfer_s=lambda tokens: tokens / 8, spans=True)
    (prefill,), (decode,) = record.spans
    assert (prefill.start_s, prefill.end_s, prefill.phase) == (0.0, 1.0, "prefill")
    assert (decode.start_s, decode.end_s, decode.phase) == (1.5, 3.5, "decode")


def test_nobody_records_spans_unasked():
    pool = ReplicaPool(limits=SchedulerLimits(num_pages=100), clock=AffineClock(1.0))
    assert simulate(TRAFFIC, pool).spans == ((),)
