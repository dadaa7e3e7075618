"""The loss head in chunks, where its logits are not kept; with its two passes joined, where a device has the whole
vocabulary.

In chunks, the head makes the logits twice: once for the loss, once on the way back. Nothing has to be reduced in
between where the vocabulary is whole, so that one step can make the loss and its slopes: the cotangents of the stream
and of the table for a loss whose own is 1. What is left for the backward pass is to scale them. Collectives stay as
they are.
"""

from msgspec.structs import replace

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step

_FORWARD = ("chunked_logits_statistics", "rescale", "sum_loss")
_BACKWARD = ("sum_loss_backward", "chunked_logits_backward")


def with_chunked_head(block: BlockSteps) -> BlockSteps:
    """The block with the logits made chunk by chunk in both passes, and not kept; as it is where it is no loss head."""
    made = {step.op: step for step in (*block.forward, *block.backward)}
    if "logits_statistics" not in made:
        return block
    statistics, back = made["logits_statistics"], made["logits_backward"]
    logits, dlogits = statistics.inputs[0], back.result
    product = next(step for step in block.forward if step.result == logits)
    of_table, of_stream = (step for step in block.backward if dlogits in step.inputs)
    chunked = replace(statistics, op="chunked_logits_statistics", inputs=(*product.inputs, *statistics.inputs[1:]))
    joined = replace(
        back,
        op="chunked_logits_backward",
        inputs=(of_table.inputs[0], of_stream.inputs[1], *back.inputs[1:]),
        result=of_stream.result,
        more=(of_table.result,),
    )
    return replace(
        block,
        forward=tuple(chunked if step is statistics else step for step in block.forward if step is not product),
        backward=tuple(
            joined if step is back else step for step in block.backward if step not in (of_table, of_stream)
        ),
        kept=tuple(array for array in block.kept if array != logits),
    )


def with_fused_head(block: BlockSteps) -> BlockSteps:
    """The block with the head's two passes joined; as it is where it has no chunked head, or V is split."""
    return _fused(block) if _can_fuse(block) else block


def _steps(block: BlockSteps) -> dict[str, Step]:
    return {step.op: step for step in (*block.forward, *block.backward) if step.op in (*_FORWARD, *_BACKWARD)}


def _can_fuse(block: BlockSteps) -> bool:
    """Whether the loss comes from the statistics as they are: no part of them is on another device."""
    steps = _steps(block)
    if "chunked_logits_statistics" not in steps:
        return False
    statistics, loss = steps["chunked_logits_statistics"], steps["sum_loss"]
    _, picked = statistics.more
    return loss.inputs == (statistics.result, steps["rescale"].result, picked, statistics.inputs[2])


def _fused(block: BlockSteps) -> BlockSteps:
    steps = _steps(block)
    statistics, loss, back = (steps[op] for op in ("chunked_logits_statistics", "sum_loss", "chunked_logits_backward"))
    cotangents = (back.result, *back.more)
    slopes = tuple(array.replace(name=f"{array.name}_slope") for array in cotangents)
    joined = replace(loss, op="fused_head", inputs=statistics.inputs, more=slopes)
    scaled = [
        replace(back, op="scale", inputs=(slope, steps["sum_loss_backward"].inputs[0]), result=array, more=())
        for slope, array in zip(slopes, cotangents, strict=True)
    ]
    forward = tuple(
        joined if step is loss else step for step in block.forward if step is loss or step.op not in _FORWARD
    )
    backward: list[Step] = []
    for step in block.backward:
        backward.extend(scaled if step is back else () if step.op in _BACKWARD else (step,))
    return replace(block, forward=forward, backward=tuple(backward), kept=_kept(block.kept, slopes, backward))


def _kept(
    before: tuple[ShardedArray, ...], slopes: tuple[ShardedArray, ...], backward: list[Step]
) -> tuple[ShardedArray, ...]:
    """What the backward pass is still given: the slopes, and of what was held that which it still uses."""
    used = {array for step in backward for array in step.inputs}
    return (*(array for array in before if array in used), *slopes)
