"""Published serving beside predictions: how records are read, by hand, and how far predictions are off."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.accuracy.cases import Unpredicted, cases_of
from meshwright.accuracy.records import Record, read_records
from meshwright.accuracy.served import ServedCase, engine_case, served_accuracy, served_batch, served_cases
from meshwright.cost.formulas.serving import waiting_s
from meshwright.cost.train_step import price_strategy
from meshwright.spec.efficiency import generation_calibration, generation_numbers

FILE = Path(__file__).parents[2] / "benchmarks" / "data" / "published_serving.jsonl"
RECORDS = {record.id: record for record in read_records(FILE)}
DENSE = "aic-2026_04_06_llama_3_1_70b_h100_sxm_vllm_fp8_agg_1024x1024_c16_tp4_ep1_260"


def changed(record: Record, **fields) -> ServedCase | Unpredicted:
    cases, left = cases_of([msgspec.structs.replace(record, **fields)], engine_case)
    return (*cases, *left)[0]


def with_degrees(**degrees) -> ServedCase | Unpredicted:
    """A model of 256 experts with other degrees of parallelism."""
    record = next(r for r in RECORDS.values() if r.model and r.model.name == "deepseek-v3-671b" and r.isl == 1024)
    return changed(record, parallelism=msgspec.structs.replace(record.parallelism, **degrees))


def test_a_record_is_a_prefill_and_a_decode_step():
    case = engine_case(RECORDS[DENSE])
    assert (case.batch, case.output_len, case.decode.measured_s) == (16, 1024, pytest.approx(0.01319, rel=1e-3))
    prefill, decode = case.prefill.setting, case.decode.setting
    assert (prefill.job.batch_seqs, prefill.job.seq_len) == (1, 1024)
    assert (decode.job.batch_seqs, decode.job.seq_len) == (16, 1024 + 512)
    assert (decode.storage.weights, decode.storage.cache_dtype) == ("fp8", "bf16")
    assert case.decode.strategy.mesh["tensor"] == decode.cluster.num_chips == 4
    for fields in ({"backend": "trtllm"}, {"hardware": "B200-SXM"}):
        narrow = changed(RECORDS[DENSE], **fields)
        assert isinstance(narrow, ServedCase)
        assert narrow.decode.setting.storage.cache_dtype == "fp8"


def test_the_time_of_a_token_by_hand():
    """A decode step, and what it waits for 15 prefills in 1,024 steps, each priced by itself."""
    case = engine_case(RECORDS[DENSE])
    found = served_batch([case]).seconds(generation_numbers().numbers)[0, 0]
    rates = generation_calibration(case.chip)
    assert rates is not None
    in_waves = msgspec.structs.replace(rates, efficiency=msgspec.structs.replace(rates.efficiency, host_kernel_s=0.0))
    decode_s, prefill_s = (
        price_strategy(msgspec.structs.replace(one.setting, calibration=at), one.strategy).estimate.step_s
        for one, at in ((case.decode, rates), (case.prefill, in_waves))
    )
    assert found == pytest.approx(decode_s + 15 / 1024 * prefill_s, rel=1e-9)
    assert waiting_s(1.0, batch=17, output_len=8) == 2
    assert waiting_s(1.0, batch=1, output_len=8) == 0


def test_a_step_is_no_faster_than_its_bytes():
    """70 billion weights of a byte and 16 caches of 1,536 positions, over 4 chips at the data sheet's rate."""
    case = engine_case(RECORDS[DENSE])
    moved = (70e9 + 16 * 1536 * 2 * 2 * 80 * 8 * 128) / 4
    found = served_batch([case]).seconds(generation_numbers().numbers)[0, 0]
    assert moved / 3.35e12 < found < 3 * moved / 3.35e12


def test_degrees_of_experts():
    """Chips that are counted once for each part of the experts are one engine; what cannot be is refused."""
    for given, tensor, chips in (
        ({"tp": 8, "dp": 1, "ep": 8, "moe_tp": 1}, 8, 8),
        ({"tp": 64, "dp": 1, "ep": 8, "moe_tp": 8}, 8, 8),
        ({"tp": 1, "dp": 64, "ep": 8, "moe_tp": 8}, 1, 8),
    ):
        case = with_degrees(**given)
        assert isinstance(case, ServedCase)
        assert (case.decode.strategy.mesh["tensor"], case.decode.setting.cluster.num_chips) == (tensor, chips)
    for given, words in (
        ({"tp": 8, "dp": 1, "ep": 4, "moe_tp": 1}, "degrees of attention and experts disagree"),
        ({"tp": 1, "dp": 1, "ep": 1, "moe_tp": 1}, "weights and one sequence do not fit"),
    ):
        case = with_degrees(**given)
        assert isinstance(case, Unpredicted)
        assert words in case.reason
    case = with_degrees(tp=1, dp=8, ep=8, moe_tp=1)
    assert isinstance(case, ServedCase)
    assert case.batch == case.decode.setting.job.batch_seqs / 8


def test_no_more_sequences_than_caches_have_room_for():
    """An H100 has 0.95 x 80 GB - 16 GB for caches of an 8B model in 16 bits, 131,072 bytes a position; for as many
    requests as fit in 0.9 it stays at that."""
    named = (r for r in RECORDS.values() if r.model and r.model.name == "llama3.1-8b")
    record = next(record for record in named if record.precision == "unstated")
    fields = {"tp": 1, "dp": 1}
    record = msgspec.structs.replace(record, parallelism=msgspec.structs.replace(record.parallelism, **fields))
    case = changed(record, hardware="H100-SXM-80GB", isl=8192, osl=1024, concurrency=512.0)
    assert isinstance(case, ServedCase)
    assert case.batch == case.room == pytest.approx((0.95 * 80e9 - 2 * 8.03e9) / (131072 * 9216), rel=0.03)
    few = changed(record, hardware="H100-SXM-80GB", isl=8192, osl=1024, concurrency=4.0)
    assert isinstance(few, ServedCase)
    assert (few.batch, few.room) == (4, pytest.approx((0.9 * 80e9 - 2 * 8.03e9) / (131072 * 9216), rel=0.03))


def test_measurements_count_once():
    cases, left = served_cases([RECORDS[DENSE], RECORDS[DENSE]])
    assert (len(cases), [one.reason for one in left]) == (1, ["the measurement is listed twice"])


@pytest.mark.slow
def test_errors_are_those_of_the_page():
    """With the numbers of the product, which have seen all of them: see docs/accuracy.md for held-out errors."""
    found = served_accuracy(tuple(RECORDS.values())).to_json()
    errors = {name: np.mean([abs(one["error"]) for one in found["records"] if name in one["group"]]) for name in
              ("dense", "experts")}  # fmt: skip
    page = (FILE.parents[2] / "docs" / "accuracy.md").read_text()
    table = page.split("<!-- table: served-fitted -->")[1].split("<!-- end -->")[0]
    cells = {row.split("|")[1].strip(): row.split("|")[3].strip() for row in table.splitlines() if row.startswith("|")}
    assert {name: f"{error:.1%}" for name, error in errors.items()} == {name: cells[name] for name in errors}
    assert f"{found['core_decode']['mape']:.1%}" == cells["core decode"]
