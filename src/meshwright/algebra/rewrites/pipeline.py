"""Sends between stages of a pipeline, and a backward pass in two parts; `schedules` say when they run."""

import msgspec
from msgspec.structs import replace

from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Program
from meshwright.algebra.steps import Phase, Step
from meshwright.algebra.tape import Shardings
from meshwright.core.errors import CannotRunError
from meshwright.spec.strategy import Strategy

NO_PIPELINE = "an encoder with a decoder does not run in a pipeline in this version. Use pipeline=1."


class SplitBackward(msgspec.Struct, frozen=True):
    """A layer's backward pass in two parts, for schedules whose weight gradients have a pass of their own.

    ``inputs`` and ``weights`` are places in the backward steps, every one that runs for each microbatch in one of the
    two: first what the cotangent of the entering stream comes from, then the rest. ``handed`` is what the second takes
    from the first: operands of its products, gathered activations as they are, and gradients that came on the way.
    """

    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    handed: tuple[ShardedArray, ...]


def require_stages(program: Program, strategy: Strategy) -> None:
    """Raise CannotRunError for several stacks in a pipeline."""
    if len(program.stacks) > 1 and strategy.mesh.get("pipeline", 1) > 1:
        raise CannotRunError(NO_PIPELINE)


def boundary(program: Program, shardings: Shardings) -> tuple[Step, ...]:
    """Returns the stream sent to the next stage, and its cotangent sent back.

    Where the stream is whole over ``tensor`` each of its devices sends a part, which the next stage gathers.
    """
    stream = next((block.carry for block in program.blocks if block.carry), "")
    if not _has_stages(program, shardings) or not stream:
        return ()
    steps: list[Step] = []
    sides: tuple[tuple[Phase, ShardedArray], ...] = (
        ("forward", shardings.declared(stream)),
        ("backward", shardings.cotangent(stream)),
    )
    for phase, whole in sides:
        apart = whole
        if "tensor" in shardings.axes and "tensor" not in whole.spread and "T" in whole.dims:
            apart = whole.resharded({"T": (*whole.axes_of("T"), "tensor")})
        sent = Step(op="permute", inputs=(apart,), result=apart, axes=("pipeline",))
        for step in (sent, *reshard(apart, whole)):
            steps.append(replace(step, block="stage", phase=phase, critical=True))
    return tuple(steps)


def ends(program: Program, shardings: Shardings) -> tuple[Step, ...]:
    """Gradients of the weights outside the layers, which come from the first and the last stage, summed over all."""
    if not _has_stages(program, shardings):
        return ()
    outside = dict.fromkeys(n for block in program.blocks if not block.carry for op in block.ops for n in op.inputs)
    steps = []
    for name in (n for n in outside if shardings.is_weight(n)):
        total = shardings.optimizer(name).replace(name=f"d{name}")
        part = total.replace(unreduced=("pipeline",))
        steps.append(Step(op="all_reduce", inputs=(part,), result=total, axes=("pipeline",), scope="step"))
    return tuple(replace(s, block="stage", phase="backward") for s in steps)


def _has_stages(program: Program, shardings: Shardings) -> bool:
    return "pipeline" in shardings.axes and len(program.stacks) < 2
