"""Times the pages of a serving step on a CPU: 8 layers write a position of each sequence and attend, pools donated.

python benchmarks/ragged_decode.py > benchmarks/results/ragged-decode-DATE.txt
"""

# mypy: disable-error-code="no-untyped-def, var-annotated"

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ragged import side_by_side

from meshwright.nn.attention.pages import PagedPart, RaggedCall
from meshwright.nn.attention.ragged import ragged_attention
from meshwright.nn.cache import LayerCache, write_slots

LAYERS, HEADS, KV_HEADS, WIDTH, TABLE = 8, 6, 6, 64, 4096
ROUNDS, MEANS = 30, (32, 128, 300, 2000)


def paged(heads_first, longest, q, pages, first, counts, lengths, slots, keys, values):
    """Each layer writes a row for each query and attends; the next layer's queries depend on the result."""
    call = RaggedCall(
        scale=WIDTH**-0.5,
        first=first,
        counts=counts,
        lengths=lengths,
        pages=pages,
        longest=longest,
        heads_first=heads_first,
    )
    kept = ([], [])
    for k, v in zip(keys, values, strict=True):
        k, v = (
            write_slots(LayerCache(x[None], jnp.int32(0), heads_first), q[:, :KV_HEADS], slots).stack[0] for x in (k, v)
        )
        kept[0].append(k)
        kept[1].append(v)
        k, v = (jnp.swapaxes(x, 1, 2) if heads_first else x for x in (k, v))
        q = q + ragged_attention(call, [PagedPart(q, k)], v)[0]
    return q, *kept


def dense(q, positions, keys, values):
    """The same on one array of each layer, [B, S, K, H], of exactly the longest length."""
    rows, kept = jnp.arange(len(q)), ([], [])
    for k, v in zip(keys, values, strict=True):
        k, v = (x.at[rows, positions].set(q[:, :KV_HEADS], unique_indices=True) for x in (k, v))
        ends = {"scale": WIDTH**-0.5, "key_value_seq_lengths": positions + 1}
        q = q + jax.nn.dot_product_attention(q[:, None], k, v, **ends)[:, 0]
        kept[0].append(k)
        kept[1].append(v)
    return q, *kept


def dense_chunk(q, keys, values):
    """Rows of one sequence, its last, on contiguous caches [S, K, H]."""
    num_rows, length, kept = len(q), len(keys[0]), ([], [])
    seen = jnp.arange(length)[None] <= length - num_rows + jnp.arange(num_rows)[:, None]
    for k, v in zip(keys, values, strict=True):
        k, v = (x.at[length - num_rows :].set(q[:, :KV_HEADS]) for x in (k, v))
        scores = jnp.einsum("RKH,SKH->KRS", q, k) * WIDTH**-0.5
        q = q + jnp.einsum("KRS,SKH->RKH", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
        kept[0].append(k)
        kept[1].append(v)
    return q, *kept


class Run:
    """A compiled step with its own caches, which each call takes and gives back."""

    def __init__(self, function, shape, *given):
        self.caches = [[jnp.full(shape, 0.1, jnp.float32) for _ in range(LAYERS)] for _ in range(2)]
        donate = (len(given), len(given) + 1)
        self.compiled = jax.jit(function, donate_argnums=donate).lower(*given, *self.caches).compile()
        self.given = given

    def __call__(self):
        out, *self.caches = self.compiled(*self.given, *self.caches)
        return out


def paged_run(lengths, counts, page_len, heads_first, function=paged):
    """A step of sequences of these lengths, the last ``counts`` positions of which are new."""
    random = np.random.default_rng(0)
    lengths, counts = np.asarray(lengths, np.int32), np.asarray(counts, np.int32)
    used = -(-lengths // page_len)
    order, pages = (
        random.permutation(used.sum() + 1),
        np.zeros((len(lengths), -(-max(TABLE, max(lengths)) // page_len)), np.int32),
    )
    for row, (count, end) in enumerate(zip(used, np.cumsum(used), strict=True)):
        pages[row, :count] = order[end - count : end]
    positions = np.concatenate([np.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]).astype(np.int32)
    of_row = np.repeat(np.arange(len(lengths)), counts)
    q = random.normal(size=(len(positions), HEADS, WIDTH)).astype(np.float32)
    first = (np.cumsum(counts) - counts).astype(np.int32)
    given = [
        jnp.asarray(x)
        for x in (
            q,
            pages,
            first,
            counts,
            lengths,
            pages[of_row, positions // page_len] * page_len + positions % page_len,
        )
    ]
    num_pages, sizes = max(int(used.sum()) + 1, 1024 * 16 // page_len), (KV_HEADS, page_len)
    shape = (num_pages, *(sizes if heads_first else sizes[::-1]), WIDTH)
    return Run(partial(function, heads_first, int(counts.max())), shape, *given)


def dense_run(lengths):
    q = np.random.default_rng(0).normal(size=(len(lengths), HEADS, WIDTH)).astype(np.float32)
    positions = jnp.asarray(np.asarray(lengths, np.int32) - 1)
    return Run(dense, (len(lengths), max(lengths), KV_HEADS, WIDTH), jnp.asarray(q), positions)


def dense_chunk_run(num_rows, length):
    q = np.random.default_rng(0).normal(size=(num_rows, HEADS, WIDTH)).astype(np.float32)
    return Run(dense_chunk, (length, KV_HEADS, WIDTH), jnp.asarray(q))


def mixed(num_seqs, mean):
    """Lengths from few positions to several times the mean, with exactly this mean."""
    drawn = np.random.default_rng(1).lognormal(sigma=1.0, size=num_seqs)
    lengths = np.maximum(1, np.floor(drawn / drawn.sum() * mean * num_seqs)).astype(int)
    lengths[lengths.argmax()] += mean * num_seqs - lengths.sum()
    return lengths.tolist()


def main() -> None:
    print(f"{LAYERS} layers, {HEADS} heads of {WIDTH}, fp32, jax {jax.__version__}; {os.cpu_count()} cores")
    print("ms of all layers, the least of runs in turn; dense: contiguous caches of exactly the length")
    for num_seqs in (1, 8, 32):
        for mean in MEANS:
            lengths, ones = [mean] * num_seqs, [1] * num_seqs
            calls = {"dense": dense_run(lengths)}
            for page_len, heads_first in ((16, False), (16, True), (64, False), (64, True)):
                name = f"pages of {page_len}{' heads first' * heads_first}"
                calls[name] = paged_run(lengths, ones, page_len, heads_first)
            if num_seqs > 1:
                calls[f"{name}, mixed lengths"] = paged_run(mixed(num_seqs, mean), ones, page_len, True)
            took = side_by_side(calls, 8 if num_seqs * mean > 20000 else ROUNDS)
            words = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in took.items())
            print(f"{num_seqs} sequences, {mean} positions: {words}", flush=True)
    for num_rows, length in ((64, 64), (256, 256), (256, 1024)):
        calls = {
            "dense": dense_chunk_run(num_rows, length),
            "paged": paged_run([length], [num_rows], 64, True),
            "32 sequences of 128": paged_run([128] * 32, [1] * 32, 64, True),
            "both": paged_run([128] * 32 + [length], [1] * 32 + [num_rows], 64, True),
        }
        words = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in side_by_side(calls, 8).items())
        print(f"chunk of {num_rows} of {length} positions, heads first: {words}", flush=True)


if __name__ == "__main__":
    main()
