"""int8 storage: values and the scale that each group of them shares, and products with weights stored so.

``x = scale * values`` with values in -127..127 and scale = max |x| / 127 over the group, so that no entry is off by
more than half a scale.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from meshwright.algebra.generation import scales
from meshwright.algebra.steps import Step
from meshwright.nn.contract import spread
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.weights import Params, rows
from meshwright.spec.model import Model

LARGEST = 127


def absmax_scale(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """The scale of each group of entries along ``axes``, in float32; 1 for a group of zeros."""
    largest = jnp.max(jnp.abs(x), axis=axes).astype(jnp.float32)
    return jnp.where(largest > 0, largest / LARGEST, 1.0)


def quantise(x: Float[Array, "..."], scale: Float[Array, "..."], axes: tuple[int, ...]) -> Int8[Array, "..."]:
    """The nearest values; ``scale`` lacks the dims ``axes``."""
    wide = x.astype(jnp.float32) / jnp.expand_dims(scale, axes)
    return jnp.clip(jnp.round(wide), -LARGEST, LARGEST).astype(jnp.int8)


def scaled_product(step: Step, lhs: Any, values: Array, scale: Array, product: Callable[[Any, Array], Array]) -> Any:
    """``product(lhs, weight)`` for a weight in int8: values go in as the stream's dtype, which holds them exactly, and
    the scale multiplies what comes out.

    Tokens packed by expert are multiplied by the weight itself, made from its values: their rows have other scales.
    """
    _, of_values, of_scale = (array.dims for array in step.inputs)
    if isinstance(lhs, Ragged):
        weight = values.astype(jnp.float32) * spread(scale, of_scale, of_values)
        return product(lhs, weight.astype(lhs.rows.dtype))
    found = product(lhs, values.astype(lhs.dtype)) * spread(scale, of_scale, step.result.dims)
    return found if step.result.dtype == "fp32" else found.astype(lhs.dtype)


def contracted_axes(model: Model) -> dict[str, tuple[int, ...]]:
    """Each weight that int8 may hold -> the axes of its array in `Params` that its scale lacks."""
    table = rows(model)
    found = {}
    for name, scale in scales(model).items():
        weight = table[name]
        ahead = 1 if weight.layers else 0
        found[name] = tuple(ahead + i for i, dim in enumerate(weight.dims) if dim not in scale.dims)
    return found


def quantise_params(model: Model, params: Mapping[str, Array]) -> Params:
    """Weights as int8 programs take them: matrices as values, ``<name>_scale`` beside each, the others as they are."""
    axes, named = contracted_axes(model), scales(model)
    found: Params = {}
    for name, weight in params.items():
        if name not in axes:
            found[name] = weight
            continue
        scale = absmax_scale(weight, axes[name])
        found[name] = quantise(weight, scale, axes[name])
        found[named[name].name] = scale
    return found


def param_shapes(model: Model, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of quantised weights from those of the float ones."""
    return jax.eval_shape(lambda given: quantise_params(model, given), dict(shapes))
