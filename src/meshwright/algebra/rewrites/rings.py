"""Permutes that send blocks round a ring of devices: for products (`collective_matmul`), and for attention over split
positions, where queries stay on their device and blocks of keys and values pass by."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a permute that sends blocks round a ring of n devices in n - 1 moves.

    With the ``ring`` "past" a block starts at its owner and visits every other device; with "home" it visits them
    first, is added to by each, and ends at its owner. With a ``window`` of W positions, or a chunk of so many, it
    visits only the next ceil(R n / T) devices, at most n - 1, with R the `positions_back`: no queries further on see
    it. With ``ways`` 2 the block is sent in two halves in opposite directions. ``beside_products`` says that the
    products of a collective matmul run meanwhile.
    """

    ring: Literal["past", "home"]
    window: int | None = None
    chunked: bool = False
    ways: int = 1
    beside_products: bool = False


def num_moves(step: Step, sizes: OpSizes) -> Number:
    """Returns how many times a permute sends its block on: n - 1 times or fewer round a ring (`Round`), else once.

    Sizes may be arrays, and a group of one sends nothing round its ring.
    """
    ring = step.details
    if not isinstance(ring, Round):
        return 1
    return num_before(ring.window, product(sizes.mesh[axis] for axis in step.axes), sizes, chunked=ring.chunked)


def num_before(window: int | None, ring_size: Number, sizes: OpSizes, *, chunked: bool) -> Number:
    """Returns how many devices before a device of a ring have keys that its queries see."""
    if window is None:
        return ring_size - 1
    num_back = positions_back(window, sizes.dims["T"] / ring_size, chunked=chunked)
    return np.minimum(ring_size - 1, np.ceil(num_back * ring_size / sizes.dims["T"]))


def positions_back(window: int, length: Number, *, chunked: bool) -> Number:
    """Returns how many positions before its own ``length`` a device's queries see at most: ``window`` - 1; with chunks
    ``window`` - gcd(``length``, ``window``), as starts of devices and chunks differ by multiples of it."""
    return window - np.gcd(np.asarray(length, dtype=np.int64), window) if chunked else window - 1


def num_ways(step: Step, sizes: OpSizes) -> Number:
    """Returns the pieces of a block that are sent at once, in opposite directions: 2 where a permute has two directions
    and its block can be cut along its dim, else 1."""
    if not isinstance(step.details, Round) or step.details.ways != 2:
        return 1
    return np.minimum(2, sizes.local(step.result)[step.dim])


def in_ring(step: Step, keys: Sequence[ShardedArray]) -> tuple[Step, ...]:
    """Returns the permutes and a step of attention, forward or backward, on ``keys`` (and values) that go round the
    ring of its details; only the step if its details name no ring.

    In the backward pass the keys go round once more, with their cotangents, which end on the device of their keys.
    """
    if not step.details.ring:
        return (step,)
    is_forward = not step.op.endswith("_backward")
    num_given = 0 if is_forward else 3
    passing_keys = tuple(key.replace(name=f"{key.name}_{'passing' if is_forward else 'returning'}") for key in keys)
    cotangents = () if is_forward else step.more[: len(keys)]
    passing_cotangents = tuple(array.replace(name=f"{array.name}_passing") for array in cotangents)
    attention = replace(
        step,
        inputs=(*step.inputs[:num_given], *passing_keys, *step.inputs[num_given:]),
        more=(*passing_cotangents, *step.more[len(passing_cotangents) :]),
    )
    past_rounds = (_round(step, *pair, ring="past") for pair in zip(keys, passing_keys, strict=True))
    home_rounds = (_round(step, *pair, ring="home") for pair in zip(passing_cotangents, cotangents, strict=True))
    return (*past_rounds, attention, *home_rounds)


def _round(step: Step, array: ShardedArray, result: ShardedArray, *, ring: Literal["past", "home"]) -> Step:
    """Returns the permute of an array round the ring of an attention step, as far as its window needs."""
    details = Round(ring=ring, window=step.details.window, chunked=step.details.chunked)
    return Step(op="permute", inputs=(array,), result=result, axes=step.details.ring, details=details)
