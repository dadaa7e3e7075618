"""Collectives along a ring or a line of devices, hop by hop: who sends which block when, and whose data it carries.

An AllGather passes blocks on to neighbours until all have them. A ReduceScatter is its reverse: blocks travel the other
way and are added on each device. An AllReduce is both. Source: How to Scale Your Model, section 3.2.
"""

from typing import Literal

from meshwright.core.errors import InputError
from meshwright.report.arrays.ring import Move, RingFrame

RingKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
RING_KINDS: tuple[RingKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def gather_moves(size: int, *, wraps: bool = True, two_way: bool = True) -> list[tuple[Move, ...]]:
    """Returns the moves of each step of an AllGather: in every step a device passes on the block of the step before.

    A ring takes size - 1 steps one way and half of that, rounded up, both ways; a line is used both ways and takes
    size - 1. With an even number of devices the last step of a two-way ring needs one direction only.
    """
    if not wraps and not two_way:
        raise InputError("a line cannot be used in one direction: its first device would get nothing. Use a ring.")
    last = size - 1 if not (wraps and two_way) else size // 2
    steps = []
    for step in range(last):
        directions = (1, -1) if two_way and not (wraps and 2 * (step + 1) == size) else (1,)
        steps.append(
            tuple(
                Move(source=device, target=(device + way) % size, block=(device - way * step) % size)
                for way in directions
                for device in range(size)
                if wraps or (0 <= device + way < size and 0 <= device - way * step < size)
            )
        )
    return steps


def ring_frames(kind: RingKind, size: int, *, wraps: bool = True, two_way: bool = True) -> tuple[RingFrame, ...]:
    """Returns the start, and a frame for each step of the collective.

    AllGather: each device begins with its block. ReduceScatter and AllReduce: each begins with an addend of all blocks.
    """
    moves = gather_moves(size, wraps=wraps, two_way=two_way)
    steps: list[tuple[Literal["gather", "reduce"], tuple[Move, ...]]] = []
    if kind != "all_gather":
        steps += [
            ("reduce", tuple(Move(source=m.target, target=m.source, block=m.block) for m in step))
            for step in reversed(moves)
        ]
    if kind != "reduce_scatter":
        steps += [("gather", step) for step in moves]
    held: list[list[tuple[int, ...]]] = [
        [(device,) if kind != "all_gather" or block == device else () for block in range(size)]
        for device in range(size)
    ]
    frames = [RingFrame(step=0, moves=(), held=tuple(map(tuple, held)), phase="start")]
    for number, (phase, step) in enumerate(steps, start=1):
        sent = [held[m.source][m.block] for m in step]
        if phase == "reduce":
            for m in step:
                held[m.source][m.block] = ()
        for m, data in zip(step, sent, strict=True):
            kept = held[m.target][m.block] if phase == "reduce" else ()
            if not data or (phase == "reduce" and not kept):
                raise AssertionError(f"block {m.block} is not where device {m.source} or {m.target} needs it")
            held[m.target][m.block] = tuple(sorted((*kept, *data)))
        frames.append(RingFrame(step=number, moves=step, held=tuple(map(tuple, held)), phase=phase))
    return tuple(frames)
