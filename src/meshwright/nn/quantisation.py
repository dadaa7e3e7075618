"""int8 and int4 storage: values and one scale per group, and products with such weights.

``x = scale * values`` with values in -L..L and scale = max |x| / L over the group, where L is 127 for int8 and 7 for
int4, so the error of an entry is at most half a scale.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.generation import scales
from meshwright.algebra.ops.quantised_einsum import has_groups
from meshwright.algebra.steps import Step
from meshwright.nn.contract import spread
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.order import after
from meshwright.nn.weights import STORED_DTYPES, Params, rows
from meshwright.spec.model import Model

LARGEST_OF = {"int8": 127, "int4": 7}
"""Dtype of a quantised weight -> its largest value; the ranges are symmetric."""


def absmax_scale(x: Float[Array, "..."], axes: tuple[int, ...], dtype: str = "int8") -> Float[Array, "..."]:
    """Returns the scale of each group of entries along ``axes`` in float32; 1 for a group of zeros."""
    largest = jnp.max(jnp.abs(x), axis=axes).astype(jnp.float32)
    return jnp.where(largest > 0, largest / LARGEST_OF[dtype], 1.0)


def quantise(
    x: Float[Array, "..."], scale: Float[Array, "..."], axes: tuple[int, ...], dtype: str = "int8"
) -> Int[Array, "..."]:
    """Returns x / scale, rounded to whole numbers; ``scale`` has no dims for ``axes``."""
    wide, largest = x.astype(jnp.float32) / jnp.expand_dims(scale, axes), LARGEST_OF[dtype]
    return jnp.clip(jnp.round(wide), -largest, largest).astype(STORED_DTYPES[dtype])


def dequantised(values: Array, scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns values times their scales, in float32; a scale has one entry per group of entries along each dim."""
    for axis, (size, groups) in enumerate(zip(values.shape, scale.shape, strict=True)):
        scale = jnp.repeat(scale, size // groups, axis)
    return values.astype(jnp.float32) * scale


def quantise_base(model: Model, params: Params) -> Params:
    """Quantises the frozen matrices that are int8 or int4, with a scale for each output and group of its inputs."""
    table = rows(model)
    found = dict(params)
    for name in (name for name, row in table.items() if row.part == "scale"):
        own = name.replace("_scale", "", 1)
        dtype, weight = table[own].dtype, params[own].astype(jnp.float32)
        shape = (table[name].repeat, *table[name].shape)
        axis = 1 + bool(table[name].layers) + next(i for i, dim in enumerate(table[name].dims) if dim.endswith("g"))
        grouped = weight.reshape(*shape[:axis], -1, *shape[axis:])
        scale = absmax_scale(grouped, (axis,), dtype)
        found |= {name: scale, own: quantise(grouped, scale, (axis,), dtype).reshape(weight.shape)}
    return found


def dequantise_base(model: Model, params: Params) -> Params:
    """Inverts `quantise_base` but for rounding: returns no scales, and its matrices in the embedding's dtype."""
    pairs = {name.replace("_scale", "", 1): name for name, row in rows(model).items() if row.part == "scale"}
    whole = {own: dequantised(params[own], params[name]).astype(params["embed"].dtype) for own, name in pairs.items()}
    return {name: array for name, array in params.items() if name not in pairs.values()} | whole


def scaled_product(step: Step, lhs: Any, values: Array, scale: Array, product: Callable[[Any, Array], Array]) -> Any:
    """Returns ``product(lhs, weight)`` for a quantised weight; a weight with groups of inputs is dequantised first.

    The values are multiplied in the stream's dtype, which holds them exactly, and the scale multiplies the result.
    Rows of packed tokens have the scales of different experts, so for these too the weight is dequantised first.
    """
    _, of_values, of_scale = (array.dims for array in step.inputs)
    if has_groups(step.inputs[2]):
        return product(lhs, dequantised(values, scale).astype(lhs.dtype)).astype(lhs.dtype)
    if isinstance(lhs, Ragged):
        # else the weights of all products in a loop's iteration are made at its start
        weight = values.astype(jnp.float32) * spread(after(scale, [lhs.rows]), of_scale, of_values)
        return product(lhs, weight.astype(lhs.rows.dtype))
    found = product(lhs, values.astype(lhs.dtype)) * spread(scale, of_scale, step.result.dims)
    return found if step.result.dtype == "fp32" else found.astype(lhs.dtype)


def contracted_axes(model: Model) -> dict[str, tuple[int, ...]]:
    """Returns, for each weight that may be int8, the axes of its array in `Params` that its scale lacks."""
    named = [(name, rows(model)[name], scale.dims) for name, scale in scales(model).items()]
    return {
        name: tuple(bool(weight.layers) + i for i, dim in enumerate(weight.dims) if dim not in of_scale)
        for name, weight, of_scale in named
    }


def quantise_params(model: Model, params: Mapping[str, Array]) -> Params:
    """Returns int8 values and ``<name>_scale`` for each matrix that may be int8; other weights are unchanged."""
    found, named = dict(params), scales(model)
    for name, axes in contracted_axes(model).items():
        if name in params:
            scale = absmax_scale(params[name], axes)
            found |= {name: quantise(params[name], scale, axes), named[name].name: scale}
    return found


def param_shapes(model: Model, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of quantised weights, given the shapes of the float weights."""
    return jax.eval_shape(lambda given: quantise_params(model, given), dict(shapes))
