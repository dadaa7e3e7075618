"""Attention, and how it reads the keys of other devices' positions: gathered, unless a strategy asks for "ulysses",
which gives each device all positions of some heads, or for "ring" (`rewrites.rings`). Keys that all queries see are
gathered instead of going round a ring. Their dim of positions may differ from the queries': S, as in cross-attention.
"""

from functools import lru_cache, partial
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.rewrites.rings import in_ring, num_before
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape, axes_beside
from meshwright.core.errors import InputError
from meshwright.masks import mods
from meshwright.masks.names import example_data, mask_named
from meshwright.masks.table import NOTHING, block_table
from meshwright.masks.user import is_users, table_of_user


class Attention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: ``sees_all`` says that every query sees every key, or every key that ``mask`` leaves; ``window`` is in
    positions, with ``chunked`` those of the query's chunk of that length. ``softcap`` bounds the scores, ``ring`` has
    the mesh axes around which keys are sent. ``mask`` is the rule in place of causal, ``score`` the rule that changes
    scores, as `layers` writes them. With a ``distance`` scores have T5's learnt bias of each head for each bucket of
    distances; distances from ``distance`` on share the last bucket."""

    sees_all: bool = False
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    mask: str = ""
    score: str = ""
    distance: int = 0
    ring: tuple[str, ...] = ()


class AttentionArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Operands of an attention step by role: ShardedArrays of the step, or the values that an interpreter has for them.

    ``given`` has a backward step's cotangent of the result, result and log-sum-exp. ``passing`` are the keys and values
    that go round a ring. ``data`` are the arrays that the mask reads of each sequence, of all positions. ``per_head``
    is the parameter of each head: its sink, or its biases of distances. Operands that an op does not have are empty or
    None.
    """

    given: tuple[Any, ...]
    passing: tuple[Any, ...]
    q: Any
    k: Any
    v: Any
    data: tuple[Any, ...]
    per_head: Any | None

    @classmethod
    def of(cls, step: Step, values: Any = None) -> "AttentionArrays":
        """Returns the operands of a step by role: its arrays, or ``values`` in the order of its inputs."""
        arrays = step.inputs if values is None else tuple(values)
        num_given = 3 if step.op.endswith("_backward") else 0
        q_index = num_given + (2 if step.details.ring else 0)
        q, k, v, *operands = arrays[q_index:]
        row_flags = ["B" in array.dims for array in step.inputs[q_index + 3 :]]
        return cls(
            given=arrays[:num_given],
            passing=arrays[num_given:q_index],
            q=q,
            k=k,
            v=v,
            data=tuple(compress(operands, row_flags)),
            per_head=next((operand for operand, is_row in zip(operands, row_flags, strict=True) if not is_row), None),
        )


def positions_of(array: ShardedArray) -> str:
    """Returns the dim of positions: T, or S for an encoder's queries, keys and values."""
    return array.dims[1]


def _layout(tape: Tape) -> tuple[Attention, tuple[ShardedArray, ...]]:
    """Returns the details, and the op's inputs resharded so that attention is local."""
    details = tape.details(Attention)
    q, k, v, *operands = tape.inputs
    head_axes = k.axes_of(k.dims[2])
    if q.axes_of(q.dims[2])[: len(head_axes)] == head_axes:
        # axes that split query heads further than kv heads split positions of queries instead
        q = q.resharded({q.dims[1]: q.axes[1] + q.axes[2][len(head_axes) :], q.dims[2]: head_axes})
    for array in (k, v):
        if array.axes_of(array.dims[2]) != q.axes_of(q.dims[2]) or array.axes_of("B") != q.axes_of("B"):
            raise InputError(f"attention of {q} with {array}: heads and sequences must be split alike. Split N as K.")
    position_axes = q.axes_of(positions_of(q))
    method = tape.shardings.strategy.context_attention if position_axes else "gather"
    if method == "ring" and not (details.sees_all or details.distance):  # blocks of a bias would each need a part
        if any(array.axes_of("T") != q.axes_of("T") for array in (k, v)):
            raise InputError(f"ring attention of {q} with {k}: positions must be split alike. Give T the same axes.")
        details = replace(details, ring=position_axes)
    elif method == "ulysses":
        # heads take the axes of positions
        q, k, v = (a.resharded({a.dims[1]: (), a.dims[2]: a.axes[2] + position_axes}) for a in (q, k, v))
    else:
        k, v = (array.resharded({positions_of(array): ()}) for array in (k, v))
    # inputs of masks are whole along positions
    return details, (q, k, v, *(operand.like(q).resharded({"T": ()}) for operand in operands))


def _statistics(out: ShardedArray, q: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
    """Returns the result, and the logarithm of each query's sum of exponentials, sharded as the queries are."""
    row_dims = out.dims[:3]
    row_axes = tuple(q.axes_of(dim) for dim in row_dims)
    return out.like(q), ShardedArray(f"{out.name.removesuffix('o')}lse", row_dims, row_axes, dtype="fp32")


def forward(tape: Tape) -> None:
    """Adds the steps that reshard queries, keys and values so that attention is local, and the attention."""
    details, operands = _layout(tape)
    for array, target in zip(tape.inputs, operands, strict=True):
        tape.move(array, target)
    result, lse = _statistics(tape.out, operands[0])
    step = Step(op=tape.op.kind, inputs=operands, result=result, more=(lse,), details=details)
    tape.add(*in_ring(step, operands[1:3]))
    tape.move(result, tape.out)


def backward(tape: Tape) -> None:
    """Adds the steps that make the input cotangents; of keys and values unreduced if only queries are split."""
    details, operands = _layout(tape)
    q, *keys = operands[:3]
    dout = tape.move(tape.dout, tape.dout.like(q))
    o, lse = _statistics(tape.out, q)
    tape.need(*operands, lse)
    # a kept result has the sharding of the product after it
    tape.move(tape.out, o)
    unsummed_axes = tuple(a for a in q.axes_of(positions_of(q)) if a not in keys[0].axes_of(positions_of(keys[0])))
    input_names = [*tape.op.inputs[:3], *(array.name for array in operands[3:] if "B" not in array.dims)]
    dq, *cotangents = (tape.cotangent(name) for name in input_names)
    dq = dq.like(q)
    results = [d.like(key).replace(unreduced=unsummed_axes) for d, key in zip(cotangents[:2], keys, strict=True)]
    results += [d.like(dq).replace(unreduced=axes_beside(dq, d)) for d in cotangents[2:]]
    inputs = (dout, o, lse, *operands)
    parts = tape.as_parts(results)
    step = Step(op=f"{tape.op.kind}_backward", inputs=inputs, result=dq, more=tuple(parts), details=details)
    tape.add(*in_ring(step, keys))
    tape.join_parts(parts, results)
    for name, array in zip(input_names, (dq, *results), strict=True):
        tape.contribute(name, array)


# -- counts -----------------------------------------------------------------------------------------------


MOST_BLOCKS = 512
"""Blocks along a sequence in which a mask is counted, at most."""


@lru_cache(maxsize=256)
def block_share(mask: str, window: int | None, length: float, *, chunked: bool = False) -> float:
    """Returns the share of the T x T blocks of a mask that attention computes, with blocks of 128 positions, or more
    for long sequences. A mask that reads arrays is counted with example data (`masks.names.example_data`), a user's
    mask in a child process, for the first head."""
    seq_len = max(1, round(length))
    mask_sizes: dict[str, Any] = {"q_len": seq_len, "kv_len": seq_len, "block": max(128, -(-seq_len // MOST_BLOCKS))}
    window_mask = None if window is None else mods.chunk(window) if chunked else mods.window(window)
    if is_users(mask):
        block_kinds = table_of_user(mask, **mask_sizes).table.kinds * block_table(window_mask, **mask_sizes).kinds
        return float((block_kinds != NOTHING).mean())
    rule = mask_named(mask)
    predicate = rule.make(*example_data(rule, length=seq_len))
    predicate = predicate if window_mask is None else mods.and_masks(predicate, window_mask)
    return 1 - block_table(predicate, **mask_sizes).sparsity()


def keys_per_query(length: Number, *, window: int | None = None, causal: bool = False, chunked: bool = False) -> Number:
    """Returns the keys that a query attends to on average: T, or the window where that is shorter.

    With ``causal`` the first queries see fewer: W - W^2 / 2T with W the window or T, which is T / 2 without a window.
    In n whole chunks and R positions more queries see (n W^2 + R^2) / T keys, with ``causal`` half of that.
    """
    if window is not None and chunked:
        num_in_chunks = (length // window * window**2 + (length % window) ** 2) / length
        return num_in_chunks / 2 if causal else num_in_chunks
    num_keys = length if window is None else np.minimum(length, window)
    return num_keys - num_keys**2 / (2 * length) if causal else num_keys


def num_ring_blocks(step: Step, sizes: OpSizes) -> Number:
    """Returns the number of blocks of keys that attention computes one after another: one for each device of its ring,
    up to where a window or a chunk ends; 1 without a ring."""
    ring_size = product(sizes.mesh[axis] for axis in step.details.ring)
    return 1 + num_before(step.details.window, ring_size, sizes, chunked=step.details.chunked)


def score_elements(step: Step, sizes: OpSizes) -> Number:
    """Returns the local scores B x N x T x S, S all keys or the window; masked ones count unless causal or ``mask``."""
    arrays, window, chunked = AttentionArrays.of(step), step.details.window, step.details.chunked
    q_sizes = sizes.local(arrays.q)
    num_keys = sizes.local(arrays.k)[positions_of(arrays.k)] * product(sizes.mesh[axis] for axis in step.details.ring)
    is_causal = sizes.causal and not step.details.sees_all
    if step.details.mask and not step.details.sees_all:
        block_shares = np.vectorize(partial(block_share, step.details.mask, window, chunked=chunked))(num_keys)
        num_keys = num_keys * (block_shares if isinstance(num_keys, np.ndarray) else float(block_shares))
    elif window is not None or is_causal:
        num_keys = keys_per_query(num_keys, window=window, causal=is_causal, chunked=chunked)
    return q_sizes["B"] * q_sizes[arrays.q.dims[2]] * q_sizes[positions_of(arrays.q)] * num_keys


def _counted(step: Step, sizes: OpSizes) -> OpSizes:
    """Returns the sizes by which a step is counted: scores with a bias of distances go through memory, and masked keys
    count, because no fused kernel looks up a table."""
    if not step.details.distance:
        return sizes
    score_storage = "in_memory" if sizes.scores == "on_chip" else sizes.scores
    return replace(sizes, scores=score_storage, causal=False)


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns 2 B T S N (H + Hv): scores and the weighted sum; 4 B T S N H where values are as wide as keys.

    Backward 2 B T S N (3 H + 2 Hv): the scores again, then the products for dV, dP, dQ and dK.
    """
    arrays, sizes = AttentionArrays.of(step), _counted(step, sizes)
    qk_width, value_width = (sizes.dims[array.dims[-1]] for array in (arrays.q, arrays.v))
    product_width = 3 * qk_width + 2 * value_width if arrays.given else qk_width + value_width
    return 2.0 * score_elements(step, sizes) * product_width


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts inputs and results, once for every block of keys; if scores are in memory, these (written, read twice) and
    weights (written, read). Backward counts scores again; dP is written and read twice, dS written and read twice."""
    arrays, sizes = AttentionArrays.of(step), _counted(step, sizes)
    moved_bytes = (stream(step, sizes) - sizes.total(*arrays.passing)) * num_ring_blocks(step, sizes)
    if sizes.scores == "on_chip":
        return moved_bytes
    score_passes, weight_passes = (6, 5) if arrays.given else (3, 2)
    score_bytes = 2 if sizes.scores == "in_memory_16" else 4
    return moved_bytes + score_elements(step, sizes) * (score_passes * score_bytes + weight_passes * sizes.width)


def scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts T x S arrays unless scores stay on chip: float32 scores and the weights; backward also float32 dP."""
    if _counted(step, sizes).scores == "on_chip":
        return 0.0
    arrays = AttentionArrays.of(step)
    q_sizes = sizes.local(arrays.q)
    fp32_bytes = 8 if arrays.given else 4
    num_keys = sizes.local(arrays.k)[positions_of(arrays.k)]
    return (
        q_sizes["B"]
        * q_sizes[arrays.q.dims[2]]
        * q_sizes[positions_of(arrays.q)]
        * num_keys
        * (fp32_bytes + sizes.width)
    )


COUNTS = StepKind(flops=flops, hbm_bytes=hbm_bytes, group="attention", scratch_bytes=scratch_bytes)
OP = OpKind(forward=forward, backward=backward, steps={"attention": COUNTS, "attention_backward": COUNTS})
