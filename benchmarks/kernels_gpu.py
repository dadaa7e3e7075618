"""Kernels of one GPU beside dense float32: the first part of `on_gpu.sh`.

Each case is what the product calls, so that the platform's own kernel runs, and the largest error of its results and
gradients, relative to the largest value: below 1% where operands are bfloat16. Quantised values are compared with the
values that they stand for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from gpu_part import Part, model_of
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.masks import mods
from meshwright.nn.attention.flex import flex_attention
from meshwright.nn.attention.pages import PagedPart, RaggedCall
from meshwright.nn.attention.ragged import ragged_attention
from meshwright.nn.experts.products import blocks_of, slot_product, slot_weight_gradient
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.ops.einsum import contract_step
from meshwright.nn.quantisation import absmax_scale, dequantised, pairs, quantise, scaled_product
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.optimizers.table import make_optimizer
from meshwright.train.settings import TrainSettings

BOUND = 0.01
"""Largest error of a result of bfloat16 operands, of whose rounding 2**-8 is the most of one value."""
GROUP = 64
"""Inputs that share a scale in int4."""

Arrays = tuple[Any, ...]
Both = tuple[Callable[[], Arrays], Callable[[], Arrays]]
"""What the product makes, and what is wanted, which is made with float32 products in full."""


class Check(NamedTuple):
    """A case, made when it is its turn."""

    name: str
    make: Callable[[], Both]
    bound: float = BOUND


def draw(*shape: int, seed: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Normal values."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def wide(*arrays: jax.Array) -> list[jax.Array]:
    """The same in float32."""
    return [x.astype(jnp.float32) for x in arrays]


# -- attention ---------------------------------------------------------------------------------------------

LENGTH, HEADS, KV_HEADS, BATCH = 700, 4, 2, 2


def dense(score: Any, mask: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention with all scores."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    at = [jnp.arange(n).reshape([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(sizes)]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = scores if score is None else score(scores, *at)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask(*at), scores, -1e30), axis=-1), v)


def attention(score: Any, mask: Any, length: int, width: int) -> Both:
    """The result and the three gradients."""
    q, k, v, dout = (draw(BATCH, length, n, width, seed=i) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS)))

    def both(function: Callable[..., Any], dout: jax.Array, *qkv: jax.Array) -> Arrays:
        o, pull = jax.vjp(function, *qkv)
        return o, *pull(dout)

    ours, theirs = (
        jax.jit(partial(both, f))
        for f in (lambda q, k, v: flex_attention(q, k, v, score, mask), partial(dense, score, mask))
    )
    return lambda: ours(dout, q, k, v), lambda: theirs(*wide(dout, q, k, v))


def attentions(tiny: bool) -> Iterator[Check]:
    """Masks and score rules, of widths that the kernels tell apart."""
    length = 140 if tiny else LENGTH
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, (BATCH, length)), axis=1))
    cases = {
        "causal": (None, mods.causal(), length + 68),  # whole blocks, as cuDNN takes them
        "window": (None, mods.sliding_window(length // 5), length + 68),
        "documents": (None, mods.and_masks(mods.causal(), mods.document(ids)), length),
        "soft cap": (mods.softcap(20.0), mods.causal(), length),
        "alibi": (mods.alibi(jnp.asarray(mods.alibi_slopes(HEADS))), mods.causal(), length),
    }
    for width in (64,) if tiny else (64, 128):
        for name, (score, mask, size) in cases.items():
            yield Check(f"attention, {name}, width {width}", partial(attention, score, mask, size, width))


# -- pages -------------------------------------------------------------------------------------------------

SEQUENCES = [(1, 1), (700, 1), (33, 1), (256, 1), (300, 40)]
"""Positions of a sequence, and how many of them, the last, are queries."""
PAGE_LEN, NUM_PAGES = 16, 96


def packed(dtype: str, kv_heads: int, width: int, num: int) -> Both:
    """The first ``num`` sequences on pages."""
    lengths, counts = np.array(SEQUENCES[:num]).T
    used = -(-lengths // PAGE_LEN)
    order, table = np.random.default_rng(0).permutation(NUM_PAGES), np.zeros((num, max(used)), np.int32)
    for row, (count, end) in enumerate(zip(used, np.cumsum(used), strict=True)):
        table[row, :count] = order[end - count : end]
    q = draw(int(counts.sum()), 8, width, seed=1)
    pools, scales, held = [], [], []
    for seed in (2, 3):
        pool = draw(NUM_PAGES, PAGE_LEN, kv_heads, width, seed=seed, dtype=jnp.float32)
        scale = absmax_scale(pool, (3,)) if dtype == "int8" else None
        narrow = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}
        pools.append(pool.astype(narrow[dtype]) if scale is None else quantise(pool, scale, (3,)))
        scales.append(scale)
        held.append(pools[-1].astype(jnp.float32) * (1 if scale is None else scale[..., None]))
    first = np.cumsum(counts) - counts
    numbers = {"first": first, "counts": counts, "lengths": lengths, "pages": table}
    fields: dict[str, Any] = {name: jnp.asarray(x, jnp.int32) for name, x in numbers.items()}
    call = RaggedCall(scale=width**-0.5, longest=int(counts.max()), **fields)
    run = jax.jit(lambda q, k, v, ks, vs: ragged_attention(call, [PagedPart(q, k, ks)], v, vs)[0])

    def of_sequence(row: int) -> jax.Array:
        own = wide(q[first[row] : first[row] + counts[row]])[0][None]
        keys, values = (x[table[row]].reshape(1, -1, kv_heads, width)[:, : lengths[row]] for x in held)
        ahead = int(lengths[row] - counts[row])
        return dense(None, lambda b, h, t, s: s <= t + ahead, own, keys, values)[0]

    return lambda: (run(q, *pools, *scales),), lambda: (jnp.concatenate([of_sequence(row) for row in range(num)]),)


def pages() -> Iterator[Check]:
    """Pools of each dtype with one, two and eight kv heads: a step that decodes, and one that also has a chunk."""
    for dtype in ("bf16", "int8", "fp8"):
        for kv_heads in (1, 2, 8):
            yield Check(f"pages, {dtype}, {kv_heads} kv heads, decode", partial(packed, dtype, kv_heads, 64, 4))
        yield Check(f"pages, {dtype}, 2 kv heads, a chunk too", partial(packed, dtype, 2, 64, 5))


# -- products ----------------------------------------------------------------------------------------------


def experts(sizes: list[int], rows: int, width: int, out: int) -> Both:
    """Grouped products, forward and backward, with an expert without rows and spare rows behind the last."""
    spare = sum(sizes)
    x, dy = (draw(rows, n, seed=seed).at[spare:].set(0) for seed, n in ((1, width), (2, out)))
    w = draw(len(sizes), width, out, seed=3)
    group = jnp.array([sizes], jnp.int32)

    @jax.jit
    def ours(x: jax.Array, dy: jax.Array, w: jax.Array) -> Arrays:
        mine, gradient = Ragged(x, group), Ragged(dy, group)
        blocks = blocks_of(mine, SimpleNamespace(num_experts=len(sizes), experts_per_token=2))  # type: ignore[arg-type]
        made: list[Any] = [slot_product(mine, w, blocks), slot_product(gradient, w, blocks, transposed=True)]
        return made[0].rows, made[1].rows, slot_weight_gradient(mine, gradient, blocks)

    owner = jnp.asarray(np.repeat(np.arange(len(sizes) + 1), [*sizes, rows - spare]))
    chosen = jax.nn.one_hot(owner, len(sizes))
    given = chosen, *wide(x, dy, w)
    products = ("re,ri,eio->ro", 0, 1, 3), ("re,ro,eio->ri", 0, 2, 3), ("re,ri,ro->eio", 0, 1, 2)
    return lambda: ours(x, dy, w), lambda: tuple(
        jnp.einsum(what, *(given[n] for n in places)) for what, *places in products
    )


def quantised(dtype: str, rows: int, width: int, out: int) -> Both:
    """A product with a narrow weight."""
    x, w = draw(rows, width, seed=1), draw(width, out, seed=2, dtype=jnp.float32)
    of_scale: tuple[str, ...]
    if dtype == "int4":
        split = w.reshape(-1, GROUP, out)
        scale, of_scale = absmax_scale(split, (1,), dtype), ("Dg", "F")
        values = pairs(quantise(split, scale, (1,), dtype).reshape(w.shape), 0, len(split))
    else:
        scale, of_scale = absmax_scale(w, (0,), dtype), ("F",)
        values = quantise(w, scale, (0,), dtype)
    dims = {"x": ("B", "D"), "w": ("D", "F"), "s": of_scale, "y": ("B", "F")}
    arrays = [ShardedArray(name, own, ((),) * len(own)) for name, own in dims.items()]
    step = Step(op="quantised_einsum", inputs=tuple(arrays[:3]), result=arrays[3])
    plain = Step(op="einsum", inputs=tuple(arrays[:2]), result=arrays[3].replace(dtype="fp32"))
    run = jax.jit(lambda x, v, s: scaled_product(step, x, v, s, partial(contract_step, plain)))
    return (
        lambda: (run(x, values, scale),),
        lambda: (wide(x)[0] @ dequantised(values, scale, dims["w"], of_scale),),
    )


def products(tiny: bool) -> Iterator[Check]:
    """Experts, and weights in 8 and 4 bits with few rows and with many."""
    rows, width, out = (512, 256, 128) if tiny else (4096, 1024, 2048)
    share = rows // 8
    for name, sizes in {"uneven": [3 * share, 0, share + 50, share], "full": [rows // 4] * 4}.items():
        yield Check(f"experts, {name}", partial(experts, sizes, rows, width, out))
    for dtype in ("fp8", "int8", "int4"):
        for count in (1, 8, rows // 4):
            yield Check(f"weights in {dtype}, {count} rows", partial(quantised, dtype, count, width, out))


def collectives() -> Both:
    """Each collective on a mesh of one device, which gives back what it is given."""
    x = draw(8, 128, seed=1)
    every: list[Callable[[jax.Array], jax.Array]] = [
        lambda x: lax.psum(x, "data"),
        lambda x: lax.all_gather(x, "data", tiled=True),
        lambda x: lax.psum_scatter(x, "data", tiled=True),
        lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True),
        lambda x: lax.ppermute(x, "data", [(0, 0)]),
    ]
    mesh, own = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec()
    run = jax.jit(
        jax.shard_map(lambda x: tuple(one(x) for one in every), mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
    )
    return lambda: run(x), lambda: (x,) * len(every)


# -- a whole step ------------------------------------------------------------------------------------------

SIZES = {"d_model": 256, "d_ff": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 1024}


def step(name: str, changes: dict[str, Any]) -> Both:
    """The losses of three training steps and the first gradient's norm, in bfloat16 beside float32."""
    model = msgspec.structs.replace(model_of(name, layers=2), **SIZES, **changes)
    rows = np.random.default_rng(0).integers(0, 1024, (4, 257), dtype=np.int32)

    def run(state: str) -> Arrays:
        settings = TrainSettings(learning_rate=1e-3, schedule="constant", warmup_steps=0)
        one = TrainStep(
            model, Strategy(mesh=make_mesh({}), state=state), optimizer=make_optimizer(model, settings, state)
        )
        held, batch = one.init(0), one.place({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
        figures = []
        for number in range(3):
            held, metrics = one.step(held, batch)
            figures += [metrics.loss] if number else [metrics.loss, metrics.grad_norm]
        return tuple(figures)

    return partial(run, "bf16-adam"), partial(run, "fp32")


def main() -> None:
    """Runs every check."""
    part = Part("kernels", "every error below its bound", __doc__)
    worst: list[float] = []

    def run(check: Check) -> None:
        ours, theirs = check.make()
        with jax.default_matmul_precision("highest"):
            wanted = theirs()
        errors = []
        for a, b in zip(ours(), wanted, strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            errors.append(float(np.abs(a - b).max() / np.abs(b).max()) if np.isfinite(a).all() else float("inf"))
        worst.append(max(errors) / check.bound if check.bound else max(errors))
        right = max(errors) <= check.bound
        text = f"{check.name}: {' '.join(f'{x:.1e}' for x in errors)}{'' if right else ' WRONG'}"
        part.keep(text, case=check.name, errors=errors, bound=check.bound, right=right)

    every = [
        *attentions(part.tiny),
        *pages(),
        *products(part.tiny),
        Check("collectives", collectives, 0.0),
        Check("step, llama3.2-1b", partial(step, "llama3.2-1b", {}), 0.02),
        Check("step, mixtral-8x7b", partial(step, "mixtral-8x7b", {"d_ff_expert": 512}), 0.02),
    ]
    part.each(every, run)
    right = sum(case.get("right", False) for case in part.cases)
    part.close(
        f"{right} of {len(every)} right, the largest error {max(worst, default=0):.2f} of its bound",
        right == len(every),
    )


if __name__ == "__main__":
    main()
