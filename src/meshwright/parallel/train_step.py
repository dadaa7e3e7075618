"""The training step of a strategy: derived steps inside `shard_map`, or a GSPMD form for comparison."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from meshwright.algebra.derive import derive
from meshwright.algebra.layers import ENCODER, ENCODER_LENGTHS, FEATURES, PLAIN, ProgramOptions, mask_data
from meshwright.algebra.notation import ShardedArray, check
from meshwright.algebra.program import LOSSES
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.algebra.rewrites.split_backward import counts_of, weight_updates
from meshwright.algebra.transformer import transformer, weight_variables
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import checked
from meshwright.core.labels import OPTIMIZER
from meshwright.nn.attention.order import SequenceOrder, zigzag_order
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.context import Context
from meshwright.nn.experts.balance import FromCounts, without_counts
from meshwright.nn.ops.quantised_embed import DTYPES
from meshwright.nn.order import after
from meshwright.nn.quantisation import quantise_params, quantised_base
from meshwright.nn.weights import Params, init_params, param_shapes
from meshwright.parallel.blocks import Inputs, apply_collectives, moved_in_pieces
from meshwright.parallel.gradients import Losses, microbatch_loss, once_per_step, squared_norm, step_gradients
from meshwright.parallel.held import OfWeight, Tree, resized, without_split
from meshwright.parallel.mesh import compiler_options, lower, named_sharding, partition_spec, shardings, strategy_mesh
from meshwright.parallel.optimizer import Optimizer, UpdateLayout, plain_optimizer
from meshwright.parallel.passes import Passes
from meshwright.parallel.pipeline.stages import Pipeline, strategy_schedule
from meshwright.parallel.second_labels import second_labels
from meshwright.spec.assumptions import require_runnable_strategy
from meshwright.spec.model import MASK_DATA, Model, require_runnable
from meshwright.spec.strategy import Form, Strategy, held_dims
from meshwright.spec.weights import has_frozen_matrices

Batch = dict[str, Array]
"""tokens and labels, both [B, T] int32 (a label of -1 is ignored); positions, and documents if rows have several;
num_labels, a float32 scalar: the counted labels of the whole batch (0 makes the loss 0). A model with ``mtp_weight``
also needs mtp_tokens, mtp_labels and num_mtp_labels (`second_labels`)."""


StepGradients = tuple[Losses, Params, Array, FromCounts]
"""Mean losses of the global batch, reduced gradients, their squared norm, and results of the routers' counts."""


class State(NamedTuple):
    """Weights (`Params`) and the optimizer's state, or their shardings."""

    params: Tree
    opt_state: Tree


class Metrics(NamedTuple):
    """Mean loss per counted label of the global batch, and the norm of the whole gradient before clipping.

    ``extras`` are the `routing_metrics` of the batch, each [layers with experts] in the devices' layer order: sharded
    over pipeline stages, else replicated. They are absent for dense models, and without a router loss, a bound on
    slots or a correction rate. A model with ``mtp_weight`` adds ``mtp_loss``, the mean loss per counted label of its
    layer for the token after the next.
    """

    loss: Array
    grad_norm: Array
    extras: dict[str, Array]


class TrainStep:
    """Trains a model under a strategy: `init`, and `step(state, batch) -> (state, metrics)`.

    The default ``optimizer`` is AdamW at a rate of 3e-4. Gradients are clipped to ``max_grad_norm`` if it is given.
    ``form="shard_map"`` runs exactly the derived steps. ``form="gspmd"`` gives XLA the declared shardings as
    constraints and lets it choose the collectives, for comparison.
    """

    @checked
    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        *,
        optimizer: optax.GradientTransformation | Optimizer | None = None,
        max_grad_norm: float | None = None,
        options: ProgramOptions = PLAIN,
        form: Form = "shard_map",
        mesh: Mesh | AbstractMesh | None = None,
    ) -> None:
        require_runnable(model)
        require_runnable_strategy(strategy)
        capacity_factor = options.capacity_factor or strategy.capacity_factor
        options = msgspec.structs.replace(options, capacity_factor=capacity_factor)
        self.model, self.strategy, self.form, self.options = model, strategy, form, options
        if form == "gspmd" and strategy.mesh.get("pipeline", 1) > 1:
            raise CannotRunError("a pipeline does not run in the GSPMD form. Leave the form out, or use pipeline=1.")
        executed = strategy_of_heads(strategy, model.common_kv_heads)  # self.strategy stays as given
        if form == "gspmd" and (held_dims(model.dims, strategy.mesh)["V"] != model.vocab_size or executed != strategy):
            raise CannotRunError(
                f"in the GSPMD form tensor must divide the vocabulary of {model.vocab_size} and the "
                f"{model.common_kv_heads} kv heads, and is {strategy.mesh['tensor']}. Use another tensor, or leave the "
                f"form out."
            )
        if optimizer is None and strategy.state != "fp32":
            raise InputError(f"state {strategy.state!r} needs an optimizer: the default is for 'fp32' only. Give one.")
        opt = optimizer if optimizer is not None else optax.adamw(3e-4)
        self.optimizer = plain_optimizer(opt) if isinstance(opt, optax.GradientTransformation) else opt
        self.max_grad_norm = max_grad_norm
        self.mesh = mesh or strategy_mesh(strategy)
        self.program = transformer(model, options)
        self.declared = derive(self.program, executed, optimizer=self.optimizer.kind)
        size_by_dim = held_dims(model.dims, strategy.mesh)
        for block in self.declared.blocks:
            for array in (block_step.result for block_step in (*block.forward, *block.backward)):
                check(array, {**dict.fromkeys(array.dims, 0), **size_by_dim}, strategy.mesh)
        self.dtype = DTYPES[strategy.state_dtype]
        self.shards = self.declared.shards
        self.compiler = compiler_options(self.mesh)
        self.compile = jax.jit(
            self._step,
            in_shardings=(self.state_shardings, self.batch_shardings),
            out_shardings=(self.state_shardings, None),
            donate_argnums=0,  # else the old and the new state both take memory
            compiler_options=self.compiler.used,
        )

    # -- shapes and shardings ----------------------------------------------------------------------

    @cached_property
    def stacked(self) -> frozenset[str]:
        """Names of the weights of layers, whose first dim is the layers of their kind."""
        return frozenset(name for name, (weight, _) in weight_variables(self.model).items() if weight.layers)

    def _specs(self, arrays: Mapping[str, ShardedArray]) -> dict[str, PartitionSpec]:
        layers_axis = "pipeline" if self.pipeline else None
        names = (name for name in weight_variables(self.model) if name in arrays)
        return {name: partition_spec(arrays[name], stacked=name in self.stacked, layers=layers_axis) for name in names}

    def trained(self, params: Mapping[str, OfWeight]) -> dict[str, OfWeight]:
        """Returns the entries of ``params`` that belong to weights that training updates."""
        return {name: value for name, value in params.items() if name in self.shards}

    def saved(self, params: Mapping[str, OfWeight]) -> dict[str, OfWeight]:
        """Returns the entries of weights that a checkpoint saves: all, or only trained ones if matrices are frozen."""
        return self.trained(params) if has_frozen_matrices(self.model) else dict(params)

    @cached_property
    def param_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the weights between steps."""
        return self._specs(self.declared.declared)

    @cached_property
    def shard_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the optimizer's state by weight, and of the gradients passed to the optimizer."""
        return self._specs(self.shards)

    @property
    def update_layout(self) -> UpdateLayout:
        """The derived steps that update the shards of the weights, with mesh and shardings."""
        steps_by_name = {name: weight_steps.update for name, weight_steps in weight_updates(self.declared).items()}
        return UpdateLayout(steps_by_name, self.mesh, self.shard_specs)

    @cached_property
    def batch_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the arrays of a batch."""
        names = (variable.name for variable in self.program.of_role("input", "position"))
        spec_by_name = {name: partition_spec(self.declared.declared[name]) for name in names}
        return spec_by_name | dict.fromkeys(self.counts.values(), PartitionSpec())

    @property
    def counts(self) -> dict[str, str]:
        """Name of each loss of the program -> name of the batch's scalar that counts its labels."""
        return {name: f"num_{name.replace('loss', 'labels')}" for name in LOSSES if name in self.program.variables}

    @cached_property
    def param_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes and dtypes of the weights, with vocabulary and layers padded for the mesh."""
        shapes = param_shapes(self.model, dtype=self.dtype, mesh=self.strategy.mesh)
        return self.pipeline.held(shapes) if self.pipeline else shapes

    @cached_property
    def canonical(self) -> tuple[State, State]:
        """(Shapes, shardings) of the state in the form of `to_canonical`; the shapes are the same on every mesh."""
        shapes = param_shapes(self.model, dtype=self.dtype)
        param_specs, shard_specs = (
            without_split(shapes, self.param_shapes, held_specs) for held_specs in (self.param_specs, self.shard_specs)
        )
        trained_shapes = self.trained(shapes)
        state_shapes = State(shapes, jax.eval_shape(self.optimizer.init, trained_shapes))
        return state_shapes, self._shardings(State(param_specs, self.optimizer.specs(trained_shapes, shard_specs)))

    @cached_property
    def state_shapes(self) -> State:
        """Global shapes and dtypes of the state."""
        return State(self.param_shapes, jax.eval_shape(self.optimizer.init, self.trained(self.param_shapes)))

    @cached_property
    def state_shardings(self) -> State:
        """The sharding of each array of the state on the mesh."""
        opt_specs = self.optimizer.specs(self.trained(self.param_shapes), self.shard_specs)
        return self._shardings(State(self.param_specs, opt_specs))

    def _shardings(self, specs: State) -> State:
        opt_shardings = shardings(self.mesh, specs.opt_state)
        if "optimizer" in self.strategy.offload:
            opt_shardings = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), opt_shardings)
        return State(shardings(self.mesh, specs.params), opt_shardings)

    @cached_property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each array of a global batch on the mesh."""
        return shardings(self.mesh, self.batch_specs)

    def token_order(self, seq_len: int) -> np.ndarray | None:
        """Returns the position at each index of a row; None if in order. Raises InputError for an indivisible length.

        Ring attention shards positions in zigzag, so that causal attention gives each device equal work. With windows
        positions stay in order, since a block of keys then visits only some devices.
        """
        if not self._in_zigzag:
            return None
        num_ranks = self.strategy.mesh["context"]
        if seq_len % (2 * num_ranks):
            raise InputError(
                f"seq_len={seq_len} does not divide into {2 * num_ranks} parts, which ring attention over "
                f"context={num_ranks} needs. Use a multiple of {2 * num_ranks}."
            )
        return zigzag_order(seq_len, num_ranks)

    @property
    def _in_zigzag(self) -> bool:
        is_ring = self.strategy.context_attention == "ring" and self.strategy.mesh.get("context", 1) > 1
        return is_ring and not self.model.sliding_layers

    def place(self, batch: Mapping[str, ArrayLike]) -> Batch:
        """Puts a global batch on devices in `token_order`; adds default arrays. Raises InputError for bad mask data."""
        arrays = {n: np.asarray(a) for n, a in batch.items()}
        shape = arrays["tokens"].shape
        if FEATURES in arrays:
            arrays[FEATURES] = arrays[FEATURES].astype(self.dtype)
        for name in (name for name in self.batch_specs if name.endswith("positions")):
            length = arrays[FEATURES].shape[-1] // 2 if name.startswith(ENCODER) and FEATURES in arrays else 0
            length = length or arrays[name.replace("positions", "tokens")].shape[1]
            positions = np.broadcast_to(np.arange(length, dtype=np.int32), (shape[0], length))
            arrays.setdefault(name, positions)
        if ENCODER_LENGTHS in self.batch_specs:
            arrays.setdefault(ENCODER_LENGTHS, np.full(shape[0], arrays[f"{ENCODER}positions"].shape[1], np.int32))
        if "documents" in mask_data(self.model, self.options):
            arrays.setdefault("documents", np.zeros(shape, np.int32))
        missing = [name for name in mask_data(self.model, self.options) if name not in arrays]
        if missing:
            raise InputError(
                f"attention_mask={self.model.attention_mask!r} reads {missing[0]} of each sequence, which the batch "
                f"does not have. Add {missing[0]} to the batch, or use another mask."
            )
        for name in mask_data(self.model, self.options):
            expected, dtype = shape[: len(MASK_DATA[name])], arrays[name].dtype
            if arrays[name].shape != expected or not np.issubdtype(dtype, np.integer):
                raise InputError(f"{name} of the batch is {dtype}{arrays[name].shape}. Give whole numbers {expected}.")
        if self.model.mtp_layers:
            next_pos = np.minimum(np.arange(shape[1]) + 1, shape[1] - 1)
            arrays = second_labels(arrays, {n: a[:, next_pos] for n, a in arrays.items() if a.shape == shape}) | arrays
        for name in self.counts.values():
            arrays.setdefault(name, np.asarray(np.count_nonzero(arrays[name.removeprefix("num_")] >= 0), np.float32))
        order = self.token_order(shape[1])
        ordered_arrays = {
            n: a if order is None or a.ndim == 0 or "T" not in self.program.variables[n].dims else a[:, order]
            for n, a in arrays.items()
            if n in self.batch_specs
        }
        return jax.device_put(ordered_arrays, self.batch_shardings)

    # -- what a user calls -------------------------------------------------------------------------

    def init(self, seed: int, given: Params | None = None) -> State:
        """Returns the sharded initial state, made shard by shard; a seed gives the same weights on every mesh.

        ``given`` weights, in the canonical form of the model, replace random ones.
        """
        sharding_by_name = self.canonical[1].params
        given_params = jax.device_put(given or {}, {name: sharding_by_name[name] for name in given or {}})
        params = self._first_params(seed, given_params)
        return State(params, self.init_optimizer(params))

    @cached_property
    def _first_params(self) -> Callable[[int, Params], Params]:
        def make(seed: int, given: Params) -> Params:
            drawn_params = init_params(self.model, seed, dtype=self.dtype)
            return self.from_canonical(quantise_params(self.model, drawn_params | given, quantised_base(self.model)))

        return jax.jit(make, out_shardings=self.state_shardings.params)

    def from_canonical(self, params: Params) -> Params:
        """Returns weights, or arrays like them, in this mesh's form: layers in the order of pipeline stages, and layers
        and vocabulary padded with zeros."""
        padded_params = resized(params, self.canonical[0].params, self.param_shapes, self.param_specs)
        return self.pipeline.in_stage_order(padded_params) if self.pipeline else padded_params

    def to_canonical(self, params: Params) -> Params:
        """Returns weights, or arrays like them, in the model's order of layers and without padding."""
        ordered = self.pipeline.in_model_order(params) if self.pipeline else params
        shapes = self.canonical[0].params
        return resized(ordered, self.param_shapes, shapes, without_split(shapes, self.param_shapes, self.param_specs))

    def init_optimizer(self, params: Params) -> Tree:
        """Returns the initial state of the optimizer for these weights."""
        return jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)(self.trained(params))

    def step(self, state: State, batch: Mapping[str, ArrayLike]) -> tuple[State, Metrics]:
        """Returns the state after one step on a global batch, and its metrics; donates the given state."""
        return self.compile(state, self.placed(batch))

    def placed(self, batch: Mapping[str, Any]) -> Batch:
        """Returns the batch if it has all arrays of the step, else the result of `place`."""
        return dict(batch) if set(batch) == set(self.batch_specs) else self.place(batch)

    def batch_shapes(self, batch_seqs: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the global shapes and dtypes of a batch."""
        sizes, structs = {**self.model.dims, "B": batch_seqs, "T": seq_len}, dict[str, jax.ShapeDtypeStruct]()
        for variable in self.program.of_role("input", "position"):
            dtype = jnp.int32 if variable.is_whole_numbers else self.dtype
            structs[variable.name] = jax.ShapeDtypeStruct(tuple(sizes[dim] for dim in variable.dims), dtype)
        return structs | dict.fromkeys(self.counts.values(), jax.ShapeDtypeStruct((), jnp.float32))

    def lower(self, batch_seqs: int, seq_len: int, *, platform: str = "") -> jax.stages.Lowered:
        """Lowers the step for a batch size, without data; an abstract mesh needs a ``platform``."""
        argument_shapes = self.state_shapes, self.batch_shapes(batch_seqs, seq_len)
        return lower(self.compile, self.mesh, *argument_shapes, platform=platform)

    def gradients(self, params: Params, batch: Mapping[str, ArrayLike]) -> tuple[Array, Params]:
        """Returns the mean loss of a global batch and its gradients, sharded for the optimizer (no update)."""
        losses, grads = jax.jit(lambda p, b: self._gradients(p, b)[:2])(params, self.placed(batch))
        return losses["loss"], grads

    @cached_property
    def loss_sum(self) -> Callable[[Params, Batch], Array]:
        """The jitted function (params, placed batch) -> cross entropy summed over counted labels, without z-loss or
        other losses; it saves nothing for a backward pass."""
        if self.options.z_loss:
            options = msgspec.structs.replace(self.options, z_loss=0.0)
            model, strategy = self.model, self.strategy
            step = TrainStep(model, strategy, optimizer=self.optimizer, options=options, form=self.form, mesh=self.mesh)
            return step.loss_sum

        def local(params: Params, batch: Batch) -> Array:
            inputs = _inputs(batch)
            if self.pipeline:
                return self._over_devices("loss", self.pipeline.loss(params, inputs))
            return self._over_devices("loss", microbatch_loss(self._passes, params, inputs))

        return jax.jit(self._mapped(local, (self.param_specs, self.batch_specs), PartitionSpec()))

    # -- the step ----------------------------------------------------------------------------------

    def _mapped(self, body: Callable[..., Tree], in_specs: Tree, out_specs: Tree) -> Callable[..., Tree]:
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self._context, ahead=self.strategy.prefetch)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of the strategy; None if it has one stage."""
        if self.strategy.mesh.get("pipeline", 1) == 1:
            return None
        return Pipeline(context=self._context, schedule=strategy_schedule(self.strategy), stacked=self.stacked)

    @cached_property
    def _context(self) -> Context:
        return Context(
            model=self.model,
            derived=self.declared,
            mesh=self.strategy.mesh,
            options=self.options,
            order=SequenceOrder(self.strategy.mesh["context"] if self._in_zigzag else 0),
            offload="activations" in self.strategy.offload,
        )

    # -- in two halves, between which other islands' gradients are added --------------------------------------

    @cached_property
    def summands(self) -> Callable[[Params, Batch], tuple[Losses, Params]]:
        """The jitted function (params, placed batch) -> this island's losses and gradients. Their sums over islands are
        the arguments of `finish`; the batch's label counts must be of all islands."""
        specs = (PartitionSpec(), self._summand_specs)
        body = self._mapped(self._local_summands, (self.param_specs, self.batch_specs), specs)
        return jax.jit(body, compiler_options=self.compiler.used)

    @cached_property
    def finish(self) -> Callable[[State, Losses, Params], tuple[State, Metrics]]:
        """The jitted function (state, summed losses and gradients) -> (new state, metrics); donates the state."""

        def run(state: State, losses: Losses, grads: Params) -> tuple[State, Metrics]:
            extras_spec = PartitionSpec("pipeline") if self.pipeline else PartitionSpec()
            out_specs = (self.shard_specs, PartitionSpec(), extras_spec)
            reduced = self._mapped(self._local_norm, (self._summand_specs,), out_specs)(grads)
            return self._finished(state, (losses, *reduced))

        return jax.jit(
            run,
            in_shardings=(self.state_shardings, None, shardings(self.mesh, self._summand_specs)),
            out_shardings=(self.state_shardings, None),
            donate_argnums=0,
            compiler_options=self.compiler.used,
        )

    @property
    def _summand_specs(self) -> dict[str, PartitionSpec]:
        layers_spec = PartitionSpec("pipeline") if self.pipeline else PartitionSpec()
        count_names = {name for steps in self.declared.blocks for name in counts_of(steps)}
        return self.shard_specs | dict.fromkeys(sorted(count_names), layers_spec)

    def _local_gradients(self, params: Params, batch: Batch) -> StepGradients:
        """Returns `StepGradients` from one device's shards."""
        losses, grads = self._local_summands(params, batch)
        return losses, *self._local_norm(grads)

    def _local_norm(self, grads: Params) -> tuple[Params, Array, FromCounts]:
        grads, routing_counts = without_counts(self.declared, grads, self.model)
        squared_part = squared_norm(self.shards, grads, self.strategy.mesh, stacked=self.stacked)
        return grads, self._over_devices("grad_norm", squared_part), routing_counts

    def _local_summands(self, params: Params, batch: Batch) -> tuple[Losses, Params]:
        mean_factors = self._means(batch)
        if self.pipeline:
            loss_sum, grads = self.pipeline.gradients(params, _inputs(batch), mean_factors["loss"])
            losses = {"loss": loss_sum}
            grads = once_per_step(self.declared, grads, stacked=self.stacked)  # for any `gradient_sync`
        else:
            losses, grads = self._summed(self._passes, params, batch, mean_factors)
        return {name: self._over_devices(name, loss) * mean_factors[name] for name, loss in losses.items()}, grads

    def _summed(self, passes: Passes, params: Params, batch: Batch, means: Losses) -> tuple[Losses, Params]:
        dloss = means | {"mtp_loss": self.model.mtp_weight * means["mtp_loss"]} if self.model.mtp_layers else means
        return step_gradients(passes, params, _inputs(batch), dloss, strategy=self.strategy, stacked=self.stacked)

    def _means(self, batch: Batch) -> Losses:
        """Returns for each loss 1 / (its counted labels), or 1 if there are none (the loss is then 0)."""
        return {name: 1.0 / jnp.maximum(batch[count_name], 1.0) for name, count_name in self.counts.items()}

    def _over_devices(self, name: str, scalar: Array) -> Array:
        """Sums the scalar ``name`` over devices by its derived collectives."""
        steps = [step for step in self.declared.update if step.is_collective and step.result.name == name]
        return apply_collectives(steps, scalar)

    def _gradients(self, params: Params, batch: Batch) -> StepGradients:
        if self.form == "gspmd":
            return self._gspmd_gradients(params, batch)
        extras_spec = PartitionSpec("pipeline") if self.pipeline else PartitionSpec()
        out_specs = (PartitionSpec(), self.shard_specs, PartitionSpec(), extras_spec)
        return self._mapped(self._local_gradients, (self.param_specs, self.batch_specs), out_specs)(params, batch)

    def _step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        return self._finished(state, self._gradients(state.params, batch))

    def _finished(self, state: State, gradients: StepGradients) -> tuple[State, Metrics]:
        losses, grads, squared_total, (extras, correction_moves) = gradients
        loss, losses = losses["loss"], {name: loss for name, loss in losses.items() if name != "loss"}
        grad_norm = jnp.sqrt(squared_total)
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (grad_norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)  # else gradients become float32
        trained_params = self.trained(state.params)
        shards = self._moved(trained_params)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        shards, opt_state = self._updated(grads, state.opt_state, shards, is_finite)
        params = state.params | self._moved(shards, into=trained_params)
        params |= {name: params[name] + jnp.where(is_finite, move, 0.0) for name, move in correction_moves.items()}
        extras = (self.pipeline.counted(extras) if self.pipeline else extras) | losses
        return State(params, opt_state), Metrics(loss, grad_norm, extras)

    def _updated(self, grads: Params, opt_state: Tree, shards: Params, finite: Array) -> tuple[Params, Tree]:
        """Runs the optimizer's update; keeps its state in host memory between steps if the strategy offloads it.

        Nothing changes unless ``finite``: clipping would spread one bad gradient to every weight, and the weights
        before the step could not be inspected.
        """
        is_offloaded = "optimizer" in self.strategy.offload
        old_state = jax.device_put(opt_state, jax.memory.Space.Device) if is_offloaded else opt_state
        with jax.named_scope(OPTIMIZER):
            results = self.optimizer.update(grads, old_state, shards, self.update_layout)
            shards, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), results, (shards, old_state))
            if default_platform() == "cpu" and self.form == "shard_map":
                # else CPUs copy the old moments to write the new ones in place before the weights read them
                specs = self.optimizer.specs(self.trained(self.param_shapes), self.shard_specs)
                ordered = self._mapped(lambda state, new: after(state, new.values()), (specs, self.shard_specs), specs)
                opt_state = ordered(opt_state, shards)  # in shard_map: else arrays are gathered to read one scalar
        return shards, jax.device_put(opt_state, jax.memory.Space.Host) if is_offloaded else opt_state

    def _moved(self, params: Params, *, into: Params | None = None) -> Params:
        """Reshards weights to the sharding of the update, or, given ``into`` (the old weights), back after it."""
        specs = self.trained(self.param_specs)
        if specs == self.shard_specs or self.form == "gspmd":
            return params
        moves = {n: steps.before if into is None else steps.after for n, steps in weight_updates(self.declared).items()}
        if into is None:

            def body(params: Params) -> Params:
                return {n: apply_collectives(moves[n], p, leading=int(n in self.stacked)) for n, p in params.items()}

            return self._mapped(body, (specs,), self.shard_specs)(params)
        gather = partial(moved_in_pieces, moves, stacked=self.stacked)
        return self._mapped(gather, (self.shard_specs, specs), specs)(params, into)

    # -- the comparison: XLA chooses the collectives --------------------------------------------------

    def _gspmd_gradients(self, params: Params, batch: Batch) -> StepGradients:
        source, mesh = self.strategy, dict.fromkeys(self.strategy.mesh, 1)
        single = Strategy(mesh=mesh, remat=source.remat, num_microbatches=source.num_microbatches, state=source.state)
        derived = derive(self.program, single, fused_head=False)

        def constrain(array: ShardedArray, value: Array) -> Array:
            declared_array = self.declared.declared[array.name]
            return lax.with_sharding_constraint(value, named_sharding(self.mesh, declared_array))

        context = Context(model=self.model, derived=derived, mesh=mesh, options=self.options, constrain=constrain)
        mean_factors = self._means(batch)
        losses, grads = self._summed(Passes(context), params, batch, mean_factors)
        grads, routing_counts = without_counts(self.declared, grads, self.model)
        grads = lax.with_sharding_constraint(grads, shardings(self.mesh, self.shard_specs))
        losses = {name: loss * mean_factors[name] for name, loss in losses.items()}
        return losses, grads, squared_norm(self.shards, grads, {}, stacked=self.stacked), routing_counts


def _inputs(batch: Batch) -> Inputs:
    return {name: array for name, array in batch.items() if array.ndim}
