"""Shapes of arrays on devices: the vocabulary and the layers are padded with zeros so that shards are equal.

The loss head gives padding no probability (`nn.ops.linear_cross_entropy`), and a layer of zeros adds nothing to the
stream, so both stay zero (`spec.strategy.held_dims`, `parallel.pipeline.stages`).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from meshwright.nn.weights import Params

Shapes = Mapping[str, jax.ShapeDtypeStruct]

Tree = Any
"""A pytree of arrays, shapes or shardings."""

OfWeight = TypeVar("OfWeight")
"""The value of a table for each weight: an array, its shape or its sharding."""


def without_split(shapes: Shapes, held: Shapes, specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Returns the specs of arrays of unpadded ``shapes``: a dim that is padded in ``held`` is not sharded."""
    return {
        name: PartitionSpec(
            *(
                dim_axes if size == held_size else None  # the unpadded size would have unequal shards
                for dim_axes, size, held_size in zip(specs[name], shapes[name].shape, held[name].shape, strict=True)
            )
        )
        for name in shapes.keys() & specs.keys()
    }


def resized(params: Params, before: Shapes, after: Shapes, specs: Mapping[str, PartitionSpec]) -> Params:
    """Returns weights, or an optimizer's arrays by weight name, cut or zero-padded from ``before`` to ``after``.

    An array on devices keeps its sharding; dims that change size get the sharding of ``specs``.
    """
    changed_params = {
        name: _resized(array, before[name].shape, after[name].shape, specs[name])
        for name, array in params.items()
        if before[name].shape != after[name].shape and len(before[name].shape) == array.ndim
    }
    return params | changed_params


def _resized(array: Array, old_dims: tuple[int, ...], new_dims: tuple[int, ...], spec: PartitionSpec) -> Array:
    dim_sizes = zip(array.shape, old_dims, new_dims, strict=True)
    # an optimizer's mean over a dim has size 1 in that dim, and keeps it
    shape = tuple(new if size == old else size for size, old, new in dim_sizes)

    def resize(array: Array) -> Array:
        cut_array = array[tuple(slice(0, size) for size in shape)]
        return jnp.pad(cut_array, [(0, size - cut_size) for size, cut_size in zip(shape, cut_array.shape, strict=True)])

    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or isinstance(array, jax.core.Tracer):
        return resize(array)
    held = (*sharding.spec, *[None] * array.ndim)
    axes = (part if new == old else axis for part, axis, new, old in zip(held, spec, new_dims, old_dims, strict=False))
    return jax.jit(resize, out_shardings=NamedSharding(sharding.mesh, PartitionSpec(*axes)))(array)
