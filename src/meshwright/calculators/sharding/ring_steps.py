"""Collectives along a ring or a line of devices, hop by hop: who sends which block when, on NumPy blocks.

An AllGather passes blocks on to neighbours until all have them. A ReduceScatter is the same run backwards: blocks
travel the other way and are added where they meet. An AllReduce is both. Source: How to Scale Your Model, section 3.2.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from meshwright.calculators.sharding.blocks import BlockSet
from meshwright.core.errors import InputError
from meshwright.report.arrays.ring import Move, RingFrame

RingKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
RING_KINDS: tuple[RingKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")


class RingRun(msgspec.Struct, frozen=True, kw_only=True):
    """Every frame of a collective, and the blocks that the devices have in the end."""

    frames: tuple[RingFrame, ...]
    blocks: list[np.ndarray]

    @property
    def num_steps(self) -> int:
        """Hops one after the other."""
        return len(self.frames) - 1


def gather_moves(size: int, *, wraps: bool = True, two_way: bool = True) -> list[tuple[Move, ...]]:
    """The moves of each step of an AllGather: in every step a device passes on what it got in the step before.

    A ring takes size - 1 steps one way and half of that, rounded up, both ways; a line is used both ways and takes
    size - 1. With an even number of devices the last step of a two-way ring needs one direction only.
    """
    if not wraps and not two_way:
        raise InputError("a line cannot be used in one direction: its first device would get nothing. Use a ring.")
    last = size - 1 if not (wraps and two_way) else size // 2
    steps = []
    for step in range(last):
        moves = [_move(device, device + 1, device - step, size, wraps) for device in range(size)]
        if two_way and not (wraps and 2 * (step + 1) == size):
            moves += [_move(device, device - 1, device + step, size, wraps) for device in range(size)]
        steps.append(tuple(move for move in moves if move is not None))
    return steps


def _move(source: int, target: int, block: int, size: int, wraps: bool) -> Move | None:
    """The move, round the ring; None where a line has no such neighbour or no such block."""
    if wraps:
        return Move(source=source, target=target % size, block=block % size)
    inside = 0 <= target < size and 0 <= block < size
    return Move(source=source, target=target, block=block) if inside else None


def run_ring(kind: RingKind, blocks: BlockSet, *, wraps: bool = True, two_way: bool = True) -> RingRun:
    """The collective along dim 0 of the devices' blocks, step by step.

    AllGather: each device has its block. ReduceScatter and AllReduce: each has an addend of the whole, which its size
    must divide by the number of devices.
    """
    size = len(blocks)
    moves = gather_moves(size, wraps=wraps, two_way=two_way)
    if kind == "all_gather":
        held: list[list[np.ndarray | None]] = [[b if d == at else None for d in range(size)] for at, b in
                                               enumerate(blocks)]  # fmt: skip
        state = _State(held, [[(at,) if d == at else () for d in range(size)] for at in range(size)])
    else:
        held = [list(np.split(b, size)) for b in blocks]
        state = _State(held, [[(at,)] * size for at in range(size)])
    frames = [state.frame((), "start")]
    if kind != "all_gather":
        frames += [state.reduce(_backwards(step)) for step in reversed(moves)]
    if kind != "reduce_scatter":
        frames += [state.gather(step) for step in moves]
    return RingRun(frames=tuple(frames), blocks=state.joined())


def _backwards(moves: Sequence[Move]) -> tuple[Move, ...]:
    return tuple(Move(source=m.target, target=m.source, block=m.block) for m in moves)


class _State:
    """Values of all blocks on all devices, and whose data each holds."""

    def __init__(self, values: list[list[np.ndarray | None]], held: list[list[tuple[int, ...]]]) -> None:
        self._values = values
        self._held = held
        self._step = -1

    def gather(self, moves: Sequence[Move]) -> RingFrame:
        for move in moves:
            if self._values[move.source][move.block] is None:
                raise AssertionError(f"device {move.source} has no block {move.block} to pass on")
        sent = [(self._values[m.source][m.block], self._held[m.source][m.block]) for m in moves]
        for move, (value, held) in zip(moves, sent, strict=True):
            self._values[move.target][move.block], self._held[move.target][move.block] = value, held
        return self.frame(moves, "gather")

    def reduce(self, moves: Sequence[Move]) -> RingFrame:
        sent = [(self._values[m.source][m.block], self._held[m.source][m.block]) for m in moves]
        for move in moves:
            self._values[move.source][move.block], self._held[move.source][move.block] = None, ()
        for move, (value, held) in zip(moves, sent, strict=True):
            mine = self._values[move.target][move.block]
            if mine is None or value is None:
                raise AssertionError(f"block {move.block} left device {move.target} before it was complete")
            self._values[move.target][move.block] = mine + value
            self._held[move.target][move.block] = tuple(sorted((*self._held[move.target][move.block], *held)))
        return self.frame(moves, "reduce")

    def frame(self, moves: Sequence[Move], phase: Literal["start", "gather", "reduce"]) -> RingFrame:
        self._step += 1
        return RingFrame(step=self._step, moves=tuple(moves), held=tuple(tuple(row) for row in self._held), phase=phase)

    def joined(self) -> list[np.ndarray]:
        return [np.concatenate([value for value in row if value is not None]) for row in self._values]
