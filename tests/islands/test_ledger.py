"""Samples of islands that leave and come, with batches of their own: none is lost, and none is taken twice."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from meshwright.islands.ledger import Ledger, SampleBlock, deal, handed_over, num_samples, postponed, sample_numbers

SIZES = st.dictionaries(st.integers(0, 4), st.integers(1, 6), min_size=1)
"""Islands that are there, and the samples of a step of each."""


def require_whole(taken: list[int], blocks: Mapping[int, SampleBlock], ledger: Ledger) -> None:
    """Raises AssertionError unless every sample so far was taken, is in one block, or is postponed."""
    in_blocks = [number for block in blocks.values() for number in sample_numbers(block)]
    assert sorted([*taken, *in_blocks, *sample_numbers(ledger.postponed)]) == list(range(ledger.samples))


@given(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=8))
def test_every_sample_is_taken_once(worlds):
    taken, ledger = list[int](), Ledger()
    for sizes, later in worlds:
        blocks, after = deal(ledger, sizes)
        assert {island: num_samples(block) for island, block in blocks.items()} == sizes
        require_whole(taken, blocks, after)
        kept, after = handed_over(blocks, later, after)
        require_whole(taken, kept, after)
        assert kept.keys() == later.keys()
        assert all(num_samples(block) in (0, later[island]) for island, block in kept.items())
        assert all(kept[island] == blocks[island] for island in sizes if later.get(island) == sizes[island])
        taken += [number for block in kept.values() for number in sample_numbers(block)]
        ledger = after
    require_whole(taken, {}, ledger)


def test_who_came_takes_over_a_block_of_its_size_alone():
    blocks = {0: ((0, 2),), 1: ((2, 3),), 2: ((5, 2),)}
    assert handed_over(blocks, {0: 2, 3: 3}, Ledger(samples=7)) == (
        {0: ((0, 2),), 3: ((2, 3),)},
        Ledger(samples=7, postponed=((5, 2),)),
    )
    assert handed_over(blocks, {0: 4, 1: 3}, Ledger(samples=7))[0] == {0: (), 1: ((2, 3),)}
    assert postponed(Ledger(samples=7), [((2, 3),), ((0, 2),)]).postponed == ((0, 5),)
