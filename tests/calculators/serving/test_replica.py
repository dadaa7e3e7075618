"""Closed forms of serving against values worked out by hand, on numbers and on arrays."""

import numpy as np
import pytest

from meshwright.calculators.serving import replica
from meshwright.calculators.serving.sharding import WeightStationary, decode_max_tensor, product_link_s, sharding
from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster

QUIZ = {"kv_bytes": 819.2e6, "weight_bytes": 30e9, "num_chips": 16, "hbm_bytes_per_s": 8.1e11}
"""The pop quiz of section 7.1.5."""


def quiz(batch, **more):
    return replica.DecodeStep(batch_seqs=batch, active_params=30e9, peak_flops=1.97e14, **QUIZ, **more)


def test_a_step_is_caches_then_the_longer_of_weights_and_flops():
    small, large = quiz(4), quiz(256)
    assert small.time_s == pytest.approx((4 * 819.2e6 + 30e9) / (16 * 8.1e11))
    assert large.time_s == pytest.approx(256 * 819.2e6 / (16 * 8.1e11) + 2 * 256 * 30e9 / (16 * 1.97e14))
    assert (small.longest, large.longest) == ("weights", "kv_cache")
    assert quiz(256).tokens_per_s_per_chip == pytest.approx(256 / large.time_s / 16)


def test_batches_may_be_arrays():
    batches = np.array([1, 4, 256])
    every = quiz(batches)
    for name in ("weights_s", "kv_s", "flops_s", "time_s", "tokens_per_s_per_chip", "longest"):
        one_by_one = [getattr(quiz(batch), name) for batch in batches]
        assert list(np.broadcast_to(getattr(every, name), 3)) == one_by_one
    assert decode_max_tensor(16384, np.array([32, 64]), beta=8).tolist() == [64, 32]


def test_without_flops_it_is_the_shortest_step():
    step = replica.DecodeStep(batch_seqs=2, kv_bytes=3, weight_bytes=4, hbm_bytes_per_s=5)
    assert (step.time_s, step.flops_s) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("name", "num_bytes", "shape"),
    [
        ("v5e-book", 140e9, "4x4"), ("v5e-book", 112e9, "2x4"), ("v5e-book", 1, "1x1"), ("v5p", 700e9, "2x2x2"),
        ("h100", 140e9, "2x1"), ("h100", 1e12, "8x2"), ("gb200", 1e13, "64x1"), ("gb200", 1e14, "72x8"),
    ],
)  # fmt: skip
def test_the_smallest_slice_is_one_on_offer(name, num_bytes, shape):
    assert replica.smallest_slice(chip(name), num_bytes).short_name == f"{name}:{shape}"


def test_no_pod_holds_that():
    with pytest.raises(CannotRunError, match=r"5e\+12 bytes need 313 chips; no slice of v5e-book has as many"):
        replica.smallest_slice(chip("v5e-book"), 5e12)


def test_narrow_weights_lower_the_limit_of_tensor():
    """Where F / (B beta) is reached, links and memory take equally long."""
    for width in (2, 1):
        most = decode_max_tensor(28672, 64, beta=9.0, weight_element_bytes=width)
        hbm_s = width * 8192 * 28672 / (most * 8.1e11)
        assert product_link_s(64, 8192, axis_bytes_per_s=9e10) == pytest.approx(hbm_s)


@pytest.mark.parametrize(("axes", "chips", "best"), [(3, 72, 3), (2, 64, 4), (1, 16, 2)])
def test_weights_in_two_dims(axes, chips, best):
    """The best X is a minimum, and both ways of splitting are equal at the number of chips from which it wins."""
    layer = WeightStationary(d_model=4096, d_ff=16384, num_chips=chips, num_axes=axes)
    assert (layer.min_chips, layer.best_size) == (chips, best)
    at_best = layer.comms_s(8, over_d=best, axis_bytes_per_s=9e10)
    assert at_best == pytest.approx(layer.tensor_comms_s(8, axis_bytes_per_s=9e10))
    assert (layer.comms_s(8, over_d=best * np.array([0.9, 1.1]), axis_bytes_per_s=9e10) > at_best).all()


def test_latency_of_section_7_6_3():
    """Links send 45 kB one way in the 1 us of a hop: a gather of more shards of 2 B D bytes is bound by latency."""
    at = replica.ServingReplica(
        cluster=parse_cluster("v5e-book:4x4"), model=load_model("llama3-70b"), peak_flops=1.97e14
    )
    assert sharding(at, 16)["bounds"][-1]["bound"] == pytest.approx(2 * 16 * 8192 / 45_000)


def test_requests():
    """Section 8.1.2; interleaved, a sequence waits for the prefills that fill the other 31 places in 4096 steps."""
    lengths = {"prompt_len": 8192, "output_len": 4096, "prefill_s": 0.91, "num_chips": 16}
    rates = replica.request_rates(32, 0.019, **lengths)
    assert (rates["finished_per_step"], rates["evicted_per_step"]) == (32 / 4096, 96)
    assert rates["per_s_per_chip"] == pytest.approx(32 / (4096 * 0.019) / 16)
    assert rates["tpot_interleaved_s"] == pytest.approx(0.019 + 31 / 4096 * 0.91)
    assert replica.request_rates(1, 0.019, **lengths)["tpot_interleaved_s"] == 0.019
    assert rates["prefill_servers"] == pytest.approx(0.91 * rates["per_s"])


def test_drafts_pay_where_memory_binds():
    free = {"batch_seqs": 1, "kv_bytes": 0, "weight_bytes": 1, "hbm_bytes_per_s": 1e9}
    speeds = replica.DecodeStep(**free).speedups(0.8, draft_cost=0.05)
    assert np.argmax(speeds) == 8
    assert speeds[8] == pytest.approx(sum(0.8**n for n in range(9)) / (1 + 8 * 0.05))
    bound_by_flops = replica.DecodeStep(**free, active_params=1, peak_flops=1)
    assert bound_by_flops.speedups(0.8, draft_cost=0.05).argmax() == 0  # drafts cost what they bring


def test_a_cache_of_prefixes():
    assert replica.lru_hit_share(30, [1] * 100) == pytest.approx(0.3)
    assert replica.lru_hit_share(100, [1] * 100) == 1
    assert replica.lru_hit_share(0, [1] * 100) == pytest.approx(0)
    with pytest.raises(InputError, match="popularities above 0"):
        replica.lru_hit_share(1, [1, 0])


def test_the_share_of_hits_is_that_of_a_cache_that_runs():
    """An LRU list of 20 of 200 prompts, asked for in proportion to 1 / rank."""
    popularity = [1 / rank for rank in range(1, 201)]
    asked = np.random.default_rng(0).choice(200, size=40_000, p=np.array(popularity) / sum(popularity))
    kept, hits = dict[int, None](), 0
    for one in asked.tolist():
        hits += one in kept
        kept.pop(one, None)
        kept[one] = None
        if len(kept) > 20:
            del kept[next(iter(kept))]
    assert replica.lru_hit_share(20, popularity) == pytest.approx(hits / len(asked), abs=0.01)
