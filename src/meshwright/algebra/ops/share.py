"""Joins two attentions of the same queries: each result is scaled by its share of both sums of exponentials."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.prompt_attention import statistics
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Scales the first result of ``share(o1[B,T,N,H], o2[B,T,N,H])``."""
    o1, o2 = tape.inputs
    tape.run("share", (o1, *statistics(o1), *statistics(o2)), tape.out)


OP = OpKind(forward=forward, steps={"share": StepKind()})
