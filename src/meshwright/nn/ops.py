"""The local op kinds of a program as pure JAX functions of one device's blocks.

Each works on the block it is given; nothing here communicates. Norms, rotations, scores with their softmax, and
the loss are in float32 whatever the dtype of the weights; products take their operands as they are.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.transformer import HEAD_CHUNK_TOKENS
from meshwright.spec.model import Model, RopeScaling


def rms_norm(x: Float[Array, "B T D"], scale: Float[Array, " D"], *, eps: float) -> Float[Array, "B T D"]:
    """``x / sqrt(mean(x**2) + eps) * scale`` over the last dim."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * scale.astype(x.dtype)[None, None]


def rope_frequencies(model: Model) -> Float[Array, " half"]:
    """Radians per position of each of the H / 2 rotations, with llama 3's or linear scaling applied."""
    half = model.head_dim // 2
    frequencies = 1.0 / model.rope_theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    scaling = model.rope_scaling
    if scaling is None or scaling.kind == "default":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: Float[Array, " half"], scaling: RopeScaling) -> Float[Array, " half"]:
    """Long wavelengths divided by ``factor``, short ones kept, a linear blend between (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_positions
    if low is None or high is None or original is None:
        raise AssertionError("llama3 rope scaling lacks its factors")
    wavelengths = 2 * math.pi / frequencies
    blend = jnp.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def rope(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], *, frequencies: Float[Array, " half"]
) -> Float[Array, "B T N H"]:
    """Rotates pairs (i, i + H/2) of each head by position times frequency."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


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


def embed(
    tokens: Int[Array, "B T"], table: Float[Array, "V D"], *, first_row: Int[Array, ""] | int
) -> Float[Array, "B T D"]:
    """Rows of the part of the table that starts at ``first_row``; zeros for tokens outside of it."""
    local = tokens - first_row
    inside = (local >= 0) & (local < table.shape[0])
    rows = jnp.take(table, jnp.where(inside, local, 0), axis=0)
    return jnp.where(inside[..., None], rows, jnp.zeros((), rows.dtype))


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
