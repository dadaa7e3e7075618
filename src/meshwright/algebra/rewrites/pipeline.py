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

NO_PIPELINE = "a model with mtp_weight does not run in a pipeline in this version. Use pipeline=1."
NO_SHARING = "a model whose layers share keys or embeddings does not run in a pipeline in this version. Use pipeline=1."


class SplitBackward(msgspec.Struct, frozen=True):
    """A layer's backward pass in two parts, for schedules that run the weight gradients in a separate pass.

    ``inputs`` and ``weights`` are indices of backward steps that run for each microbatch: first the recomputed segment
    and the steps that the cotangent of the layer's input needs, then the rest. ``handed`` are the arrays that the
    second part takes from the first, besides weights and inputs: activations, cotangents, finished gradients.
    """

    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    handed: tuple[ShardedArray, ...]


class StageLayers(NamedTuple):
    """The layers of virtual stages. All devices run one program, so each stage runs the blocks of ``pattern``.

    ``places`` has, for each stage, the number of the layer that runs as each block of the pattern, or -1: a layer of
    zero weights runs there, which adds nothing to the stream.
    """

    pattern: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def stage_layers(names: tuple[str, ...], stages: int) -> StageLayers:
    """Returns the layers of each of ``stages``; ``names`` are the blocks of the model's layers, in order.

    The pattern is the shortest run of consecutive ``names`` that has room for the layers of every stage, and stages are
    as equal as it allows; of more stages than layers some have none.
    """
    for num_blocks in range(-(-len(names) // stages), len(names)):
        for pattern in dict.fromkeys(names[start : start + num_blocks] for start in range(len(names) - num_blocks + 1)):
            for is_even in (True, False):
                if layers_by_stage := _places(names, stages, pattern, even=is_even):
                    return StageLayers(pattern, layers_by_stage)
    return StageLayers(names, _places(names, stages, names, even=False))


def _places(names: Sequence[str], stages: int, pattern: Sequence[str], *, even: bool) -> tuple[tuple[int, ...], ...]:
    """Returns `StageLayers.places`, () if layers do not fit: a stage takes all that fit, at most an ``even`` share."""
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


def no_stages(program: Program) -> str:
    """Returns why a model cannot run in pipeline stages, "" if it can: each stack has to make its own stream, which
    enters the first stage, and no layer may read results of another layer besides the stream."""
    if not all(stack.first or not stack.carry for stack in program.stacks):
        return NO_PIPELINE
    return NO_SHARING * any(block.shares for block in program.blocks)


def require_stages(program: Program, strategy: Strategy) -> None:
    """Raises CannotRunError if the strategy has pipeline stages and the program cannot run in stages (`no_stages`)."""
    if (reason := no_stages(program)) and strategy.mesh.get("pipeline", 1) > 1:
        raise CannotRunError(reason)


def boundary(program: Program, shardings: Shardings) -> tuple[Step, ...]:
    """Returns the steps that send the stream of each stack to the next stage and its cotangent back; () without stages.

    If ``tensor`` does not split a stream, each device of that axis sends a part, and the next stage gathers the parts.
    """
    stream_names = dict.fromkeys(block.carry for block in program.blocks if block.carry)
    if not _has_stages(program, shardings) or not stream_names:
        return ()
    steps: list[Step] = []
    phase_streams: list[tuple[Phase, ShardedArray]] = [
        *(("forward", shardings.declared(name)) for name in stream_names),
        *(("backward", shardings.cotangent(name)) for name in stream_names),
    ]
    for phase, stream_array in phase_streams:
        sent_array, dim = stream_array, next((dim for dim in stream_array.dims if dim in ("T", "S")), "")
        if dim and "tensor" in shardings.axes and "tensor" not in stream_array.spread:
            sent_array = stream_array.resharded({dim: (*stream_array.axes_of(dim), "tensor")})
        send = Step(op="permute", inputs=(sent_array,), result=sent_array, axes=("pipeline",))
        moves = (send, *reshard(sent_array, stream_array))
        steps += [replace(step, block="stage", phase=phase, critical=True) for step in moves]
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
    return "pipeline" in shardings.axes and not no_stages(program)
