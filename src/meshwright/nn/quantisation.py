"""Weights in int8, int4 and fp8: values and scales, and products with these weights.

``x = scale * values`` with values in -L..L and scale = max |x| / L over the entries that share it, where L is 127 for
int8, 7 for int4 and 448 for fp8 (e4m3). The error of an entry is at most half a scale for integers, and in fp8 a
sixteenth of the entry.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from meshwright.algebra.generation.program import WeightDtype
from meshwright.algebra.generation.stored import quantised_weights
from meshwright.algebra.ops.quantised_einsum import has_groups
from meshwright.algebra.program import Variable
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import rows, transformer
from meshwright.nn.contract import spread
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.order import after
from meshwright.nn.weights import STORED_DTYPES, Params
from meshwright.spec.model import Model

Quantised = Mapping[str, tuple[Variable, Variable]]
"""Name of a quantised weight -> (variable of its values, variable of its scales)."""

LARGEST_OF = {"int8": 127, "int4": 7, "fp8": 448}
"""Dtype of a quantised weight -> its largest value; the ranges are symmetric."""


def absmax_scale(x: Float[Array, "..."], axes: tuple[int, ...], dtype: str = "int8") -> Float[Array, "..."]:
    """Returns the scale of each group of entries along ``axes`` in float32; 1 for a group of zeros."""
    max_abs = jnp.max(jnp.abs(x), axis=axes).astype(jnp.float32)
    return jnp.where(max_abs > 0, max_abs / LARGEST_OF[dtype], 1.0)


def quantise(
    x: Float[Array, "..."], scale: Float[Array, "..."], axes: tuple[int, ...], dtype: str = "int8"
) -> Num[Array, "..."]:
    """Returns x / scale, rounded to values of the dtype; ``scale`` lacks the dims ``axes`` of x."""
    scaled_x, max_value = x.astype(jnp.float32) / jnp.expand_dims(scale, axes), LARGEST_OF[dtype]
    rounded = scaled_x if dtype == "fp8" else jnp.round(scaled_x)
    return jnp.clip(rounded, -max_value, max_value).astype(STORED_DTYPES[dtype])


def dequantised(
    values: Array, scale: Float[Array, "..."], dims: tuple[str, ...], of_scale: tuple[str, ...]
) -> Float[Array, "..."]:
    """Returns values over ``dims`` times scales over ``of_scale`` (which may have groups of a dim) in float32; both may
    have a leading dim of layers. uint8 values are int4 in the format of `pairs`."""
    layer_dims = ("",) * (values.ndim - len(dims))
    scale = spread(scale, (*layer_dims, *(dim.removesuffix("g") for dim in of_scale)), (*layer_dims, *dims))
    group_axis = next((i for i, dim in enumerate(dims, len(layer_dims)) if f"{dim}g" in of_scale), None)
    if group_axis is None:
        return values.astype(jnp.float32) * scale
    lead_shape, trail_shape = values.shape[:group_axis], values.shape[group_axis + 1 :]
    groups = values.reshape(*lead_shape, scale.shape[group_axis], -1, *trail_shape)
    if values.dtype == jnp.uint8:
        signed_bytes = groups.astype(jnp.int8)
        groups = jnp.concatenate([(signed_bytes << 4) >> 4, signed_bytes >> 4], group_axis + 1)
    return (groups.astype(jnp.float32) * jnp.expand_dims(scale, group_axis + 1)).reshape(*lead_shape, -1, *trail_shape)


def quantised_base(model: Model) -> Quantised:
    """Returns the frozen matrices that training stores in int8 or int4, by name."""
    variables = transformer(model).variables
    scale_by_weight = {name.replace("_scale", "", 1): name for name, row in rows(model).items() if row.part == "scale"}
    return {name: (variables[name], variables[scale_name]) for name, scale_name in scale_by_weight.items()}


def quantise_params(model: Model, params: Mapping[str, Array], quantised: Quantised) -> Params:
    """Returns all weights: those named in ``quantised`` as values and scales, other weights unchanged."""
    arrays = dict(params)
    for name, (weight_array, scale_array) in quantised.items():
        array = params[name].astype(jnp.float32)
        layer_dims = ("",) * (array.ndim - len(weight_array.dims))
        dims, scale_dims = (*layer_dims, *weight_array.dims), (*layer_dims, *scale_array.dims)
        num_groups = [
            size if dim in scale_dims else model.dims[f"{dim}g"] if f"{dim}g" in scale_dims else 1
            for dim, size in zip(dims, array.shape, strict=True)
        ]
        # a dim is its groups and their entries
        split_shape = [dim_len for size, n in zip(array.shape, num_groups, strict=True) for dim_len in (n, size // n)]
        grouped_values, entry_axes = array.reshape(split_shape), tuple(range(1, len(split_shape), 2))
        scales = absmax_scale(grouped_values, entry_axes, weight_array.dtype)
        shape = [n for n, dim in zip(num_groups, dims, strict=True) if dim in scale_dims or f"{dim}g" in scale_dims]
        values = quantise(grouped_values, scales, entry_axes, weight_array.dtype).reshape(array.shape)
        arrays |= {name: values, scale_array.name: scales.reshape(shape)}
    return arrays


def dequantise_params(params: Params, quantised: Quantised, dtype: DTypeLike) -> Params:
    """Inverts `quantise_params` up to rounding: returns no scales, and the quantised weights in ``dtype``."""
    arrays = dict(params)
    for name, (weight_variable, scale) in quantised.items():
        arrays[name] = dequantised(params[name], arrays.pop(scale.name), weight_variable.dims, scale.dims).astype(dtype)
    return arrays


def scaled_product(step: Step, lhs: Any, values: Array, scale: Array, product: Callable[[Any, Array], Array]) -> Any:
    """Returns ``product(lhs, weight)`` for a quantised weight; a weight with groups of inputs is dequantised first.

    Otherwise the values are multiplied in the dtype of ``lhs``, which represents them exactly, and the result is
    multiplied by the scale. Rows of packed tokens need different experts' scales, so for these too the weight is
    dequantised first."""
    _, value_dims, scale_dims = (array.dims for array in step.inputs)
    if isinstance(lhs, Ragged) or has_groups(step.inputs[2]):
        stream_rows = lhs.rows if isinstance(lhs, Ragged) else lhs
        # else a loop's iteration dequantises the weights of all products at its start
        weight = dequantised(values, after(scale, [stream_rows]), value_dims, scale_dims)
        result = product(lhs, weight.astype(stream_rows.dtype))
    else:
        result = product(lhs, values.astype(lhs.dtype)) * spread(scale, scale_dims, step.result.dims)
    return result if step.result.dtype == "fp32" or isinstance(lhs, Ragged) else result.astype(lhs.dtype)


def stored_params(model: Model, params: Mapping[str, Array], dtype: WeightDtype) -> Params:
    """Returns weights as generation stores them: int4 values are `pairs` in bytes.

    In jaxlib 0.10.2 loops over layers use a byte for each int4, and programs compiled ahead of time reject them.
    """
    pair_by_name = quantised_weights(model, dtype)
    arrays = quantise_params(model, params, pair_by_name)
    for name, (weight_array, scale_array) in pair_by_name.items():
        if weight_array.dtype == "int4":
            group_axis = next(i for i, dim in enumerate(weight_array.dims) if f"{dim}g" in scale_array.dims)
            num_groups = model.dims[f"{weight_array.dims[group_axis]}g"]
            arrays[name] = pairs(arrays[name], arrays[name].ndim - len(weight_array.dims) + group_axis, num_groups)
    return arrays


def pairs(values: Int[Array, "..."], axis: int, groups: int) -> Int[Array, "..."]:
    """Returns int4 values as bytes: the first half of each group along ``axis`` in the low bits, the second half in the
    high bits. A dim of two entries per byte would fill few lanes of a TPU."""
    leading_shape, trailing_shape = values.shape[:axis], values.shape[axis + 1 :]
    grouped_halves = values.astype(jnp.uint8).reshape(*leading_shape, groups, 2, -1, *trailing_shape)
    low_half, high_half = (lax.index_in_dim(grouped_halves, half, axis + 1, keepdims=False) for half in (0, 1))
    return ((low_half & 15) | (high_half << 4)).reshape(*leading_shape, -1, *trailing_shape)


def param_shapes(
    model: Model, shapes: Mapping[str, jax.ShapeDtypeStruct], dtype: WeightDtype
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of weights that generation stores in ``dtype``, given the shapes of the float weights."""
    return jax.eval_shape(lambda arrays: stored_params(model, arrays, dtype), dict(shapes))
