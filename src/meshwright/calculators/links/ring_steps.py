"""Collectives hop by hop along a ring or a line, over a switch or by trees: the blocks that devices send in each step.

In an AllGather devices pass blocks on until all have them. A ReduceScatter is its reverse: blocks travel in the
opposite direction and are added on each device. An AllReduce is both. An AllToAll delivers one block from every device
to every device; blocks for one device are drawn as one column. Source: How to Scale Your Model, section 3.2; trees:
Bruck et al. (1997).
"""

import itertools
from typing import Literal

from meshwright.core.errors import InputError
from meshwright.cost.network.legs import Leg
from meshwright.report.arrays.ring import Move, RingFrame

DrawnKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
DRAWN_KINDS: tuple[DrawnKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def leg_moves(kind: DrawnKind, leg: Leg, *, two_way: bool = True) -> list[tuple[Move, ...]]:
    """Returns the steps of an AllGather or an AllToAll over a leg: along a torus axis, in one step over a switch, or by
    trees over a network, in which a device sends all its blocks twice as far in each step."""
    devices, is_exchange = range(int(leg.size)), kind == "all_to_all"
    if leg.level == "ici":
        return (exchange_moves if is_exchange else gather_moves)(len(devices), wraps=leg.wraps, two_way=two_way)
    if is_exchange or leg.hops == 1:
        device_pairs = [(source, target) for source in devices for target in devices if source != target]
        return [tuple(Move(source=s, target=t, block=t if is_exchange else s) for s, t in device_pairs)]
    return [
        tuple(
            Move(source=device, target=(device + distance) % len(devices), block=(device - offset) % len(devices))
            for device in devices
            for offset in range(min(distance, len(devices) - distance))
        )
        for distance in (2**step for step in range(leg.hops))
    ]


def gather_moves(size: int, *, wraps: bool = True, two_way: bool = True) -> list[tuple[Move, ...]]:
    """Returns the moves of each step of an AllGather: in every step a device passes on the block that it just received.

    A ring takes size - 1 steps in one direction, half as many, rounded up, in both (of an even size the last step is
    one-way); a line takes size - 1. Raises InputError for a line used in one direction.
    """
    if not wraps and not two_way:
        raise InputError("a line cannot be used in one direction: its first device would get nothing. Use a ring.")
    ring_hops = (size // 2, (size - 1) // 2) if two_way else (size - 1, 0)
    spans = [ring_hops if wraps else (size - 1 - device, device) for device in range(size)]
    return _hops(size, [(d, way, hops, d) for d, (on, back) in enumerate(spans) for way, hops in ((1, on), (-1, back))])


def exchange_moves(size: int, *, wraps: bool, two_way: bool) -> list[tuple[Move, ...]]:
    """Returns the steps of an AllToAll along a ring or a line: blocks take the shorter direction, of equal ones
    forwards."""
    routes = []
    for source, target in itertools.product(range(size), range(size)):
        distance = (target - source) % size
        goes_forwards = target >= source if not wraps else not two_way or 2 * distance <= size
        routes.append((source, 1, distance, target) if goes_forwards else (source, -1, size - distance, target))
    return _hops(size, routes)


def _hops(size: int, routes: list[tuple[int, int, int, int]]) -> list[tuple[Move, ...]]:
    """Returns the moves of each step for routes of a source, a direction, a number of hops and a block."""
    moves_by_hop: list[set[tuple[int, int, int]]] = [set() for _ in range(max(hops for _, _, hops, _ in routes))]
    for source, direction, hops, block in routes:
        for hop in range(hops):
            moves_by_hop[hop].add(((source + direction * hop) % size, (source + direction * (hop + 1)) % size, block))
    return [tuple(Move(source=s, target=t, block=b) for s, t, b in sorted(hop_moves)) for hop_moves in moves_by_hop]


def collective_frames(kind: DrawnKind, size: int, moves: list[tuple[Move, ...]]) -> tuple[RingFrame, ...]:
    """Returns the state before the first step and after each step; ``moves`` are of an AllGather, or of an AllToAll.

    At the start of an AllGather each device has its own block; of an AllToAll, a block for each device; of other
    collectives, an addend of every block.
    """
    steps: list[tuple[Literal["gather", "reduce", "exchange"], tuple[Move, ...]]] = []
    if kind in ("reduce_scatter", "all_reduce"):
        steps += [
            ("reduce", tuple(Move(source=m.target, target=m.source, block=m.block) for m in step_moves))
            for step_moves in reversed(moves)
        ]
    if kind != "reduce_scatter":
        steps += [("exchange" if kind == "all_to_all" else "gather", step_moves) for step_moves in moves]
    data_held: list[list[tuple[int, ...]]] = [
        [(device,) if kind != "all_gather" or block == device else () for block in range(size)]
        for device in range(size)
    ]
    frames = [RingFrame(step=0, moves=(), held=tuple(map(tuple, data_held)), phase="start")]
    for step_index, (phase, step_moves) in enumerate(steps, start=1):
        sent_data = [data_held[m.source][m.block] for m in step_moves]
        if phase != "gather":
            for m in step_moves:
                data_held[m.source][m.block] = ()
        for m, data in zip(step_moves, sent_data, strict=True):
            data_there = data_held[m.target][m.block] if phase != "gather" else ()
            if not data or (phase == "reduce" and not data_there):
                raise AssertionError(f"block {m.block} is not where device {m.source} or {m.target} needs it")
            data_held[m.target][m.block] = tuple(sorted((*data_there, *data)))
        frames.append(RingFrame(step=step_index, moves=step_moves, held=tuple(map(tuple, data_held)), phase=phase))
    return tuple(frames)
