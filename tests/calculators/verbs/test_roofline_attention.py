"""Attention beside the feed-forward block: where it is compute-bound, and what it costs as the context grows."""

import pytest

from meshwright.calculators.verbs.roofline_attention import block_times, compute_bound_len
from meshwright.core.errors import InputError
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip

BOOK = chip("v5e-book")


def times(name, **sizes):
    return block_times(load_model(name), BOOK, dtype="bf16", **sizes)


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-70b"])
def test_prefill_turns_compute_bound_at_the_length(name):
    """Exercise 4.4: T G / (G + 1) above the critical intensity."""
    at = compute_bound_len(load_model(name), 197e12 / 810e9)
    below, above = (times(name, keys=n, queries=n, batch_seqs=1) for n in (int(at) - 1, int(at) + 1))
    assert (below["bound_by"], above["bound_by"]) == ("hbm", "compute")


def test_generation_stays_bound_by_memory():
    one = times("llama3-70b", keys=100_000, queries=1, batch_seqs=64)
    assert one["bound_by"] == "hbm"
    assert one["intensity"] == pytest.approx(8, rel=1e-3)


def test_far_above_both_limits_the_ratio_is_that_of_flops():
    """Compute-bound: 4 T^2 N H against 6 T D F."""
    m = load_model("llama3-70b")
    found = times("llama3-70b", keys=65536, queries=65536, batch_seqs=1)
    assert found["ratio"] == pytest.approx(4 * 65536 * 64 * 128 / (6 * m.d_model * m.d_ff))


def test_experts_that_the_tokens_meet():
    """One token reads the weights of 2 of 8 experts, eight tokens at most all of them."""
    m = load_model("mixtral-8x7b")
    one = times("mixtral-8x7b", keys=1, queries=1, batch_seqs=1)
    weights = 2 * 3 * 2 * m.d_model * m.d_ff_expert
    assert one["ffw_s"] == pytest.approx(weights / 810e9, rel=1e-3)
    many = times("mixtral-8x7b", keys=1, queries=1, batch_seqs=8)
    assert many["ffw_s"] == pytest.approx(4 * one["ffw_s"], rel=1e-2)


def test_latents_are_refused():
    with pytest.raises(InputError, match="keeps latents"):
        times("deepseek-v3", keys=8, queries=1, batch_seqs=1)
