"""Muon and Adafactor for arrays that hold a matrix per layer and expert.

They run the derived steps of their optimizer on the shards of weights, in `shard_map` or on one device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from meshwright.algebra.derive import derive
from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.adafactor import outputs, stacked
from meshwright.algebra.ops.adafactor import update as adafactor_steps
from meshwright.algebra.ops.muon import update as muon_steps
from meshwright.algebra.transformer import transformer
from meshwright.nn.interpreter import run_update
from meshwright.nn.ops.muon import momentum
from meshwright.nn.weights import Params
from meshwright.parallel.mesh import partition_spec
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy


class WeightLayout(NamedTuple):
    """The mesh, None for one device, and each weight as the derived update of the optimizer has it; the model's own
    ``sizes`` of dims that devices hold padded."""

    mesh: Mesh | AbstractMesh | None
    weights: Mapping[str, Updated]
    sizes: Mapping[str, int] = {}


def on_one_device(model: Model) -> WeightLayout:
    """Returns the layout of a model's weights on one device."""
    return WeightLayout(None, derive(transformer(model), Strategy(mesh={})).weights)


def on_shards(
    body: Callable[..., tuple[Array, ...]],
    layout: WeightLayout,
    given: Mapping[ShardedArray, Array],
    results: Sequence[ShardedArray],
) -> tuple[Array, ...]:
    """Runs ``body`` on each device's shards of the arrays ``given``; it returns shards of ``results``."""
    if layout.mesh is None:
        return body(*given.values())
    specs = tuple(partition_spec(array) for array in given)
    out = tuple(partition_spec(array) for array in results)
    return jax.shard_map(body, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(*given.values())


class MuonState(NamedTuple):
    """Number of updates, and the running mean of the gradients."""

    count: Any
    momentum: Params


def scale_by_muon(decay: float, layout: Callable[[], WeightLayout]) -> optax.GradientTransformation:
    """Orthogonalises the Nesterov momentum of every matrix, and scales it by 0.2 sqrt(max(inputs, outputs)).

    Each device works on whole matrices of some layers. Source: Jordan, Muon (2024); Liu et al., Muon is
    Scalable for LLM Training (2025), for the scale.
    """

    def init(params: Params) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))

    def update(grads: Params, state: MuonState, params: Params | None = None) -> tuple[Params, MuonState]:
        count, layout_now = state.count + 1, layout()
        pairs = {n: momentum(state.momentum[n], grad, count, decay=decay) for n, grad in grads.items()}
        changes = {name: orthogonal(mixed, layout_now.weights[name], layout_now) for name, (_, mixed) in pairs.items()}
        return changes, MuonState(count, {name: mean for name, (mean, _) in pairs.items()})

    return optax.GradientTransformation(init, update)


def orthogonal(values: Array, weight: Updated, layout: WeightLayout) -> Array:
    """Maps every matrix U S V^T of a sharded array to about c U V^T; each device works on whole matrices.

    Layers are padded with zeros to a multiple of the devices, so a device receives at most one matrix that it does not
    need. GSPMD would gather whole arrays in every iteration instead.
    """
    steps = muon_steps(weight)[1:-1]
    array, (first, last) = stacked(weight, weight.shard.name), (steps[0].inputs[0], steps[-1].result)
    num_counted = 1 + len(weight.batch)
    devices = math.prod(layout.mesh.shape[axis] for axis in steps[0].details.axes) if layout.mesh is not None else 1

    def body(here: Array) -> tuple[Array, ...]:
        num_matrices = math.prod(here.shape[:num_counted])
        flat = here.reshape(num_matrices, *here.shape[num_counted:])
        padded = jnp.pad(flat, [(0, -num_matrices % devices), *[(0, 0)] * (flat.ndim - 1)])
        return (run_update(steps, {first: padded})[last][:num_matrices].reshape(here.shape),)

    return on_shards(body, layout, {array: values}, (array,))[0]


DECAY_POWER = 0.8
"""Power in the decay 1 - t^-0.8 at update t. Source: Shazeer and Stern, Adafactor (2018)."""


class FactoredState(NamedTuple):
    """Number of updates; running means of squared gradients: for matrices over outputs (``rows``) and over inputs
    (``columns``), for vectors of each entry (``whole``). Reduced dims have size 1."""

    count: Any
    rows: Params
    columns: Params
    whole: Params


def scale_by_adafactor(layout: Callable[[], WeightLayout], weights: dict[str, Updated]) -> optax.GradientTransformation:
    """Divides gradients by the factored root of their second moments; clips each matrix to RMS 1 and scales it by the
    RMS of its weights. Source: Shazeer and Stern, Adafactor (2018), algorithms 4 and 5, section 8.

    ``weights`` are unsharded; they say which dims make up the matrices.
    """

    def left_out(name: str) -> tuple[tuple[int, ...], ...]:
        """Returns the axes that each mean of a weight reduces: outputs and inputs of matrices, none of vectors."""
        weight = weights[name]
        if not weight.inputs:
            return ((),)
        dims, batch = stacked(weight, name).dims, {weight.layers, *weight.batch}
        sides = ({*batch, *weight.inputs}, {*batch, *outputs(weight)})
        return tuple(tuple(i for i, dim in enumerate(dims) if dim not in side) for side in sides)

    def state(count: Array, means: dict[str, list[Array]]) -> FactoredState:
        matrices = [name for name in means if weights[name].inputs]
        return FactoredState(
            count,
            {name: means[name][0] for name in matrices},
            {name: means[name][1] for name in matrices},
            {name: means[name][0] for name in means if not weights[name].inputs},
        )

    def init(params: Params) -> FactoredState:
        def empty(name: str, over: tuple[int, ...]) -> Array:
            shape = [1 if axis in over else size for axis, size in enumerate(params[name].shape)]
            return jnp.zeros(shape, jnp.float32)

        return state(jnp.zeros((), jnp.int32), {n: [empty(n, reduced) for reduced in left_out(n)] for n in params})

    def update(grads: Params, old: FactoredState, params: Params | None = None) -> tuple[Params, FactoredState]:
        assert params is not None
        count, layout_now = old.count + 1, layout()
        decay = 1 - count.astype(jnp.float32) ** -DECAY_POWER
        changes, new_means = Params(), dict[str, list[Array]]()
        for name, grad in grads.items():
            axes = left_out(name)
            old_means = (old.rows[name], old.columns[name]) if weights[name].inputs else (old.whole[name],)
            means = [mean.squeeze(reduced) for mean, reduced in zip(old_means, axes, strict=True)]
            changes[name], *means = _updated(layout_now, layout_now.weights[name], (grad, params[name]), means, decay)
            new_means[name] = [jnp.expand_dims(mean, reduced) for mean, reduced in zip(means, axes, strict=True)]
        return changes, state(count, new_means)

    return optax.GradientTransformation(init, update)


def _updated(
    layout: WeightLayout, weight: Updated, values: tuple[Array, Array], means: list[Array], decay: Array
) -> tuple[Array, ...]:
    """Returns the change of one weight, and its new running means."""
    *steps, _ = adafactor_steps(weight)
    first, keeping = steps[0], next(step for step in steps if "decay" in {array.name for array in step.inputs})
    (current,) = next(step.inputs for step in steps if step.result.name.endswith(".weights"))
    before = [array for array in keeping.inputs if array.name.endswith(".before")]
    new_means = [array for array in keeping.more if array.name.endswith(".after")]
    arrays = dict(zip((first.inputs[0], current, *before, keeping.inputs[-1]), (*values, *means, decay), strict=True))
    results = (steps[-1].result, *new_means)

    def body(*blocks: Array) -> tuple[Array, ...]:
        env = run_update(steps, dict(zip(arrays, blocks, strict=True)), layout.sizes)
        return tuple(env[array] for array in results)

    return on_shards(body, layout, arrays, results)
