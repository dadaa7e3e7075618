"""The local ops of layer programs in NumPy, and derived steps of a block run on the blocks of every device.

Attention, norms and the rest are written plainly, forward and backward, on one device's arrays; what is tested
with them is where the derivation puts blocks and sums, not the ops.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from meshwright.algebra.blocks import block_of, execute, groups, num_devices, split
from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.attention import AttentionArrays
from meshwright.algebra.steps import Step

Values = dict[ShardedArray, Sequence[np.ndarray]]
"""Array -> its block on every device."""

EPS = 1e-6


def rms_norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def rms_norm_backward(dout, x, scale):
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    wide = dout * scale
    dx = inverse * wide - x * inverse**3 * (wide * x).mean(-1, keepdims=True)
    return dx, _sum_rows(dout * x * inverse, scale)


def layer_norm(x, scale, bias=0):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * scale + bias


def layer_norm_backward(dout, x, scale):
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS)
    normal, wide = centred * inverse, dout * scale
    dx = inverse * (wide - wide.mean(-1, keepdims=True) - normal * (wide * normal).mean(-1, keepdims=True))
    return dx, _sum_rows(dout * normal, scale), _sum_rows(dout, scale)


def _sum_rows(rows, scale):
    return rows.reshape(-1, *scale.shape).sum(0)


def rope(x, positions, sign=1.0):
    half = x.shape[-1] // 2
    shape = positions.shape + (1,) * (x.ndim - positions.ndim)
    angles = sign * positions.reshape(shape) * 0.3 ** np.arange(half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def silu_mul_backward(dout, gate, up):
    sigmoid = 1 / (1 + np.exp(-gate))
    return dout * up * sigmoid * (1 + gate * (1 - sigmoid)), dout * gate * sigmoid


def token_gate(x, h, gate):
    return x / (1 + np.exp(-(h @ gate)))[..., None]


def token_gate_backward(dout, x, h, gate):
    sigmoid = 1 / (1 + np.exp(-(h @ gate)))
    dscore = (dout * x).sum(-1) * sigmoid * (1 - sigmoid)
    return dout * sigmoid[..., None], dscore[..., None] * gate, np.einsum("bt,btd->d", dscore, h)


def join_heads(kept, shared):
    wide = np.broadcast_to(shared[:, :, None], (*kept.shape[:3], shared.shape[-1]))
    return np.concatenate([kept, wide], -1)


def attention_weights(q, k, first, window, sinks):
    """Weights of queries from position ``first`` on over all keys, beside which a sink takes a share of its own, and
    the log of each sum."""
    heads = q.shape[2] // k.shape[2]
    scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, heads, 2)) / np.sqrt(q.shape[-1])
    ahead = first + np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    weights = np.where((ahead >= 0) & (ahead < window), np.exp(scores), 0.0)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks)[:, None])
    return weights / total[..., None], np.log(total).transpose(0, 2, 1), heads


def attention(q, k, v, sinks=None, *, first, window):
    weights, lse, heads = attention_weights(q, k, first, window, sinks)
    return np.einsum("bnts,bsnh->btnh", weights, np.repeat(v, heads, 2)), lse


def attention_backward(dout, o, lse, q, k, v, sinks=None, *, first, window):
    weights, again, heads = attention_weights(q, k, first, window, sinks)
    assert np.allclose(lse, again)
    assert np.allclose(o, attention(q, k, v, sinks, first=first, window=window)[0])
    share = (dout * o).sum(-1).transpose(0, 2, 1)[..., None]
    dscores = weights * (np.einsum("btnh,bsnh->bnts", dout, np.repeat(v, heads, 2)) - share)
    dscaled = dscores / np.sqrt(q.shape[-1])
    dq = np.einsum("bnts,bsnh->btnh", dscaled, np.repeat(k, heads, 2))
    dk, dv = np.einsum("bnts,btnh->bsnh", dscaled, q), np.einsum("bnts,btnh->bsnh", weights, dout)
    found = (dq, _sum_groups(dk, heads), _sum_groups(dv, heads))
    if sinks is None:
        return found
    of_sink = np.exp(sinks[:, None] - lse.transpose(0, 2, 1))
    return (*found, -(of_sink * share[..., 0]).sum((0, 2)))


def _sum_groups(x, heads):
    return x.reshape(*x.shape[:2], -1, heads, x.shape[-1]).sum(3)


def route(scores, num_chosen):
    chosen = np.argsort(-scores, -1)[..., :num_chosen]
    picked = np.exp(np.take_along_axis(scores, chosen, -1))
    return picked / picked.sum(-1, keepdims=True), chosen


def route_backward(dgates, scores, chosen):
    gates, _ = route(scores, chosen.shape[-1])
    dscores = np.zeros_like(scores)
    np.put_along_axis(dscores, chosen, gates * (dgates - (dgates * gates).sum(-1, keepdims=True)), -1)
    return dscores


def _in_slots(values, chosen, num_experts):
    """[E, slots, ...]: every token has a slot of its own number with each expert, so no slot is ever short."""
    experts = chosen.reshape(-1, chosen.shape[-1])
    slots = np.zeros((num_experts, len(experts), *values.shape[3:]))
    slots[experts, np.arange(len(experts))[:, None]] = values.reshape(*experts.shape, *values.shape[3:])
    return slots


def _of_chosen(slots, chosen):
    """[B, T, Ea, ...]: what each token's experts have in its slots."""
    experts = chosen.reshape(-1, chosen.shape[-1])
    found = slots[experts, np.arange(len(experts))[:, None]]
    return found.reshape(*chosen.shape, *slots.shape[2:])


def _copies_in_slots(x, chosen, like):
    return _in_slots(np.repeat(x[:, :, None], chosen.shape[-1], 2), chosen, len(like))


PLAIN = {
    "silu_mul": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "gelu_mul": lambda gate, up: np.tanh(gate) * up,
    "gelu_mul_backward": lambda dout, gate, up: (dout * up * (1 - np.tanh(gate) ** 2), dout * np.tanh(gate)),
    "gelu": lambda x: np.tanh(x) * x,
    "gelu_backward": lambda dout, x: dout * (np.tanh(x) + x * (1 - np.tanh(x) ** 2)),
    "dispatch": _copies_in_slots,
    "dispatch_backward": lambda dslots, chosen, *tokens: _of_chosen(dslots, chosen).sum(2),
    "dispatch_gates_backward": lambda dslots, chosen, *gates: _of_chosen(dslots, chosen),
    "weighted": lambda rows, by: rows * by[..., None],
    "weighted_backward": lambda dout, rows, by: (dout * by[..., None], (dout * rows).sum(-1)),
    "combine": lambda slots, chosen: _of_chosen(slots, chosen).sum(2),
    "combine_backward": _copies_in_slots,
}


def run_local(step: Step, blocks: list[np.ndarray], sizes: Mapping[str, int], rows: range) -> tuple:
    """Results of one local op on one device; ``rows`` are those that it has of a look-up's table, or of queries."""
    seen = {"first": rows.start, "window": getattr(step.details, "window", None) or 10**9}
    special = {
        "attention": lambda: attention(*blocks, **seen),
        "attention_backward": lambda: attention_backward(*blocks, **seen),
        "rope_backward": lambda: rope(*blocks, sign=-1.0),
        "bias_add": lambda: blocks[0] + blocks[1].reshape(_broadcast(step.inputs[1], step.inputs[0], blocks[1])),
        "bias_add_backward": lambda: _narrow(blocks[0], step.result, step.inputs[0]),
        "join_heads_backward": lambda: _unjoin(blocks[0], sizes[step.result.dims[-1]]),
        "route": lambda: route(*blocks, num_chosen=sizes["Ea"]),
        "dispatch_gates": lambda: _in_slots(*blocks, num_experts=sizes["E"]),
        "embed": lambda: _look_up(*blocks, rows),
        "embed_backward": lambda: _add_rows(*blocks, rows),
    }
    found = special[step.op]() if step.op in special else (PLAIN.get(step.op) or globals()[step.op])(*blocks)
    return found if isinstance(found, tuple) else (found,)


def _narrow(dout, array: ShardedArray, out: ShardedArray):
    """The sum of a cotangent over the dims that a broadcast input lacks."""
    return dout.sum(tuple(i for i, dim in enumerate(out.dims) if dim not in array.dims))


def _unjoin(dout, width):
    return dout[..., :width], dout[..., width:].sum(2)


def _broadcast(array: ShardedArray, out: ShardedArray, block: np.ndarray) -> tuple[int, ...]:
    have = dict(zip(array.dims, block.shape, strict=True))
    return tuple(have.get(dim, 1) for dim in out.dims)


def _look_up(numbers, table, rows):
    inside = (numbers >= rows.start) & (numbers < rows.stop)
    return np.where(inside[..., None], table[np.where(inside, numbers - rows.start, 0)], 0.0)


def _add_rows(numbers, dout, rows):
    total = np.zeros((rows.stop, dout.shape[-1]))
    inside = numbers < rows.stop
    np.add.at(total, numbers[inside], dout[inside])
    return total[rows.start :]


def run_steps(steps: Sequence[Step], values: Values, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> Values:
    """Blocks of every array after the steps. A ring is run as if each device saw all blocks at once."""
    made = dict(values)
    for step in steps:
        if step.op == "permute":
            made[step.result] = made[step.inputs[0]]
        elif step.is_collective or step.op in ("slice", "einsum", "add", "copy"):
            made = execute([step], made, mesh)
        else:
            _store(step, _everywhere(step, made, mesh, sizes), made)
    return made


def _everywhere(step: Step, made: Values, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> list[tuple]:
    if getattr(step.details, "ring", ()):
        return _ring(step, made, mesh, sizes)
    return [
        run_local(step, [made[a][device] for a in step.inputs], sizes, _rows(step, device, mesh, sizes))
        for device in range(num_devices(mesh))
    ]


def _rows(step: Step, device: int, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> range:
    """Rows of a look-up's table, or of the queries, that a device holds."""
    if step.op.startswith("attention"):
        array, dim = AttentionArrays.of(step).q, 1
    elif step.op.startswith("embed"):
        array, dim = step.inputs[1] if step.op == "embed" else step.result, 0
    else:
        return range(0)
    number = sizes[array.dims[dim]] // math.prod(mesh[axis] for axis in array.axes[dim])
    first = block_of(array, mesh, device)[dim] * number
    return range(first, first + number)


def _ring(step: Step, made: Values, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> list[tuple]:
    """Keys of the whole ring for every device; cotangents of keys summed over the ring, each its own block."""
    given = 3 if step.op == "attention_backward" else 0
    inputs = (*step.inputs[:given], *step.inputs[given + 2 :])
    k, v = given + 1, given + 2
    found: list[tuple] = [()] * num_devices(mesh)
    for group in groups(mesh, step.details.ring):
        whole = {i: np.concatenate([made[inputs[i]][device] for device in group], 1) for i in (k, v)}
        results = []
        for device in group:
            blocks = [whole.get(i, made[array][device]) for i, array in enumerate(inputs)]
            results.append(run_local(step, blocks, sizes, _rows(step, device, mesh, sizes)))
        if step.op == "attention":
            found = [results[group.index(device)] if device in group else old for device, old in enumerate(found)]
            continue
        keys = [np.split(sum(parts), len(group), axis=1) for parts in list(zip(*results, strict=True))[1:3]]
        for number, device in enumerate(group):
            found[device] = (results[number][0], *(blocks[number] for blocks in keys), *results[number][3:])
    return found


def _store(step: Step, found: list[tuple], made: Values) -> None:
    for number, array in enumerate((step.result, *step.more)):
        blocks = [np.asarray(results[number]) for results in found]
        if number == 0 and step.accumulates:
            blocks = [before + block for before, block in zip(made[array], blocks, strict=True)]
        made[array] = blocks


def run_block(
    derived: Derived, block: BlockSteps, given: Mapping[str, np.ndarray], mesh: Mapping[str, int], sizes: dict[str, int]
) -> Values:
    """Forward, then backward from what the saved set holds; ``given`` are the inputs by name and the cotangent of the
    result, as whole arrays."""
    start: Values = {}
    for name, value in given.items():
        result = block.block.ops[-1].out
        array = derived.declared[result].replace(name=name) if name == f"d{result}" else derived.declared[name]
        start[array] = split(value, array, mesh)
    forward = run_steps(block.forward, start, mesh, sizes)
    held = {**start, **{array: forward[array] for array in block.kept}}
    after = run_steps(block.backward, held, mesh, sizes)
    return {**forward, **after}
