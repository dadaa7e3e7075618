"""Labels that name the derived step of each instruction in a compiled program."""

import re

import msgspec

_LABEL = re.compile(r"(\w*):(forward|recompute|backward|update):([\w.']+)=(\w+)")

OPTIMIZER = "optimizer:update:weights=optimizer"
"""Label of the optimizer's instructions, which come from no derived step."""

AT_MOST_ONCE = "at_most_once"
FURTHER_ROUNDS = "further_rounds"
"""Scopes of two loops: a conditional, written as a loop of at most one iteration so that its buffers are updated in
place; and the further rounds of an exchange of expert rows, none if loads are even."""


class StepLabel(msgspec.Struct, frozen=True):
    """The derived step of an instruction: ``layer:backward:dq=einsum`` is the product that computes dq.

    ``block`` is a block of the program (embed, layer or a kind of layer, head), ``result`` the name of the result.
    """

    block: str
    phase: str
    result: str
    op: str

    def __str__(self) -> str:
        return f"{self.block}:{self.phase}:{self.result}={self.op}"


def find_label(op_name: str) -> StepLabel | None:
    """Returns the innermost label in an instruction's ``op_name``, or None."""
    # the text of a program writes a quote with a backslash
    labels = _LABEL.findall(op_name.replace("\\'", "'"))
    return StepLabel(*labels[-1]) if labels else None
