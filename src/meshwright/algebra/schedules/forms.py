"""What a schedule comes to with a program for each stage, for uniform stages: what the search multiplies a million
times.

From the closed forms of the schedule's own file, else simulated once for each size. Sizes and times may be NumPy
arrays; sizes that a schedule does not exist for are masked by `is_legal`, not branched on. Each closed form is the
longest path through the schedule's own rows, so that it equals the simulator's result: see
``tests/algebra/schedules/test_forms.py``.
"""

import numpy as np

from meshwright.algebra.schedules.definition import Array
from meshwright.algebra.schedules.registry import definition
from meshwright.algebra.schedules.simulated import MAX_PASSES, longest_bubble, over_sizes, simulated_size


def bubble_seconds(
    name: str,
    *,
    stages: Array,
    microbatches: Array,
    chunks: Array = 1,
    forward_s: Array,
    backward_s: Array,
    weight_s: Array = 0.0,
) -> Array:
    """Seconds of a step beyond ``microbatches * (forward_s + backward_s + weight_s)``, with a barrier at its end.

    Times are of one microbatch through all layers of one device: ``backward_s`` for the gradients of the inputs (with
    any recomputation), ``weight_s`` for those of the weights, which schedules that do not split make in one pass.
    Sending is free here. Exact, but for zb-h2 with fewer microbatches than stages.
    """
    found = definition(name)
    if found.forms:
        return found.forms.bubble_s(stages, microbatches, chunks, forward_s, backward_s, weight_s)
    return longest_bubble(
        lambda *size: simulated_size(found, *size).paths,
        *(stages, microbatches, chunks),
        (forward_s, backward_s, weight_s),
    )


def peak_stash(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Most whole-stage microbatches alive at once on the worst device; W keeps as much as B. Exact.

    The unit is what the backward pass of one microbatch needs of all layers of one device; what is kept for one of
    several pieces of a device counts as its part.
    """
    found = definition(name)
    if found.forms:
        return found.forms.stash(stages, microbatches, chunks)
    return over_sizes(lambda *size: simulated_size(found, *size).stash, stages, microbatches, chunks)


def sends(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Sends, one way, that a step waits for where a send is short beside a pass."""
    found = definition(name)
    if found.forms:
        return found.forms.sends(stages, microbatches, chunks)
    return over_sizes(lambda *size: simulated_size(found, *size).sends, stages, microbatches, chunks)


def split_passes(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Microbatches whose weight gradients have a pass of their own in the layers of the device with most of them."""
    found = definition(name)
    if found.forms:
        return found.forms.split(stages, microbatches, chunks)
    return over_sizes(lambda *size: simulated_size(found, *size).split, stages, microbatches, chunks)


def is_legal(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """True where the schedule exists for these sizes, `registry.build` makes its rows, and they can be priced."""
    found = definition(name)
    legal = found.is_legal(stages, microbatches, chunks)
    if found.forms and found.lockstep:
        return legal
    return legal & (3 * np.asarray(stages) * microbatches * chunks <= MAX_PASSES)


def weight_copies(name: str) -> int:
    """How often the devices hold the weights together: 2 where microbatches enter at both ends."""
    return definition(name).stage_placement.weight_copies
