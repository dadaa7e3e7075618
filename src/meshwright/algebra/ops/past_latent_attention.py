"""Attention of rows on the latents that a cache had before their step.

Queries are multiplied with the keys' projection, results with the values'; rows without earlier positions cost nothing.
"""

import numpy as np

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import product
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.ops.prompt_attention import statistics
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape

CHUNK_BYTES = 2**27
"""Bytes of absorbed queries, in float32, for which attention runs at a time."""


def chunk_rows(num_rows: Number, elements: Number) -> Number:
    """Returns how many of ``num_rows`` run at a time, if a row has ``elements`` of absorbed queries: at least 32."""
    return np.minimum(num_rows, np.maximum(32, CHUNK_BYTES // (4 * elements)))


def forward(tape: Tape) -> None:
    """Adds ``past_latent_attention(q[B,T,N,H], latents[Pg,Pl,Rkv], shared[Pg,Pl,Hr], .., wk, wv)`` on the devices of
    each sequence, with its statistics (`prompt_attention`); axes that split rows further keep doing so."""
    q, latents, *operands = tape.inputs
    owner_axes = latents.axes[0]
    head_axes = tuple(axis for axis in q.axes_of("N") if axis not in owner_axes)
    further_axes = tuple(axis for axis in q.axes_of("B") if axis not in owner_axes)
    queries = tape.move(q, q.resharded({"B": owner_axes + further_axes, "N": head_axes}))
    inputs = [
        array
        if {"Pl", "Q"} & {*array.dims}
        else tape.move(array, array.resharded({dim: head_axes if dim == "N" else () for dim in array.dims}))
        for array in operands
    ]
    result = tape.out.like(queries)
    tape.run(tape.op.kind, (queries, latents, *inputs), result, *statistics(result), details=tape.details(Attention))
    for array, declared_array in zip((result, *statistics(result)), (tape.out, *statistics(tape.out)), strict=True):
        tape.move(array, declared_array)


def _share(sizes: OpSizes) -> Number:
    """Returns the share of rows whose sequence has positions before this step."""
    num_rows = sum(part.count * part.rows for part in sizes.sequences)
    return sum(part.count * part.rows * (np.asarray(part.before) > 0) for part in sizes.sequences) / num_rows


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns 2 B T N (Hn Rkv + Rkv Hv) for rows with earlier positions + 2 B T N S (2 Rkv + Hr), S their mean."""
    queries, latents, shared = step.inputs[:3]
    num_rows = product(sizes.local(queries)[dim] for dim in queries.dims[:-1])
    latent_width, rotated_width, query_width = (sizes.dims[array.dims[-1]] for array in (latents, shared, queries))
    num_pairs = sum(part.count * part.rows * part.before for part in sizes.sequences)
    num_met = num_pairs / sum(part.count * part.rows for part in sizes.sequences)
    projected_width = _share(sizes) * latent_width * (query_width - rotated_width + sizes.dims[step.result.dims[-1]])
    return 2.0 * num_rows * (projected_width + num_met * (2 * latent_width + rotated_width))


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of results, and of queries, latents and weights that rows with earlier positions read."""
    caches = [array for array in step.inputs if "Pl" in array.dims]
    num_seen_slots = sum(part.count * part.before for part in sizes.sequences)
    num_seen_slots = num_seen_slots / product(sizes.mesh[axis] for axis in caches[0].axes[0])
    slot_bytes = sum(sizes.bytes(a) / sizes.elements(a.replace(dims=a.dims[:2], axes=a.axes[:2])) for a in caches)
    operands = [array for array in step.inputs if array not in caches]
    row_share = _share(sizes)
    read_bytes = row_share * sizes.bytes(operands[0]) + (row_share > 0) * sizes.total(*operands[1:])
    return sizes.total(*step.results) + read_bytes + num_seen_slots * slot_bytes


def scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes for rows that run at a time: five float32 arrays as large as the absorbed queries."""
    local_sizes = sizes.local(step.inputs[0])
    row_elements = local_sizes["N"] * sizes.dims[step.inputs[1].dims[-1]]
    return 5 * 4 * row_elements * chunk_rows(local_sizes["B"] * local_sizes["T"], row_elements)


OP = OpKind(
    forward=forward,
    steps={
        "past_latent_attention": StepKind(
            flops=flops, hbm_bytes=hbm_bytes, group="attention", scratch_bytes=scratch_bytes
        )
    },
)
