"""Published serving through the simulation: clients, engines and pools by hand, and the table of the page."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.accuracy.queueing import client_traffic, engine_limits, pooled_accuracy, queued_accuracy, queued_times
from meshwright.accuracy.records import read_records
from meshwright.accuracy.served import ServedCase, engine_case, served_calibrations

FILE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_serving.jsonl"
RECORDS = {record.id: record for record in read_records(FILE)}
DENSE = RECORDS["aic-2026_04_06_llama_3_1_70b_h100_sxm_vllm_fp8_agg_1024x1024_c16_tp4_ep1_260"]


def case_of(**fields) -> ServedCase:
    return engine_case(msgspec.structs.replace(DENSE, **fields))


def test_clients_send_ten_requests_for_each_at_a_time():
    drawn, printed = client_traffic(case_of(), 16), client_traffic(case_of(isl=2048, osl=256), 4)
    assert (len(drawn), len(printed)) == (160, 40)
    assert 819 <= drawn.prompt.min() < 900 < 1000 < drawn.output.max() <= 1024
    assert (set(printed.prompt), set(printed.output)) == ({2048}, {256})


def test_bounds_of_engines():
    limits = engine_limits(case_of())
    assert (limits.policy, limits.max_requests, limits.token_budget, limits.look_every) == ("chunked", 16, 8192, 1)
    assert limits.num_pages == 16 * (1024 + 1024) / 16
    sglang = case_of(backend="sglang", hardware="B200-SXM")
    assert (engine_limits(sglang).policy, engine_limits(sglang).look_every) == ("interleaved", 30)
    assert engine_limits(case_of(backend="sglang", hardware="B200-SXM", concurrency=8.0)).look_every == 10
    assert engine_limits(case_of(backend="sglang", hardware="B200-SXM", isl=1000)).look_every == 1


def test_a_client_of_one_waits_for_its_prefill_alone():
    """Nothing queues: the prefill, whose kernels the host starts. Times per token are those of decode by itself."""
    case = case_of(concurrency=1.0, isl=8192)
    rates = served_calibrations([case], {})
    ttft_s, tpot_s = queued_times([case], [rates])
    ttft_of_many, tpot_of_many = queued_times([case_of(concurrency=64.0, isl=8192)], [rates])
    assert 0.2 < ttft_s[0] < 0.6 < ttft_of_many[0]
    assert tpot_s[0] < tpot_of_many[0]


def test_errors_of_times_to_the_first_token():
    case = case_of()
    rates = served_calibrations([case], {})
    found = queued_accuracy([case], [rates], ())
    ttft, tpot = (found[name].predictions[0] for name in ("served-ttft", "served-tpot"))
    assert (ttft.measured_s, tpot.measured_s) == (
        pytest.approx(DENSE.measured.ttft_ms / 1e3),
        pytest.approx(DENSE.measured.tpot_ms / 1e3),
    )
    assert ttft.covered is None
    assert abs(ttft.error) < 0.4
    assert abs(tpot.error) < 0.2


def test_pools_of_a_disaggregated_service():
    """One prefills and one decodes, of a service with few clients; without a concurrency nothing is predicted."""
    record = next(r for r in RECORDS.values() if r.kind == "disagg" and r.concurrency == 4)
    found = pooled_accuracy([record, msgspec.structs.replace(record, concurrency=None)], {})
    assert [one.reason for one in found["pools-ttft"].unpredicted] == [
        "no pools or no concurrency of a disaggregated service"
    ]
    (tpot,) = found["pools-tpot"].predictions
    assert abs(tpot.error) < 0.4
    assert np.isfinite(found["pools-ttft"].predictions[0].predicted_s)
    assert pooled_accuracy([DENSE], {}) == {}


def test_the_page_has_the_target():
    page = (FILE.parents[2] / "docs" / "accuracy.md").read_text()
    table = page.split("<!-- table: served-ttft -->")[1].split("<!-- end -->")[0]
    cells = {row.split("|")[1].strip(): row.split("|")[3].strip() for row in table.splitlines() if row.startswith("|")}
    assert float(cells["all"].rstrip("%")) <= 35
