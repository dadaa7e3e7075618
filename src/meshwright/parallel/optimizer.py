"""The interface between an optimizer and a training step: an update of global arrays, and the state's sharding."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.tree_util import DictKey

from meshwright.algebra.steps import Step
from meshwright.nn.weights import Params
from meshwright.parallel.held import Shapes, Tree


class UpdateLayout(NamedTuple):
    """The derived steps that update each weight, the mesh that they run on, and the sharding of each weight during the
    update, which its gradient and optimizer state share."""

    steps: Mapping[str, Sequence[Step]]
    mesh: Mesh | AbstractMesh
    specs: Mapping[str, PartitionSpec]


class Optimizer(NamedTuple):
    """``init(params) -> state`` and ``update(grads, state, params, layout) -> (new params, new state)``.

    Without a layout the update runs on one device. An array of the state belongs to the weight that its path names;
    arrays without such a name are counters. ``kind`` is the op of `algebra.ops` whose steps the update runs.
    """

    init: Callable[[Params], Tree]
    update: Callable[..., tuple[Params, Tree]]
    kind: str = "adamw"

    def specs(self, param_shapes: Shapes, param_specs: Mapping[str, PartitionSpec]) -> Tree:
        """Returns the sharding of each array of the state, given the shapes and shardings of the weights."""
        return state_specs(jax.eval_shape(self.init, param_shapes), param_shapes, param_specs)


def state_specs(state: Tree, params: Params | Shapes, param_specs: Mapping[str, PartitionSpec]) -> Tree:
    """Returns the sharding of each array of a state, given the weights, or their shapes, and their shardings.

    An array that belongs to a weight (by its name) is sharded like the weight in every dim of equal size; dims of size
    1, over which a mean was taken, and counters are replicated.
    """

    def spec(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        weight_name = weight_of(path, param_specs)
        if weight_name is None or len(leaf.shape) != len(params[weight_name].shape):
            return PartitionSpec()
        padded_axes = [*param_specs[weight_name], *[None] * len(leaf.shape)]
        sizes_and_axes = zip(leaf.shape, params[weight_name].shape, padded_axes, strict=False)
        return PartitionSpec(*(axis if size == weight_size else None for size, weight_size, axis in sizes_and_axes))

    return jax.tree_util.tree_map_with_path(spec, state)


def plain_optimizer(transformation: optax.GradientTransformation, kind: str = "adamw") -> Optimizer:
    """Wraps an optax transformation. ``kind`` is the op whose derivation describes its update, by default AdamW:
    elementwise, without communication."""

    def update(grads: Params, state: Tree, params: Params, *layout: UpdateLayout) -> tuple[Params, Tree]:
        param_updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, param_updates), state

    return Optimizer(transformation.init, update, kind)


def weight_of(path: tuple[object, ...], names: Collection[str]) -> str | None:
    """Returns the weight to which an array of a state belongs: the last key on its path that names one, or None."""
    weight_names = [key.key for key in path if isinstance(key, DictKey) and key.key in names]
    return weight_names[-1] if weight_names else None
