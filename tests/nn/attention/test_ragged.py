"""Attention on pages against a softmax written out in float64, for random lengths, chunks and orders of pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.nn.attention.ragged import PagedPart, RaggedCall, ragged_attention
from meshwright.nn.quantisation import absmax_scale, quantise
from tests.nn.arrays import close

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


@st.composite
def cases(draw):
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.sampled_from([0, 1, 7, 40, 129, 300]))
        sequences.append((length, min(length, draw(st.sampled_from([0, 1, 1, 3, 40])))))
    options = {"window": draw(st.sampled_from([None, 1, 5, 150])), "softcap": draw(st.sampled_from([None, 0.7]))}
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
        scale=0.4,
        **{**case.options, "sinks": None if sinks is None else jnp.asarray(sinks)},
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
        for width in ((6, 3) if case.latent else (6,))
    ]
    values = (parts[0].keys, parts[0].scale) if case.latent else pool(5)
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
                0.4 * w[where][:, n * kv_heads // heads] @ np.asarray(p.queries, np.float64)[row, n]
                for w, p in zip(wide, parts, strict=True)
            )
            scores = call.softcap * np.tanh(scores / call.softcap) if call.softcap else scores
            seen = (at <= position) & (at > position - (call.window or length + 1))
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
        return ragged_attention(dataclasses.replace(call, **given), parts, values, value_scale)

    return jax.jit(run)(given, *arrays)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_pages_are_attended_as_by_a_plain_softmax(case):
    call, *arrays = drawn(case)
    close(attended(call, *arrays), plain(case, call, *arrays), 3e-6 if any(c for _, c in case.sequences) else 1)
