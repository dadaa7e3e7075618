"""Finds, on the devices, the first array with a value that is not finite."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from meshwright.algebra.transformer import rows
from meshwright.parallel.optimizer import weight_of
from meshwright.parallel.train_step import State, TrainStep
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight


def where_not_finite(step: TrainStep, state: State, batch: Any) -> str:
    """Returns a text of what is not finite after a step with a bad loss or gradient: a weight, a gradient or neither.

    Checks the weights after the step; if they are finite, computes and checks the gradients of the batch again. Layers
    are numbered as in the model, whatever their order in the stages of a pipeline.
    """
    bad_weight = non_finite(step.to_canonical(state.params), step.model)
    if bad_weight:
        return f"after the step the weight {bad_weight}"
    bad_gradient = non_finite(step.to_canonical(step.gradients(state.params, batch)[1]), step.model)
    if bad_gradient:
        return f"all weights are finite; of the gradients computed again, {bad_gradient}"
    return "weights and gradients are finite"


def non_finite(tree: Any, model: Model) -> str | None:
    """Names the first array with a NaN or an infinity: "layers.wq of layer 3 holds NaN"; None if all are finite.

    Arrays are checked in the order of the weight table, other arrays last; of stacked layers the first is named.
    """
    weights = rows(model)
    index_by_name = {name: index for index, name in enumerate(weights)}
    named_leaves = [
        (weight_of(path, index_by_name), path, leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if not named_leaves:
        return None
    named_leaves.sort(key=lambda entry: index_by_name.get(entry[0] or "", len(index_by_name)))
    stacked_flags = tuple(bool(name and weights[name].layers) and leaf.ndim > 0 for name, _, leaf in named_leaves)
    mesh = getattr(getattr(named_leaves[0][2], "sharding", None), "mesh", None)
    flags = _flags_on(mesh if isinstance(mesh, Mesh) else None)([leaf for *_, leaf in named_leaves], stacked_flags)
    for (name, path, _), leaf_flags in zip(named_leaves, flags, strict=True):
        nan, is_infinite = np.asarray(leaf_flags)
        is_bad = nan | is_infinite
        if is_bad.any():
            index = int(is_bad.argmax())
            return f"{_words(path, name, weights.get(name or ''), index)} holds {'NaN' if nan[index] else 'infinity'}"
    return None


def _words(path: tuple[Any, ...], name: str | None, weight: Weight | None, index: int) -> str:
    """Returns ``inner.mu: layers.wq of layer 3``; without a prefix for a weight at the root."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    prefix = ".".join(key for key in keys if key != name)
    if weight is None:
        return prefix
    return f"{prefix}: " * bool(prefix) + weight.name + (f" of layer {weight.layers[index]}" if weight.layers else "")


@lru_cache
def _flags_on(mesh: Mesh | None) -> Any:
    """Returns jitted (arrays, flags of stacked ones) -> booleans [2, layers or 1] each: NaN, infinity; replicated."""

    def flags(array: Array, by_layer: bool) -> Array:
        axes = tuple(range(by_layer, array.ndim))
        return jnp.stack([jnp.isnan(array).any(axes), jnp.isinf(array).any(axes)]).reshape(2, -1)

    replicated_sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda *trees: list(map(flags, *trees)), static_argnums=1, out_shardings=replicated_sharding)
