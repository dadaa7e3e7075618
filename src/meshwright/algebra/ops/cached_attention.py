"""Attention of new positions on the keys and values of a cache."""

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops.attention import Attention, AttentionArrays
from meshwright.algebra.ops.prompt_attention import statistics
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape
from meshwright.core.errors import InputError
from meshwright.core.notation import Axes


def reads_cache(step: Step) -> bool:
    """True if a step is attention on pages of a cache."""
    return step.op.endswith("attention") and any("Pl" in array.dims for array in step.inputs)


def queries_of(step: Step) -> ShardedArray:
    """Returns the queries of an attention step: the first input of a step on a cache, else `AttentionArrays.q`."""
    has_queries_first = step.details is None or reads_cache(step)
    return step.inputs[0] if has_queries_first else AttentionArrays.of(step).q


def forward(tape: Tape) -> None:
    """Adds the steps that move queries to the devices of their cache, attend, and reshard the result for the next
    product.

    Devices that split a cache over sequences beyond the batch of queries exchange heads for sequences by all-to-all;
    other axes keep splitting rows. Devices that split the slots of pages gather the heads of queries, attend each to
    its slots, and sum results weighted by their share of exponentials. Raises InputError if heads are split
    differently."""
    (q, *operands), details = tape.inputs, tape.details(Attention)
    cache = next(array for array in operands if array.dims[1:2] == ("Pl",))
    row_axes, slot_axes = cache.axes[0], cache.axes[1]
    # a latent (Pg Pl Rkv) has no heads: every device has all of it
    head_axes = tuple(axis for axis in q.axes_of("N") if axis not in (*row_axes, *slot_axes))
    for array in operands:
        if len(array.dims) == 4 and array.dims[:2] == cache.dims[:2] and array.axes[2] != head_axes:
            raise InputError(f"attention of {q} with {array}: heads must be split alike. Give N and K equal axes.")
    further_axes = tuple(axis for axis in q.axes_of("B") if axis not in (*row_axes, *slot_axes))
    queries = q.resharded({"B": row_axes + further_axes, "N": head_axes})
    inputs = tuple(tape.move(array, array.like(queries)) for array in tape.inputs)
    result = tape.out.like(queries)
    if not slot_axes:
        tape.run(tape.op.kind, inputs, result, details=details)
        tape.move(result, tape.out)
        return
    local_result = result.replace(name=f"{result.name}_own", unreduced=slot_axes)
    peak, exp_sum = (array.replace(unreduced=slot_axes) for array in statistics(result))
    whole_peak, exp_share = peak.replace(unreduced=()), exp_sum.replace(name=f"{tape.out.name}_share")
    tape.run(tape.op.kind, inputs, local_result, peak, exp_sum, details=details)
    tape.add(Step(op="all_reduce", inputs=(peak,), result=whole_peak, axes=slot_axes, reduction="max"))
    tape.run("rescale", (exp_sum, peak, whole_peak), exp_share)
    whole_share = tape.move(exp_share, exp_share.replace(unreduced=()))
    weighted_result = result.replace(unreduced=slot_axes)
    tape.run("scale_by_share", (local_result, exp_share, whole_share), weighted_result)
    tape.move(weighted_result, tape.out)


def slots_met(step: Step, sizes: OpSizes) -> Number:
    """Returns the mean number of a device's slots that a query attends to: the positions that it sees."""
    num_rows = sum(part.count * part.rows for part in sizes.sequences)
    is_cross, window, chunked = step.details.sees_all, step.details.window, step.details.chunked
    num_pairs = sum(
        part.count * part.rows * part.source if is_cross else part.pairs(window, chunked=chunked)
        for part in sizes.sequences
    )
    return num_pairs / num_rows / product(sizes.mesh[axis] for axis in split_slots(step))


def slots_read(step: Step, sizes: OpSizes) -> Number:
    """Returns the number of slots that a device reads: slots that any row of its sequences sees, each once."""
    is_cross, window, chunked = step.details.sees_all, step.details.window, step.details.chunked
    num_seen_slots = sum(
        part.count * part.source if is_cross else part.positions(window, chunked=chunked) for part in sizes.sequences
    )
    owner_axes = next(array.axes[0] for array in step.inputs if array.dims == ("Q",))
    return num_seen_slots / product(sizes.mesh[axis] for axis in (*owner_axes, *split_slots(step)))


def split_slots(step: Step) -> Axes:
    """Returns the mesh axes that split the slots of the pages that a step reads or writes."""
    return next((array.axes_of("Pl") for array in step.inputs if "Pl" in array.dims), ())


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns 2 B T N S (H + Hv), with S the slots of a query (`slots_met`)."""
    queries, _, values = step.inputs[:3]
    num_rows = product(sizes.local(queries)[dim] for dim in queries.dims[:-1])
    return 2.0 * num_rows * slots_met(step, sizes) * (sizes.dims[queries.dims[-1]] + sizes.dims[values.dims[-1]])


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts every input, read, and the result, written once; of a cache the slots that rows see. No page is copied."""
    caches = [array for array in step.inputs if array.dims[1:2] == ("Pl",)]
    num_slots = slots_read(step, sizes)
    # bytes of one slot: the bytes of a cache over the elements of its first two dims
    slot_bytes = sum(sizes.bytes(a) / sizes.elements(a.replace(dims=a.dims[:2], axes=a.axes[:2])) for a in caches)
    return stream(step, sizes) - sizes.total(*caches) + num_slots * slot_bytes


OP = OpKind(
    forward=forward,
    steps={
        "cached_attention": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="attention"),
        "scale_by_share": StepKind(),
    },
)
