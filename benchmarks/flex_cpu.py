"""Attention under masks and score rules on a CPU: meshwright beside PyTorch, one process, two threads, float32.

python benchmarks/flex_cpu.py                     the grid of attention-gym's flex_perf at 2,048 to 8,192 positions
python benchmarks/flex_cpu.py --lengths 2048      one length
python benchmarks/flex_cpu.py --no-torch          our kernels alone

Batch 1, 8 heads of 64. For each variant: forward, and forward + backward, the best of --repeats runs in turn.
"line" is forward + backward over (the fastest of our dense ones, of any block size and with the same score rule) x
(1 - the sparsity in blocks of 128). "sdpa" is scaled_dot_product_attention: is_causal for causal variants, else dense
with the mask as an array where there is one. "flex" is torch.compile(flex_attention), forward: it has no backward pass
on a CPU. A fall-back of flex to its eager form stops the run.
"""

import argparse
import datetime
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.masks import mods
from meshwright.masks.names import mask_named
from meshwright.masks.table import block_table
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.kernels import xla
from meshwright.nn.attention.tiles import Mod

HEADS, WIDTH = 8, 64
SIZES = ((256, 128), (512, 128), (512, 256), (128, 128))
"""Rows of blocks, and of those that they list, of the dense attention that variants are compared with."""


class Variant(NamedTuple):
    """A mask and a score rule, ours and PyTorch's."""

    mask: Mod | None
    score: Mod | None = None
    is_causal: bool = False
    torch_score: Any = None


def variants(length: int) -> dict[str, Variant]:
    """The variants of flex_perf, and documents and random blocks besides."""
    import torch

    causal = _named("causal")
    slopes = mods.alibi_slopes(HEADS)
    bias = np.random.default_rng(2).normal(size=HEADS).astype(np.float32)
    torch_slopes, torch_bias = torch.from_numpy(slopes), torch.from_numpy(bias)
    rng = np.random.default_rng(0)
    ends = np.sort(rng.choice(np.arange(1, length), 7, replace=False))
    ids = np.searchsorted(ends, np.arange(length), side="right").astype(np.int32)[None]
    cells = rng.random((1, -(-length // 128), -(-length // 128))) < 0.25
    cells |= np.eye(cells.shape[1], dtype=bool)[None]
    return {
        "noop": Variant(None),
        "causal": Variant(causal, is_causal=True),
        "rel": Variant(None, Mod(mods.relative), torch_score=lambda s, b, h, q, k: s + (q - k)),
        "head_bias": Variant(None, Mod(mods.head_bias, (bias,)), torch_score=lambda s, b, h, q, k: s + torch_bias[h]),
        "alibi": Variant(
            causal, Mod(mods.alibi, (slopes,)), torch_score=lambda s, b, h, q, k: s + torch_slopes[h] * (k - q)
        ),
        "sliding_window": Variant(_named("sliding_window(2048)")),
        "prefix_lm": Variant(_named("prefix_lm", np.array([512], np.int32))),
        "softcap": Variant(
            causal, Mod(partial(mods.softcap, 50.0)), torch_score=lambda s, b, h, q, k: 50 * torch.tanh(s / 50)
        ),
        "documents (8)": Variant(_named("causal & document", ids)),
        "window 512": Variant(_named("sliding_window(512)")),
        "blocks (1/4)": Variant(Mod(lambda: lambda b, h, q, k: mods.take(cells, b, q // 128, k // 128))),
    }


def _named(text: str, *arrays: np.ndarray) -> Mod:
    rule = mask_named(text)
    return Mod(rule.make, arrays, rule.terms)


def best(run: Callable[[], Any], repeats: int) -> float:
    """Returns the shortest time of a call in seconds, behind one that is not counted."""
    run()
    found = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - start)
    return found


def ours(variant: Variant, given: dict[str, jax.Array], repeats: int) -> tuple[float, float]:
    """Returns the seconds of forward, and of forward + backward."""
    call = AttentionCall(scale=WIDTH**-0.5, mask=variant.mask, score=variant.score, platform="cpu")

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(call, q, k, v)[0]

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        o, lse = attention(call, q, k, v)
        return attention_backward(call, (dout, o, lse), q, k, v)

    qkv = [given[n] for n in "qkv"]
    steps = jax.jit(forward), jax.jit(both)
    return (
        best(lambda: jax.block_until_ready(steps[0](*qkv)), repeats),
        best(lambda: jax.block_until_ready(steps[1](*qkv, given["dout"])), repeats),
    )


def dense(score: Mod | None, given: dict[str, jax.Array], repeats: int) -> tuple[float, float]:
    """Returns the seconds of our fastest dense attention with a score rule, over sizes of blocks."""
    found = []
    kept = xla.ROWS, xla.LISTED, xla.LONGEST
    for size in SIZES:
        xla.ROWS, xla.LISTED = size
        for longest in (0, kept[2]) if size == SIZES[0] else (0,):
            xla.LONGEST = longest
            found.append(ours(Variant(None, score), given, repeats))
    xla.ROWS, xla.LISTED, xla.LONGEST = kept
    return min(x for x, _ in found), min(x for _, x in found)


class Torch:
    """PyTorch on the same arrays."""

    def __init__(self, given: dict[str, jax.Array], repeats: int) -> None:
        import torch

        torch.set_num_threads(2)
        self.torch, self.repeats = torch, repeats
        turned = {n: np.asarray(x).swapaxes(1, 2).copy() for n, x in given.items()}
        self.qkv = [torch.from_numpy(turned[n]).requires_grad_(True) for n in "qkv"]
        self.dout = torch.from_numpy(turned["dout"])

    def sdpa(self, variant: Variant) -> tuple[float, float]:
        """Returns the seconds of forward, and of forward + backward; scores as they are."""
        torch = self.torch
        given: dict[str, Any] = {"is_causal": True} if variant.is_causal else {}
        if variant.mask is not None and not variant.is_causal:
            length = self.dout.shape[2]
            at = [
                np.arange(n).reshape([-1 if d == dim else 1 for d in range(4)])
                for dim, n in enumerate((1, 1, length, length))
            ]
            given = {
                "attn_mask": torch.from_numpy(
                    np.ascontiguousarray(np.broadcast_to(variant.mask(*at), (1, 1, length, length)))
                )
            }

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(*self.qkv, **given)

        with torch.no_grad():
            ahead = best(forward, self.repeats)
        return ahead, best(lambda: torch.autograd.grad(forward(), self.qkv, self.dout), self.repeats)

    def flex(self, variant: Variant, length: int) -> float:
        """Returns the seconds of forward by the compiled flex_attention."""
        torch = self.torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        block_mask = None
        if variant.mask is not None:
            seen = variant.mask(
                *(
                    np.arange(n).reshape([-1 if d == dim else 1 for d in range(4)])
                    for dim, n in enumerate((1, 1, length, length))
                )
            )
            table = torch.from_numpy(np.array(np.broadcast_to(seen, (1, 1, length, length))[0, 0]))
            plain = {"causal": lambda b, h, q, k: q >= k}
            block_mask = create_block_mask(
                plain["causal"] if variant.is_causal else lambda b, h, q, k: table[q, k],
                1,
                1,
                length,
                length,
                device="cpu",
            )
        compiled = torch.compile(flex_attention, fullgraph=True)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*without torch.compile.*")
            qkv = [x.detach() for x in self.qkv]
            return best(lambda: compiled(*qkv, score_mod=variant.torch_score, block_mask=block_mask), self.repeats)


def main() -> None:
    """Prints a table for each length, then the four figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=(2048, 4096, 8192))
    parser.add_argument("--only", default="", help="variants, with commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    print(f"{datetime.date.today()}, jax {jax.__version__}; seconds x 1000", flush=True)
    lines, flexes, causals, masks, denses = [], [], [], [], []
    for length in args.lengths:
        rng = np.random.default_rng(0)
        given = {
            n: jnp.asarray(rng.normal(size=(1, length, HEADS, WIDTH)), jnp.float32) for n in ("q", "k", "v", "dout")
        }
        peer = None if args.no_torch else Torch(given, args.repeats)
        whole: dict[Any, tuple[float, float]] = {}
        print(
            f"\n{length} positions   1-sparsity  forward    both   dense  line | sdpa forward    both   flex",
            flush=True,
        )
        for name, variant in variants(length).items():
            if args.only and name not in args.only.split(","):
                continue
            kind = name if variant.score else ""
            if kind not in whole:
                whole[kind] = dense(variant.score, given, args.repeats)
            live = 1.0
            if variant.mask is not None:
                live -= block_table(
                    variant.mask.make(*variant.mask.arrays), q_len=length, kv_len=length, block=128
                ).sparsity()
            ahead, both = ours(variant, given, args.repeats)
            line = both / (whole[kind][1] * live)
            lines.append((line, name, length))
            text = (
                f"{name:16} {live:11.3f} {ahead * 1e3:8.1f} {both * 1e3:7.1f} {whole[kind][1] * 1e3:7.1f} {line:5.2f}"
            )
            if peer is not None:
                sdpa = peer.sdpa(variant)
                flex = peer.flex(variant, length)
                flexes.append(flex / ahead)
                if name == "noop":
                    denses.append(sdpa[1] / whole[kind][1])
                if variant.is_causal and not variant.score:
                    causals.append(sdpa[1] / both)
                if name == "blocks (1/4)":
                    masks.append(sdpa[1] / both)
                text += f" | {sdpa[0] * 1e3:12.1f} {sdpa[1] * 1e3:7.1f} {flex * 1e3:6.1f}"
            print(text, flush=True)
    worst = sorted(lines, reverse=True)[:3]
    print("\n(a) line, worst: " + ", ".join(f"{x:.2f} {name} at {length}" for x, name, length in worst))
    for what, found in (
        ("(a) dense forward + backward, speed over sdpa", denses),
        ("(b) causal forward + backward, speed over sdpa is_causal", causals),
        ("(d) a quarter of the blocks, forward + backward, speed over sdpa with the mask", masks),
    ):
        if found:
            print(f"{what}: " + ", ".join(f"{x:.2f}" for x in found))
    if flexes:
        print(
            f"(c) forward, speed over flex: {math.exp(sum(map(math.log, flexes)) / len(flexes)):.2f} (geometric mean)"
        )


if __name__ == "__main__":
    main()
