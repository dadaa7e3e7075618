"""The local op kinds of a program as pure JAX functions of one device's blocks.

Each works on the block it is given; nothing here communicates. Norms, rotations, scores with their softmax, and
the loss are in float32 whatever the dtype of the weights; products take their operands as they are.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshwright.algebra.transformer import HEAD_CHUNK_TOKENS
from meshwright.spec.model import Model


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Causal grouped-query attention: a query sees keys at its own and earlier positions."""
    batch, length, heads, width = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    # Heads in front and a group's queries in one row of matrices: plain batched products, fast on every backend.
    rows = q.reshape(batch, length, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    scores = jnp.matmul(
        rows.reshape(batch, kv_heads, group * length, width),
        k.transpose(0, 2, 3, 1),
        preferred_element_type=jnp.float32,
    )
    scores_BKGTS = scores.reshape(batch, kv_heads, group, length, -1) * scale
    visible = positions[:, None, None, :, None] >= key_positions[:, None, None, None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores_BKGTS, -jnp.inf), axis=-1).astype(v.dtype)
    mixed = jnp.matmul(weights.reshape(batch, kv_heads, group * length, -1), v.transpose(0, 2, 1, 3))
    return mixed.reshape(batch, kv_heads, group, length, width).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def silu_mul(gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    """``silu(gate) * up``."""
    return jax.nn.silu(gate) * up


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


Statistics = tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]


def logits_statistics(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"], *, first_row: Int[Array, ""] | int
) -> Statistics:
    """Per token over the local part of V: largest logit, sum of exp(logit - largest), the label's logit.

    The largest logit carries no gradient: it cancels in the loss.
    """
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    total = jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1)
    local = labels - first_row
    inside = (local >= 0) & (local < logits.shape[-1])
    found = jnp.take_along_axis(logits, jnp.where(inside, local, 0)[..., None], axis=-1)[..., 0]
    return peak, total, jnp.where(inside, found, 0.0)


def chunked_logits_statistics(
    x: Float[Array, "B T D"],
    table: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    *,
    first_row: Int[Array, ""] | int,
    chunk_tokens: int = HEAD_CHUNK_TOKENS,
) -> Statistics:
    """The same numbers from ``x * table`` in chunks of T, so that B x T x V never exists at once."""
    batch, length = labels.shape
    chunks = max(1, math.ceil(batch * length / chunk_tokens))
    while length % chunks:
        chunks += 1

    @jax.checkpoint
    def one(x_chunk: Array, labels_chunk: Array) -> Statistics:
        logits = jnp.einsum("BTD,DV->BTV", x_chunk, table, preferred_element_type=jnp.float32)
        return logits_statistics(logits, labels_chunk, first_row=first_row)

    split = tuple(jnp.moveaxis(a.reshape(batch, chunks, -1, *a.shape[2:]), 1, 0) for a in (x, labels))
    _, parts = jax.lax.scan(lambda carry, pair: (carry, one(*pair)), None, split)
    peak, total, picked = (jnp.moveaxis(p, 0, 1).reshape(batch, length) for p in parts)
    return peak, total, picked


def rescale(
    total: Float[Array, "B T"], local_peak: Float[Array, "B T"], peak: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """A sum of exp(logit - local peak) as one of exp(logit - peak)."""
    return total * jnp.exp(local_peak - peak)


def sum_loss(peak: Float[Array, "B T"], scaled: Float[Array, "B T"], picked: Float[Array, "B T"]) -> Float[Array, ""]:
    """Sum over the local tokens of -log softmax(logits)[label]."""
    return jnp.sum(jnp.log(scaled) + peak - picked)
