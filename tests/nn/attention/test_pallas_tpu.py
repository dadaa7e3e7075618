"""The kernels of TPUs, interpreted on CPUs, against dense attention in float64."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.attention.kernels import pallas_tpu
from meshwright.nn.attention.tiles import BlockLists, Tile, TileRule
from tests.nn.arrays import close, draw

BLOCKS = (128, 256)
NOTHING, SOME, ALL = 0, 1, 2


def lists_of(kinds):
    """Lists of a table [B, N, rows, columns]; what follows the last block of a row points outside."""
    columns = kinds.shape[-1]
    order = np.argsort(np.choose(kinds, (2 * columns, 0, columns)) + np.arange(columns), axis=-1)
    total = (kinds != NOTHING).sum(-1)
    index = np.where(np.arange(columns) < total[..., None], order, 10**6)
    return BlockLists(*(jnp.asarray(x, jnp.int32) for x in ((kinds == SOME).sum(-1), total, index)))


def kinds_of(seen, blocks=BLOCKS):
    """How much of each block is seen in a mask [B, N, T, S]."""
    batch, heads, length, num_keys = seen.shape
    tiles = seen.reshape(batch, heads, length // blocks[0], blocks[0], num_keys // blocks[1], blocks[1])
    return np.where(tiles.all((3, 5)), ALL, np.where(tiles.any((3, 5)), SOME, NOTHING))


def dense(inputs, seen, scale, score, slope):
    """Result, log-sum-exp and gradients in float64; ``slope`` is the derivative of ``score``, both of whole arrays."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    scaled = scale * np.einsum("btnh,bsnh->bnts", q, wide_k)
    s = np.where(seen, score(scaled), -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(s).sum(-1))
    p = np.exp(s - np.where(np.isinf(lse), 0, lse)[..., None])
    o = np.einsum("bnts,bsnh->btnh", p, wide_v)
    dp = np.einsum("btnh,bsnh->bnts", dout, wide_v)
    ds = scale * slope(scaled) * p * (dp - (dout * o).sum(-1).swapaxes(1, 2)[..., None])
    dq = np.einsum("bnts,bsnh->btnh", ds, wide_k)
    dk, dv = np.einsum("bnts,btnh->bsnh", ds, q), np.einsum("bnts,btnh->bsnh", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
    return o, lse.swapaxes(1, 2), dq, dk, dv


def random_inputs(sizes, dtype):
    batch, length, num_keys, heads, kv_heads, width, value_width = sizes
    shapes = {
        "q": (batch, length, heads, width),
        "k": (batch, num_keys, kv_heads, width),
        "v": (batch, num_keys, kv_heads, value_width),
        "dout": (batch, length, heads, value_width),
    }
    drawn = {name: jnp.asarray(draw(*shape, seed=i), dtype) for i, (name, shape) in enumerate(shapes.items())}
    return SimpleNamespace(**drawn)


@functools.partial(jax.jit, static_argnames=("rule", "scale"))
def run(rule, scale, arrays, by_query, by_key, q, k, v, dout):
    rule = rule._replace(**arrays)
    o, lse = pallas_tpu.forward(rule, by_query, BLOCKS, scale, q, k, v, interpret=True)
    given = (dout, o, lse)
    return o, lse, *pallas_tpu.backward(rule, (by_query, by_key), BLOCKS, scale, given, q, k, v, interpret=True)


def check(rule, sizes, *, score=lambda s: s, slope=np.ones_like, kinds=None, dtype=np.float32, error=1e-5):
    """Compares values, log-sum-exp and all gradients; what is seen follows from the rule evaluated on whole arrays."""
    inputs = random_inputs(sizes, dtype)
    batch, length, num_keys, heads = sizes[:4]
    whole = Tile(
        np.arange(length)[:, None],
        np.arange(num_keys),
        tuple(x[:, :, None, None] for x in rule.heads),
        tuple(x[..., :, None] for x in rule.rows),
        tuple(x[..., None, :] for x in rule.columns),
    )
    seen = np.asarray(rule.mask(whole)) if rule.mask else np.ones((length, num_keys), bool)
    seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
    if kinds is None:
        kinds = kinds_of(seen)
    else:
        within = np.repeat(np.repeat(kinds, BLOCKS[0], axis=2), BLOCKS[1], axis=3)
        seen = (within == ALL) | ((within == SOME) & seen)
    scale = sizes[5] ** -0.5
    arrays = {name: getattr(rule, name) for name in ("heads", "rows", "columns")}
    given = (arrays, lists_of(kinds), lists_of(kinds.swapaxes(2, 3)))
    # arrays are arguments: the rule that is closed over holds functions alone
    bare = rule._replace(heads=(), rows=(), columns=())
    found = run(bare, scale, *given, inputs.q, inputs.k, inputs.v, inputs.dout)
    expected = dense(inputs, np.broadcast_to(seen, (batch, heads, length, num_keys)), scale, score, slope)
    assert found[1].dtype == np.float32
    for name, x, wanted in zip(("o", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        unseen = np.isneginf(wanted)
        np.testing.assert_array_equal(np.isneginf(x), unseen, err_msg=name)
        close(np.where(unseen, 0, np.asarray(x, np.float64)), np.where(unseen, 0, wanted), error, name)
    return found, expected


def test_causal_with_grouped_heads():
    check(TileRule(mask=lambda tile: tile.key <= tile.query), (2, 512, 512, 4, 2, 64, 64))


def test_bfloat16():
    check(TileRule(mask=lambda tile: tile.key <= tile.query), (1, 512, 512, 2, 1, 64, 64), dtype="bfloat16", error=2e-2)


def test_every_key_with_values_of_another_width():
    """Latent attention on another number of keys, without a mask."""
    check(TileRule(), (1, 256, 768, 2, 2, 192, 128))


def test_window_in_documents():
    """Documents differ between sequences; values of rows and columns of one head serve all."""
    document = np.sort(np.random.default_rng(0).integers(0, 4, (2, 1, 512)), axis=-1).astype(np.int32)

    def mask(tile):
        near = (tile.key <= tile.query) & (tile.query - tile.key < 100)
        return near & (tile.rows[0] == tile.columns[0])

    rule = TileRule(rows=(document,), columns=(document,), mask=mask)
    check(rule, (2, 512, 512, 4, 2, 64, 64))


def test_alibi_and_softcap():
    slopes = 2.0 ** -np.arange(1, 5, dtype=np.float32)[None]
    query, key = np.arange(512)[:, None], np.arange(512)
    bias = slopes[:, :, None, None] * (key - query)

    def score(s, tile):
        return 2.0 * jnp.tanh((s + tile.heads[0] * (tile.key - tile.query)) / 2.0)

    check(
        TileRule(heads=(slopes,), mask=lambda tile: tile.key <= tile.query, score=score),
        (1, 512, 512, 4, 2, 64, 64),
        score=lambda s: 2.0 * np.tanh((s + bias) / 2.0),
        slope=lambda s: 1.0 / np.cosh((s + bias) / 2.0) ** 2,
    )


def test_values_of_rows_and_columns_by_head():
    """The heads of a group have their own bias and mask of the same keys."""
    rows, columns = draw(2, 4, 512, seed=1), draw(2, 4, 512, seed=2)
    bias = rows[..., None] * columns[..., None, :]
    rule = TileRule(
        rows=(rows,),
        columns=(columns,),
        mask=lambda tile: tile.columns[0] < 1.0,
        score=lambda s, tile: s + tile.rows[0] * tile.columns[0],
    )
    shared = np.full((1, 1, 4, 2), SOME)
    check(rule, (2, 512, 512, 4, 2, 64, 64), score=lambda s: s + bias, kinds=shared)


def test_random_blocks_of_each_head_and_rows_that_see_nothing():
    kinds = np.random.default_rng(3).integers(0, 3, (2, 4, 4, 3))
    kinds[1, 2, 1] = NOTHING
    kinds[:, 3] = NOTHING
    rule = TileRule(mask=lambda tile: (tile.key + tile.query) % 3 == 0)
    (o, lse, *_), _ = check(rule, (2, 512, 768, 4, 2, 64, 64), kinds=kinds)
    assert np.isneginf(lse[1, 128:256, 2]).all()
    assert not np.any(o[:, :, 3])


def test_a_score_may_hide_keys():
    """Minus infinity is a mask, in rows that see other keys and in rows that see none."""
    rule = TileRule(score=lambda s, tile: jnp.where((tile.key < 100) & (tile.query > 5), s, -jnp.inf))
    mask = (np.arange(512) < 100) & (np.arange(256)[:, None] > 5)
    check(
        rule,
        (1, 256, 512, 2, 2, 64, 64),
        score=lambda s: np.where(mask, s, -np.inf),
        slope=lambda s: np.where(mask, 1.0, 0.0),
        kinds=np.full((1, 1, 2, 2), ALL),
    )


def test_blocks_outside_the_lists_are_not_read():
    """Their keys and values, and the queries that no list names, may be anything."""
    kinds = np.array([[[[ALL, NOTHING], [SOME, NOTHING], [NOTHING, NOTHING], [ALL, NOTHING]]]])
    inputs = random_inputs((1, 512, 512, 2, 2, 64, 64), np.float32)
    lists = lists_of(kinds), lists_of(kinds.swapaxes(2, 3))
    rule = TileRule(mask=lambda tile: tile.key < 60)
    clean = run(rule, 0.125, {}, *lists, inputs.q, inputs.k, inputs.v, inputs.dout)
    q = inputs.q.at[:, 256:384].set(jnp.nan)
    k, v = (x.at[:, 256:].set(jnp.nan) for x in (inputs.k, inputs.v))
    o, lse, *gradients = run(rule, 0.125, {}, *lists, q, k, v, inputs.dout)
    for found, wanted in zip((o, lse, *gradients), clean, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_keys_in_spans(monkeypatch):
    """A core too small for the cotangents of all keys: each span of keys has its own kernel."""
    monkeypatch.setattr(pallas_tpu, "_KEPT_BYTES", 2**20)
    kinds = np.random.default_rng(4).integers(0, 3, (1, 1, 4, 4))
    kinds[0, 0, 1] = [NOTHING, ALL, NOTHING, NOTHING]
    check(TileRule(mask=lambda tile: tile.key > tile.query), (1, 512, 1024, 2, 1, 64, 64), kinds=kinds)


def test_steps_are_the_blocks_of_the_lists():
    """One step for each block, and one for a row of blocks without any; all else is left out of the grid."""
    kinds = np.random.default_rng(1).integers(0, 3, (2, 4, 6, 5))
    kinds[0, 0, 2] = NOTHING
    for span in (range(5), range(1, 3)):
        words, most = pallas_tpu._steps(lists_of(kinds), span)
        present = (kinds[..., span.start : span.stop] != NOTHING).sum(-1)
        assert most == np.maximum(present, 1).sum(-1).max()
        assert ((words & 1) == 1).sum() == present.sum()


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((4, 8, 64, 64), True), ((8, 7, 64, 64), False), ((3, 1, 256, 256), True), ((4, 1, 256, 256), False)],
)
def test_lists_that_fit_in_scalar_memory(shape, fits):
    """As libtpu compiled them, or refused to; seven heads take the memory of eight."""
    count = np.zeros(shape[:3], np.int32)
    assert pallas_tpu.fits(BlockLists(count, count, np.zeros(shape, np.int32))) == fits
