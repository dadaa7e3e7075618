"""Sends and sums between stages of a pipeline, and the form of a split backward pass. Schedules say when they run."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Program
from meshwright.algebra.steps import Phase, Step
from meshwright.algebra.tape import Shardings
from meshwright.core.errors import CannotRunError
from meshwright.spec.strategy import Strategy

NO_PIPELINE = (
    "an encoder with a decoder does not run in a pipeline in this version, nor does a model with mtp_weight. "
    "Use pipeline=1."
)


class SplitBackward(msgspec.Struct, frozen=True):
    """A layer's backward pass in two parts, for schedules whose weight gradients have a pass of their own.

    Both are indices of the backward steps that run for each microbatch: ``inputs`` are a segment's second run and the
    steps that the cotangent of the layer's input needs, ``weights`` are the rest. ``handed`` are arrays that the second
    part needs from the first, besides weights and inputs: activations, cotangents, finished gradients.
    """

    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    handed: tuple[ShardedArray, ...]


class StageLayers(NamedTuple):
    """The layers of virtual stages. All devices run one program, so each stage runs the blocks of ``pattern``.

    ``places`` has, for each stage, the layer at each place of the pattern, or -1. A layer whose weights are zero adds
    nothing to the stream; such layers run at the places without one.
    """

    pattern: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def stage_layers(names: tuple[str, ...], stages: int) -> StageLayers:
    """Returns the layers of each of ``stages``; ``names`` are the blocks of the model's layers, in order.

    The pattern is the shortest part of ``names`` that can hold the layers of every stage, and stages are as equal as
    it allows; of more stages than layers some have none.
    """
    for num_blocks in range(-(-len(names) // stages), len(names)):
        for pattern in dict.fromkeys(names[start : start + num_blocks] for start in range(len(names) - num_blocks + 1)):
            for is_even in (True, False):
                if layers_by_stage := _places(names, stages, pattern, even=is_even):
                    return StageLayers(pattern, layers_by_stage)
    return StageLayers(names, _places(names, stages, names, even=False))


def _places(names: Sequence[str], stages: int, pattern: Sequence[str], *, even: bool) -> tuple[tuple[int, ...], ...]:
    """Returns the places of all layers, () if they do not fit: as many in each stage as fit, or an ``even`` share."""
    next_layer, layers_by_stage = 0, []
    for stage in range(stages):
        end_layer = next_layer + -(-(len(names) - next_layer) // (stages - stage)) if even else len(names)
        layers_of_stage = []
        for block in pattern:
            fits = next_layer < end_layer and names[next_layer] == block
            layers_of_stage.append(next_layer if fits else -1)
            next_layer += fits
        layers_by_stage.append(tuple(layers_of_stage))
    return tuple(layers_by_stage) if next_layer == len(names) else ()


def is_one_stack(program: Program) -> bool:
    """True if all layers are of one stack, as a pipeline needs them."""
    return len(program.stacks) < 2


def require_one_stack(program: Program, strategy: Strategy) -> None:
    """Raises CannotRunError for several stacks in a pipeline."""
    if not is_one_stack(program) and strategy.mesh.get("pipeline", 1) > 1:
        raise CannotRunError(NO_PIPELINE)


def boundary(program: Program, shardings: Shardings) -> tuple[Step, ...]:
    """Returns the steps that send the stream to the next stage and its cotangent back; () without stages.

    If the stream is whole over ``tensor``, each device of that axis sends a part, which the next stage gathers.
    """
    stream_name = next((block.carry for block in program.blocks if block.carry), "")
    if not _has_stages(program, shardings) or not stream_name:
        return ()
    steps: list[Step] = []
    phase_streams: tuple[tuple[Phase, ShardedArray], ...] = (
        ("forward", shardings.declared(stream_name)),
        ("backward", shardings.cotangent(stream_name)),
    )
    for phase, stream_array in phase_streams:
        sent_array = stream_array
        if "tensor" in shardings.axes and "tensor" not in stream_array.spread and "T" in stream_array.dims:
            sent_array = stream_array.resharded({"T": (*stream_array.axes_of("T"), "tensor")})
        send = Step(op="permute", inputs=(sent_array,), result=sent_array, axes=("pipeline",))
        for step in (send, *reshard(sent_array, stream_array)):
            steps.append(replace(step, block="stage", phase=phase, critical=True))
    return tuple(steps)


def ends(program: Program, shardings: Shardings) -> tuple[Step, ...]:
    """Returns the sums over stages of the gradients of weights outside the layers; () without stages."""
    if not _has_stages(program, shardings):
        return ()
    outer_names = dict.fromkeys(n for block in program.blocks if not block.carry for op in block.ops for n in op.inputs)
    steps = []
    for name in (n for n in outer_names if shardings.is_weight(n) and not program.variables[n].frozen):
        gradient = shardings.optimizer(name).replace(name=f"d{name}")
        partial_sum = gradient.replace(unreduced=("pipeline",))
        steps.append(Step(op="all_reduce", inputs=(partial_sum,), result=gradient, axes=("pipeline",), scope="step"))
    return tuple(replace(s, block="stage", phase="backward") for s in steps)


def _has_stages(program: Program, shardings: Shardings) -> bool:
    return "pipeline" in shardings.axes and is_one_stack(program)
