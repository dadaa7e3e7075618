"""A derived model as stages of a pipeline: loss and gradients of one device's part of a batch, under any schedule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.schedules.registry import build
from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import TickTables, forward_tables, tick_tables
from meshwright.algebra.steps import Phase, Step
from meshwright.core.errors import CannotRunError
from meshwright.nn.context import Context
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import Inputs, through
from meshwright.parallel.layer_order import layer_pattern, layer_permutation
from meshwright.parallel.passes import Passes
from meshwright.parallel.pipeline.executor import run_forward, run_schedule
from meshwright.parallel.pipeline.functions import StageFunctions, Stream, Weights
from meshwright.parallel.pipeline.split import SplitPasses
from meshwright.spec.strategy import Strategy


def strategy_schedule(strategy: Strategy) -> Schedule:
    """The schedule that a strategy names: one of the product's own, or the path of a file that a person wrote."""
    stages = strategy.mesh.get("pipeline", 1)
    return build(strategy.schedule, stages=stages, microbatches=strategy.num_microbatches, chunks=strategy.chunks)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One model on one pipeline. ``stacked`` are the weights of layers; the others lie whole on every stage.

    Raises CannotRunError for layers that do not make equal stages, and for what does not run in stages.
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
        layer_pattern(self.schedule, self._layers)

    @property
    def _layers(self) -> tuple[str, ...]:
        """The block of every layer of the one stack that stages share out."""
        (stack,) = self.context.derived.program.stacks
        return stack.layers

    @cached_property
    def tables(self) -> TickTables:
        """What runs in a training step."""
        return tick_tables(self.schedule)

    @cached_property
    def forward_tables(self) -> TickTables:
        """What runs for the loss alone."""
        return forward_tables(self.schedule)

    def stored(self, params: Params) -> Params:
        """Global arrays of weights, the layers in the order in which the stages hold them."""
        return self._reordered(params, lambda count: layer_permutation(self.schedule, count))

    def in_order(self, params: Params) -> Params:
        """The same the other way: of weights as the stages hold them, or of their gradients."""
        return self._reordered(params, lambda count: np.argsort(layer_permutation(self.schedule, count)))

    def _reordered(self, params: Params, order: Callable[[int], np.ndarray]) -> Params:
        orders = {name: order(len(params[name])) for name in params if name in self.stacked}
        moved = {name: found for name, found in orders.items() if (found != np.arange(len(found))).any()}
        return params | _taken({name: params[name] for name in moved}, moved)

    def gradients(self, params: Params, inputs: Inputs, dloss: jax.Array) -> tuple[jax.Array, Params]:
        """Summed loss of this device's rows, and gradients of ``dloss`` times it, summed over its microbatches.

        Both are this device's part: what is summed once per step, over the pipeline too, is left to do. The counts of
        its own layers' routers go with the gradients.
        """
        stages, parts = self.stages(dloss), self._microbatches(inputs)
        loss, grads = run_schedule(self.tables, stages, self._weights(params), parts)
        return loss, grads.layers | grads.ends

    def loss(self, params: Params, inputs: Inputs) -> jax.Array:
        """The summed loss alone, on the stage that has the loss head."""
        stages = self.stages(jnp.ones(()))
        return run_forward(self.forward_tables, stages, self._weights(params), self._microbatches(inputs))

    def _weights(self, params: Params) -> Weights:
        return Weights(
            {name: array for name, array in params.items() if name in self.stacked},
            {name: array for name, array in params.items() if name not in self.stacked},
        )

    def _microbatches(self, inputs: Inputs) -> Inputs:
        count = self.schedule.num_microbatches
        return {n: a.reshape(count, a.shape[0] // count, *a.shape[1:]) for n, a in inputs.items()}

    def stages(self, dloss: jax.Array) -> StageFunctions:
        """The derived steps of one stage; ``dloss`` is the cotangent of the summed loss."""
        names = layer_pattern(self.schedule, self._layers)
        passes, split = Passes(self.context, names), SplitPasses(self.context, names)
        derived = self.context.derived

        def embed_backward(ends: Params, inputs: Inputs, dx: Stream) -> Params:
            held = passes.embed.forward(ends, inputs, None)[1] if passes.embed.steps.kept else ()
            return passes.embed.backward(ends, inputs, held, dx)[1]

        def head_backward(ends: Params, inputs: Inputs, held: tuple[jax.Array, ...]) -> tuple[Stream, Params]:
            cotangent, grads = passes.head.backward(ends, inputs, held, dloss)
            assert cotangent is not None
            return cotangent, grads

        return StageFunctions(
            embed=lambda ends, inputs: passes.embed.forward(ends, inputs, None)[0],
            embed_backward=embed_backward,
            forward=passes.layers_forward,
            backward=passes.layers_backward,
            input_backward=split.layers_input_backward,
            weight_backward=split.layers_weight_backward,
            head_forward=passes.head.forward,
            head_backward=head_backward,
            send=_before(derived, "forward"),
            receive=_after(derived, "forward"),
            send_back=_before(derived, "backward"),
            receive_back=_after(derived, "backward"),
        )


def _taken(arrays: Params, orders: dict[str, np.ndarray]) -> Params:
    """Arrays with their first dim in another order; those that lie on devices stay split as they were."""

    def take(arrays: Params) -> Params:
        return {name: array[orders[name]] for name, array in arrays.items()}

    lie = {name: array.sharding for name, array in arrays.items() if _is_placed(array)}
    if not arrays or len(lie) < len(arrays):
        return take(arrays)
    return jax.jit(take, out_shardings=lie)(arrays)


def _is_placed(array: Any) -> bool:
    """Whether an array is on devices already: neither being traced nor NumPy's."""
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def _after(derived: Derived, phase: Phase) -> Callable[[Stream], Stream]:
    """What the next stage does with what it is sent."""
    _, *steps = _boundary(derived, phase)
    return lambda part: through(steps, part)


def _before(derived: Derived, phase: Phase) -> Callable[[Stream], Stream]:
    """What a stage sends of a stream that lies as its own: a part of it where others of its group have the same."""
    sent, *steps = _boundary(derived, phase)
    whole = steps[-1].result if steps else sent.result
    return lambda stream: through(reshard(whole, sent.result), stream)


def _boundary(derived: Derived, phase: Phase) -> list[Step]:
    """The permute of one way, and the steps after it."""
    return [step for step in derived.boundary if step.phase == phase]
