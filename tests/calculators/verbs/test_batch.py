"""`meshwright batch`: the bookkeeping of a step, solved for what is missing."""

import pytest

SLIDES = ("batch", "--batch", "4Mi", "--seq", "4096", "--micro", "2")


def test_the_slides_example(call):
    found = call(*SLIDES, "--replicas", "128", "--json").json
    (only,) = found["solutions"]
    assert (found["batch_seqs"], found["tokens_per_step"], only["accumulate"]) == (1024, 2**22, 4)
    assert only["hbm_compute_bound"] is None


def test_the_slides_quiz_with_512_gpus(call):
    (only,) = call(*SLIDES, "--on", "h100:8x64", "--json").json["solutions"]
    assert (only["replicas"], only["accumulate"], only["chips"]) == (512, 1, 512)
    assert only["hbm_compute_bound"] is only["fsdp_compute_bound"] is True


def test_the_batch_from_its_parts(call):
    found = call("batch", "--seq", "4096", "--micro", "2", "--accumulate", "4", "--replicas", "128", "--json").json
    assert found["tokens_per_step"] == 2**22


def test_all_ways_and_limits(call):
    args = ("batch", "--batch", "1024seq", "--seq", "1024", "--on", "v5p:8x8x8", "--chips-per-replica", "4")
    found = call(*args, "--json").json
    assert [s["micro"] * s["accumulate"] for s in found["solutions"]] == [8] * 4
    assert found["limits"]["per_chip_link"] == pytest.approx(850)
    assert [s["fsdp_compute_bound"] for s in found["solutions"]] == [True, True, False, False]
    text = call(*args).words
    assert "from 850 tokens a chip (ICI, 3 axes, both ways)" in text
    assert "links" in text


def test_experts_raise_the_limit(call):
    args = ("batch", "--batch", "64seq", "--seq", "4096", "--on", "v5p:4x4x4")
    dense, sparse = (call(*args, *more, "--json").json for more in ((), ("--model", "deepseek-v3")))
    assert sparse["limits"]["per_replica_hbm"] == pytest.approx(32 * dense["limits"]["per_replica_hbm"])


def test_narrow_weights_lower_the_limit(call):
    """Exercise 4.8: int8 weights halve it; 256 experts of which 8 are active raise it 32-fold."""
    args = ("batch", "--batch", "64seq", "--seq", "4096", "--on", "v5e-book:4x4", "--model", "deepseek-v3")
    wide, narrow = (call(*args, *more, "--json").json["limits"] for more in ((), ("--weights", "int8")))
    assert narrow["per_replica_hbm"] == pytest.approx(197e12 / 810e9 / 2 * 32)
    assert wide["per_replica_hbm"] == pytest.approx(2 * narrow["per_replica_hbm"])
    assert wide["per_chip_link"] == narrow["per_chip_link"]
    call("batch", "--batch", "64seq", "--seq", "4096", "--weights", "int8").assert_refused(2, "Give --on")


def test_the_critical_batch(call):
    assert "this step is beyond it" in call(*SLIDES, "--replicas", "128", "--loss", "3").words
    assert "this step is within it" in call(*SLIDES, "--replicas", "128", "--loss", "2").words


def test_only_microbatches_that_fit(call):
    args = ("batch", "--batch", "64seq", "--seq", "1k", "--replicas", "4")
    assert [s["micro"] for s in call(*args, "--max-micro", "2", "--json").json["solutions"]] == [2, 1]
    said = call("batch", "--batch", "64seq", "--seq", "1k", "--replicas", "4", "--accumulate", "1", "--max-micro", "2")
    assert (said.code, "microbatches of 16 or more" in said.err) == (3, True)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--seq", "4k"), 2, "Give one more"),
        (("--batch", "4M", "--seq", "4096"), 2, "Use 4Mi"),
        (("--batch", "1000seq", "--seq", "4k", "--micro", "3"), 3, "999 or 1,002"),
        (("--batch", "8seq", "--seq", "4k", "--on", "h100:8x1", "--chips-per-replica", "3"), 2, "Use a divisor"),
        (("--batch", "8seq", "--seq", "4k", "--on", "h100:8x1", "--replicas", "4"), 2, "Leave one out"),
        (("--batch", "8seq", "--seq", "0"), 2, "--seq '0' is below 1"),
    ],
)
def test_refused(call, args, code, message):
    call("batch", *args).assert_refused(code, message)
