"""Assigns samples to islands for each step, so that no sample is lost or used twice."""

from collections.abc import Mapping, Sequence

import msgspec

SampleBlock = tuple[tuple[int, int], ...]
"""Samples of a run as ranges: (first sample, number of samples) each."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The samples done so far: all before ``samples`` except ``postponed`` ones, which are dealt next."""

    samples: int = 0
    postponed: SampleBlock = ()


def deal(ledger: Ledger, sizes: Mapping[int, int]) -> tuple[dict[int, SampleBlock], Ledger]:
    """Returns the next block of ``sizes[island]`` samples for each island, and the ledger after them."""
    ranges, samples = list(ledger.postponed), ledger.samples
    blocks = {}
    for island, size in sizes.items():
        block = []
        while size:
            if not ranges:
                ranges, samples = [(samples, size)], samples + size
            first, count = ranges.pop(0)
            taken = min(size, count)
            block.append((first, taken))
            size -= taken
            if taken < count:
                ranges.insert(0, (first + taken, count - taken))
        blocks[island] = _merged(block)
    return blocks, Ledger(samples=samples, postponed=tuple(ranges))


def postponed(ledger: Ledger, blocks: Sequence[SampleBlock]) -> Ledger:
    """Returns the ledger with the samples of undone blocks added to its postponed ones."""
    ranges = sorted([*ledger.postponed, *(one for block in blocks for one in block)])
    return Ledger(samples=ledger.samples, postponed=_merged(ranges))


def handed_over(
    blocks: Mapping[int, SampleBlock], sizes: Mapping[int, int], ledger: Ledger
) -> tuple[dict[int, SampleBlock], Ledger]:
    """Returns the blocks of an unfinished step for the present islands (``sizes``), and the ledger after the step.

    An island with a block keeps it; a new one takes over a departed island's block of its size, or gets an empty one.
    """
    kept = {island: block for island, block in blocks.items() if num_samples(block) == sizes.get(island)}
    left = [block for island, block in blocks.items() if island not in kept and block]
    for island, size in sizes.items():
        fitting = [block for block in left if island not in kept and num_samples(block) == size]
        left = [block for block in left if block not in fitting[:1]]
        kept.setdefault(island, *fitting[:1] or [()])
    return {island: kept[island] for island in sizes}, postponed(ledger, left)


def num_samples(block: SampleBlock) -> int:
    """Returns the number of samples of a block."""
    return sum(count for _, count in block)


def sample_numbers(block: SampleBlock) -> list[int]:
    """Returns the numbers of the samples of a block."""
    return [number for first, count in block for number in range(first, first + count)]


def _merged(ranges: Sequence[tuple[int, int]]) -> SampleBlock:
    merged: list[tuple[int, int]] = []
    for first, count in ranges:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return tuple(merged)
