"""Rematerialisation: the forward results that a strategy keeps for the backward pass, by name, and segments of layers
that run again. The backward pass recomputes other results where it needs them (`Tape.need`)."""

from msgspec.structs import replace

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.layers import CROSS, ENCODER, FULL
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import LOSSES, Block
from meshwright.algebra.rewrites.frozen import needed_steps
from meshwright.algebra.rewrites.reruns import Rerun
from meshwright.algebra.steps import Phase, Step
from meshwright.algebra.tape import Shardings
from meshwright.core.errors import InputError, nearest
from meshwright.spec.strategy import Strategy


class SavedSet:
    """The forward results that a strategy keeps for the backward pass.

    Raises InputError for a name that is not a result of the program.
    """

    def __init__(self, shardings: Shardings) -> None:
        program, strategy = shardings.program, shardings.strategy
        self.shardings, self.names = shardings, strategy.kept_names  # None: every name
        if self.names is not None and isinstance(strategy.remat, tuple):
            op_outs = {op.out for block in program.blocks for op in block.ops} | {"logits"}
            for name in (name for name in self.names if name not in op_outs):
                raise InputError(f"remat keeps {name!r}, which is not a result of the program.{nearest(name, op_outs)}")
        elif self.names is not None and strategy.remat == "selective" and "qr" not in program.variables:
            # without rope or a bias, q and k enter attention
            self.names = (*self.names, "q", "k")

    def keeps(self, array: ShardedArray, block: Block) -> bool:
        """True if a forward result is kept; gathered weights are not.

        The backward pass of a block that ends in a loss follows its forward pass at once, so it keeps everything,
        the gathered table too; a head that does not keep its logits never has them whole.
        """
        if block.ops[-1].out in LOSSES:
            return True
        if self.shardings.is_weight(array.name):
            return False
        if self.names is None:
            return True
        base_name = array.name.removeprefix(ENCODER).removeprefix(CROSS).removesuffix(FULL)
        if base_name == "lse":  # attention's backward pass needs it together with its result
            return "o" in self.names
        variables = self.shardings.program.variables
        is_declared = array.name in variables and self.shardings.declared(array.name).axes == array.axes
        return is_declared and not array.unreduced and (base_name in self.names or array.name in self.names)


def keeps_logits(strategy: Strategy) -> bool:
    """True if the loss head keeps its logits for the backward pass; else it makes them in chunks."""
    kept_names = strategy.kept_names
    return kept_names is None or "logits" in kept_names


def in_segments(steps: BlockSteps, shardings: Shardings) -> BlockSteps:
    """Returns a block's steps; with segments a layer's backward pass begins with its forward steps (with a `Rerun` only
    those that the stream needs), in the phase recompute, or backward for gathers of weights."""
    segment, rerun = shardings.strategy.segment, None
    if segment is None or not steps.is_layer:
        return steps
    forward, rerun_steps = list(steps.forward), list[Step]()
    if shardings.strategy.recomputes_each:
        assert segment != "sqrt"
        stacks, block_name = shardings.program.stacks, steps.block.name
        layers = next((stack.layers for stack in stacks if block_name in stack.layers), (block_name,) * steps.repeat)
        forward, rerun = needed_steps(forward, forward[-1].results)[0], Rerun(block_name, layers, segment)
    for step in forward:
        is_gather = step.is_collective and shardings.is_weight(step.result.name)
        phase: Phase = "backward" if is_gather else "recompute"
        parts = tuple(replace(part, phase=phase) for part in step.parts)
        rerun_steps.append(replace(step, phase=phase, parts=parts))
    backward = (*rerun_steps, *steps.backward)
    return replace(steps, backward=backward, segment=segment, num_again=len(rerun_steps), rerun=rerun)
