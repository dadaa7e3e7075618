"""What a schedule comes to as one program runs it on all devices: in fused ticks, in lockstep.

`forms` has devices that run ahead of each other as far as messages let them. Here all devices take part in every tick
(see `fused`): a message takes a tick each way, so that more microbatches are in flight, and what fills a bubble
elsewhere may not. From the closed forms of the schedule's own file, which equal the tables of `ticks` and
`fused_seconds` (``tests/algebra/schedules/test_lockstep.py``), else from these tables. Sizes and times may be NumPy
arrays.
"""

from typing import Literal

import numpy as np

from meshwright.algebra.schedules.definition import Array
from meshwright.algebra.schedules.forms import peak_stash
from meshwright.algebra.schedules.registry import definition
from meshwright.algebra.schedules.simulated import longest_bubble, over_sizes, simulated_lockstep

Buffer = Literal["x", "dx", "stash", "head", "handed"]
"""The fields of `ticks.Slots`."""


def lockstep_slots(name: str, buffer: Buffer, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Slots of a buffer of `ticks.Slots` on the worst device, which all devices have, as all run one program. Exact.

    Those of ``stash`` and ``handed`` are of one virtual stage, 1/chunks of a device's layers.
    """
    p, m, v = (np.asarray(size) for size in (stages, microbatches, chunks))
    found = definition(name)
    form = found.lockstep
    if form is None:
        return over_sizes(lambda *size: getattr(simulated_lockstep(found, *size).slots, buffer), p, m, v)
    if buffer == "stash":
        if form.stash:
            return form.stash(p, m, v)
        return np.rint(v * peak_stash(name, stages=p, microbatches=m, chunks=v)).astype(int)
    if buffer == "handed":
        return form.handed(p, m)
    if buffer == "head":
        return form.head(m)
    return 1 + (p > form.two_ways_from) if buffer == "x" else 1 + 0 * p


def lockstep_ticks(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Rows of the table. Exact."""
    p, m, v = (np.asarray(size) for size in (stages, microbatches, chunks))
    found = definition(name)
    if found.lockstep:
        return found.lockstep.ticks(p, m, v)
    return over_sizes(lambda *size: simulated_lockstep(found, *size).ticks, p, m, v)


def lockstep_sends(name: str, *, stages: Array, microbatches: Array, chunks: Array = 1) -> Array:
    """Sends, one way, that a step waits for: the messages of all ticks but the first and the last, or fewer."""
    form = definition(name).lockstep
    if form and form.sends:
        return form.sends(stages, microbatches, chunks)
    return lockstep_ticks(name, stages=stages, microbatches=microbatches, chunks=chunks) - 2


def lockstep_bubble_seconds(
    name: str,
    *,
    stages: Array,
    microbatches: Array,
    chunks: Array = 1,
    forward_s: Array,
    backward_s: Array,
    weight_s: Array = 0.0,
) -> Array:
    """Seconds of a step beyond its passes, as `forms.bubble_seconds` says, with every tick in lockstep.

    Exact, but for zb-h2 with more microbatches than stages and fewer than twice as many less one.
    """
    p, m, v = (np.asarray(size) for size in (stages, microbatches, chunks))
    found = definition(name)
    if found.lockstep is None:
        times = (forward_s, backward_s, weight_s)
        return longest_bubble(lambda *size: simulated_lockstep(found, *size).paths, p, m, v, times)
    form = found.lockstep
    hops, waits = form.hops(p, m), form.weight_hops(p, m)
    return (hops * (forward_s + backward_s) + waits * weight_s) / (v if form.is_divided else 1)
