"""The interface of an optimizer to a training step: an update of global arrays, and the sharding of its state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, KeyPath

from meshwright.nn.weights import Params


class Optimizer(NamedTuple):
    """``init(params) -> state`` and ``update(grads, state, params) -> (new params, new state)``.

    ``kind`` is the op of `algebra.ops` whose steps the update runs.
    """

    init: Callable[[Params], Any]
    update: Callable[[Params, Any, Params], tuple[Params, Any]]
    kind: str = "adamw"

    def specs(self, param_shapes: Mapping[str, Any], param_specs: Mapping[str, PartitionSpec]) -> Any:
        """Returns the sharding of each array of the state, given the shapes and shardings of the weights.

        An array that belongs to a weight (by its name) is sharded like the weight in every dim of equal size; dims of
        size 1, over which a mean was taken, and counters are replicated.
        """

        def spec(path: KeyPath, leaf: Any) -> PartitionSpec:
            name = weight_of(path, param_specs)
            if name is None or len(leaf.shape) != len(param_shapes[name].shape):
                return PartitionSpec()
            axes = [*param_specs[name], *[None] * len(leaf.shape)]
            dims = zip(leaf.shape, param_shapes[name].shape, axes, strict=False)
            return PartitionSpec(*(part if size == weight_size else None for size, weight_size, part in dims))

        return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(self.init, param_shapes))


def plain_optimizer(transformation: optax.GradientTransformation) -> Optimizer:
    """Wraps an optax transformation. Its update is derived as AdamW's is: elementwise, without communication."""

    def update(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Optimizer(transformation.init, update)


def weight_of(path: KeyPath, names: Mapping[str, Any]) -> str | None:
    """Returns the weight to which an array of a state belongs: the last key on its path that names one, or None."""
    keys = [key.key for key in path if isinstance(key, DictKey) and key.key in names]
    return keys[-1] if keys else None
