"""Attention of packed rows on the rows before them in the same step, whose keys and values need not come from a cache.

It returns each query's largest score and sum of exponentials, by which ``share`` joins it with attention on the cache.
"""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def statistics(out: ShardedArray) -> tuple[ShardedArray, ShardedArray]:
    """Returns the arrays of each query's largest score and sum of exponentials, for the result of an attention."""
    dims_and_axes = out.dims[:3], out.axes[:3]
    peak, exp_sum = (ShardedArray(f"{out.name}_{name}", *dims_and_axes, dtype="fp32") for name in ("peak", "total"))
    return peak, exp_sum


def forward(tape: Tape) -> None:
    """Adds ``prompt_attention(q[B,T,N,H], k[B,T,N,H], v[B,T,N,Hv], first[Q], counts[Q])`` on the devices of the
    sequences; axes that split rows further split queries, not the keys of a sequence."""
    q, k, v, first_rows, row_counts = tape.inputs
    owner_axes = first_rows.axes_of("Q")
    head_axes = tuple(axis for axis in q.axes_of("N") if axis not in owner_axes)
    further_axes = tuple(axis for axis in q.axes_of("B") if axis not in owner_axes)
    queries = tape.move(q, q.resharded({"B": owner_axes + further_axes, "N": head_axes}))
    keys_and_values = (tape.move(array, array.resharded({"B": owner_axes, "N": head_axes})) for array in (k, v))
    result = tape.out.like(queries)
    tape.run(tape.op.kind, (queries, *keys_and_values, first_rows, row_counts), result, *statistics(result))
    for array, declared_array in zip((result, *statistics(result)), (tape.out, *statistics(tape.out)), strict=True):
        tape.move(array, declared_array)


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns 2 B T N S (H + Hv), with S the mean number of rows of its sequence up to and with a query."""
    queries, _, values = step.inputs[:3]
    num_rows = product(sizes.local(queries)[dim] for dim in queries.dims[:-1])
    num_pairs = sum(part.count * part.rows * (part.rows + 1) / 2 for part in sizes.sequences)
    n_keys = num_pairs / sum(part.count * part.rows for part in sizes.sequences)
    return 2.0 * num_rows * n_keys * (sizes.dims[queries.dims[-1]] + sizes.dims[values.dims[-1]])


OP = OpKind(forward=forward, steps={"prompt_attention": StepKind(flops=flops, group="attention")})
