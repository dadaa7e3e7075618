"""The loss head of a derivation with its two passes joined, where a device has the whole vocabulary.

Derived in chunks, the head makes the logits twice: once for the loss, once on the way back. Nothing has to be reduced
in between where the vocabulary is whole, so that one step can make the loss and its slopes: the cotangents of the
stream and of the table for a loss whose own is 1. What is left for the backward pass is to scale them. Collectives stay
as they are.
"""

from msgspec.structs import replace

from meshwright.algebra.derive import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step

_FORWARD = ("chunked_logits_statistics", "rescale", "sum_loss")
_BACKWARD = ("sum_loss_backward", "chunked_logits_backward")


def with_fused_head(derived: Derived) -> Derived:
    """The derivation with the head's two passes joined, or as it is where that cannot be."""
    return replace(derived, blocks=tuple(_fused(block) if _can_fuse(block) else block for block in derived.blocks))


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
        replace(back, op="scale", inputs=(steps["sum_loss_backward"].inputs[0], slope), result=array, more=())
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
