"""The loss head on one device: cross entropy from statistics of the logits, and the way back.

Per token the loss is ``lse - logit[label]`` with ``lse = log(sum(exp(logits)))``, plus ``z_loss * lse**2``. A label of
-1 counts nothing. The vocabulary may be split over devices: each has the statistics of its own part, from
``first_row`` on, and its own part of the cotangents. Everything here is in float32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.transformer import HEAD_CHUNK_TOKENS

Statistics = tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]


def capped(logits: Array, softcap: float) -> Array:
    """``softcap * tanh(logits / softcap)``; the logits themselves without a cap."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def logits_statistics(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    *,
    first_row: Int[Array, ""] | int,
    softcap: float = 0.0,
) -> Statistics:
    """Per token over the local part of V: largest logit, sum of exp(logit - largest), the label's logit or 0."""
    logits = capped(logits, softcap)
    peak = jnp.max(logits, axis=-1)
    total = jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1)
    local = labels - first_row
    inside = (local >= 0) & (local < logits.shape[-1])
    found = jnp.take_along_axis(logits, jnp.where(inside, local, 0)[..., None], axis=-1)[..., 0]
    return peak, total, jnp.where(inside, found, 0.0)


def rescale(
    total: Float[Array, "B T"], local_peak: Float[Array, "B T"], peak: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """A sum of exp(logit - local peak) as one of exp(logit - peak)."""
    return total * jnp.exp(local_peak - peak)


def sum_loss(
    peak: Float[Array, "B T"],
    scaled: Float[Array, "B T"],
    picked: Float[Array, "B T"],
    labels: Int[Array, "B T"],
    *,
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """The loss summed over the local tokens that have a label."""
    lse = jnp.log(scaled) + peak
    return jnp.sum(jnp.where(labels >= 0, lse - picked + z_loss * lse**2, 0.0))


def sum_loss_backward(
    dloss: Float[Array, ""],
    peak: Float[Array, "B T"],
    scaled: Float[Array, "B T"],
    labels: Int[Array, "B T"],
    *,
    z_loss: float = 0.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Cotangents of the sums of exponentials and of the picked logits."""
    counted = jnp.where(labels >= 0, dloss, 0.0)
    lse = jnp.log(scaled) + peak
    return counted * (1 + 2 * z_loss * lse) / scaled, -counted


def logits_backward(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    peak: Float[Array, "B T"],
    dscaled: Float[Array, "B T"],
    dpicked: Float[Array, "B T"],
    *,
    first_row: Int[Array, ""] | int,
    softcap: float = 0.0,
) -> Float[Array, "B T V"]:
    """``dscaled * exp(logit - peak)``, and ``dpicked`` at the label, through the cap."""
    soft = capped(logits, softcap)
    at = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == (labels - first_row)[..., None]
    found = dscaled[..., None] * jnp.exp(soft - peak[..., None]) + jnp.where(at, dpicked[..., None], 0.0)
    return found * (1 - (soft / softcap) ** 2) if softcap else found


def num_chunks(batch: int, length: int, chunk_tokens: int) -> int:
    """Chunks of T, as many as keep a chunk within ``chunk_tokens`` tokens and divide the length."""
    chunks = min(length, max(1, math.ceil(batch * length / chunk_tokens)))
    while length % chunks:
        chunks += 1
    return chunks


def _in_chunks(array: Array, chunks: int) -> Array:
    batch, length = array.shape[:2]
    return jnp.moveaxis(array.reshape(batch, chunks, length // chunks, *array.shape[2:]), 1, 0)


def _joined(chunks: Array) -> Array:
    moved = jnp.moveaxis(chunks, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


def chunked_logits_statistics(
    x: Float[Array, "B T D"],
    table: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    *,
    first_row: Int[Array, ""] | int,
    softcap: float = 0.0,
    chunk_tokens: int = HEAD_CHUNK_TOKENS,
) -> Statistics:
    """The statistics from ``x * table`` in chunks of T, so that B x T x V never exists at once."""
    chunks = num_chunks(labels.shape[0], labels.shape[1], chunk_tokens)

    def one(_: None, given: tuple[Array, Array]) -> tuple[None, Statistics]:
        here, of_here = given
        logits = jnp.einsum("BTD,DV->BTV", here, table, preferred_element_type=jnp.float32)
        return None, logits_statistics(logits, of_here, first_row=first_row, softcap=softcap)

    _, (peak, total, picked) = jax.lax.scan(one, None, (_in_chunks(x, chunks), _in_chunks(labels, chunks)))
    return _joined(peak), _joined(total), _joined(picked)


def chunked_logits_backward(
    x: Float[Array, "B T D"],
    table: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    peak: Float[Array, "B T"],
    dscaled: Float[Array, "B T"],
    dpicked: Float[Array, "B T"],
    *,
    first_row: Int[Array, ""] | int,
    softcap: float = 0.0,
    chunk_tokens: int = HEAD_CHUNK_TOKENS,
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"]]:
    """Cotangents of the stream and of the table; logits and their cotangent exist one chunk at a time."""
    chunks = num_chunks(labels.shape[0], labels.shape[1], chunk_tokens)

    def one(dtable: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        here, *rows = given
        logits = jnp.einsum("BTD,DV->BTV", here, table, preferred_element_type=jnp.float32)
        dlogits = logits_backward(logits, *rows, first_row=first_row, softcap=softcap).astype(x.dtype)
        added = jnp.einsum("BTD,BTV->DV", here, dlogits, preferred_element_type=jnp.float32)
        return dtable + added, jnp.einsum("BTV,DV->BTD", dlogits, table)

    given = tuple(_in_chunks(a, chunks) for a in (x, labels, peak, dscaled, dpicked))
    dtable, dx = jax.lax.scan(one, jnp.zeros(table.shape, jnp.float32), given)
    return _joined(dx), dtable.astype(table.dtype)
