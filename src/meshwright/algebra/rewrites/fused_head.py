"""Rewrites the chunked loss head: joins its two passes where a device has the whole vocabulary.

A head in chunks makes the logits twice: once for the loss, once in the backward pass. Nothing has to be reduced in
between where the vocabulary is whole, so one step can make the loss and its slopes: the cotangents of the stream
and of the table for a loss cotangent of 1. The backward pass then only scales them. Collectives stay as they are.
"""

from msgspec.structs import replace

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.steps import Step

_FORWARD = ("chunked_logits_statistics", "rescale")
"""Steps before the loss that the fused head replaces."""


def with_fused_head(block: BlockSteps) -> BlockSteps:
    """Returns the block with the head's two passes joined.

    Returns it unchanged if it has no chunked head, or if several devices have parts of its statistics.
    """
    step_of = {step.op: step for step in (*block.forward, *block.backward)}
    if "chunked_logits_statistics" not in step_of:
        return block
    stats_step, loss, bwd = (step_of[op] for op in ("chunked_logits_statistics", "sum_loss", "chunked_logits_backward"))
    loss_inputs = (stats_step.result, step_of["rescale"].result, stats_step.more[1], stats_step.inputs[2])
    if loss.inputs != loss_inputs:
        # a part of the statistics is on another device
        return block
    cotangents = bwd.results
    slopes = tuple(array.replace(name=f"{array.name}_slope") for array in cotangents)
    fused_step = replace(loss, op="fused_head", inputs=stats_step.inputs, more=slopes)
    dloss = step_of["sum_loss_backward"].inputs[0]
    scale_steps = [
        replace(bwd, op="scale", inputs=(slope, dloss), result=array, more=())
        for slope, array in zip(slopes, cotangents, strict=True)
    ]
    forward = [fused_step if step is loss else step for step in block.forward if step.op not in _FORWARD]
    backward: list[Step] = []
    for step in block.backward:
        if step is bwd:
            backward += scale_steps
        elif step.op != "sum_loss_backward":
            backward.append(step)
    used_arrays = {array for step in backward for array in step.inputs}
    kept_arrays = (*(array for array in block.kept if array in used_arrays), *slopes)
    return replace(block, forward=tuple(forward), backward=tuple(backward), kept=kept_arrays)
