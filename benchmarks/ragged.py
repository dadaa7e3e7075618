"""Times a decode step of attention on pages: sequences of mixed lengths against the same positions in one length.

python benchmarks/ragged.py > benchmarks/results/ragged-DATE.txt
"""

# mypy: disable-error-code="no-untyped-def, var-annotated"

import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.nn.attention.pages import PagedPart, RaggedCall
from meshwright.nn.attention.ragged import ragged_attention

NUM_SEQS, HEADS, KV_HEADS, WIDTH, MEAN = 64, 16, 4, 64, 512
PAGE_LENS = (16, 64, 128)
ROUNDS = 60


def mixed(random: np.random.Generator, mean: int, num_seqs: int = NUM_SEQS) -> np.ndarray:
    """Lengths from few positions to several times the mean, as of requests, with exactly this mean."""
    drawn = random.lognormal(sigma=1.0, size=num_seqs)
    lengths = np.maximum(1, np.floor(drawn / drawn.sum() * mean * num_seqs)).astype(np.int32)
    lengths[lengths.argmax()] += mean * num_seqs - lengths.sum()
    return lengths


def arrays(lengths: np.ndarray, page_len: int, table: int, random: np.random.Generator):
    """Queries, keys and values in pages of no order, and the page table, of ``table`` pages for a sequence."""
    used = -(-lengths // page_len)
    order, pages = random.permutation(used.sum()), np.zeros((len(lengths), table), np.int32)
    for row, (count, end) in enumerate(zip(used, np.cumsum(used), strict=True)):
        pages[row, :count] = order[end - count : end]
    pool = (used.sum(), page_len, KV_HEADS, WIDTH)
    q = random.normal(size=(len(lengths), HEADS, WIDTH))
    return [jnp.asarray(x, jnp.float32) for x in (q, random.normal(size=pool), random.normal(size=pool))], pages


@jax.jit
def ragged(q, k, v, pages, lengths):
    ones = jnp.ones_like(lengths)
    call = RaggedCall(
        scale=WIDTH**-0.5, first=jnp.arange(len(ones)), counts=ones, lengths=lengths, pages=pages, longest=1
    )
    return ragged_attention(call, [PagedPart(q, k)], v)[0]


@jax.jit
def gathered(q, k, v, pages, lengths):
    """Pages side by side first, then all slots of the table."""
    k, v = (x[pages].reshape(len(pages), -1, KV_HEADS, WIDTH) for x in (k, v))
    return jax.nn.dot_product_attention(q[:, None], k, v, scale=WIDTH**-0.5, key_value_seq_lengths=lengths)[:, 0]


def side_by_side(calls: dict[str, partial[jax.Array]], rounds: int = ROUNDS) -> dict[str, float]:
    """Returns the least seconds of each call; one of each runs in turn, so that a busy machine slows all alike."""
    for call in calls.values():
        jax.block_until_ready(call())
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}


def main() -> None:
    random = np.random.default_rng(0)
    print(f"{NUM_SEQS} sequences, {HEADS} heads, {KV_HEADS} kv heads of {WIDTH}, fp32; {os.cpu_count()} cores")
    lengths = {"mixed": mixed(random, MEAN), "same": np.full(NUM_SEQS, MEAN, np.int32)}
    longest = int(lengths["mixed"].max())
    print(f"mixed: {lengths['mixed'].min()} to {longest} positions, {MEAN} in the mean; same: {MEAN}")
    print(
        f"ms, the least of {ROUNDS} runs in turn; gathered: all pages of the table, {longest} positions, side by side"
    )
    for page_len in PAGE_LENS:
        calls, before = {}, {}
        for name, each in lengths.items():
            qkv, pages = arrays(each, page_len, -(-longest // page_len), random)
            given = (*qkv, jnp.asarray(pages), jnp.asarray(each))
            calls[name], before[name] = partial(ragged, *given), partial(gathered, *given)
        took, once = side_by_side(calls), side_by_side(before, 3)
        words = ", ".join(f"{name} {1e3 * took[name]:.1f} (gathered {1e3 * once[name]:.1f})" for name in took)
        print(f"page_len {page_len}: {words}; mixed / same {took['mixed'] / took['same']:.2f}", flush=True)
    print("ms against positions, mixed lengths, page_len 16, table of 4,096 positions")
    calls = {}
    for mean in (32, 64, 128, 256, 512):
        each = mixed(random, mean)
        qkv, pages = arrays(each, 16, 256, random)
        calls[str(mean * NUM_SEQS)] = partial(ragged, *qkv, jnp.asarray(pages), jnp.asarray(each))
    took = side_by_side(calls)
    slope, start = np.polyfit([int(name) for name in took], list(took.values()), 1)
    print(", ".join(f"{name}: {1e3 * seconds:.2f}" for name, seconds in took.items()))
    print(f"line: {1e3 * start:.2f} ms + {1e9 * slope:.0f} ns a position")


if __name__ == "__main__":
    main()
