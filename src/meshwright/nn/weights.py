"""The weights of a model as a flat dict of arrays: made from a seed, and from Hugging Face's names."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.algebra.transformer import local_name
from meshwright.core.errors import InputError
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight, weight_table

Params = dict[str, jax.Array]
"""Name inside the block -> array; the weights of repeated layers are stacked in front, [L, ...]."""

INIT_STD = 0.02
_INTO_STREAM = ("wo", "w_down")


def rows(model: Model) -> dict[str, Weight]:
    """The weight table by the names that programs use, tied weights once."""
    return {local_name(w): w for w in weight_table(model) if not w.tied_to}


def is_stacked(weight: Weight) -> bool:
    """Whether the weight belongs to the repeated layers, and so has L in front."""
    return weight.name.startswith("layers.")


def stacked_shape(weight: Weight) -> tuple[int, ...]:
    """Shape of the array in `Params`."""
    return (weight.repeat, *weight.shape) if is_stacked(weight) else weight.shape


def init_params(model: Model, seed: int, *, dtype: jnp.dtype = jnp.float32) -> Params:
    """Weights drawn from ``seed``: the same numbers whatever mesh they are made on.

    Normal with standard deviation 0.02, divided by sqrt(2 L) where a matrix writes into the residual stream
    (GPT-2's rule); norms are ones.
    """
    params: Params = {}
    for index, (name, weight) in enumerate(rows(model).items()):
        shape = stacked_shape(weight)
        if weight.kind == "vector":
            params[name] = jnp.ones(shape, dtype)
            continue
        std = INIT_STD / np.sqrt(2 * model.num_layers) if name in _INTO_STREAM else INIT_STD
        key = jax.random.fold_in(jax.random.key(seed), index)
        params[name] = (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)
    return params


def params_from_hf(model: Model, tensors: Mapping[str, np.ndarray]) -> Params:
    """Weights from a Hugging Face state dict (names to arrays) of the same model.

    Raises InputError that names the first missing tensor or wrong shape.
    """
    return {name: jnp.asarray(_from_hf(weight, tensors)) for name, weight in rows(model).items()}


def _from_hf(weight: Weight, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    if not is_stacked(weight):
        return _oriented(weight, weight.hf_name, tensors)
    layers = [weight.hf_name.format(layer=i, expert="{expert}") for i in range(weight.repeat)]
    return np.stack([_oriented(weight, name, tensors) for name in layers])


def _oriented(weight: Weight, hf_name: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """One tensor in einsum order. Hugging Face stores a linear layer as [out, in]."""
    if hf_name not in tensors:
        raise InputError(f"the checkpoint lacks {hf_name} ({weight.name}); give one made for this model.")
    found = np.asarray(tensors[hf_name])
    if found.size != np.prod(weight.shape):
        raise InputError(f"{hf_name} has shape {found.shape}; {weight.name} needs {weight.shape}.")
    keeps_order = weight.kind == "vector" or weight.part == "embedding"
    return (found if keeps_order else found.T).reshape(weight.shape)
