"""The kernels for Hopper in JAX's interpreter of Mosaic GPU, against attention in float64, and their compilation."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from meshwright.nn.attention.kernels import mosaic_gpu
from meshwright.nn.attention.tiles import BlockLists, Tile, TileRule
from meshwright.spec.cluster import parse_cluster
from meshwright.verify.targets import is_installed, target_of

B, T, N, K, H = 1, 256, 2, 1, 64
BLOCKS = 128, 128
SCALE = 0.3
HOPPER = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=8, platform="gpu")
DOCUMENT = np.repeat(np.arange(4), [100, 30, 60, 66]).astype(np.int32)[None, None]
SLOPES = np.array([[0.5, 0.25]], np.float32)


def causal(t: Tile):
    return t.query >= t.key


RULES = {
    "causal": TileRule(mask=causal),
    "documents": TileRule(
        rows=(DOCUMENT,), columns=(DOCUMENT,), mask=lambda t: (t.rows[0] == t.columns[0]) & (t.query - t.key < 50)
    ),
    "soft cap": TileRule(mask=causal, score=lambda s, t: 2 * jnp.tanh(s / 2)),
    "alibi": TileRule(heads=(SLOPES,), score=lambda s, t: s - t.heads[0] * jnp.abs(t.query - t.key).astype(s.dtype)),
}


def lists_of(sees, whole) -> BlockLists:
    order = np.argsort(np.where(sees & ~whole, 0, np.where(sees, 1, 2)), axis=1, kind="stable")
    found = ((sees & ~whole).sum(1), sees.sum(1), order)
    return BlockLists(*(jnp.asarray(x, jnp.int32)[None, None] for x in found))


def whole_tile(rule: TileRule) -> Tile:
    """The operands of the tile of all scores [B, N, T, S]."""
    indices = (np.arange(T, dtype=np.int32).reshape(shape) for shape in ((1, 1, T, 1), (1, 1, 1, T)))
    return Tile(
        *indices, tuple(x[..., None, None] for x in rule.heads), tuple(x[..., :, None] for x in rule.rows),
        tuple(x[..., None, :] for x in rule.columns),
    )  # fmt: skip


def visible(rule: TileRule, missing=()):
    """The pairs [T, S] that a rule shows, without some blocks, and the tables of blocks that exist and are whole."""
    seen = np.ones((T, T), bool)
    if rule.mask:
        seen &= np.asarray(rule.mask(whole_tile(rule))).reshape(T, T)
    blocks = seen.reshape(T // BLOCKS[0], BLOCKS[0], T // BLOCKS[1], BLOCKS[1]).swapaxes(1, 2)
    for i, j in missing:
        blocks[i, j] = False
    return blocks.swapaxes(1, 2).reshape(T, T), blocks.any((2, 3)), blocks.all((2, 3))


def reference(rule, seen, q, k, v, dout):
    """o, lse, dq, dk, dv in float64; derivatives of scores by JAX in float32."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    scores, slope = np.einsum("btnh,bsnh->bnts", q, k) * SCALE, 1.0
    if rule.score:
        there = whole_tile(rule)
        found, pull = jax.vjp(lambda s: rule.score(s, there), jnp.asarray(scores, jnp.float32))
        scores, slope = np.asarray(found, np.float64), np.asarray(pull(jnp.ones(scores.shape))[0], np.float64)
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e30)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0].swapaxes(1, 2)
    p /= np.where(total > 0, total, 1)
    o = np.einsum("bnts,bsnh->btnh", p, v)
    dp = np.einsum("btnh,bsnh->bnts", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope * SCALE
    grouped = lambda x: x.reshape(B, T, K, N // K, H).sum(3)  # noqa: E731
    dk, dv = np.einsum("bnts,btnh->bsnh", ds, q), np.einsum("bnts,btnh->bsnh", p, dout)
    return o, lse, np.einsum("bnts,bsnh->btnh", ds, k), grouped(dk), grouped(dv)


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, T, n, H)), jnp.bfloat16) for n in (N, K, K, N)]


# the last block of queries of "causal" loses its partial block, the first block of "alibi" all its keys
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "missing"), [(n, ()) for n in RULES] + [("causal", [(1, 1)]), ("alibi", [(0, 0), (0, 1)])]
)
def test_kernels_give_attention_of_a_rule(name, missing):
    rule = RULES[name]
    q, k, v, dout = arrays()
    seen, some, whole = visible(rule, missing)
    by_query, by_key = lists_of(some, whole), lists_of(some.T, whole.T)
    rule = jax.tree.map(jnp.asarray, rule._replace(mask=None, score=None))._replace(mask=rule.mask, score=rule.score)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=HOPPER)):
        o, lse = mosaic_gpu.forward(rule, by_query, BLOCKS, SCALE, q, k, v, interpret=True)
        grads = mosaic_gpu.backward(
            rule, (by_query, by_key), BLOCKS, SCALE, (dout, o, lse), q, k, v, interpret=True
        )  # fmt: skip
    want = reference(RULES[name], seen, q, k, v, dout)
    np.testing.assert_allclose(lse, want[1], atol=1e-4)
    for got, expected in zip((o, *grads), (want[0], *want[2:]), strict=True):
        np.testing.assert_allclose(got, expected, atol=0.01 * np.abs(expected).max())


@pytest.mark.skipif(not is_installed("cuda"), reason="the compiler for cuda is not installed")
def test_kernels_compile_for_hopper():
    options = dict(target_of(parse_cluster("h100:1")).options)
    (device,) = topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
    place = SingleDeviceSharding(device)
    spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    rule = RULES["soft cap"]
    _, some, whole = visible(rule)
    by_query, by_key = lists_of(some, whole), lists_of(some.T, whole.T)

    def run(by_query, by_key, q, k, v, dout):
        o, lse = mosaic_gpu.forward(rule, by_query, BLOCKS, SCALE, q, k, v)
        return mosaic_gpu.backward(rule, (by_query, by_key), BLOCKS, SCALE, (dout, o, lse), q, k, v)

    given = jax.tree.map(spec, (by_query, by_key, *arrays()))
    lowered = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile()
    assert compiled.as_text().count("mosaic_gpu") >= 3
    assert compiled.memory_analysis().output_size_in_bytes >= 2 * (prod(given[2].shape) + 2 * prod(given[3].shape))
