"""Times the attention kernels of Mosaic GPU beside cuDNN: `PYTHONPATH=src python benchmarks/flex_gpu.py`.

Checks every variant against a dense reference first. TFLOP/s count visible pairs only, the backward pass as 2.5 times
the forward one. The grid is that of attention-gym's benchmarks/flex_perf.py. `--tiny` checks in an interpreter.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.nn.attention.kernels import mosaic_gpu
from meshwright.nn.attention.tiles import BlockLists, TileRule


class Variant(NamedTuple):
    """A rule with the pairs that it sees, over positions of T queries as [T, 1] and keys as [1, T]."""

    rule: TileRule
    sees: Callable[[np.ndarray, np.ndarray], np.ndarray]
    cudnn: dict[str, Any] | None = None


def causal(t: Any) -> Any:
    return t.query >= t.key


def variants(T: int, N: int, window: int) -> dict[str, Variant]:
    """Returns the variants of attention-gym's benchmark at one length and number of heads."""
    ends = np.sort(np.random.default_rng(0).permutation(np.arange(1, T))[: max(1, T // 1024)])
    document = np.searchsorted(ends, np.arange(T), side="right").astype(np.int32)
    ids = (jnp.asarray(document)[None, None],)
    slopes = (jnp.exp2(-8 * jnp.arange(1, N + 1, dtype=jnp.float32) / N)[None],)
    prefix = T // 4
    before = lambda q, k: q >= k  # noqa: E731
    return {
        "full": Variant(TileRule(), lambda q, k: (q >= 0) & (k >= 0), {}),
        "causal": Variant(TileRule(mask=causal), before, {"causal": True}),
        "window": Variant(
            TileRule(mask=lambda t: causal(t) & (t.query - t.key < window)),
            lambda q, k: (q >= k) & (q - k < window), {"causal": True, "window": window},
        ),
        "documents": Variant(
            TileRule(rows=ids, columns=ids, mask=lambda t: causal(t) & (t.rows[0] == t.columns[0])),
            lambda q, k: (q >= k) & (document[q] == document[k]),
        ),
        "prefix": Variant(TileRule(mask=lambda t: causal(t) | (t.key < prefix)), lambda q, k: (q >= k) | (k < prefix)),
        "alibi": Variant(
            TileRule(
                heads=slopes, mask=causal,
                score=lambda s, t: s + t.heads[0] * (t.key - t.query).astype(jnp.float32),
            ), before,
        ),
        "softcap": Variant(TileRule(mask=causal, score=lambda s, t: 20 * jnp.tanh(s * (1 / 20))), before),
    }  # fmt: skip


def lists(sees: np.ndarray, whole: np.ndarray) -> BlockLists:
    """Returns the lists of blocks from tables [rows, columns] of those that exist and those that are seen whole."""
    order = np.argsort(np.where(sees & ~whole, 0, np.where(sees, 1, 2)), axis=1, kind="stable")
    found = (sees & ~whole).sum(1), sees.sum(1), order
    return BlockLists(*(jnp.asarray(x, jnp.int32)[None, None] for x in found))


def tables(variant: Variant, T: int, blocks: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the blocks that exist, those seen whole, and the number of visible pairs."""
    some, whole, pairs = [], [], 0
    for start in range(0, T, blocks[0]):
        seen = variant.sees(np.arange(start, start + blocks[0])[:, None], np.arange(T)[None, :])
        in_blocks = seen.reshape(blocks[0], T // blocks[1], blocks[1])
        some.append(in_blocks.any((0, 2)))
        whole.append(in_blocks.all((0, 2)))
        pairs += int(seen.sum())
    return np.stack(some), np.stack(whole), pairs


def inputs(B: int, T: int, heads: tuple[int, int], H: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    counts = heads[0], heads[1], heads[1], heads[0]
    return [jax.random.normal(key, (B, T, n, H), jnp.bfloat16) for key, n in zip(keys, counts, strict=True)]


def dense(variant: Variant, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention in float32 with a mask of all pairs."""
    from meshwright.nn.attention.tiles import Tile

    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    (_, T, N, H), K = q.shape, k.shape[2]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * H**-0.5
    rule = variant.rule
    if rule.score:
        tile = Tile(
            jnp.arange(T)[:, None], jnp.arange(T)[None, :],
            tuple(x[..., None, None] for x in rule.heads), tuple(x[..., :, None] for x in rule.rows),
            tuple(x[..., None, :] for x in rule.columns),
        )  # fmt: skip
        scores = rule.score(scores, tile)
    seen = variant.sees(np.arange(T)[:, None], np.arange(T)[None, :])
    scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - lse[..., None]), v, precision="highest"), lse


class Case(NamedTuple):
    """A variant with its blocks, as functions of (q, k, v, dout)."""

    variant: Variant
    by_query: BlockLists
    by_key: BlockLists
    blocks: tuple[int, int]
    stages: int
    tiles: tuple[int, int]
    interpret: bool

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = q.shape[-1] ** -0.5
        return mosaic_gpu.forward(
            self.variant.rule, self.by_query, self.blocks, scale, q, k, v, stages=self.stages, interpret=self.interpret
        )

    def both(self, q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        o, lse = self.forward(q, k, v)
        return mosaic_gpu.backward(
            self.variant.rule, (self.by_query, self.by_key), self.blocks, q.shape[-1] ** -0.5, (dout, o, lse), q, k, v,
            tiles=self.tiles, interpret=self.interpret,
        )  # fmt: skip


def case_of(variant: Variant, T: int, args: argparse.Namespace, blocks: tuple[int, int]) -> tuple[Case, int]:
    some, whole, pairs = tables(variant, T, blocks)
    given = variant, lists(some, whole), lists(some.T, whole.T), blocks, args.stages, args.tiles, args.tiny
    return Case(*given), pairs


def check(args: argparse.Namespace, blocks: tuple[int, int]) -> None:
    """Prints the largest errors of every variant on small inputs, relative to the largest value."""
    B, T, heads = (1, 256, (2, 1)) if args.tiny else (2, 512, (4, 2))
    for H in args.widths:
        q, k, v, dout = inputs(B, T, heads, H)
        for name, variant in variants(T, heads[0], T // 4 + 13).items():
            if args.only and name not in args.only:
                continue
            case, _ = case_of(variant, T, args, blocks)
            (want, want_lse), pull = jax.vjp(lambda *x, v=variant: dense(v, *x), q, k, v)
            got, lse = jax.jit(case.forward)(q, k, v)
            pairs = {"o": (got, want), "lse": (jnp.swapaxes(lse, 1, 2), want_lse)}
            if args.backward:
                slopes = pull((dout.astype(jnp.float32), jnp.zeros_like(want_lse)))
                found = zip(jax.jit(case.both)(q, k, v, dout), slopes, strict=True)
                pairs |= dict(zip(("dq", "dk", "dv"), found, strict=True))
            errors = " ".join(f"{key} {_error(*pair):.1e}" for key, pair in pairs.items())
            print(f"check {name} D {H} blocks {blocks}: {errors}", flush=True)


def _error(got: jax.Array, want: jax.Array) -> float:
    found, wanted = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def seconds(run: Callable[..., Any], *arrays: jax.Array) -> float:
    """Returns the mean time of one call: of many without a pause, behind two that are not counted."""
    step = jax.jit(run)
    jax.block_until_ready([step(*arrays) for _ in range(2)])
    start = time.perf_counter()
    jax.block_until_ready(step(*arrays))
    count = max(3, min(50, int(0.15 / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(count):
        last = step(*arrays)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / count


def cudnn(given: dict[str, Any]) -> Callable[..., jax.Array]:
    """Attention of cuDNN for a variant that it knows."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window = (given["window"] - 1, 0) if "window" in given else None
        causal = given.get("causal", False)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, local_window_size=window, implementation="cudnn"
        )  # fmt: skip

    return run


def with_gradients(run: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Forward and backward passes of a function."""
    return lambda q, k, v, dout: jax.vjp(run, q, k, v)[1](dout)


def measure(args: argparse.Namespace, blocks: tuple[int, int], started: float) -> None:
    """Prints times and rates, largest cases last, until the time is up."""
    for T, H, heads in itertools.product(args.lengths, args.widths, args.heads):
        q, k, v, dout = inputs(args.batch, T, heads, H)
        for name, variant in variants(T, heads[0], 1024).items():
            if args.only and name not in args.only:
                continue
            if time.perf_counter() - started > args.seconds:
                print("time is up", flush=True)
                return
            case, pairs = case_of(variant, T, args, blocks)
            flops = 4 * args.batch * heads[0] * H * pairs
            runs: dict[str, tuple[Callable[..., Any], float]] = {"forward": (case.forward, 1)}
            if args.backward:
                runs["both"] = case.both, 3.5
            if variant.cudnn is not None and args.cudnn:
                runs["cudnn forward"] = cudnn(variant.cudnn), 1
                if args.backward:
                    runs["cudnn both"] = with_gradients(cudnn(variant.cudnn)), 3.5
            found = []
            for what, (run, times) in runs.items():
                try:
                    took = seconds(run, *((q, k, v) if times == 1 else (q, k, v, dout)))
                    found.append(f"{what} {took * 1e3:.3f} ms {flops * times / took / 1e12:.0f} TFLOP/s")
                except Exception as error:
                    found.append(f"{what} failed: {str(error)[-300:]}")
            sizes = f"T {T} D {H} heads {heads[0]}/{heads[1]} blocks {blocks} stages {args.stages} tiles {args.tiles}"
            print(f"{name} {sizes}: " + "; ".join(found), flush=True)


def main() -> None:
    """Reads the options, checks, then measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda text: tuple(int(one) for one in text.split(","))  # noqa: E731
    parser.add_argument("--tiny", action="store_true", help="only check, small and in an interpreter on CPU")
    parser.add_argument("--lengths", type=numbers, default=(2048, 4096, 8192, 16384))
    parser.add_argument("--widths", type=numbers, default=(128, 64))
    parser.add_argument("--heads", type=numbers, nargs="*", default=[(16, 16), (16, 4)], help="16,16 16,4")
    parser.add_argument("--blocks", type=numbers, nargs="*", default=[(128, 128)], help="queries,keys, several")
    parser.add_argument("--stages", type=int, default=2, help="of the forward kernel")
    parser.add_argument("--tiles", type=numbers, default=(64, 64), help="queries,keys of the backward kernels")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--only", nargs="*", help="variants by name")
    parser.add_argument("--seconds", type=float, default=200, help="starts no case after this time")
    parser.add_argument("--no-backward", dest="backward", action="store_false")
    parser.add_argument("--no-cudnn", dest="cudnn", action="store_false")
    parser.add_argument("--no-check", dest="check", action="store_false")
    args = parser.parse_args()
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if args.tiny:
            from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

            device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=8, platform="gpu")
            stack.enter_context(use_abstract_mesh(AbstractMesh((), (), abstract_device=device)))
        print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
        for blocks in args.blocks:
            if args.check:
                check(args, blocks)
            if not args.tiny:
                measure(args, blocks, started)


if __name__ == "__main__":
    main()
