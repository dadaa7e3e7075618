"""Workloads: for each op and its sizes the program, its inputs, and the FLOPs or bytes of one round."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.bench.devices import JAX_DTYPES, AttentionShape, Bench, MlpShape, Shard, Workload
from meshwright.bench.results import ELEMENT_BYTES, Contents, CopyKind, Group
from meshwright.core.dims import DTYPE_BYTES, CollectiveKind
from meshwright.masks.mods import causal
from meshwright.nn.activations import silu_mul
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.tiles import Mod
from meshwright.nn.contract import contract

FLOPS_EACH = 2
"""FLOPs of a multiply-add."""
ROUNDS = 10
"""Consecutive collectives in a call."""
LAYER_ROUNDS = 4
"""Consecutive layers in a call, all with the same weights."""
DISTANCE_ROUNDS = 8
"""Consecutive combinations of two matrices in a call, so that its launch hardly counts."""
EPSILON = 1e-6

SILU_BYTES = 2**22
FORWARD_PRODUCTS, ALL_PRODUCTS = 2, 7
"""Products of attention, forward (scores, weighted sum) and in both passes (then scores again, four cotangents)."""


# -- products ---------------------------------------------------------------------------------------------


def product_flops(m: int, k: int, n: int) -> float:
    """Returns 2 m k n: a multiplication and an addition for each pair."""
    return 2.0 * m * k * n


def product_workload(bench: Bench, dtype: str, size: int, rounds: int, *, contents: Contents | None = None) -> Workload:
    """Returns the workload of ``rounds`` products of two square shards, normal or of ``contents`` drawn per repeat.

    One element of an operand comes from the previous result, so that the compiler cannot drop a product. Results are
    int32 for int8, and bf16 for fp8. float32 runs at the highest precision where the default is narrower; "tf32" is
    that default.
    """
    result_dtype = {"int8": jnp.int32, "fp8": jnp.bfloat16}.get(dtype, JAX_DTYPES[dtype])
    is_exact = dtype == "fp32" and not bench.emulated
    precision = lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT

    def product(a: Array, b: Array) -> Array:
        if bench.emulated and dtype == "bf16":
            return contract("mk,kn->mn", a, b)  # as training steps do; XLA would widen both operands of `jnp.matmul`
        return jnp.matmul(a, b, preferred_element_type=result_dtype, precision=precision)

    def body(a: Array, b: Array) -> Array:
        def again(_: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            a, _out = carry
            out = product(a, b)
            # Clipped to stay finite through many products.
            corner = jnp.clip(out[:1, :1], -1, 1).astype(a.dtype)
            return lax.dynamic_update_slice(a, corner, (0, 0)), out

        return lax.fori_loop(0, rounds, again, (a, jnp.zeros_like(product(a, b))))[1]

    shard = Shard(shape=(size, size), dtype=dtype, contents=contents or "normal")
    return Workload(
        body=body, shards=(shard, shard), work=product_flops(size, size, size), rounds=rounds,
        arrays="new" if contents else "same",
    )  # fmt: skip


def mlp_workload(shape: MlpShape, dtype: str) -> Workload:
    """Returns the workload of a gated MLP, forward and backward as in a training step, with its transposes and copies.

    The program has three products forward and six backward, and returns the output and gradients of input and weights.
    """
    m, k, n = shape

    def body(x: Array, gate: Array, up: Array, down: Array, cotangent: Array) -> tuple[Array, ...]:
        gate_and_up = [contract("mk,kn->mn", x, weight)[None] for weight in (gate, up)]
        hidden, silu_vjp = jax.vjp(silu_mul, *gate_and_up)
        out, hidden_cotangent = contract("mn,nk->mk", hidden[0], down), contract("mk,nk->mn", cotangent, down)
        pair_cotangents = [cotangent_part[0] for cotangent_part in silu_vjp(hidden_cotangent[None])]
        x_cotangent = contract("mn,kn->mk", pair_cotangents[0], gate) + contract("mn,kn->mk", pair_cotangents[1], up)
        weight_cotangents = (contract("mk,mn->kn", x, cotangent_part) for cotangent_part in pair_cotangents)
        return out, x_cotangent, *weight_cotangents, contract("mn,mk->nk", hidden[0], cotangent)

    shapes = ((m, k), (k, n), (k, n), (n, k), (m, k))
    scales = (1.0, k**-0.5, k**-0.5, n**-0.5, 1.0)
    shards = tuple(Shard(shape=dims, dtype=dtype, scale=scale) for dims, scale in zip(shapes, scales, strict=True))
    return Workload(body=body, shards=shards, work=3 * 3 * product_flops(m, k, n))


def weight_workload(dtype: str) -> Workload:
    """Returns the workload of a product of 8 rows with a weight [outputs, inputs]; ``work`` is the weight's bytes."""
    num_outputs, num_inputs = 16384, 1024
    shards = Shard(shape=(8, num_inputs), dtype=dtype), Shard(shape=(num_outputs, num_inputs), dtype=dtype)
    product = partial(contract, "mk,nk->mn")
    return Workload(body=product, shards=shards, work=num_outputs * num_inputs * DTYPE_BYTES[dtype])


def attention_workload(shape: AttentionShape, dtype: str, *, both: bool) -> Workload:
    """Returns the workload of training's attention, forward or both passes; ``work`` counts all pairs of positions."""
    batch, seq_len, num_heads, num_kv_heads, head_dim = shape

    def body(q: Array, k: Array, v: Array, cotangent: Array) -> Array | tuple[Array, ...]:
        attention_call = AttentionCall(scale=head_dim**-0.5, mask=Mod(causal, (), {"causal": ()}))
        o, lse = attention(attention_call, q, k, v)
        return (o, *attention_backward(attention_call, (cotangent, o, lse), q, k, v)) if both else o

    q_shape, kv_shape = (batch, seq_len, num_heads, head_dim), (batch, seq_len, num_kv_heads, head_dim)
    shards = tuple(Shard(shape=dims, dtype=dtype) for dims in (q_shape, kv_shape, kv_shape, q_shape))
    num_products = ALL_PRODUCTS if both else FORWARD_PRODUCTS
    return Workload(body=body, shards=shards, work=2.0 * num_products * batch * seq_len**2 * num_heads * head_dim)


def weight_shards(sizes: Mapping[str, int], dtype: str) -> tuple[Shard, ...]:
    """Returns the shards Wq, Wk, Wv, Wo, gate, up and down of one layer."""
    d, ff = sizes["D"], sizes["F"]
    q_width, kv_width = sizes["N"] * sizes["H"], sizes["K"] * sizes["H"]
    shapes = ((d, q_width), (d, kv_width), (d, kv_width), (q_width, d), (d, ff), (d, ff), (ff, d))
    return tuple(Shard(shape=shape, dtype=dtype, scale=shape[0] ** -0.5) for shape in shapes)


def layer_flops(sizes: Mapping[str, int], tokens: int) -> float:
    """Returns the FLOPs of a layer's products: 2 for every weight and token."""
    return sum(product_flops(tokens, *shard.shape) for shard in weight_shards(sizes, "fp32"))


def layer_workload(sizes: Mapping[str, int], tokens: int, dtype: str) -> Workload:
    """Returns the workload of layers: norms, and the products of attention and of a gated MLP.

    No scores are computed: the sum of queries, keys and values stands in for attention.
    """

    def norm(x: Array) -> Array:
        x_fp32 = x.astype(jnp.float32)
        return (x_fp32 * lax.rsqrt(jnp.mean(x_fp32**2, axis=-1, keepdims=True) + EPSILON)).astype(x.dtype)

    def layer(x: Array, *weights: Array) -> Array:
        query, key, value, out, gate, up, down = weights
        h = norm(x)
        heads_per_group = query.shape[1] // key.shape[1]
        mixed_heads = h @ query + jnp.tile(h @ key + h @ value, (1, heads_per_group))
        x = x + mixed_heads @ out
        h = norm(x)
        return norm(x + silu_mul((h @ gate)[None], (h @ up)[None])[0] @ down)

    def body(x: Array, *weights: Array) -> Array:
        return lax.fori_loop(0, LAYER_ROUNDS, lambda _, y: layer(y, *weights), x)

    residual = Shard(shape=(tokens, sizes["D"]), dtype=dtype)
    shards = (residual, *weight_shards(sizes, dtype))
    return Workload(body=body, shards=shards, work=layer_flops(sizes, tokens), rounds=LAYER_ROUNDS)


# -- no products ------------------------------------------------------------------------------------------


def log_space(a: Array, b: Array) -> Array:
    """Returns the log of the product of exp a and exp b."""
    return jax.nn.logsumexp(a[:, :, None] + b[None, :, :], axis=1)


def l1_distance(a: Array, b: Array) -> Array:
    """Returns the sums of absolute differences between rows of a and columns of b."""
    return jnp.sum(jnp.abs(a[:, :, None] - b[None, :, :]), axis=1)


DISTANCES: dict[str, tuple[Callable[[Array, Array], Array], tuple[int, int] | None]] = {
    "matmul": (lambda a, b: jnp.matmul(a, b, precision=lax.Precision.HIGHEST), None),
    "log-space": (log_space, (5, 1)),
    "L1 distance": (l1_distance, (3, 0)),
}
"""Ways to combine [m,k] and [k,n], with the simple vector operations and the exponentials for each of the m k n pairs.
Log-space: add and maximum, then add again, subtract, exponential, add; L1: subtract, magnitude, add."""
EXP_OPS = {"cpu": 18, "cuda": 8, "rocm": 4, "tpu": 1}
"""Vector operations that take as long as an exponential. On a CPU it is a polynomial of about as many; NVIDIA GPUs
compute 16 exponentials or 128 additions a cycle (programming guide, throughput of arithmetic instructions), AMD's a
quarter as many as additions, and a TPU has a separate unit for exponentials."""


def distance_workload(what: str, size: int) -> Workload:
    """Returns the workload that combines two square shards by ``what`` of `DISTANCES`; ``work``: a product's FLOPs."""

    def body(a: Array, b: Array) -> Array:
        # Each round needs the one before it, as in `product_workload`.
        return lax.fori_loop(
            0, DISTANCE_ROUNDS, lambda _, out: DISTANCES[what][0](a.at[:1, :1].add(out[:1, :1] * 1e-6), b), a
        )

    shard = Shard(shape=(size, size))
    return Workload(body=body, shards=(shard, shard), work=product_flops(size, size, size), rounds=DISTANCE_ROUNDS)


def chain_workload(elements: int, repeats: int, *, fused: bool = True) -> Workload:
    """Returns the workload x = a x + b, ``repeats`` times, in one fused kernel or a kernel each; a, b are inputs."""

    def body(x: Array, ab: Array) -> Array:
        factor, addend = ab[0] * 1e-3, ab[1]
        for _ in range(repeats if fused else 1):
            x = x * factor + addend
        return x

    shards = (Shard(shape=(elements,)), Shard(shape=(2,), contents="uniform"))
    num_flops = float(FLOPS_EACH * repeats * elements)
    return Workload(body=body, shards=shards, work=num_flops, arrays="in place", launches=1 if fused else repeats)


def copy_workload(kind: CopyKind, array_bytes: int, rounds: int) -> Workload:
    """Returns the workload that reads and writes an array ``rounds`` times, adding so that the compiler drops none.

    "silu" also computes an exponential, as softmax and activations do, and writes a new array, as layers do. "copy"
    works in place, so that arrays may be large.
    """

    def once(_: int, x: Array) -> Array:
        return jax.nn.silu(x) + 0.5 if kind == "silu" else x + 1.0

    return Workload(
        body=lambda x: lax.fori_loop(0, rounds, once, x),
        shards=(Shard(shape=(array_bytes // ELEMENT_BYTES,)),),
        work=2.0 * array_bytes,
        rounds=rounds,
        arrays="same" if kind == "silu" else "in place",
    )


# -- collectives ------------------------------------------------------------------------------------------


COLLECTIVE_FUNCTIONS: dict[CollectiveKind, Callable[[Array, str], Array]] = {
    "all_gather": lambda x, axis: lax.all_gather(x, axis, tiled=True),
    "reduce_scatter": lambda x, axis: lax.psum_scatter(x, axis, tiled=True),
    "all_reduce": lax.psum,
    "all_to_all": lambda x, axis: lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True),
    "permute": lambda x, axis: lax.pshuffle(x, axis, [lax.axis_size(axis) - 1, *range(lax.axis_size(axis) - 1)]),
}
"""Collectives over a mesh axis, along the only dim of an array."""


def groups_of(num_devices: int, axes: Mapping[str, int]) -> list[Group]:
    """Returns the axes of a mesh, or groups of every power of two that divides the number of devices, largest first."""
    if axes:
        groups = [Group(axis=axis, size=size, mesh=dict(axes)) for axis, size in axes.items() if size > 1]
    else:
        sizes = [2**power for power in range(1, num_devices.bit_length()) if num_devices % 2**power == 0]
        groups = [Group(axis="group", size=size, mesh={"others": num_devices // size, "group": size}) for size in sizes]
    return sorted(groups, key=lambda group: -group.size)


def collective_workload(kind: CollectiveKind, group: Group, array_bytes: int) -> Workload:
    """Returns the workload of collectives on an array of ``array_bytes`` over the group (for permute per device)."""

    def again(_: int, y: Array) -> Array:
        # The first element of the result feeds the next round, so that none is dropped or reordered.
        return y + COLLECTIVE_FUNCTIONS[kind](y, group.axis)[:1] * 1e-6

    num_elements = array_bytes // ELEMENT_BYTES
    shard_elements = num_elements if kind in ("reduce_scatter", "all_reduce", "permute") else num_elements // group.size
    return Workload(
        body=lambda x: lax.fori_loop(0, ROUNDS, again, x),
        shards=(Shard(shape=(shard_elements,)),),
        work=array_bytes,
        rounds=ROUNDS,
        axes=group.mesh,
    )
