"""Writes keys or values of new positions into a cache, in place.

A cache[B,S,K,H] stays on its devices; of a cache split over S each device writes the positions that it has. A pool of
pages[Pg,Pl,K,H] is split as the sequences are, so that a device finds the pages of its own sequences in its own part.
"""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape, require_whole


class CacheWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: ``prompt`` says that all positions of a prompt are written, not one more of each row; ``paged`` that
    they are written into pages."""

    prompt: bool = False
    paged: bool = False


def forward(tape: Tape) -> None:
    """Writes ``cache_write(cache[B,S,..], values[B,T,..], where)`` on the cache's devices: ``where`` is the last index
    of each prompt, or the positions. A page table is a fourth input. Packed rows have slots in its place, and reach the
    devices of all pages."""
    cache, values, *where = tape.inputs
    if "Pl" in cache.dims:
        require_whole(cache, "Pl", tape.op.kind)
    packed = "Pl" in cache.dims and len(where) == 1
    rows = {"B": () if packed else cache.axes_of(cache.dims[0])}
    here = tape.move(values, values.resharded({"T": ()}).like(cache).resharded(rows))
    places = [tape.move(one, one.resharded(rows)) for one in where]
    tape.run("cache_write", (cache, here, *places), tape.out, details=tape.details(CacheWrite))


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts the new positions, read and written; the rest of the cache stays as it is."""
    return 2 * sizes.bytes(step.inputs[1]) + sizes.total(*step.inputs[2:])


OP = OpKind(forward=forward, steps={"cache_write": StepKind(hbm_bytes=hbm_bytes, group="embedding", in_place=True)})
