"""Attention on pages against a softmax written out in float64, for random lengths, chunks and orders of pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.dims import DTYPE_BYTES
from meshwright.nn import cache
from meshwright.nn.attention import ragged
from meshwright.nn.attention.pages import PagedPart, RaggedCall, SpreadSlots, page_tiles
from meshwright.nn.attention.ragged import ragged_attention
from meshwright.nn.cache import LayerCache, cache_layout, write_slots
from meshwright.nn.quantisation import absmax_scale, quantise
from meshwright.spec.cluster import parse_cluster
from meshwright.verify.targets import target_of
from tests.nn.arrays import close
from tests.tier import sampled
from tests.verify.compiled import compiled_for

DTYPES = {"float32": jnp.float32, "int8": jnp.int8, "float8": jnp.float8_e4m3fn}


@dataclasses.dataclass
class Case:
    """Sequences as (length, queries), and what differs between calls."""

    sequences: list[tuple[int, int]]
    page_len: int
    options: dict
    dtype: str = "float32"
    latent: bool = False
    heads: tuple[int, int] = (4, 2)
    width: int = 6


@st.composite
def cases(draw):
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.sampled_from([0, 1, 7, 40, 129, 300]))
        sequences.append((length, min(length, draw(st.sampled_from([0, 1, 1, 3, 40])))))
    options = {"window": draw(st.sampled_from([None, 1, 5, 150])), "softcap": draw(st.sampled_from([None, 0.7]))}
    options["chunked"] = options["window"] is not None and draw(st.booleans())
    if draw(st.booleans()):
        options["sinks"] = np.linspace(-1, 2, 4).astype(np.float32)
    latent = draw(st.booleans())
    return Case(
        sequences, draw(st.sampled_from([1, 5, 16, 64])), options, draw(st.sampled_from(list(DTYPES))), latent,
        (4, 1) if latent else draw(st.sampled_from([(4, 1), (4, 2), (4, 4)])),
    )  # fmt: skip


def drawn(case, seed=0):
    """Returns the call, its parts and values, the values' scale, and the position and sequence of each row."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = case.heads
    each = max(1, *(-(-length // case.page_len) for length, _ in case.sequences)) + 1
    num_pages = each * len(case.sequences) + 2
    table = rng.permutation(num_pages)[: each * len(case.sequences)].reshape(-1, each)
    counts = np.array([count for _, count in case.sequences], np.int32)
    # rows of no sequence are before, between and behind those of sequences
    first = np.cumsum(counts + 1) - counts
    rows = int(first[-1] + counts[-1]) + 1
    sinks = case.options.get("sinks")
    call = RaggedCall(
        **{"scale": 0.4, **case.options, "sinks": None if sinks is None else jnp.asarray(sinks)},
        first=jnp.asarray(first, jnp.int32),
        counts=jnp.asarray(counts),
        lengths=jnp.asarray([length for length, _ in case.sequences], jnp.int32),
        pages=jnp.asarray(table, jnp.int32),
        longest=max(1, int(counts.max())),
        platform="cpu",
    )

    def pool(width):
        array = jnp.asarray(rng.normal(size=(num_pages, case.page_len, kv_heads, width)), jnp.float32)
        if case.dtype == "float32":
            return array, None
        scale = absmax_scale(array, (3,))
        return (quantise(array, scale, (3,)) if case.dtype == "int8" else (array / scale[..., None]).astype(
            DTYPES[case.dtype])), scale  # fmt: skip

    parts = [
        PagedPart(jnp.asarray(rng.normal(size=(rows, heads, width)), jnp.float32), *pool(width))
        for width in ((case.width, 3) if case.latent else (case.width,))
    ]
    values = (parts[0].keys, parts[0].scale) if case.latent else pool(case.width - 1)
    return call, parts, *values


def plain(case, call, parts, values, value_scale):
    """Row by row and head by head in float64."""
    heads, kv_heads = case.heads
    wide = [np.asarray(p.keys, np.float64) * (1 if p.scale is None else np.asarray(p.scale)[..., None]) for p in parts]
    mixed = np.asarray(values, np.float64) * (1 if value_scale is None else np.asarray(value_scale)[..., None])
    out = np.zeros((parts[0].queries.shape[0], heads, values.shape[-1]))
    for b, (length, count) in enumerate(case.sequences):
        at = np.arange(length)
        where = np.asarray(call.pages)[b, at // case.page_len], at % case.page_len
        for i, n in np.ndindex(count, heads):
            row, position = int(call.first[b]) + i, length - count + i
            scores = sum(
                call.scale * w[where][:, n * kv_heads // heads] @ np.asarray(p.queries, np.float64)[row, n]
                for w, p in zip(wide, parts, strict=True)
            )
            scores = call.softcap * np.tanh(scores / call.softcap) if call.softcap else scores
            seen = (at <= position) & (at > position - (call.window or length + 1))
            seen &= not call.chunked or at // (call.window or 1) == position // (call.window or 1)
            if call.rule:
                seen = np.ones_like(seen)
                scores = np.asarray(call.rule(scores, np.array(b), np.array(n), np.array(position), at), np.float64)
            weights = np.where(seen, np.exp(scores), 0)
            total = weights.sum() + (np.exp(np.float64(call.sinks[n])) if call.sinks is not None else 0)
            out[row, n] = weights / total @ mixed[where][:, n * kv_heads // heads]
    return out


def attended(call, *arrays):
    """Compiled, with everything but Python's numbers as inputs."""
    given = {name: getattr(call, name) for name in ("first", "counts", "lengths", "pages", "sinks")}
    latent = arrays[1] is arrays[0][0].keys

    def run(given, parts, values, value_scale):
        values = parts[0].keys if latent else values
        return ragged_attention(dataclasses.replace(call, **given), parts, values, value_scale)[0]

    return jax.jit(run)(given, *arrays)


@settings(max_examples=4, deadline=None)
@given(cases(), st.sampled_from(["cpu", "cuda"]))
def test_pages_are_attended_as_by_a_plain_softmax(case, platform):
    """GPUs have other lanes and another order of dims."""
    call, *arrays = drawn(case)
    close(attended(dataclasses.replace(call, platform=platform), *arrays), plain(case, call, *arrays), 3e-6)


DECODE, CHUNKS = [(300, 1), (7, 1), (0, 0), (129, 1)], [(300, 3), (7, 1), (40, 0), (129, 40)]
SINKS = {"softcap": 0.7, "sinks": np.linspace(-1, 2, 4).astype(np.float32)}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_rule_changes_scores_and_may_see_later_positions(platform):
    """A prefix of each sequence, which all of its positions see; scores fall with the distance, by the head."""
    case, prefix = Case(CHUNKS, 16, {}), jnp.array([299, 0, 0, 110])
    call, *arrays = drawn(case)

    def rule(scores, sequence, head, query, key):
        allowed = (key <= query) | (key < prefix[sequence])
        return jnp.where(allowed, scores - 0.01 * head * abs(query - key), -jnp.inf)

    call = dataclasses.replace(call, rule=rule, known=call.lengths, platform=platform)
    close(attended(call, *arrays), plain(case, call, *arrays), 3e-6)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(ragged, "attend_on_tpu", functools.partial(ragged.attend_on_tpu, interpret=True))


@pytest.mark.parametrize(
    ("platform", "window"),
    sampled([("cpu", 150), ("cuda", None), ("tpu", 150), ("tpu", -64)], ("cpu", 150), ("tpu", -64)),
)
def test_pages_whose_slots_are_spread_over_devices_are_attended_in_parts(platform, window, interpreted):
    """Largest scores and sums of each device make a whole of the parts; sinks count once."""
    case = Case(CHUNKS, 15, SINKS | {"window": window and abs(window), "chunked": (window or 0) < 0}, "int8")
    call, parts, values, value_scale = drawn(case)
    found = []
    for rank in range(3):
        sinks = call.sinks if rank == 1 else jnp.full_like(call.sinks, -jnp.inf)
        spread = SpreadSlots(jnp.int32(rank * 5), 15)
        given = dataclasses.replace(call, spread=spread, sinks=sinks, platform=platform)
        own = slice(rank * 5, rank * 5 + 5)
        here = [PagedPart(p.queries, p.keys[:, own], p.scale[:, own]) for p in parts]
        rest = values[:, own], value_scale[:, own]
        found.append(jax.jit(lambda: ragged_attention(given, here, *rest))())  # noqa: B023
    out, peak, total = (np.stack(rows) for rows in zip(*found, strict=True))
    share = total * np.exp(peak - peak.max(0))
    whole = (out * (share / share.sum(0))[..., None]).sum(0)
    close(whole, plain(case, call, parts, values, value_scale), 3e-6)


@pytest.mark.parametrize(
    ("sequences", "options", "dtype", "heads"),
    [
        pytest.param(DECODE, {}, "float32", (4, 2), marks=pytest.mark.slow),
        (DECODE, {"window": 5}, "int8", (4, 2)),
        pytest.param(DECODE, {"window": 150, "chunked": True}, "float32", (4, 2), marks=pytest.mark.slow),
        (CHUNKS, SINKS | {"window": 64, "chunked": True}, "float32", (4, 2)),
        pytest.param(CHUNKS, SINKS, "float8", (4, 2), marks=pytest.mark.slow),
        (CHUNKS, SINKS | {"window": 150}, "int8", (4, 1)),
        # heads that leave rows of a tile over
        (CHUNKS, {"window": 150}, "int8", (12, 6)),
        pytest.param(DECODE, {}, "float32", (3, 3), marks=pytest.mark.slow),
    ],
)
def test_the_kernel_of_tpus_attends_so_too(interpreted, sequences, options, dtype, heads):
    case = Case(sequences, 16, options, dtype, heads[1] == 1, heads)
    attends_on_tpu(case)


@pytest.mark.parametrize(("dtype", "heads"), [("int8", (8, 4)), ("float32", (4, 2)), ("float32", (2, 1))])
def test_the_kernel_of_tpus_reads_slots_of_several_tiles(interpreted, dtype, heads):
    attends_on_tpu(Case(DECODE, 16, {"window": 150, "scale": 0.1}, dtype, False, heads, 160))


def attends_on_tpu(case):
    call, *arrays = drawn(case)
    call = dataclasses.replace(call, platform="tpu")
    close(attended(call, *arrays), plain(case, call, *arrays), 3e-6)
    assert "pallas_call" in str(jax.make_jaxpr(lambda: ragged_attention(call, *arrays))())


def test_pages_in_parts_are_written_and_read_as_whole_ones():
    layers, pages, page_len, width = 2, 5, 48, 6
    new, slots = jnp.arange(1.0, 4 * width + 1).reshape(4, 1, width), jnp.array([0, 95, 47, pages * page_len])
    whole = LayerCache(jnp.zeros((layers, pages, page_len, 1, width)), jnp.int32(1))
    parts = LayerCache(whole.stack.reshape(layers, pages, 3, 16, 1, width), jnp.int32(1))
    assert parts.in_parts
    assert parts.page_sizes == whole.page_sizes == (pages, page_len)
    assert parts.in_pool(slots).tolist() == whole.in_pool(slots).tolist()
    whole, parts = write_slots(whole, new, slots), write_slots(parts, new, slots)
    assert parts.in_parts
    np.testing.assert_array_equal(parts.pages, whole.pages)
    np.testing.assert_array_equal(whole.pages[6, 47], new[1])


def test_rows_of_no_sequence_are_zero_and_pages_of_none_are_not_read():
    case = Case(DECODE, 16, {})
    call, parts, values, _ = drawn(case)
    found = np.asarray(attended(call, parts, values, None))
    own = np.concatenate([int(f) + np.arange(c) for f, c in zip(call.first, call.counts, strict=True)])
    others = np.setdiff1d(np.arange(len(found)), own)
    assert others.size
    np.testing.assert_array_equal(found[others], 0)
    used = np.concatenate([np.asarray(row)[: -(-n // 16)] for row, (n, _) in zip(call.pages, DECODE, strict=True)])
    others = np.setdiff1d(np.arange(len(values)), used)
    parts = [parts[0]._replace(keys=parts[0].keys.at[others].set(1e4))]
    pages = call.pages.at[:, -1].set(-7)  # no position has this entry
    again = attended(dataclasses.replace(call, pages=pages), parts, values.at[others].set(1e4), None)
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3 + 1 + 2),
        ({"window": 130}, 2 + 1 + 2),
        ({"window": 44}, 1 + 1 + 2),
        ({"window": 128, "chunked": True}, 1 + 1 + 1),
    ],
)
def test_tiles_are_those_that_queries_see(options, expected):
    """300, 7 and 129 positions in tiles of 128, whatever the page table could hold."""
    for more in (0, 50):
        call, *_ = drawn(Case(DECODE, 16, options))
        call = dataclasses.replace(call, pages=jnp.pad(call.pages, ((0, 0), (0, more))), platform="cuda")
        assert int(page_tiles(call, 1, 8, 16).ends[-1]) == expected


@pytest.mark.parametrize("heads_first", sampled([False, True], False))
def test_on_a_cpu_a_row_is_the_same_bit_by_bit_whatever_the_batch(heads_first):
    """Sequences of several tiles, alone and among others: the tiles of an iteration are others."""
    lengths = [300, 7, 1100, 129]
    case = Case([(length, 1) for length in lengths], 16, SINKS, heads=(4, 2))
    call, parts, values, _ = drawn(case)
    call = dataclasses.replace(call, heads_first=heads_first)
    found = np.asarray(attended(call, parts, values, None))
    for b in range(len(lengths)):
        for others in ([b], [2, b, 3]):
            own = {name: getattr(call, name)[jnp.array(others)] for name in ("first", "counts", "lengths", "pages")}
            again = attended(dataclasses.replace(call, **own), parts, values, None)
            row = int(call.first[b])
            np.testing.assert_array_equal(again[row], found[row])


def test_rows_of_one_layer_are_written_and_attended_with_heads_first():
    call, parts, values, _ = drawn(Case(DECODE, 16, {}))
    expected = attended(call, parts, values, None)
    slots = jnp.array([3 * 16 + 1, 5 * 16 + 15, len(values) * 16])  # the last one is beyond the pages
    new = jnp.ones((3, *values.shape[2:]))

    def run(call, heads_first, keys, values):
        values = write_slots(LayerCache(values[None], jnp.int32(0), heads_first), new, slots).stack[0]
        view = functools.partial(jnp.swapaxes, axis1=1, axis2=2) if heads_first else (lambda x: x)
        call = dataclasses.replace(call, heads_first=heads_first)
        return ragged_attention(call, [parts[0]._replace(keys=view(keys))], view(values))[0], values

    pools = parts[0].keys, values
    plain, written = run(call, False, *pools)
    turned, again = run(call, True, *(jnp.swapaxes(x, 1, 2) for x in pools))
    np.testing.assert_array_equal(jnp.swapaxes(again, 1, 2), written)
    np.testing.assert_array_equal(turned, plain)
    assert np.abs(np.asarray(plain) - expected).max() > 0
    assert (np.asarray(written)[3, 1] == 1).all()


def test_on_a_tpu_two_heads_of_8_bits_are_outside_of_slots(monkeypatch):
    """Read by lanes, as pages of 5 are too many for the kernel, and written head by head."""
    case = Case(CHUNKS, 5, SINKS, "int8")
    call, parts, values, scale = drawn(case)
    on_tpu = dataclasses.replace(call, platform="tpu")
    assert "pallas_call" not in str(jax.make_jaxpr(lambda: ragged_attention(on_tpu, parts, values, scale))())
    close(attended(on_tpu, parts, values, scale), plain(case, call, parts, values, scale), 3e-6)
    order = cache_layout("tpu", ("Pg", "Pl", "K", "H"), (1, *values.shape), "int8").major_to_minor
    assert order == (0, 1, 3, 2, 4)
    caches = [LayerCache(each[None], jnp.int32(0)) for each in (values, scale)]
    new = [jnp.arange(3 * each.stack[0, 0, 0].size).reshape(3, *each.stack.shape[3:]) for each in caches]
    slots = jnp.array([6, 24, len(values) * 5])

    def written():
        return [write_slots(one, x, slots).stack for one, x in zip(caches, new, strict=True)]

    expected = written()
    monkeypatch.setattr(cache, "default_platform", lambda: "tpu")
    for one, other in zip(written(), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (expected[0][0, 1, 1] == new[0][0]).all()


# -- compiled for chips -----------------------------------------------------------------------------------

LAYERS, NUM_PAGES, PAGE_LEN, WIDTH = 4, 1024, 128, 128


@pytest.mark.aot
@pytest.mark.parametrize("on", ["v5e:2x2", "v6e:2x2", "h100:8x1"])
@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8", "fp32"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 20])
def test_compiled_programs_copy_no_pool(on, dtype, kv_heads):
    """Layers write pages and read them in a scan: temporary arrays are smaller than a pool, in `cache_layout`."""
    temporaries, kept = compiled_layers(on, dtype, kv_heads, PAGE_LEN)
    assert temporaries < kept / 3


@pytest.mark.aot
@pytest.mark.parametrize("on", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize(("dtype", "kv_heads"), [("bf16", 1), ("bf16", 2), ("bf16", 4), ("int8", 4), ("int8", 8)])
def test_compiled_programs_copy_no_pool_of_wide_heads(on, dtype, kv_heads, monkeypatch):
    monkeypatch.setattr("tests.nn.attention.test_ragged.WIDTH", 256)
    temporaries, kept = compiled_layers(on, dtype, kv_heads, PAGE_LEN)
    assert temporaries < kept / 3


@pytest.mark.aot
@pytest.mark.parametrize("on", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
def test_a_page_may_be_as_long_as_a_sequence(on):
    """A contiguous cache is a layout of pages, and is not copied either."""
    temporaries, kept = compiled_layers(on, "bf16", 1, NUM_PAGES * PAGE_LEN // 64)
    assert temporaries < kept / 3


@pytest.mark.aot
@pytest.mark.parametrize("on", ["v5e:2x2", "v6e:2x2"])
def test_chunks_are_compiled_too(on):
    temporaries, kept = compiled_layers(on, "bf16", 8, PAGE_LEN, window=500, chunked=True)
    assert temporaries < kept / 3


def compiled_layers(on, dtype, kv_heads, page_len, **options):
    """Bytes of temporary arrays, and of keys, of a scan that writes and reads pages of 64 sequences."""
    num_pages = NUM_PAGES * PAGE_LEN // page_len
    platform = target_of(parse_cluster(on)).platform
    platform = "cuda" if platform == "gpu" else platform

    def pool(*widths, name):
        shape = (LAYERS, num_pages, page_len, kv_heads, *widths)
        layout = cache_layout(platform, ("Pg", "Pl", "K", "H")[: len(shape) - 1], shape, name)
        dtypes = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
        return jax.ShapeDtypeStruct(shape, dtypes.get(name, name)), layout

    pools = [pool(WIDTH, name=dtype)] * 2 + [pool(name="fp32")] * (2 if dtype == "int8" else 0)
    others = (
        jax.ShapeDtypeStruct((64, 32 - 32 % kv_heads, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, num_pages // 64), jnp.int32),
    )

    def layer(q, pages, positions, stacks, number):
        caches = [LayerCache(stack, number) for stack in stacks]
        new = [jnp.full((64, *stack.shape[3:]), q[0, 0, 0]) for stack in stacks]
        own = jnp.take_along_axis(pages, positions[:, None] // page_len, axis=1)[:, 0]
        slots = own * page_len + positions % page_len
        caches = [write_slots(one, x, slots) for one, x in zip(caches, new, strict=True)]
        k, v, *scales = (one.pages for one in caches)
        key_scale, value_scale = scales or (None, None)
        ones = jnp.ones_like(positions)
        call = RaggedCall(
            scale=0.1,
            first=jnp.arange(64),
            counts=ones,
            lengths=positions + 1,
            pages=caches[0].in_pool(pages),
            longest=1,
            **options,
        )
        return ragged_attention(call, [PagedPart(q, k, key_scale)], v, value_scale)[0], [one.stack for one in caches]

    def decode(q, pages, positions, *stacks):
        def step(carry, number):
            return layer(carry[0], pages, positions, carry[1], number), None

        (out, stacks), _ = jax.lax.scan(step, (q, list(stacks)), jnp.arange(LAYERS))
        return out, *stacks

    positions = jax.ShapeDtypeStruct((64,), jnp.int32)
    arrays, layouts = zip(*pools, strict=True)
    found = compiled_for(on, decode, *others, positions, *arrays, layouts=layouts)
    assert ("tpu_custom_call" in found.as_text()) == on.startswith("v")
    kept = LAYERS * NUM_PAGES * PAGE_LEN * kv_heads * WIDTH * DTYPE_BYTES[dtype]
    return found.memory_analysis().temp_size_in_bytes, kept
