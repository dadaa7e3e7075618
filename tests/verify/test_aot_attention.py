"""Kernels of attention compiled for chips that are not here; `make test-aot` installs their compilers."""

import functools

import jax
import jax.numpy as jnp
import pytest

from meshwright.nn.attention.kernels import pallas_tpu
from meshwright.nn.attention.tiles import BlockLists, TileRule
from tests.verify.compiled import compiled_for

pytestmark = pytest.mark.aot

TPUS = ["v4p:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
BATCH, LENGTH, HEADS, KV_HEADS, BLOCK = 1, 4096, 4, 2, 512


def documents(tile):
    return (tile.key <= tile.query) & (tile.rows[0] == tile.columns[0])


def capped(s, tile):
    return 30.0 * jnp.tanh((s + tile.heads[0] * (tile.key - tile.query)) / 30.0)


def both_passes(rule, document, slopes, by_query, by_key, q, k, v, dout):
    rule = rule._replace(heads=(slopes,), rows=(document,), columns=(document,))
    of = functools.partial(jnp.asarray, dtype=q.dtype)
    o, lse = pallas_tpu.forward(rule, by_query, (BLOCK, BLOCK), 0.125, q, k, v)
    given = (of(dout), o, lse)
    return o, *pallas_tpu.backward(rule, (by_query, by_key), (BLOCK, BLOCK), 0.125, given, q, k, v)


def compiled(on, rule, *, dtype, widths, list_heads=1):
    """Both passes, with lists of blocks, documents and slopes that are known only when the program runs."""
    of = jax.ShapeDtypeStruct
    blocks = LENGTH // BLOCK
    count, index = ((BATCH, list_heads, blocks), jnp.int32), ((BATCH, list_heads, blocks, blocks), jnp.int32)
    lists = BlockLists(of(*count), of(*count), of(*index))
    shapes = ((HEADS, widths[0]), (KV_HEADS, widths[0]), (KV_HEADS, widths[1]), (HEADS, widths[1]))
    arrays = [of((BATCH, LENGTH, *shape), dtype) for shape in shapes]
    document, slopes = of((BATCH, 1, LENGTH), jnp.int32), of((1, HEADS), jnp.float32)
    return compiled_for(on, functools.partial(both_passes, rule), document, slopes, lists, lists, *arrays)


def check(found, num_kernels):
    """A kernel for each pass and span of keys, and no array of scores in memory."""
    assert found.as_text().count('custom_call_target="tpu_custom_call"') == num_kernels
    assert found.memory_analysis().temp_size_in_bytes < BATCH * HEADS * LENGTH * LENGTH


WIDTHS = [("bfloat16", (128, 128)), ("float32", (256, 256))]
"""The head of most models, and the one that takes the most memory."""

OTHER_WIDTHS = [("bfloat16", (64, 64)), ("bfloat16", (192, 128)), ("bfloat16", (256, 256))]


@pytest.mark.parametrize(
    ("on", "dtype", "widths"),
    [*((on, *case) for on in TPUS for case in WIDTHS), *(("tpu7x:2x2x1", *case) for case in OTHER_WIDTHS)],
)
def test_flash_attention(on, dtype, widths):
    # the core of a v4 does not hold the cotangents of all keys
    spans = LENGTH * sum(widths) * 8 // 2**22 if on.startswith("v4p") else 1
    check(compiled(on, TileRule(mask=documents), dtype=dtype, widths=widths), 1 + spans)


@pytest.mark.parametrize("on", ["v5e:2x2", "tpu7x:2x2x1"])
def test_scores_and_lists_of_each_head(on):
    rule = TileRule(mask=documents, score=capped)
    check(compiled(on, rule, dtype="bfloat16", widths=(64, 64), list_heads=HEADS), 2)
