"""Collective matmuls priced: what hides behind their products, and what the links allow."""

import numpy as np
import pytest

from meshwright.cost.pass_times import _left_of_rounds
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import REMAT_POLICIES, Strategy, make_mesh, standard_assignment

LLAMA = catalogue.load_model("llama3-8b")
H100, RING = ("h100:8x4", {"fsdp": 4, "tensor": 8}, 32), ("v5p:8x8x8", {"fsdp": 64, "tensor": 8}, 256)

ON_Z = {"fsdp": "x (8) x y (8)", "tensor": "z (8)"}


def price(case, ways, *, sequence_parallel=True, seq_len=8192, **fields):
    """A case (cluster, mesh, sequences) by the data sheet."""
    cluster, axes, batch_seqs = case
    found = parse_cluster(cluster)
    made = Strategy(
        mesh=make_mesh(axes),
        collective_matmul=ways,
        assignment=standard_assignment(sequence_parallel=sequence_parallel),
        **fields,
    )
    return price_strategy(Setting(LLAMA, found, Job(batch_seqs=batch_seqs, seq_len=seq_len)), made)


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize(
    ("case", "ways", "whole"),
    [(H100, "one-way", False), (H100, "two-way", False), (H100, "one-way", True), (RING, "two-way", False)],
)
def test_no_slower_and_no_more_memory_than_plain(case, ways, whole, remat):
    plain, found = (price(case, w, sequence_parallel=not whole, remat=remat).estimate for w in ("none", ways))
    assert found.step_s < plain.step_s
    assert found.hbm_bytes_per_chip <= plain.hbm_bytes_per_chip
    assert found.flops == pytest.approx(plain.flops, rel=1e-12)
    assert found.step_s_lower <= found.step_s <= found.step_s_upper


def rounds(priced):
    return [cost for cost in priced.costs.all if cost.in_ring_loop]


def test_a_closed_ring_carries_halves_both_ways_at_once():
    """A port of a switch does not: there both halves pass through it."""
    for case, factor in ((RING, 2.0), (H100, 1.0)):
        placement = {**dict.fromkeys(make_mesh({}), "1 chip"), **ON_Z} if case is RING else {}
        one, two = (price(case, ways, placement=placement) for ways in ("one-way", "two-way"))
        assert float(two.rates.groups[frozenset({"tensor"})].ring_links) == factor
        first, second = (sum(float(c.network_s - c.latency_s) for c in rounds(priced)) for priced in (one, two))
        assert first / second == pytest.approx(factor, rel=1e-6)


def test_moves_take_what_the_collective_takes_that_they_replace():
    """On a switch n - 1 moves of a block are a ring AllGather: (n - 1) / n of the array through the port.

    Each block is a message of its own, which follows its first byte after a hop of 1 us.
    """
    plain, found = (price(H100, ways) for ways in ("none", "one-way"))
    gather = next(c for c in plain.costs.all if c.step.op == "all_gather" and c.step.axes == ("tensor",))
    moves = rounds(found)[0]
    assert float(moves.network_s) == pytest.approx(float(gather.network_s) + 7 * 1e-6, rel=1e-9)
    assert float(moves.network_bytes) == pytest.approx(float(gather.network_bytes) / 8, rel=1e-12)


def test_of_n_blocks_the_products_of_n_minus_one_hide_moves():
    priced = price(H100, "one-way")
    forward = priced.costs.layers[0].forward
    left = _left_of_rounds(forward, priced.rates)
    moves = [number for number, cost in enumerate(forward) if cost.in_ring_loop]
    assert len(left) == len(moves) == 4
    for number, seconds in zip(moves, left, strict=True):
        product = forward[number + (1 if forward[number].step.details.ring == "past" else -1)]
        expected = max(0.0, float(forward[number].network_s) - 7 / 8 * float(product.local_s))
        assert float(seconds) == pytest.approx(expected, abs=1e-12)


def test_a_product_is_priced_as_its_parts_in_blocks():
    plain, found = (price(H100, ways, remat="none") for ways in ("none", "two-way"))
    for field in ("flops", "hbm_bytes"):
        one, other = (
            sum(float(getattr(c, field) * c.count) for c in p.costs.all if not c.step.is_collective)
            for p in (plain, found)
        )
        assert one == pytest.approx(other, rel=1e-12)
    made = next(c for c in found.costs.all if c.step.parts)
    assert made.num_kernels == len(made.step.parts) * (1 + 2 * 7)
    assert np.isclose(float(made.math_s), sum(c.math_s for c in plain.costs.all if c.step in made.step.parts))
