"""What an op declares: rules of its two passes; FLOPs, bytes and group of each local step.

FLOPs count matrix products only (a multiply and an add are 2), as utilisation does. Everything else
an op does is bounded by the memory it streams. Rules for the bytes: a product reads its operands and writes its
result once; an elementwise op is one fusion that reads every input once and writes every result once; a fusion
that needs a sum or maximum over its own row reads the row twice; a renamed (copy) or sliced array moves nothing.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape

OpRule = Callable[[Tape], None]
"""A function that adds to a tape the steps of the op that the tape is `at`."""

CountRule = Callable[[Step, OpSizes], Number]
"""A function that counts the FLOPs or bytes of a step on one device."""

WorkGroup = Literal["contraction", "attention", "normalisation", "elementwise", "embedding", "optimizer", "copy"]
"""Classes of work, by which prices, breakdowns and profiles total seconds. Collectives are a class of their own."""


def nothing(step: Step, sizes: OpSizes) -> Number:
    """Returns 0: for steps without matrix products, or without memory traffic."""
    return 0.0


def stream(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of every input, read once, and of every result, written once."""
    return sizes.total(*step.inputs, *step.results)


def row_stream(step: Step, sizes: OpSizes, *, rows: int = 1) -> Number:
    """Returns the bytes of a reduction over each row and an elementwise pass: the first ``rows`` inputs count twice."""
    return stream(step, sizes) + sizes.total(*step.inputs[:rows])


def row_bytes(step: Step, sizes: OpSizes, *, numbers: int = 1) -> Number:
    """Returns the bytes of moving rows: the result twice (read and written), and input ``numbers``, the row numbers."""
    return sizes.bytes(step.inputs[numbers]) + 2 * sizes.bytes(step.result)


class StepKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of local step: its FLOPs, its bytes to and from memory, and the group of work that it belongs to.

    ``is_einsum``: one product of two arrays, whose shape decides its rate. ``num_kernels`` is 0 for a step that a
    compiler only renames or fuses into the one before. ``reads_sum``: if the result is added to an array, the step
    reads that array too. ``in_place``: the result takes the memory of the first input. ``scratch_bytes`` exist only
    while the step runs; ``chunk_bytes`` are the bytes of logits that exist one chunk at a time.
    """

    flops: CountRule = nothing
    hbm_bytes: CountRule = stream
    group: WorkGroup = "elementwise"
    is_einsum: bool = False
    num_kernels: int = 1
    reads_sum: bool = True
    in_place: bool = False
    scratch_bytes: CountRule = nothing
    chunk_bytes: CountRule = nothing


def no_rule(tape: Tape) -> None:
    """Raises AssertionError: the op has no backward pass (generation only), or only a rewrite makes its steps."""
    raise AssertionError(f"{tape.op.kind} has no backward pass; derive it with derive_forward")


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """A weight as an optimizer updates it: the ``shard`` of one layer on one device, and the meaning of its dims.

    ``inputs`` are the input dims of its matrices (() for a vector), ``batch`` the dims that count matrices: E of
    experts. ``layers`` is the dim of the layers that have the weight, "" outside the layers; ``layer_axes`` split that
    dim."""

    shard: ShardedArray
    inputs: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    layers: str = ""
    layer_axes: tuple[str, ...] = ()


class OpKind(msgspec.Struct, frozen=True, kw_only=True):
    """One op kind: its rules forward and backward, and the local steps that they or a rewrite make, by name.

    An optimizer has ``update``, the steps for one weight, which read and replace running means ``WEIGHT.KIND.state``.
    """

    forward: OpRule = no_rule
    backward: OpRule = no_rule
    update: Callable[[Updated], tuple[Step, ...]] | None = None
    steps: dict[str, StepKind]
