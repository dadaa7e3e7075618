"""The loss head on one device: cross entropy from statistics of the logits, and the way back.

Two forms. Where the vocabulary is split over devices, each makes the statistics of its own part of the logits, which
are put together before the loss, and makes the logits again on the way back. Where it is whole, `fused_head` makes the
loss and the cotangents from the same logits, chunk by chunk: three products instead of four.

Per token the loss is ``lse - logit[label]`` with ``lse = log(sum(exp(logits)))``, plus ``z_loss * lse**2``. A label of
-1 counts nothing. The vocabulary may be split over devices: each has the statistics of its own part, from
``first_row`` on, and its own part of the cotangents. Everything here is in float32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.ops.fused_head import CHUNK_TOKENS
from meshwright.nn.contract import contract

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


def chunk_length(batch: int, length: int, chunk_tokens: int) -> int:
    """Positions of a chunk: as even as can be, of at most ``chunk_tokens`` tokens but at least one position."""
    chunks = min(length, max(1, math.ceil(batch * length / chunk_tokens)))
    return math.ceil(length / chunks)


def _in_chunks(array: Array, size: int, fill: float = 0) -> Array:
    """[B, T, ...] as [chunks, B, size, ...], the last chunk filled up."""
    batch, length = array.shape[:2]
    missing = -length % size
    if missing:
        array = jnp.pad(array, ((0, 0), (0, missing), *((0, 0) for _ in array.shape[2:])), constant_values=fill)
    return jnp.moveaxis(array.reshape(batch, -1, size, *array.shape[2:]), 1, 0)


def _joined(chunks: Array, length: int) -> Array:
    """The chunks one after the other again, without what they were filled up with."""
    moved = jnp.moveaxis(chunks, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])[:, :length]


def chunked_logits_statistics(
    x: Float[Array, "B T D"],
    table: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    *,
    first_row: Int[Array, ""] | int,
    softcap: float = 0.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Statistics:
    """The statistics from ``x * table`` in chunks of T, so that B x T x V never exists at once."""
    size = chunk_length(labels.shape[0], labels.shape[1], chunk_tokens)

    def one(_: None, given: tuple[Array, Array]) -> tuple[None, Statistics]:
        here, of_here = given
        return None, logits_statistics(_logits(here, table), of_here, first_row=first_row, softcap=softcap)

    _, found = jax.lax.scan(one, None, (_in_chunks(x, size), _in_chunks(labels, size, -1)))
    peak, total, picked = (_joined(part, labels.shape[1]) for part in found)
    return peak, total, picked


def _logits(x: Array, table: Array) -> Array:
    return contract("btd,dv->btv", x, table, dtype=jnp.float32)


def _cotangents(x: Array, table: Array, dlogits: Array) -> tuple[Array, Array]:
    """That of the stream, and that of the table in float32."""
    narrow = dlogits.astype(x.dtype)
    return contract("btv,dv->btd", narrow, table), contract("btd,btv->dv", x, narrow, dtype=jnp.float32)


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
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"]]:
    """Cotangents of the stream and of the table; logits and their cotangent exist one chunk at a time."""
    size = chunk_length(labels.shape[0], labels.shape[1], chunk_tokens)

    def one(dtable: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        here, *rows = given
        dlogits = logits_backward(_logits(here, table), *rows, first_row=first_row, softcap=softcap)
        dx, added = _cotangents(here, table, dlogits)
        return dtable + added, dx

    # Rows that fill up a chunk have no cotangent, and so change nothing.
    given = tuple(_in_chunks(a, size, -1 if a is labels else 0) for a in (x, labels, peak, dscaled, dpicked))
    dtable, dx = jax.lax.scan(one, jnp.zeros(table.shape, jnp.float32), given)
    return _joined(dx, labels.shape[1]), dtable.astype(table.dtype)


def fused_head(
    x: Float[Array, "B T D"],
    table: Float[Array, "D V"],
    labels: Int[Array, "B T"],
    *,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, ""], Float[Array, "B T D"], Float[Array, "D V"]]:
    """The summed loss, and the cotangents of the stream and of the whole table where the loss's own is 1.

    The logits of a chunk are made once and used for all three. Who wants the loss alone pays for nothing else: what
    is not used is not computed under `jax.jit`.
    """
    size = chunk_length(labels.shape[0], labels.shape[1], chunk_tokens)

    def one(carry: tuple[Array, Array], given: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        here, of_here = given
        loss, dtable = carry
        added, dlogits = _loss_and_cotangent(_logits(here, table), of_here, softcap=softcap, z_loss=z_loss)
        dx, dtable_here = _cotangents(here, table, dlogits)
        return (loss + added, dtable + dtable_here), dx

    start = (jnp.zeros((), jnp.float32), jnp.zeros(table.shape, jnp.float32))
    (loss, dtable), dx = jax.lax.scan(one, start, (_in_chunks(x, size), _in_chunks(labels, size, -1)))
    return loss, _joined(dx, labels.shape[1]), dtable.astype(table.dtype)


def _loss_and_cotangent(logits: Array, labels: Array, *, softcap: float, z_loss: float) -> tuple[Array, Array]:
    """The summed loss of some tokens, and the cotangent of their logits."""
    peak, total, picked = logits_statistics(logits, labels, first_row=0, softcap=softcap)
    loss = sum_loss(peak, total, picked, labels, z_loss=z_loss)
    dtotal, dpicked = sum_loss_backward(jnp.float32(1), peak, total, labels, z_loss=z_loss)
    return loss, logits_backward(logits, labels, peak, dtotal, dpicked, first_row=0, softcap=softcap)
