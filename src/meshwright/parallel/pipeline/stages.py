"""Runs a derived model as pipeline stages: loss and gradients of one device's part of a batch, for any schedule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.algebra.derived import Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.rewrites.pipeline import stage_layers
from meshwright.algebra.rewrites.split_backward import counts_of
from meshwright.algebra.schedules.registry import build
from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import TickTables, forward_tables, tick_tables
from meshwright.algebra.steps import Phase, Step
from meshwright.core.errors import CannotRunError
from meshwright.nn.context import Context
from meshwright.nn.order import zeros_after
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import Inputs, apply_collectives, presence_of
from meshwright.parallel.passes import Passes
from meshwright.parallel.pipeline.executor import AXIS, StageFunctions, StageWeights, Stream, run_schedule
from meshwright.parallel.pipeline.stacks import StagePasses
from meshwright.spec.strategy import Strategy


def strategy_schedule(strategy: Strategy) -> Schedule:
    """Returns the schedule that a strategy names: a built-in schedule, or one read from a file."""
    num_stages = strategy.mesh.get("pipeline", 1)
    return build(strategy.schedule, stages=num_stages, microbatches=strategy.num_microbatches, chunks=strategy.chunks)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One model on one pipeline. ``stacked`` are the weights of layers; other weights are replicated over stages.

    Raises CannotRunError for more stages than layers, and for options that do not run in stages.
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
        if self.schedule.num_devices > len(self._names):
            raise CannotRunError(
                f"pipeline={self.schedule.num_devices} makes more stages than the {len(self._names)} layers. "
                f"Use at most {len(self._names)}."
            )

    @property
    def _names(self) -> tuple[str, ...]:
        """The block names of the model's layers, in order."""
        return tuple(name for stack in self.context.derived.program.stacks for name in stack.layers)

    @cached_property
    def _rows_of(self) -> dict[str, np.ndarray]:
        """Name of a weight or router count -> `layer_rows` of its block."""
        block_rows = layer_rows(self.schedule, self._names)
        block_steps = [steps for steps in self.context.derived.blocks if steps.block.name in block_rows]
        block_by_weight = {n: steps.block.name for steps in block_steps for op in steps.block.ops for n in op.inputs}
        block_by_count = {name: steps.block.name for steps in block_steps for name in counts_of(steps)}
        names = self.stacked | block_by_count.keys()
        return {name: block_rows[block] for name, block in (block_by_weight | block_by_count).items() if name in names}

    def held(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes with the number of layers on all devices, padding layers included."""
        return {
            name: shape.update(shape=(len(self._rows_of[name]), *shape.shape[1:])) if name in self.stacked else shape
            for name, shape in shapes.items()
        }

    def in_stage_order(self, params: Params) -> Params:
        """Reorders `held` arrays from the model's order, padding layers last, to the order of stages."""
        return self._reordered(params, lambda order: order)

    def in_model_order(self, params: Params) -> Params:
        """Reorders weights or gradients from the order of stages to the model's order, padding layers last."""
        return self._reordered(params, np.argsort)

    def _reordered(self, params: Params, order_of: Callable[[np.ndarray], np.ndarray]) -> Params:
        orders = {}
        for name in (name for name in params if name in self.stacked):
            rows = self._rows_of[name]
            # padding layers have rows after the model's layers
            row_order = order_of(np.where(rows < 0, np.count_nonzero(rows >= 0) + np.cumsum(rows < 0) - 1, rows))
            if (row_order != np.arange(len(row_order))).any():
                orders[name] = row_order
        arrays = {name: params[name] for name in orders}

        def take(arrays: Params) -> Params:
            return {name: array[orders[name]] for name, array in arrays.items()}

        # Arrays on devices keep their shardings; traced and NumPy arrays have none.
        if not orders or not all(isinstance(a, Array) and not isinstance(a, jax.core.Tracer) for a in arrays.values()):
            return params | take(arrays)
        return params | jax.jit(take, out_shardings={n: a.sharding for n, a in arrays.items()})(arrays)

    def counted(self, extras: Mapping[str, Array]) -> dict[str, Array]:
        """Returns ``extras``, metrics with a row for each layer with experts, without the rows of padding layers."""
        router_names = sorted(name for steps in self.context.derived.blocks for name in counts_of(steps))
        rows_by_router = [self._rows_of[name].reshape(self.schedule.num_devices, -1) for name in router_names]
        # indexing an array that is sharded over stages would gather it
        if all((rows >= 0).all() for rows in rows_by_router):
            return dict(extras)
        present_rows = np.flatnonzero(np.concatenate(rows_by_router, axis=1) >= 0)
        return {name: metric[present_rows] for name, metric in extras.items()}

    def _of_device(self, rows: np.ndarray) -> Array:
        """Returns this device's equal share of ``rows``, which are in order of devices."""
        return jnp.asarray(rows.reshape(self.schedule.num_devices, -1))[lax.axis_index(AXIS)]

    def _of_layers(self, grads: Params) -> Params:
        """Returns a device's gradients, set to zero for padding layers, so that these stay zero."""

        def own(name: str, grad: Array) -> Array:
            if (self._rows_of[name] >= 0).all():
                return grad
            is_real = self._of_device(self._rows_of[name] >= 0)
            return jnp.where(is_real.reshape(-1, *[1] * (grad.ndim - 1)), grad, zeros_after((), grad.dtype, grad))

        return {name: own(name, grad) for name, grad in grads.items()}

    def gradients(self, params: Params, inputs: Inputs, dloss: Array) -> tuple[Array, Params]:
        """Returns the summed loss of this device's rows, and gradients of ``dloss`` times loss over all microbatches.

        The loss is 0 without the head. Collectives of scope "step" have not run. Gradients include router counts.
        """
        loss, grads = self._run(tick_tables(self.schedule), params, inputs, dloss)
        between = {name: grads.layers[name].sum(0) for name in self._passes.between}
        layer_grads = {name: grad for name, grad in grads.layers.items() if name not in between}
        return loss, self._of_layers(layer_grads) | grads.ends | between

    def loss(self, params: Params, inputs: Inputs) -> Array:
        """Returns the summed loss without gradients; 0 on stages without the loss head."""
        return self._run(forward_tables(self.schedule), params, inputs, jnp.ones(()))[0]

    def _run(self, tables: TickTables, params: Params, inputs: Inputs, dloss: Array) -> tuple[Array, StageWeights]:
        layer_params = {name: array for name, array in params.items() if name in self.stacked}
        end_params = {name: array for name, array in params.items() if name not in self.stacked}
        num_runs = self.schedule.num_chunks // self.schedule.weight_copies
        for name in self._passes.between:  # one copy per chunk
            layer_params[name] = jnp.broadcast_to(params[name], (num_runs, *params[name].shape))
        for block_name, rows in layer_rows(self.schedule, self._names).items():
            if (rows < 0).any() and (self.context.model.sum_norms or self.context.model.layer_scale):
                layer_params[presence_of(block_name)] = self._of_device(rows >= 0).astype(jnp.float32)
        num_parts = self.schedule.num_microbatches
        microbatches = {n: a.reshape(num_parts, a.shape[0] // num_parts, *a.shape[1:]) for n, a in inputs.items()}
        return run_schedule(tables, self.stages(dloss), StageWeights(layer_params, end_params), microbatches)

    @cached_property
    def _passes(self) -> StagePasses:
        """The passes of one virtual stage."""
        pattern = stage_layers(self._names, self.schedule.num_virtual_stages).pattern
        stacks = Passes(self.context).stacks
        names = (tuple(name for name in pattern if name in stack.stack.layers) for stack in stacks)
        return StagePasses(tuple(replace(stack, names=own) for stack, own in zip(stacks, names, strict=True)))

    def stages(self, dloss: Array) -> StageFunctions:
        """Returns the passes of one virtual stage; ``dloss`` is the cotangent of the summed loss."""
        passes = self._passes
        (send, receive), (send_back, receive_back) = (
            _boundary(self.context.derived, phase) for phase in ("forward", "backward")
        )
        return StageFunctions(
            embed=passes.embed,
            embed_backward=passes.embed_backward,
            forward=passes.forward,
            backward=passes.backward,
            input_backward=passes.input_backward,
            weight_backward=passes.weight_backward,
            head_forward=passes.head_forward,
            head_backward=passes.head_backward(dloss),
            to_head=passes.to_head,
            send=send,
            receive=receive,
            send_back=send_back,
            receive_back=receive_back,
        )


def layer_rows(schedule: Schedule, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns, for each block of layers, its weights' rows on devices as rows of the model, -1 for padding layers.

    ``names`` are the blocks of the model's layers. Rows are in the order of devices, then chunks; of two routes only
    the first counts, as the second copy of the weights is not stored.
    """
    pattern, layers = stage_layers(names, schedule.num_virtual_stages)
    stages = sorted((pos.device, pos.chunk, stage) for stage, pos in enumerate(schedule.routes[0]))
    rows = {}
    for block in dict.fromkeys(names):
        row_of = {layer: row for row, layer in enumerate(i for i, name in enumerate(names) if name == block)}
        positions = [index for index, name in enumerate(pattern) if name == block]
        rows[block] = np.array([row_of.get(layers[stage][index], -1) for _, _, stage in stages for index in positions])
    return rows


def _boundary(derived: Derived, phase: Phase) -> tuple[Callable[[Stream], Stream], Callable[[Stream], Stream]]:
    """Returns (send, receive) for the streams of all stacks: ``send`` takes a device's part of a stream if devices of
    its group have copies of the stream, ``receive`` gathers the stream from the parts."""
    steps_by_stream: dict[str, list[Step]] = {}
    for step in (step for step in derived.boundary if step.phase == phase):
        steps_by_stream.setdefault(step.result.name.removeprefix("d" if phase == "backward" else ""), []).append(step)

    def send(streams: Stream) -> Stream:
        ends = {name: (steps[-1].result, steps[0].result) for name, steps in steps_by_stream.items()}
        return {name: apply_collectives(reshard(*ends[name]), stream) for name, stream in streams.items()}

    def receive(parts: Stream) -> Stream:
        return {name: apply_collectives(steps_by_stream[name][1:], part) for name, part in parts.items()}

    return send, receive
