"""Attention on one device under every mask and score rule: values and all gradients, beside dense float64.

Blocks and tiles are made small, so that small arrays have several.
"""

from dataclasses import replace
from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from meshwright.core.errors import InputError
from meshwright.masks import kernels, mods
from meshwright.masks.table import block_table
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.flex import flex_attention
from meshwright.nn.attention.kernels import xla
from meshwright.nn.attention.tiles import Mod
from tests.nn.attention import rules
from tests.nn.attention.rules import arrays, close, dense, equations, expected, own_score, rule_of

SCALE = 0.3


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "TILE_ROWS", 16)
    monkeypatch.setattr(xla, "WHOLE", 0)
    monkeypatch.setattr(xla, "ROWS", 16)
    monkeypatch.setattr(xla, "LISTED", 8)
    monkeypatch.setattr(xla, "WIDE", 16)


def ours(call, given, *, traced=False):
    """(o, lse, cotangents) of both passes, compiled; ``traced`` makes the arrays of the mask part of the program."""

    @jax.jit
    def both(given, mask, score):
        own = call
        if call.mask is not None and traced:
            own = replace(own, mask=call.mask._replace(arrays=mask))
        if call.score is not None:
            own = replace(own, score=call.score._replace(arrays=score))
        qkv = [given[name] for name in "qkv"]
        o, lse = attention(own, *qkv)
        return o, lse, *attention_backward(own, (given["dout"], o, lse), *qkv)

    return both(given, call.mask.arrays if call.mask else (), call.score.arrays if call.score else ())


def compare(mask, score, *, way="loops", sinks=False, T=50, S=None, **sizes):
    """Checks one case; ``way`` is "tiles" (unrolled), "halves" (unrolled, of arrays that are not known while tracing),
    "loops" or "together" (the form of other platforms)."""
    given = arrays(T=T, S=S, **sizes)
    made = rule_of(mask, score, max(T, S or 0))
    extra = np.array([0.5, -1.0, 0.0, 2.0], np.float32)[: given["q"].shape[2]] if sinks else None
    facts = {"scale": SCALE, "mask": made[0], "score": made[1], "sinks": extra, "learns": score is not None}
    call = AttentionCall(**facts, platform="other" if way == "together" else "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "LONGEST", 0 if way == "loops" else xla.LONGEST)
        found = ours(call, given, traced=way != "tiles")
    wanted = expected(SCALE, *made, extra, given)
    names = ["o", "lse", "dq", "dk", "dv", *["dsinks"] * sinks, *(f"learnt {n}" for n in range(99))]
    assert len(found) == len(wanted)
    for name, value, one in zip(names, found, wanted, strict=False):
        if one is not None:
            close(value, one, f"{mask}, {score}, {way}: {name}")


WAYS = ("tiles", "loops", "together")
GRID = [
    *((mask, None, way) for mask in rules.MASKS for way in WAYS),
    *(("causal", score, way) for score in (*rules.SCORES, "distance", "own") for way in WAYS),
]
ALWAYS = {
    *(("tiles", mask, None) for mask in ("window", "canvas")),
    ("loops", "shared prefix", None),
    ("loops", "causal", "own"),
    ("tiles", "causal", "several"),
    *(("together", "transfusion", None), ("together", "graph", None)),
}


@pytest.mark.parametrize(
    ("mask", "score", "way"),
    [
        pytest.param(m, s, w, id=f"{m}, {s}, {w}", marks=[] if (w, m, s) in ALWAYS else pytest.mark.slow)
        for m, s, w in GRID
    ],
)
def test_values_and_gradients(mask, score, way):
    compare(mask, score, way=way, sinks=mask in ("causal", "documents"))


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "score"), [("documents", None), ("documents", "own"), ("windows of documents", None)])
def test_halves_of_tiles(mask, score):
    """Where a term of the mask is known while tracing, tiles are unrolled, and run by halves if the arrays allow."""
    compare(mask, score, way="halves", T=90, N=4, K=2)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "loops" else pytest.mark.slow) for way in WAYS])
@pytest.mark.parametrize(
    "width", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_widths_of_heads(width, way):
    compare("documents", "several", way=way, H=width, Hv=width // 2, T=41)


@pytest.mark.parametrize("heads", [(3, 1), (4, 4), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_key_heads(heads):
    compare("causal", None, way="tiles", N=heads[0], K=heads[1])


def test_fewer_keys_than_queries_and_the_other_way_round():
    compare("prefix", "relative", T=50, S=23)
    compare("window", None, T=20, S=61)


def random_mask(draw, length):
    """A mask that a hypothesis draws: terms with random parameters and arrays, joined at random."""
    numbers = np.random.default_rng(draw(strategies.integers(0, 99)))
    terms = draw(
        strategies.lists(
            strategies.sampled_from(("causal", "local", "document", "blocks", "heads")), min_size=1, max_size=3
        )
    )
    size = draw(strategies.integers(1, length))
    ids = np.sort(numbers.integers(0, 4, (rules.BATCH, length)), axis=1)
    cells = numbers.random((rules.BATCH, -(-length // 8), -(-length // 8))) < 0.4
    made = {
        "causal": mods.causal(),
        "local": mods.local(size),
        "document": mods.document(ids),
        "blocks": lambda b, h, q_idx, kv_idx: mods.take(cells, b, q_idx // 8, kv_idx // 8),
        "heads": lambda b, h, q_idx, kv_idx: kv_idx + h * size <= q_idx + size,
    }
    join = draw(strategies.sampled_from((mods.and_masks, mods.or_masks)))
    return join(*(made[term] for term in terms))


@hypothesis.settings(max_examples=3, deadline=None)
@hypothesis.given(data=strategies.data())
def test_random_masks(data):
    length = data.draw(strategies.sampled_from((7, 33, 48)))
    mask = Mod(lambda: random)
    random = random_mask(data.draw, length)
    given = arrays(T=length)
    call = AttentionCall(scale=SCALE, mask=mask, platform="cpu")
    for name, value, wanted in zip(
        ("o", "lse", "dq", "dk", "dv"), ours(call, given), expected(SCALE, mask, None, None, given), strict=True
    ):
        close(value, wanted, name)


@pytest.mark.slow
def test_rows_in_any_order():
    """Indices are those of the rows, not their places: a permutation of rows permutes the result."""
    given, order = arrays(T=50), np.random.default_rng(1).permutation(50).astype(np.int32)
    mask, score = rule_of("tree", "alibi", 50)
    call = AttentionCall(scale=SCALE, mask=mask, score=score, platform="cpu")
    plain = ours(call, given)
    moved = ours(replace(call, q_idx=order, kv_idx=order), {name: value[:, order] for name, value in given.items()})
    for one, other in zip(plain, moved, strict=True):
        close(other, np.asarray(one)[:, order])


def test_neighbours_in_tiles_give_what_rows_of_a_canvas_give():
    """NATTEN's permutation test: the same window, tokens in tiles of the canvas."""
    width, height, kernel, tile = 16, 12, 5, 4
    given = arrays(T=width * height)
    index = np.arange(width * height)
    number, within = index // tile**2, index % tile**2
    row = number // (width // tile) * tile + within // tile
    column = number % (width // tile) * tile + within % tile
    order = row * width + column
    ways = {}
    for side in (0, tile):
        mask = Mod(partial(mods.neighbourhood_2d, width, height, kernel, side))
        own = given if not side else {name: value[:, order] for name, value in given.items()}
        ways[side] = ours(AttentionCall(scale=SCALE, mask=mask, platform="cpu"), own)
    for one, other in zip(ways[0], ways[tile], strict=True):
        close(other, np.asarray(one)[:, order])


def test_rows_that_see_nothing_are_zero_and_not_nan():
    """Whole blocks of queries and of keys, and single rows of a block."""
    given = arrays(T=64)
    mask = Mod(lambda: lambda b, h, q_idx, kv_idx: (kv_idx > q_idx + 20) & (q_idx % 3 > 0))
    for platform in ("cpu", "other"):
        o, lse, *found = ours(AttentionCall(scale=SCALE, mask=mask, platform=platform), given)
        wanted = expected(SCALE, mask, None, None, given)
        close(o, wanted[0])
        close(lse, wanted[1])
        blind = ~np.isfinite(wanted[1])
        assert blind.any()
        assert not blind.all()
        assert np.all(np.asarray(o)[blind] == 0)
        assert all(np.all(np.isfinite(x)) for x in found)
        assert np.all(np.asarray(found[0])[blind] == 0)


def test_scores_far_apart_do_not_overflow():
    given = arrays(T=40)
    given["q"] = given["q"] * 1000
    mask, _ = rule_of("causal", None, 40)
    for traced in (False, True):
        o, lse, *found = ours(AttentionCall(scale=SCALE, mask=mask, platform="cpu"), given, traced=traced)
        assert all(np.all(np.isfinite(x)) for x in (o, lse, *found))


def test_bfloat16_is_summed_in_float32():
    given = {n: jnp.asarray(a, jnp.bfloat16) for n, a in arrays(T=40, H=16).items()}
    rounded = {n: np.asarray(a, np.float64) for n, a in given.items()}
    mask, _ = rule_of("causal", None, 40)
    o, lse, *found = ours(AttentionCall(scale=SCALE, mask=mask, platform="cpu"), given)
    wanted = dense(np, SCALE, mask, None, None, *(rounded[n] for n in "qkv"))
    assert o.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    # The scores are exact to float32 (the scale is applied there); weights and results are rounded to 8 bits.
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(o, np.float32), wanted[0], atol=2**-7 * np.abs(wanted[0]).max())
    assert [x.dtype for x in found] == [jnp.bfloat16] * 3


@pytest.mark.parametrize("mask", ["causal", "sliding_window(16)", "neighbourhood(128,9)", "noop"])
def test_empty_tiles_are_not_computed(mask):
    """Products of queries with keys, counted in the traced program: those of the blocks that exist, and no more."""
    given = arrays(T=128, N=1, K=1, batch=1)
    made = rules.mask_of(mask, 128)
    call = AttentionCall(scale=SCALE, mask=made, platform="cpu")
    jaxpr = jax.make_jaxpr(lambda q, k, v: attention(call, q, k, v)[0])(*(given[n] for n in "qkv")).jaxpr
    shapes = [e.outvars[0].aval.shape for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    table = block_table(made, q_len=128, kv_len=128, block=16)
    live = 16 * 16 * (table.count(1) + table.count(2))
    assert sum(shape[-2] * shape[-1] for shape in shapes if shape[-1] != 8) == live


def test_functions_with_captured_arrays_have_gradients():
    """The front door: a mask and a score rule that close over arrays of the program."""
    given, rng = arrays(T=50, S=44), np.random.default_rng(2)
    ids = np.sort(rng.integers(0, 4, (2, 50)), axis=1)
    table, sinks = rng.normal(size=(4, 60)).astype(np.float32), rng.normal(size=4).astype(np.float32)

    def mask_of(ids):
        return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx <= q_idx)

    def score_of(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[h, jnp.clip(q_idx - kv_idx + 30, 0, 59)]

    @jax.jit
    @partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def slopes(qkv, table, sinks, ids):
        o, lse = flex_attention(*qkv, score_of(table), mask_of(ids), scale=SCALE, sinks=sinks, return_lse=True)
        return jnp.sum(o * given["dout"]), (o, lse)

    qkv = [jnp.asarray(given[name]) for name in "qkv"]
    (dqkv, dtable, dsinks), (o, lse) = slopes(qkv, table, sinks, jnp.asarray(ids))
    score = Mod(score_of, (table,))
    wanted = expected(SCALE, Mod(lambda: mask_of(jnp.asarray(ids))), score, sinks, given)
    for value, one in zip((o, lse, *dqkv, dsinks, dtable), wanted, strict=True):
        close(value, one)


@pytest.mark.parametrize("rule", [None, "own"])
def test_the_log_sum_exp_has_gradients(rule):
    """Cotangents of result and log-sum-exp, of queries, keys, values and sinks, beside autodiff of the dense form."""
    given, rng = arrays(T=40), np.random.default_rng(3)
    sinks, dlse = rng.normal(size=4).astype(np.float32), rng.normal(size=(2, 40, 4)).astype(np.float32)
    score = own_score(40) if rule else None
    mods_of = score and score.make(*map(jnp.asarray, score.arrays)), mods.causal()

    def loss(run, qkv, sinks):
        o, lse = run(*qkv, sinks)
        return jnp.sum(o * given["dout"]) + jnp.sum(lse * dlse)

    def ours(q, k, v, sinks):
        return flex_attention(q, k, v, *mods_of, scale=SCALE, sinks=sinks, return_lse=True)

    def plain(q, k, v, sinks):
        return dense(jnp, SCALE, mods_of[1], mods_of[0], sinks, q, k, v)

    qkv = [jnp.asarray(given[name]) for name in "qkv"]
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.jit(jax.grad(partial(loss, plain), argnums=(0, 1)))(qkv, jnp.asarray(sinks))
    found = jax.jit(jax.grad(partial(loss, ours), argnums=(0, 1)))(qkv, jnp.asarray(sinks))
    for value, one in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(value, one)


@pytest.mark.parametrize("value", [True, np.bool_(True), jnp.bool_(True)])
def test_a_rule_may_be_a_constant(value):
    q = np.random.default_rng(0).normal(size=(1, 20, 2, 8)).astype(np.float32)
    close(
        flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: 1.0, lambda b, h, q_idx, kv_idx: value),
        q.mean(1, keepdims=True).repeat(20, 1),
    )
    assert block_table(lambda b, h, q_idx, kv_idx: bool(value), q_len=20, kv_len=20, block=8).sparsity() == 0


def test_a_table_of_blocks_that_is_given_is_used():
    """A table that calls more blocks empty than the mask does leaves these out."""
    given = arrays(T=96)
    causal = rule_of("causal", None, 96)[0]
    table = block_table(mods.sliding_window(1), q_len=96, kv_len=96, block=48)
    call = AttentionCall(scale=SCALE, mask=causal, table=table, platform="cpu")
    found = ours(call, given)[0]
    apart = Mod(lambda: mods.and_masks(mods.causal(), lambda b, h, q_idx, kv_idx: q_idx // 48 == kv_idx // 48))
    close(found, expected(SCALE, apart, None, None, given)[0])


def test_what_does_not_fit_is_refused():
    q, k = np.zeros((1, 4, 3, 8)), np.zeros((1, 4, 2, 8))
    with pytest.raises(InputError, match="key heads must divide N"):
        flex_attention(q, k, k)
    with pytest.raises(InputError, match=r"give \[B, T, N, H\]"):
        flex_attention(q[0], k, k)
    with pytest.raises(InputError, match="'cudnn' cannot run on cpu: use xla"):
        flex_attention(q, k[:, :, :1], k[:, :, :1], kernel="cudnn")
    with pytest.raises(InputError, match="returns 0 arrays, not one"):
        flex_attention(q, q, q, None, lambda b, h, q_idx, kv_idx: None)
    with pytest.raises(InputError, match=r"Capture jnp.asarray\(x\)"):
        flex_attention(q, q, q, None, lambda b, h, q_idx, kv_idx: np.arange(4)[q_idx] == kv_idx)


@pytest.mark.parametrize(
    "sizes",
    [{"q_len": 2, "kv_len": 4}, {"q_len": 8, "kv_len": 4}, {"heads": 2}, {"heads": 1}],
)
def test_a_table_of_other_sizes_is_refused(sizes):
    q = np.zeros((1, 4, 3, 8))
    by_head = block_table(
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (h < 2), block=2, **({"q_len": 4, "kv_len": 4} | sizes)
    )
    with pytest.raises(InputError, match="block_table is for"):
        flex_attention(q, q, q, block_table=by_head)


def test_a_table_has_its_mask_and_may_be_an_argument():
    given = arrays(T=40)
    qkv = [given[name] for name in "qkv"]
    table = block_table(mods.causal(), q_len=40, kv_len=40, block=8)
    wanted = expected(SCALE, Mod(mods.causal), None, None, given)[0]
    close(flex_attention(*qkv, scale=SCALE, block_table=table), wanted)
    close(jax.jit(lambda table, *qkv: flex_attention(*qkv, scale=SCALE, block_table=table))(table, *qkv), wanted)
