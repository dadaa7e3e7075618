"""Collectives hop by hop give the blocks that the derived steps give, in as many hops as the cost model counts."""

import numpy as np
import pytest

from meshwright.algebra.blocks import execute, split
from meshwright.algebra.notation import parse_array
from meshwright.algebra.steps import Step
from meshwright.calculators.links.ring_steps import collective_frames, gather_moves, leg_moves
from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import ring_link_share
from meshwright.cost.network.legs import Leg
from tests.torus_legs import ring

WAYS = [(True, True), (True, False), (False, True)]
ENDS = {"all_gather": ("A[I_X,J]", "A[I,J]"), "reduce_scatter": ("A[I,J]{U_X}", "A[I_X,J]"),
        "all_reduce": ("A[I,J]{U_X}", "A[I,J]")}  # fmt: skip


def replayed(kind, blocks, frames):
    """The blocks of the devices after the moves of all frames, done on numbers."""
    size = len(blocks)
    whole = kind != "all_gather"
    values = [
        list(np.split(mine, size)) if whole else [mine if d == at else None for d in range(size)]
        for at, mine in enumerate(blocks)
    ]
    for frame in frames:
        sent = [values[m.source][m.block] for m in frame.moves]
        if frame.phase == "reduce":
            for m in frame.moves:
                values[m.source][m.block] = None
        for m, value in zip(frame.moves, sent, strict=True):
            values[m.target][m.block] = value + (values[m.target][m.block] if frame.phase == "reduce" else 0)
    return [np.concatenate([value for value in row if value is not None]) for row in values]


@pytest.mark.parametrize(("wraps", "two_way"), WAYS)
@pytest.mark.parametrize("kind", list(ENDS))
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_the_blocks_of_the_derived_step(kind, size, wraps, two_way):
    source, result = (parse_array(text) for text in ENDS[kind])
    mesh = {"X": size}
    value = np.arange(size * 2 * 3).reshape(size * 2, 3)
    blocks = split(value, source, mesh)
    dim = "" if kind == "all_reduce" else "I"
    step = Step(op=kind, inputs=(source,), result=result, axes=("X",), dim=dim)
    expected = execute([step], {source: blocks}, mesh)[result]
    found = replayed(kind, blocks, collective_frames(kind, size, gather_moves(size, wraps=wraps, two_way=two_way)))
    for mine, wanted in zip(found, expected, strict=True):
        assert np.array_equal(mine, wanted)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_as_many_hops_as_the_latency_counts(size):
    for wraps in (True, False):
        assert len(gather_moves(size, wraps=wraps)) == ring(size, 1.0, wraps=wraps).hops
    assert len(gather_moves(size, two_way=False)) == size - 1


@pytest.mark.parametrize("size", [3, 4, 8])
def test_what_crosses_a_link_one_way(size):
    """Exercise 3.10: (n - 1) / n of the array over each link of a one-way ring."""
    crossed = [sum((m.source, m.target) == (0, 1) for m in step) for step in gather_moves(size, two_way=False)]
    assert sum(crossed) / size == ring_link_share("all_gather", size, two_way=False)


def test_a_step_sends_one_block_over_a_link_at_most():
    for wraps, two_way in WAYS:
        for step in gather_moves(6, wraps=wraps, two_way=two_way):
            links = [(m.source, m.target) for m in step]
            assert len(links) == len(set(links))


def test_frames_say_whose_data_a_block_holds():
    frames = collective_frames("reduce_scatter", 4, gather_moves(4, two_way=False))
    assert frames[0].held == tuple(((d,),) * 4 for d in range(4))
    assert [frames[-1].held[d][d] for d in range(4)] == [(0, 1, 2, 3)] * 4
    assert all(not frames[-1].held[d][b] for d in range(4) for b in range(4) if b != d)


def test_a_line_has_two_directions():
    with pytest.raises(InputError, match="Use a ring"):
        gather_moves(4, wraps=False, two_way=False)


def test_a_switch_and_trees_take_as_many_steps_as_their_legs_count():
    """A domain has one hop; 6 devices over a network are reached in 3 steps: 1, 2, 4 and all 6 blocks."""
    for level, hops in (("nvlink", 1), ("network", 3)):
        moves = leg_moves("all_gather", Leg(level=level, size=6, bytes_per_s=1.0, hops=hops))
        frames = collective_frames("all_gather", 6, moves)
        assert len(moves) == hops
        assert all(data == (block,) for row in frames[-1].held for block, data in enumerate(row))
        assert [sum(map(bool, frame.held[0])) for frame in frames] == ([1, 6] if hops == 1 else [1, 2, 4, 6])
        summed = collective_frames("all_reduce", 6, moves)
        assert len(summed) == 2 * hops + 1
        assert all(data == (0, 1, 2, 3, 4, 5) for row in summed[-1].held for data in row)


@pytest.mark.parametrize(
    ("leg", "steps"),
    [
        # the furthest block of a ring of 8 takes 4 hops both ways and 7 one way; of a line of 5 it takes 4
        (Leg(level="ici", size=8, bytes_per_s=1.0, wraps=True), 4),
        (Leg(level="ici", size=5, bytes_per_s=1.0, wraps=False), 4),
        (Leg(level="nvlink", size=8, bytes_per_s=1.0), 1),
        (Leg(level="network", size=8, bytes_per_s=1.0, hops=3), 1),
    ],
)
def test_an_all_to_all_brings_every_block_to_its_device(leg, steps):
    moves = leg_moves("all_to_all", leg)
    last = collective_frames("all_to_all", leg.size, moves)[-1]
    assert len(moves) == steps
    for device, row in enumerate(last.held):
        assert row == tuple(tuple(range(leg.size)) if block == device else () for block in range(leg.size))


def test_an_all_to_all_of_one_way_takes_all_hops():
    moves = leg_moves("all_to_all", Leg(level="ici", size=8, bytes_per_s=1.0, wraps=True), two_way=False)
    assert len(moves) == 7
    assert {(m.target - m.source) % 8 for step in moves for m in step} == {1}
