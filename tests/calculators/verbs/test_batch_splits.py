"""The bookkeeping of a batch: the slides' example, every split found, and the limits beside it."""

import math

import pytest

from meshwright.calculators.verbs.batch import compute_bound_tokens, solve_batch
from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.cluster import parse_cluster


def test_the_slides_example():
    (found,) = solve_batch(batch_seqs=1024, microbatch_seqs=2, data_parallel=128)
    assert found["accumulate"] == 4
    (quiz,) = solve_batch(batch_seqs=1024, microbatch_seqs=2, data_parallel=512)
    assert quiz["accumulate"] == 1


def test_any_one_follows_from_the_others():
    whole = {"microbatch_seqs": 3, "accumulation": 5, "data_parallel": 7}
    (found,) = solve_batch(**whole)
    assert found == {"micro": 3, "accumulate": 5, "replicas": 7}
    for missing in whole:
        (again,) = solve_batch(batch_seqs=105, **{k: v for k, v in whole.items() if k != missing})
        assert again == found


@pytest.mark.parametrize("batch", [1, 12, 97, 360])
def test_all_splits_are_found_once(batch):
    found = solve_batch(batch_seqs=batch)
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    expected = {(a, b, batch // a // b) for a in divisors for b in divisors if batch % (a * b) == 0}
    assert {tuple(one.values()) for one in found} == expected
    assert len(found) == len(expected)
    assert all(math.prod(one.values()) == batch for one in found)
    assert found[0]["accumulate"] == 1


def test_what_divides_nothing_names_the_nearest_that_would():
    with pytest.raises(CannotRunError, match=r"micro 3 does not divide 1,000 sequences. Use 999 or 1,002"):
        solve_batch(batch_seqs=1000, microbatch_seqs=3)
    with pytest.raises(CannotRunError, match=r"= 12 sequences, not 1,000"):
        solve_batch(batch_seqs=1000, microbatch_seqs=3, accumulation=2, data_parallel=2)
    with pytest.raises(InputError, match="Give one more"):
        solve_batch(microbatch_seqs=3)
    with pytest.raises(InputError, match="replicas=0"):
        solve_batch(batch_seqs=8, data_parallel=0)


def test_limits_of_the_book():
    # sections 1.1, 5.1.1: 240 tokens on a v5e, 2550 on one axis of a v5p and 850 on three
    assert compute_bound_tokens(parse_cluster("v5e:4x4"), dtype="bf16")["per_replica_hbm"] == pytest.approx(
        240, rel=0.01
    )
    # a box of 2 is no ring: half the W, so 459e12 / 90e9 / 3; 8 of v5e x 16 one line and one ring, 1.5 rings
    for name, tokens in (("v5p:8x8x8", 2550 / 3), ("v5p:8x1x1", 5100), ("v5p:2x2x4", 1700), ("v5e:8x16", 2189 / 1.5)):
        found = compute_bound_tokens(parse_cluster(name), dtype="bf16")
        assert found["per_chip_link"] == pytest.approx(tokens, rel=1e-3)


def test_limits_on_switches_are_those_of_the_slowest_link():
    inside, across = (compute_bound_tokens(parse_cluster(f"h100:8x{n}"), dtype="bf16") for n in (1, 4))
    assert (inside["link"], across["link"]) == ("NVLink", "network")
    assert inside["per_chip_link"] == pytest.approx(989.4e12 / 450e9)
    assert across["per_chip_link"] == pytest.approx(989.4e12 / 400e9)


def test_experts_need_as_many_times_the_batch_as_are_not_used():
    dense = compute_bound_tokens(parse_cluster("v5e:4x4"), dtype="bf16")
    sparse = compute_bound_tokens(parse_cluster("v5e:4x4"), dtype="bf16", sparsity=256 / 8)
    assert sparse["per_replica_hbm"] == pytest.approx(32 * dense["per_replica_hbm"])


def test_one_chip_has_no_links():
    assert compute_bound_tokens(parse_cluster("h100:1x1"), dtype="bf16")["per_chip_link"] is None
