"""The loss head against its formula in float64, written here on its own, gradients included."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.ops import fused_head as head
from meshwright.nn.ops.linear_cross_entropy import (
    logits_backward,
    logits_statistics,
    rescale,
    sum_loss,
    sum_loss_backward,
)
from tests.nn.arrays import close

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 7, 5, 24
OPTIONS = [{}, {"softcap": 4.0}, {"z_loss": 0.05}, {"softcap": 4.0, "z_loss": 0.05}]


class Case(NamedTuple):
    x: np.ndarray
    table: np.ndarray
    labels: np.ndarray


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 6)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    labels[0, :3] = labels[2, -1] = -1
    return Case(
        rng.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32) * 2,
        rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32),
        labels,
    )


class Answer(NamedTuple):
    loss: float
    dx: np.ndarray
    dtable: np.ndarray


def formula(case, *, softcap=0.0, z_loss=0.0):
    """Loss and gradients by hand: d(lse)/d(logit) is the softmax."""
    x, table = case.x.astype(np.float64).reshape(-1, WIDTH), case.table.astype(np.float64)
    labels = case.labels.reshape(-1)
    raw = x @ table
    logits = softcap * np.tanh(raw / softcap) if softcap else raw
    lse = np.log(np.exp(logits).sum(-1))
    loss, dlogits = 0.0, np.zeros_like(logits)
    for row, label in enumerate(labels):
        if label < 0:
            continue
        loss += lse[row] - logits[row, label] + z_loss * lse[row] ** 2
        dlogits[row] = np.exp(logits[row] - lse[row]) * (1 + 2 * z_loss * lse[row])
        dlogits[row, label] -= 1
    draw = dlogits * (1 - np.tanh(raw / softcap) ** 2) if softcap else dlogits
    return Answer(loss, (draw @ table.T).reshape(case.x.shape), x.T @ draw)


def arrays(case):
    return (jnp.asarray(a) for a in case)


def in_parts(case, parts, *, chunked, softcap=0.0, z_loss=0.0):
    """Loss and gradients with the vocabulary in so many parts, put together as the derived steps do."""
    x, table, labels = arrays(case)
    rows = VOCABULARY // parts
    own = [(i * rows, table[:, i * rows : (i + 1) * rows]) for i in range(parts)]
    if chunked:
        found = [head.chunked_logits_statistics(x, t, labels, first_row=first, softcap=softcap) for first, t in own]
    else:
        found = [logits_statistics(x @ t, labels, first_row=first, softcap=softcap) for first, t in own]
    peak = jnp.max(jnp.stack([f[0] for f in found]), axis=0)
    scaled = sum(rescale(f[1], f[0], peak) for f in found)
    picked = sum(f[2] for f in found)
    loss = sum_loss(peak, scaled, picked, labels, z_loss=z_loss)
    given = (labels, peak, *sum_loss_backward(jnp.float32(1), peak, scaled, labels, z_loss=z_loss))
    if chunked:
        back = [head.chunked_logits_backward(x, t, *given, first_row=first, softcap=softcap) for first, t in own]
    else:
        logits = [logits_backward(x @ t, *given, first_row=first, softcap=softcap) for first, t in own]
        back = [(d @ t.T, jnp.einsum("btd,btv->dv", x, d)) for d, (_, t) in zip(logits, own, strict=True)]
    return loss, sum(b[0] for b in back), jnp.concatenate([b[1] for b in back], axis=1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_loss_and_gradients_are_the_formula(case, parts, chunked, options):
    expected = formula(case, **options)
    loss, dx, dtable = in_parts(case, parts, chunked=chunked, **options)
    close(loss, expected.loss)
    close(dx, expected.dx)
    close(dtable, expected.dtable)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_fused_head_is_the_formula(case, options):
    expected = formula(case, **options)
    loss, dx, dtable = jax.jit(partial(head.fused_head, **options))(*arrays(case))
    close(loss, expected.loss)
    close(dx, expected.dx)
    close(dtable, expected.dtable)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_a_bias_is_a_row_of_the_table_for_an_entry_of_one(case, softcap):
    bias = np.random.default_rng(1).normal(size=VOCABULARY).astype(np.float32)
    ones = np.ones((BATCH, LENGTH, 1), np.float32)
    longer = Case(np.concatenate([case.x, ones], -1), np.concatenate([case.table, bias[None]]), case.labels)
    with_row = head.fused_head(*arrays(longer), softcap=softcap)
    expected = (with_row[0], with_row[1][..., :-1], with_row[2][:-1], with_row[2][-1])
    x, table, labels = arrays(case)
    statistics = head.chunked_logits_statistics(x, table, labels, jnp.asarray(bias), first_row=0, softcap=softcap)
    peak, scaled, _ = statistics
    given = (labels, peak, *sum_loss_backward(jnp.float32(1), peak, scaled, labels))
    cotangents = head.chunked_logits_backward(x, table, *given, jnp.asarray(bias), first_row=0, softcap=softcap)
    in_chunks = (sum_loss(*statistics, labels), *cotangents)
    for found in (head.fused_head(x, table, labels, jnp.asarray(bias), softcap=softcap), in_chunks):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    kept = logits_backward(x @ table, *given, jnp.asarray(bias), first_row=0, softcap=softcap)
    close(jnp.sum(kept, axis=(0, 1)), expected[3])
    for one, other in zip(
        logits_statistics(x @ table, labels, jnp.asarray(bias), first_row=0, softcap=softcap), statistics, strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 6, 7, 12, 1000])
def test_the_size_of_a_chunk_changes_nothing(case, monkeypatch, chunk_tokens):
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk_tokens)
    expected = formula(case)
    loss, dx, dtable = head.fused_head(*arrays(case))
    close(loss, expected.loss)
    close(dx, expected.dx)
    close(dtable, expected.dtable)
    close(in_parts(case, 1, chunked=True)[2], expected.dtable)


def test_tokens_without_a_label_have_no_loss_and_no_gradient(case):
    nothing = np.full_like(case.labels, -1)
    loss, dx, dtable = head.fused_head(*arrays(case._replace(labels=nothing)))
    assert float(loss) == 0
    assert not np.any(dx)
    assert not np.any(dtable)
    dx = head.fused_head(*arrays(case))[1]
    assert not np.any(np.asarray(dx)[case.labels < 0])


def test_large_logits_do_not_overflow(case):
    loss, dx, _ = head.fused_head(*arrays(case._replace(x=case.x * 100)))
    raw = (case.x.astype(np.float64) * 100).reshape(-1, WIDTH) @ case.table.astype(np.float64)
    peak = raw.max(-1)
    lse = np.log(np.exp(raw - peak[:, None]).sum(-1)) + peak
    labels = case.labels.reshape(-1)
    close(loss, np.sum(np.where(labels >= 0, lse - raw[np.arange(labels.size), labels], 0)))
    assert np.all(np.isfinite(dx))


def test_chunks_are_even_and_no_larger_than_asked(monkeypatch):
    for batch, length, most in [(8, 512, 1024), (3, 509, 1024), (1, 7, 3), (4, 5, 1), (2, 16, 1000)]:
        monkeypatch.setattr(head, "CHUNK_TOKENS", most)
        size = head.chunk_length(batch, length)
        assert size == 1 or batch * (size - 1) < most
        assert -(-length // size) <= max(1, -(-batch * length // most))
    monkeypatch.setattr(head, "CHUNK_TOKENS", 1024)
    assert head.chunk_length(8, 512) == 128
    assert head.chunk_length(3, 509) == 255


def test_the_loss_alone_makes_no_cotangents(case, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 1000)
    given = list(arrays(case))

    def flops(function):
        return jax.jit(function).lower(*given).compile().cost_analysis()["flops"]

    assert flops(lambda *a: head.fused_head(*a)[0]) < 0.6 * flops(head.fused_head)


def test_narrow_streams_give_narrow_cotangents(case):
    x, table, labels = arrays(case)
    loss, dx, dtable = head.fused_head(x.astype(jnp.bfloat16), table.astype(jnp.bfloat16), labels)
    assert (loss.dtype, dx.dtype, dtable.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    expected = formula(case)
    np.testing.assert_allclose(dtable.astype(np.float32), expected.dtable, atol=0.03 * np.abs(expected.dtable).max())
