"""Writes keys or values of new positions into a cache, in place.

A cache[B,S,K,H] stays on its devices; of a cache split over S each device writes the positions that it has, and of a
pool of pages[Pg,Pl,K,H] the slots.
"""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


class CacheWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: ``prompt`` says that all positions of a prompt are written, not one more of each row; ``packed`` that
    rows are of any sequences and are written into pages."""

    prompt: bool = False
    packed: bool = False


def forward(tape: Tape) -> None:
    """Writes ``cache_write(cache[B,S,..], values[B,T,..], where)`` on the cache's devices: ``where`` is the last index
    of each prompt, or the positions; of packed rows the slots."""
    (cache, values, where), details = tape.inputs, tape.details(CacheWrite)
    rows = {"B": cache.axes[0]}
    here = tape.move(values, values.resharded({"T": ()}).like(cache).resharded(rows))
    tape.run("cache_write", (cache, here, tape.move(where, where.resharded(rows))), tape.out, details=details)


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts the new positions, read and written; the rest of the cache stays as it is."""
    return 2 * sizes.bytes(step.inputs[1]) + sizes.bytes(step.inputs[2])


OP = OpKind(forward=forward, steps={"cache_write": StepKind(hbm_bytes=hbm_bytes, group="embedding", in_place=True)})
