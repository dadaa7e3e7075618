"""Seconds of one layer's attention over the blocks that a mask leaves."""

from meshwright.algebra.sizes import Number
from meshwright.cost.formulas.accounting import attention_work
from meshwright.cost.work.kernel_times import PASSES
from meshwright.cost.work.kernels import ChipRates, partly_hidden


def masked_attention_s(rates: ChipRates, run: str, *, length: int, pairs: Number, heads: int, head_dim: int) -> Number:
    """Returns the predicted seconds of one sequence of ``length`` positions; ``pairs`` are those in existing blocks,
    ``run`` is "forward" or "forward + backward".

    4 N H FLOPs a pair, 10 N H more backward, over the rate of attention, beside the traffic of queries, keys, values,
    results and their cotangents. What a partial block's mask costs is not counted.
    """
    work = attention_work(queries=length, keys=length, heads=heads, kv_heads=heads, head_dim=head_dim)
    work_s, at = 4.0 * pairs * heads * head_dim / rates.attention_flops_per_s, rates.efficiency
    seconds: Number = 0.0
    for phase in run.split(" + "):
        math_s = work_s * PASSES[phase] * (1 + at.head_half / head_dim)
        moved = work.num_bytes * (2 if phase == "backward" else 1)
        seconds = seconds + partly_hidden(math_s, moved / rates.hbm_bytes_per_s, at.overlap) + at.kernel_s
    return seconds
