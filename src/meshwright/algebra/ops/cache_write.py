"""Keys or values of new positions written into a cache, in place.

A cache[B,S,K,H] stays on its devices: S is never split, and queries must have the heads that lie beside them.
"""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.program import Op
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, details_of, like, local, moved, require_whole


class CacheWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: whether all positions of a prompt are written, or one more of each row."""

    prompt: bool = False


def forward(op: Op, trace: Trace) -> None:
    """``cache_write(cache[B,S,..], values[B,T,..], where)``: every position of the values, on the cache's devices."""
    cache, values, where, out = (trace.declared(n) for n in (*op.inputs, op.out))
    require_whole(cache, "S", op.kind)
    here = like(values, cache).resharded({"T": ()})
    moved(trace, values, here)
    place = moved(trace, where, like(where, cache))
    trace.add(local(op.kind, (cache, here, place), out, details=details_of(op, CacheWrite)))


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """The new positions are read and written; the rest of the cache stays as it is."""
    return 2 * sizes.bytes(step.inputs[1]) + sizes.bytes(step.inputs[2])


OP = OpKind(forward=forward, steps={"cache_write": StepKind(hbm_bytes=hbm_bytes, group="embedding", in_place=True)})
