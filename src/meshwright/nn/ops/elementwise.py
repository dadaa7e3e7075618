"""Look-ups and the elementwise kinds of a layer as pure JAX functions of one device's blocks.

Each works on the block it is given; nothing here communicates. Norms, rotations and activations are in modules of
their own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshwright.spec.model import Model


def embed_scale(model: Model, dtype: Any) -> float:
    """sqrt(D) rounded to the dtype of the weights, as it was when they were trained (gemma); 1 for others."""
    return float(np.asarray(model.d_model**0.5, dtype)) if model.embed_scale else 1.0


def embed(
    tokens: Int[Array, "B T"], table: Float[Array, "V D"], *, first_row: Int[Array, ""] | int, scale: float = 1.0
) -> Float[Array, "B T D"]:
    """Rows of the part of the table that starts at ``first_row``, times ``scale``; zeros for tokens outside of it."""
    local, inside = _local_rows(tokens, first_row, table.shape[0])
    rows = jnp.take(table, jnp.where(inside, local, 0), axis=0)
    return jnp.where(inside[..., None], rows * scale if scale != 1 else rows, jnp.zeros((), rows.dtype))


def embed_backward(
    tokens: Int[Array, "B T"],
    dout: Float[Array, "B T D"],
    *,
    first_row: Int[Array, ""] | int,
    num_rows: int,
    scale: float = 1.0,
) -> Float[Array, "V D"]:
    """Cotangents added up per row of the part of the table, in float32 as long as they are added."""
    local, inside = _local_rows(tokens, first_row, num_rows)
    # An index behind the end is dropped; a negative one would count from the end.
    at = jnp.where(inside, local, num_rows)
    table = jnp.zeros((num_rows, dout.shape[-1]), jnp.float32)
    return (table.at[at].add(dout.astype(jnp.float32), mode="drop") * scale).astype(dout.dtype)


def _local_rows(tokens: Array, first_row: Array | int, num_rows: int) -> tuple[Array, Array]:
    """Rows counted from the first one here, and which of them are here."""
    local = tokens - first_row
    return local, (local >= 0) & (local < num_rows)


def bias_add(x: Float[Array, "*dims"], bias: Float[Array, "*some"], *, at: tuple[int, ...]) -> Float[Array, "*dims"]:
    """``x + bias``, the dims of the bias being those of ``x`` numbered ``at``."""
    shape = tuple(x.shape[i] if i in at else 1 for i in range(x.ndim))
    return x + bias.reshape(shape).astype(x.dtype)


def join_heads(own: Float[Array, "B T N Hn"], shared: Float[Array, "B T Hr"]) -> Float[Array, "B T N H"]:
    """Each head's own part, followed by the part that all heads share."""
    every = jnp.broadcast_to(shared[:, :, None], (*own.shape[:3], shared.shape[-1]))
    return jnp.concatenate([own, every], axis=-1)


def join_heads_backward(
    dout: Float[Array, "B T N H"], *, own_width: int
) -> tuple[Float[Array, "B T N Hn"], Float[Array, "B T Hr"]]:
    """Cotangents of the heads' own parts, and of the shared one: a sum over heads."""
    return dout[..., :own_width], jnp.sum(dout[..., own_width:], axis=2)


def token_gate(y: Float[Array, "B T D"], x: Float[Array, "B T D"], weight: Float[Array, " D"]) -> Float[Array, "B T D"]:
    """``sigmoid(x . weight) * y``: one gate per token."""
    score = jnp.einsum("btd,d->bt", x, weight, preferred_element_type=jnp.float32)
    return jax.nn.sigmoid(score).astype(y.dtype)[..., None] * y
