"""FLOPs and bytes of attention steps on one device, whole, windowed, or round a ring of devices."""

import numpy as np

from meshwright.algebra.notation import product
from meshwright.algebra.steps import Step
from meshwright.cost.work.op_counts import stream
from meshwright.cost.work.sizes import Number, OpSizes


def keys_per_query(length: Number, *, window: int | None = None, causal: bool = False) -> Number:
    """Keys that a query of a sequence meets on average: T, or the window where that is shorter.

    Causal, the first queries meet fewer: W - W^2 / 2T with W the window or T, which is T / 2 without a window.
    """
    keys = length if window is None else np.minimum(length, window)
    return keys - keys**2 / (2 * length) if causal else keys


def score_elements(step: Step, sizes: OpSizes) -> Number:
    """B x N x T x S local, S the keys that a query meets, from the arrays q and k of an attention step."""
    attributes = dict(step.attributes)
    q, k = step.inputs[-5:-3]
    rows, keys = sizes.local(q), sizes.local(k)
    length = keys["T"] * num_blocks(step, sizes)
    window = int(attributes["window"]) if "window" in attributes else None
    if window is not None or sizes.causal:
        length = keys_per_query(length, window=window, causal=sizes.causal)
    return rows["B"] * rows["N"] * rows["T"] * length


def num_blocks(step: Step, sizes: OpSizes) -> Number:
    """Blocks of keys that attention works through one after the other: the devices of its ring, else 1."""
    axes = dict(step.attributes).get("ring", "")
    return product(sizes.mesh[axis] for axis in axes.split(",")) if axes else 1


def _widths(step: Step, sizes: OpSizes) -> tuple[Number, Number]:
    """Head width of queries and keys, and of values."""
    q, _, v = step.inputs[-5:-2]
    return sizes.dims[q.dims[-1]], sizes.dims[v.dims[-1]]


def attention_flops(step: Step, sizes: OpSizes) -> Number:
    """2 B T S N (H + Hv): scores and the weighted sum; 4 B T S N H where values are as wide as keys."""
    width, value_width = _widths(step, sizes)
    return 2.0 * score_elements(step, sizes) * (width + value_width)


def attention_backward_flops(step: Step, sizes: OpSizes) -> Number:
    """2 B T S N (3 H + 2 Hv): the scores again, then the products for dV, dP, dQ and dK."""
    width, value_width = _widths(step, sizes)
    return 2.0 * score_elements(step, sizes) * (3 * width + 2 * value_width)


def attention_bytes(step: Step, sizes: OpSizes) -> Number:
    """Inputs and results, once for every block of keys; in memory also the scores (written, read twice) and weights
    (written, read)."""
    moved = _stream_per_block(step, sizes)
    if sizes.scores == "on_chip":
        return moved
    return moved + score_elements(step, sizes) * (3 * sizes.score_bytes + 2 * sizes.width)


def attention_backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """As forward; in memory the scores' way again, dP (written, read twice) and dS (written, read twice)."""
    moved = _stream_per_block(step, sizes)
    if sizes.scores == "on_chip":
        return moved
    return moved + score_elements(step, sizes) * (6 * sizes.score_bytes + 5 * sizes.width)


def _stream_per_block(step: Step, sizes: OpSizes) -> Number:
    first = 3 if step.op == "attention_backward" else 0  # behind the cotangent, the result and its log-sum-exp
    passing = step.inputs[first : first + 2] if "ring" in dict(step.attributes) else ()
    own = stream(step, sizes) - sizes.total(*passing)
    return own * num_blocks(step, sizes)
