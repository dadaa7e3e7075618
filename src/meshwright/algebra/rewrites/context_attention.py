"""Attention over positions split between devices without a gather of all keys and values.

"ulysses" exchanges positions for heads, so that each device has all positions of some heads. "ring" leaves queries
where they are and sends keys and values round, block by block, while attention works on the block at hand.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.steps import Step


def heads_for_positions(array: ShardedArray, axes: tuple[str, ...], positions: tuple[str, ...]) -> ShardedArray:
    """An array[B, T, N, H] with ``axes`` on its heads; its positions stay split over ``positions``."""
    _, rows, heads, _ = array.dims
    return array.resharded({rows: positions, heads: array.axes_of(heads) + axes})


def in_ring(step: Step, keys: Sequence[ShardedArray]) -> tuple[Step, ...]:
    """A step of attention, forward or backward, on ``keys`` (and values) that come round the ring of its details; the
    step as it is where they name none.

    In the backward pass they go round once more, and with them their cotangents, which come home in the end.
    """
    if not step.details.ring:
        return (step,)
    forward = not step.op.endswith("_backward")
    given = 0 if forward else 3
    passing = tuple(key.replace(name=f"{key.name}_{'passing' if forward else 'returning'}") for key in keys)
    results = () if forward else step.more[: len(keys)]
    collected = tuple(array.replace(name=f"{array.name}_passing") for array in results)
    attention = replace(
        step,
        inputs=(*step.inputs[:given], *passing, *step.inputs[given:]),
        more=(*collected, *step.more[len(collected) :]),
    )
    past = (_round(step, *pair, ring="past") for pair in zip(keys, passing, strict=True))
    home = (_round(step, *pair, ring="home") for pair in zip(collected, results, strict=True))
    return (*past, attention, *home)


def _round(step: Step, array: ShardedArray, result: ShardedArray, *, ring: Literal["past", "home"]) -> Step:
    """A permute of an array round the ring, as far as the window of the attention asks for."""
    moves = Round(ring=ring, window=step.details.window)
    return Step(op="permute", inputs=(array,), result=result, axes=step.details.ring, details=moves)
