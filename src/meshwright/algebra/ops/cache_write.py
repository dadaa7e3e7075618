"""Writes keys or values of new positions into pages[Pg,Pl,K,H] of a cache, in place, on the devices that have them."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the step ``cache_write(cache[Pg,Pl,..], values[B,T,..], slots[B,T])``, with positions T or S, on the devices
    that have the pages."""
    cache, values, slots = tape.inputs
    row_split = {"B": cache.axes[0], values.dims[1]: ()}
    local_values = tape.move(values, values.like(cache).resharded(row_split))
    tape.run("cache_write", (cache, local_values, tape.move(slots, slots.resharded(row_split))), tape.out)


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts the new positions, read and written; the rest of the cache stays as it is."""
    return 2 * sizes.bytes(step.inputs[1]) + sizes.bytes(step.inputs[2])


OP = OpKind(forward=forward, steps={"cache_write": StepKind(hbm_bytes=hbm_bytes, group="embedding", in_place=True)})
