"""A derived model as stages of a pipeline: loss and gradients of one device's part of a batch, under any schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meshwright.algebra.derived import Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.schedules.registry import build
from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import TickTables, forward_tables, tick_tables
from meshwright.algebra.steps import Phase
from meshwright.core.errors import CannotRunError
from meshwright.nn.context import Context
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import Cotangents, Inputs, apply_collectives
from meshwright.parallel.passes import Passes
from meshwright.parallel.pipeline.executor import StageFunctions, StageWeights, Stream, Tree, run_schedule
from meshwright.spec.strategy import Strategy


def strategy_schedule(strategy: Strategy) -> Schedule:
    """Returns the schedule that a strategy names: a built-in one, or one read from a file."""
    stages = strategy.mesh.get("pipeline", 1)
    return build(strategy.schedule, stages=stages, microbatches=strategy.num_microbatches, chunks=strategy.chunks)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One model on one pipeline. ``stacked`` are the weights of layers; the others are replicated over stages.

    Raises CannotRunError for layers that do not make equal stages, and for options that do not run in stages.
    """

    context: Context
    schedule: Schedule
    stacked: frozenset[str]

    def __post_init__(self) -> None:
        if self.context.offload:
            raise CannotRunError("offload of activations does not run in a pipeline. Leave it out, or use pipeline=1.")
        if self.context.derived.ahead:
            raise CannotRunError("prefetch does not run in a pipeline. Leave it out, or use pipeline=1.")
        # Devices of other stages run other passes at the same time.
        object.__setattr__(self, "context", replace(self.context, divergent=True))
        _ = self.pattern  # refuses layers that do not make equal stages

    @cached_property
    def pattern(self) -> tuple[str, ...]:
        """The blocks of one virtual stage; stages divide the layers of the one stack."""
        (stack,) = self.context.derived.program.stacks
        return layer_pattern(self.schedule, stack.layers)

    def in_stage_order(self, params: Params) -> Params:
        """Reorders global arrays of weights from the order of the model to the order of the stages."""
        return self._reordered(params, lambda count: layer_permutation(self.schedule, count))

    def in_model_order(self, params: Params) -> Params:
        """Reorders weights or gradients from the order of the stages to the order of the model."""
        return self._reordered(params, lambda count: np.argsort(layer_permutation(self.schedule, count)))

    def _reordered(self, params: Params, order: Callable[[int], np.ndarray]) -> Params:
        orders = {name: order(len(params[name])) for name in params if name in self.stacked}
        moved = {name: found for name, found in orders.items() if (found != np.arange(len(found))).any()}
        return params | _taken({name: params[name] for name in moved}, moved)

    def gradients(self, params: Params, inputs: Inputs, dloss: Array) -> tuple[Array, Params]:
        """Returns the summed loss of this device's rows, and gradients of ``dloss`` times it, summed over microbatches.

        The loss is 0 without the head. Collectives of scope "step" have not run. Router counts are among the gradients.
        """
        loss, grads = self._run(tick_tables(self.schedule), params, inputs, dloss)
        return loss, grads.layers | grads.ends

    def loss(self, params: Params, inputs: Inputs) -> Array:
        """Returns the summed loss alone; 0 on stages without the loss head."""
        return self._run(forward_tables(self.schedule), params, inputs, jnp.ones(()))[0]

    def _run(self, tables: TickTables, params: Params, inputs: Inputs, dloss: Array) -> tuple[Any, StageWeights]:
        layers = {name: array for name, array in params.items() if name in self.stacked}
        ends = {name: array for name, array in params.items() if name not in self.stacked}
        count = self.schedule.num_microbatches
        parts = {n: a.reshape(count, a.shape[0] // count, *a.shape[1:]) for n, a in inputs.items()}
        return run_schedule(tables, self.stages(dloss), StageWeights(layers, ends), parts)

    def stages(self, dloss: Array) -> StageFunctions:
        """Returns the passes of one virtual stage; ``dloss`` is the cotangent of the summed loss."""
        passes = Passes(self.context, self.pattern)
        (send, receive), (send_back, receive_back) = (
            _boundary(self.context.derived, phase) for phase in ("forward", "backward")
        )

        def embed_backward(ends: Params, inputs: Inputs, dx: Stream) -> Params:
            saved = passes.embed.forward(ends, inputs, None)[1] if passes.embed.steps.kept else ()
            return passes.embed.backward(ends, inputs, saved, Cotangents(dx, {}))[1]

        def head_backward(ends: Params, inputs: Inputs, saved: tuple[Array, ...]) -> tuple[Stream, Params]:
            cotangents, grads = passes.head.backward(ends, inputs, saved, Cotangents(dloss, {}))
            return cotangents.stream, grads

        def of_stream(back: Callable[..., tuple[Cotangents, Tree]]) -> Callable[..., tuple[Stream, Tree]]:
            def run(layers: Params, inputs: Inputs, saved: Tree, dy: Stream) -> tuple[Stream, Tree]:
                cotangents, left = back(layers, inputs, saved, Cotangents(dy, {}))
                return cotangents.stream, left

            return run

        return StageFunctions(
            embed=lambda ends, inputs: passes.embed.forward(ends, inputs, None)[0],
            embed_backward=embed_backward,
            forward=passes.layers_forward,
            backward=of_stream(passes.layers_backward),
            input_backward=of_stream(passes.input_backward),
            weight_backward=passes.weight_backward,
            head_forward=passes.head.forward,
            head_backward=head_backward,
            send=send,
            receive=receive,
            send_back=send_back,
            receive_back=receive_back,
        )


def _taken(arrays: Params, orders: dict[str, np.ndarray]) -> Params:
    """Reorders the first dim of arrays; if all are on devices, they keep their shardings."""

    def take(arrays: Params) -> Params:
        return {name: array[orders[name]] for name, array in arrays.items()}

    # Traced and NumPy arrays have no sharding to keep.
    placed = {n: a for n, a in arrays.items() if isinstance(a, Array) and not isinstance(a, jax.core.Tracer)}
    if not arrays or len(placed) < len(arrays):
        return take(arrays)
    return jax.jit(take, out_shardings={name: array.sharding for name, array in placed.items()})(arrays)


def _boundary(derived: Derived, phase: Phase) -> tuple[Callable[[Stream], Stream], Callable[[Stream], Stream]]:
    """Returns (send, receive): ``send`` takes a device's part of the stream if devices of its group hold copies of it,
    ``receive`` restores the stream from the part."""
    sent, *steps = (step for step in derived.boundary if step.phase == phase)
    before = reshard(steps[-1].result if steps else sent.result, sent.result)
    return lambda stream: apply_collectives(before, stream), lambda part: apply_collectives(steps, part)


# -- which layers a device holds -------------------------------------------------------------------------


def layer_permutation(schedule: Schedule, num_layers: int) -> np.ndarray:
    """Returns the layer at each index of the stage order, which is sorted by device, then chunk.

    The order is 0, 1, 2, ... if a device has one chunk. If microbatches enter at both ends, it follows the first route:
    the second copy of the weights is not stored. ``num_layers`` counts the layers of one kind.
    """
    size = layers_per_stage(schedule, num_layers)
    places = sorted((place.device, place.chunk, stage) for stage, place in enumerate(schedule.routes[0]))
    return np.concatenate([np.arange(stage * size, (stage + 1) * size) for _, _, stage in places])


def layers_per_stage(schedule: Schedule, num_layers: int) -> int:
    """Returns the number of layers of a virtual stage. Raises CannotRunError if stages cannot have equally many."""
    size, left = divmod(num_layers, schedule.num_virtual_stages)
    if left or not size:
        stages, chunks = schedule.num_devices, schedule.num_virtual_stages // schedule.num_devices
        wanted = [n for n in range(1, num_layers + 1) if num_layers % (n * chunks) == 0]
        instead = f"pipeline in {{{', '.join(map(str, wanted))}}}" if wanted else "fewer chunks"
        raise CannotRunError(
            f"pipeline={stages} with chunks={chunks} does not divide {num_layers} layers into equal stages, "
            f"as it must. Use {instead}."
        )
    return size


def layer_pattern(schedule: Schedule, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the blocks of one virtual stage; ``names`` has the block of every layer.

    Raises CannotRunError if stages differ, since all devices run one program.
    """
    size = layers_per_stage(schedule, len(names))
    pattern = tuple(names[:size])
    for first in range(size, len(names), size):
        here = tuple(names[first : first + size])
        if here != pattern:
            layer = next(first + i for i in range(size) if here[i] != pattern[i])
            raise CannotRunError(
                f"pipeline={schedule.num_devices} gives stages of {size} layers that differ: layer {layer} is "
                f"{names[layer]!r} where layer {layer % size} is {pattern[layer % size]!r}, and all stages run one "
                f"program. Use stages of a multiple of the layer pattern's length."
            )
    return pattern
