"""The weights of a model as a flat dict of arrays: names by the weight table, shapes, and initial values."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meshwright.algebra.transformer import local_name, rows
from meshwright.spec.model import Model
from meshwright.spec.strategy import held_dims
from meshwright.spec.weights import Weight, fixed_tables

Params = dict[str, Array]
"""Variable of the program -> array; weights of layers are stacked over the layers of one kind, [L, ...]."""

STORED_DTYPES = {"fp32": jnp.float32, "int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}
"""Dtypes of weights with a fixed dtype, which does not follow the training state."""

INIT_STD = 0.02
_INTO_STREAM = (
    *("wo", "w_down", "experts_w_down", "shared_w_down", "layer_out"),
    *("cross_wo", "encoder_wo", "encoder_w_down"),
)


def stacked_shape(weight: Weight) -> tuple[int, ...]:
    """Returns the shape of the array in `Params`: weights of the repeated layers have a leading L."""
    return (weight.repeat, *weight.shape) if weight.layers else weight.shape


def param_shapes(
    model: Model, *, dtype: jnp.dtype = jnp.float32, mesh: Mapping[str, int] = {}
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the global shapes of all arrays; with a ``mesh``, V is padded to a multiple of its ``tensor``."""
    vocab = held_dims(model.dims, mesh)["V"]

    def shape(weight: Weight) -> tuple[int, ...]:
        dims = tuple(vocab if dim == "V" else dim_len for dim, dim_len in zip(weight.dims, weight.shape, strict=True))
        return (weight.repeat, *dims) if weight.layers else dims

    return {
        name: jax.ShapeDtypeStruct(shape(weight), STORED_DTYPES.get(weight.dtype, dtype))
        for name, weight in rows(model).items()
    }


def sinusoids(num_positions: int, width: int, *, num_steps: float | None = None) -> np.ndarray:
    """Returns a table of positions [P, D] in float32: sines, then cosines, of the position times 10000^(-i / steps) for
    each i below D / 2. ``num_steps`` is D / 2 by default, as in Vaswani et al., Attention Is All You Need (2017),
    section 3.5; Whisper's is D / 2 - 1, so that the last frequency is 1/10000."""
    angles = np.arange(num_positions)[:, None] / 10000.0 ** (np.arange(width // 2) / (num_steps or width / 2))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def init_params(model: Model, seed: int, *, dtype: jnp.dtype = jnp.float32) -> Params:
    """Draws weights from ``seed``, each array from its own key, so the values do not depend on the mesh.

    Base weights are equal with and without adapters, and not quantised; scales are left out. Under `jax.jit` with
    ``out_shardings`` each device draws its own shards only.
    """
    root_key = jax.random.key(seed)
    return {
        name: _initial(model, weight, jax.random.fold_in(root_key, weight_index)).astype(
            jnp.float32 if weight.dtype == "fp32" else dtype
        )
        for weight_index, (name, weight) in enumerate((n, w) for n, w in rows(model).items() if w.part != "scale")
    }


def _initial(model: Model, weight: Weight, key: Array) -> Array:
    """Draws from a normal distribution with standard deviation 0.02, divided by sqrt(2 L) for matrices that write into
    the residual stream (GPT-2). Norms and layer scales start as identities; biases and sinks as zeros; fixed tables of
    positions are `sinusoids`. The A of an adapter is uniform in +-1/sqrt(inputs), B is zero, as in PEFT."""
    shape = stacked_shape(weight)
    if weight.part == "adapter":
        bound = np.prod(weight.shape[:-1]) ** -0.5
        is_into_rank = weight.dims[-1] == "Ra"
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound) if is_into_rank else jnp.zeros(shape)
    if weight.part == "norm" and not weight.name.endswith("_bias"):
        return jnp.zeros(shape) if model.norm_unit_offset else jnp.ones(shape)
    if weight.name == "layers.layer_scale":
        return jnp.ones(shape)
    if weight.name in fixed_tables(model):
        return jnp.asarray(sinusoids(*shape, num_steps=None if model.sinusoids else shape[1] // 2 - 1))
    if weight.kind == "vector" and weight.name != "layers.shared.gate":
        return jnp.zeros(shape)
    std = INIT_STD / np.sqrt(2 * model.num_layers) if local_name(weight) in _INTO_STREAM else INIT_STD
    return jax.random.normal(key, shape, jnp.float32) * std
