"""Weighs one of two attentions of the same queries by its share of the exponentials of both, so that the two add up."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.prompt_attention import statistics
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the step that scales o1 in ``share(o1[B,T,N,H], o2[B,T,N,H])``, by the statistics of both attentions."""
    o1, o2 = tape.inputs
    tape.run("share", (o1, *statistics(o1), *statistics(o2)), tape.out)


OP = OpKind(forward=forward, steps={"share": StepKind()})
