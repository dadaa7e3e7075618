"""The training step of a strategy: derived steps inside `shard_map`, or the GSPMD form for comparison."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.algebra.derive import BlockSteps, Derived, derive
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.transformer import transformer
from meshwright.nn.interpreter import Interpreter
from meshwright.nn.weights import Params, init_params, is_stacked, rows
from meshwright.parallel.mesh import device_mesh, named_sharding, partition_spec
from meshwright.spec.model import Model, require_runnable
from meshwright.spec.strategy import Strategy, require_runnable_strategy

Form = Literal["shard_map", "gspmd"]
Batch = dict[str, jax.Array]
"""tokens and labels, both [B, T] int32."""

DTYPES = {"fp32": jnp.float32, "bf16-adam": jnp.bfloat16}
"""Training states that run here -> dtype of weights and activations."""


class State(NamedTuple):
    """Weights (`Params`) and the optimizer's state, sharded alike; or, in their place, their shardings."""

    params: Any
    opt_state: Any


class Metrics(NamedTuple):
    """Mean loss per token over the global batch, and the norm of the whole gradient before clipping."""

    loss: Any
    grad_norm: Any


def local_loss(model: Model, derived: Derived, params: Params, batch: Batch, *, interpreter: Interpreter) -> jax.Array:
    """Sum of the losses of this device's tokens; gradients through it are this device's part.

    Every block runs under `jax.checkpoint`, keeping the results whose tags are in ``derived.keeps``; the
    repeated block is scanned, so that compile time does not grow with layers.
    """
    length = derived_positions(derived, batch)
    inputs = {"tokens": batch["tokens"], "labels": batch["labels"], "positions": length}
    stream: dict[str, jax.Array] = {}
    table = rows(model)
    for block in derived.blocks:
        used = {name for op in block.block.ops for name in op.inputs}
        given = {n: v for n, v in inputs.items() if n in used}
        weights = {n: params[n] for n in used if n in table}
        run = _block_function(interpreter, block, given)
        policy = jax.checkpoint_policies.save_only_these_names(*derived.keeps)
        if block.block.carry:
            body = jax.checkpoint(run, policy=policy, prevent_cse=False)
            carry = stream[block.block.carry]
            carry, _ = lax.scan(_carrying(body), carry, weights)
            stream = {block.block.carry: carry}
        else:
            start = next(iter(stream.values()), None)
            result = jax.checkpoint(run, policy=policy)(start, weights)
            stream = {block.block.ops[-1].out: result}
    return stream["loss"]


def _carrying(body: Callable[[jax.Array, Params], jax.Array]) -> Callable[..., tuple[jax.Array, None]]:
    """``body`` as `lax.scan` wants it: the stream is the carry, nothing is collected."""
    return lambda stream, weights: (body(stream, weights), None)


def derived_positions(derived: Derived, batch: Batch) -> jax.Array:
    """Positions 0..T-1 of every local sequence, whole in T."""
    rows_local, length = batch["tokens"].shape
    split = derived.declared["tokens"].axes_of("T")
    for axis in split:
        length *= lax.axis_size(axis)
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows_local, length))


def _block_function(
    interpreter: Interpreter, block: BlockSteps, given: Mapping[str, jax.Array]
) -> Callable[[jax.Array | None, Params], jax.Array]:
    """(stream, weights) -> the last result of the block."""
    made = {op.out for op in block.block.ops}
    used = {name for op in block.block.ops for name in op.inputs}
    activations = {v.name for v in interpreter.derived.program.of_role("activation")}
    entering = [n for n in used - made if n in activations]

    def run(stream: jax.Array | None, weights: Params) -> jax.Array:
        values = {**given, **weights, **(dict.fromkeys(entering, stream) if stream is not None else {})}
        env = interpreter.block(block, values)
        return env[block.forward[-1].result]

    return run


def _split_microbatches(batch: Batch, count: int) -> Batch:
    return {n: a.reshape(count, a.shape[0] // count, *a.shape[1:]) for n, a in batch.items()}


def local_gradients(
    loss: Callable[[Params, Batch], jax.Array], params: Params, batch: Batch, *, num_microbatches: int
) -> tuple[jax.Array, Params]:
    """Loss and gradients of the local batch, summed over microbatches one after the other in float32."""
    value_and_grad = jax.value_and_grad(loss)
    if num_microbatches == 1:
        return value_and_grad(params, batch)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    def body(carry: tuple[jax.Array, Params], part: Batch) -> tuple[tuple[jax.Array, Params], None]:
        # Ties the weights to the microbatch: otherwise XLA hoists some gathers out of the loop, not all.
        weights, rows_here = lax.optimization_barrier((params, part))
        value, grads = value_and_grad(weights, rows_here)
        return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

    (value, grads), _ = lax.scan(body, (jnp.zeros(()), zeros), _split_microbatches(batch, num_microbatches))
    return value, grads


def reduce_gradients(derived: Derived, grads: Params) -> Params:
    """Gradients summed over the axes on which their weights are the same, once per step, as derived."""
    over = {
        step.result.name.removeprefix("d"): step.axes
        for block in derived.blocks
        for step in block.backward
        if step.scope == "step"
    }
    return {name: lax.psum(g, over[name]) if name in over else g for name, g in grads.items()}


def squared_norm(derived: Derived, grads: Params, mesh_axes: Mapping[str, int]) -> jax.Array:
    """This device's share of the squared gradient norm; replicas of a shard count once between them."""
    total = jnp.zeros((), jnp.float32)
    for name, grad in grads.items():
        copies = 1
        for axis, size in mesh_axes.items():
            if axis not in derived.declared[name].spread:
                copies *= size
        total += jnp.sum(jnp.square(grad.astype(jnp.float32))) / copies
    return total


class TrainStep:
    """One strategy of one model made runnable: `init`, and `step(state, batch) -> (state, metrics)`.

    ``form="shard_map"`` runs exactly the derived collectives. ``form="gspmd"`` gives XLA the declared
    shardings as constraints and lets it choose; it is kept as the comparison.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        *,
        optimizer: optax.GradientTransformation | None = None,
        max_grad_norm: float | None = None,
        form: Form = "shard_map",
        mesh: Mesh | None = None,
    ) -> None:
        require_runnable(model)
        require_runnable_strategy(strategy)
        self.model, self.strategy, self.form = model, strategy, form
        if optimizer is None and strategy.state != "fp32":
            raise AssertionError("optax.adamw keeps its moments in the weights' dtype: give an optimizer")
        self.optimizer = optimizer or optax.adamw(3e-4)
        self.max_grad_norm = max_grad_norm
        self.mesh = mesh or device_mesh(strategy.mesh)
        self.program = transformer(model)
        self.declared = derive(self.program, strategy)
        self.dtype = DTYPES[strategy.state]
        table = rows(model)
        self.param_specs = {
            n: partition_spec(self.declared.declared[n], stacked=is_stacked(w)) for n, w in table.items()
        }
        self.batch_specs = {n: partition_spec(self.declared.declared[n]) for n in ("tokens", "labels")}
        shapes = jax.eval_shape(partial(init_params, model, dtype=self.dtype), 0)
        self.opt_specs = optax.tree.map_params(
            self.optimizer,
            lambda _, spec: spec,
            jax.eval_shape(self.optimizer.init, shapes),
            self.param_specs,
            transform_non_params=lambda _: PartitionSpec(),
        )
        self.compile = jax.jit(
            self._gspmd_step if form == "gspmd" else self._shard_map_step(),
            in_shardings=(self.state_shardings, self.batch_shardings),
            out_shardings=(self.state_shardings, None),
            donate_argnums=0,
        )

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
        )

    @property
    def state_shardings(self) -> State:
        """Where each array of the state lies."""
        return State(self._shardings(self.param_specs), self._shardings(self.opt_specs))

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        """Where each row and position of a global batch goes."""
        return self._shardings(self.batch_specs)

    def init(self, seed: int) -> State:
        """Sharded initial state: the same weights for one seed on every mesh, made shard by shard."""
        params = jax.jit(partial(init_params, self.model, dtype=self.dtype), out_shardings=self.state_shardings.params)(
            seed
        )
        return State(params, self.init_optimizer(params))

    def init_optimizer(self, params: Params) -> Any:
        """The optimizer's state for given weights, sharded as they are."""
        return jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)(params)

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """One optimizer step on a global batch; the state given is consumed."""
        return self.compile(state, batch)

    def lower(self, batch_seqs: int, seq_len: int) -> jax.stages.Lowered:
        """The step traced for a batch size without any data."""
        shape = jax.ShapeDtypeStruct((batch_seqs, seq_len), jnp.int32)
        params = jax.eval_shape(partial(init_params, self.model, dtype=self.dtype), 0)
        state = State(params, jax.eval_shape(self.optimizer.init, params))
        return self.compile.lower(state, {"tokens": shape, "labels": shape})

    def gradients(self, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """Mean loss and its gradients for a global batch, sharded as the weights are (no update)."""
        if self.form == "gspmd":
            return jax.jit(self._gspmd_gradients)(params, batch)
        body = jax.shard_map(
            lambda p, b: self._local_gradients(p, b)[:2],
            mesh=self.mesh,
            in_specs=(self.param_specs, self.batch_specs),
            out_specs=(PartitionSpec(), self.param_specs),
            check_vma=False,
        )
        return jax.jit(body)(params, batch)

    # -- the derived form --------------------------------------------------------------------------

    def _local_gradients(self, params: Params, batch: Batch) -> tuple[jax.Array, Params, jax.Array]:
        """Global loss, reduced gradients and global squared norm, from one device's blocks."""
        derived = self.declared
        axes = self.strategy.active_axes
        tokens = batch["tokens"].size
        for axis in derived.declared["tokens"].spread:
            tokens *= self.strategy.mesh[axis]
        interpreter = Interpreter(self.model, derived)

        def mean_loss(p: Params, b: Batch) -> jax.Array:
            return local_loss(self.model, derived, p, b, interpreter=interpreter) / tokens

        loss, grads = local_gradients(mean_loss, params, batch, num_microbatches=self.strategy.num_microbatches)
        grads = reduce_gradients(derived, grads)
        norm = squared_norm(derived, grads, self.strategy.mesh)
        if axes:
            loss, norm = lax.psum(loss, axes), lax.psum(norm, axes)
        return loss, grads, norm

    def _update(self, state: State, grads: Params, squared: jax.Array) -> tuple[State, jax.Array]:
        norm = jnp.sqrt(squared)
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), norm

    def _shard_map_step(self) -> Callable[[State, Batch], tuple[State, Metrics]]:
        specs = State(self.param_specs, self.opt_specs)

        def body(state: State, batch: Batch) -> tuple[State, Metrics]:
            loss, grads, squared = self._local_gradients(state.params, batch)
            state, norm = self._update(state, grads, squared)
            return state, Metrics(loss, norm)

        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(specs, self.batch_specs),
            out_specs=(specs, Metrics(PartitionSpec(), PartitionSpec())),
            check_vma=False,
        )

    # -- the comparison: XLA chooses the collectives --------------------------------------------------

    def _gspmd_gradients(self, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        whole = derive(self.program, _on_one_device(self.strategy))

        def constrain(array: ShardedArray, value: jax.Array) -> jax.Array:
            declared = self.declared.declared[array.name]
            return lax.with_sharding_constraint(value, named_sharding(self.mesh, declared))

        interpreter = Interpreter(self.model, whole, constrain=constrain)
        tokens = batch["tokens"].size

        def mean_loss(p: Params, b: Batch) -> jax.Array:
            return local_loss(self.model, whole, p, b, interpreter=interpreter) / tokens

        return local_gradients(mean_loss, params, batch, num_microbatches=self.strategy.num_microbatches)

    def _gspmd_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        loss, grads = self._gspmd_gradients(state.params, batch)
        squared = sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in grads.values()), jnp.zeros(()))
        state, norm = self._update(state, grads, squared)
        return state, Metrics(loss, norm)


def _on_one_device(strategy: Strategy) -> Strategy:
    return Strategy(
        mesh=dict.fromkeys(strategy.mesh, 1),
        remat=strategy.remat,
        num_microbatches=strategy.num_microbatches,
        state=strategy.state,
    )
