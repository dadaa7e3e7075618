"""The result of a derivation: the steps of every block, of the update and of the pipeline's boundary."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import WEIGHTS, Block, Program, layers_dim
from meshwright.algebra.rewrites.pipeline import SplitBackward
from meshwright.algebra.rewrites.stacks import SharedInput
from meshwright.algebra.steps import Step


class BlockSteps(msgspec.Struct, frozen=True):
    """Derived steps of one block, executed ``repeat`` times for every microbatch.

    ``kept`` are the forward results held until the backward pass that uses them, the block's input
    among them. With a ``segment`` ("sqrt": of the repeats that a device holds) a backward pass begins
    with the forward steps again: they are held for one segment, and only the input of each segment for all. Layers of
    a pipeline know their backward pass in two parts, ``split``; its schedule says which microbatches run it so.
    """

    block: Block
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[ShardedArray, ...]
    segment: int | Literal["sqrt"] | None = None
    split: SplitBackward | None = None

    @property
    def name(self) -> str:
        return self.block.name

    @property
    def repeat(self) -> int:
        return self.block.repeat

    @property
    def is_layer(self) -> bool:
        """True for a block of layers, which pipeline stages share out; False for embedding and head."""
        return bool(self.block.carry)

    @property
    def num_again(self) -> int:
        """How many steps of the backward pass, its first, are a segment's second run."""
        return len(self.forward) if self.segment is not None else 0


class Derived(msgspec.Struct, frozen=True):
    """Everything that one training step does, and the declared sharding of every variable.

    ``update`` are the steps after the last microbatch: the loss and the gradient norm summed over devices,
    the optimizer. Sums of gradients over replicas, and their way to the optimizer's shards, stand in their
    block's backward pass, with scope "step".
    ``keeps`` lists what the backward pass may keep: names, or whole arrays that are not split as declared.
    ``boundary`` are the sends of the stream and of its cotangent from one pipeline stage to the next, none without that
    axis; how often they run is the schedule's matter. With ``ahead`` weights are gathered before their layer runs, and
    those of the last turn of layers are not gathered again for the backward pass. ``ends`` are the sums over the
    pipeline, once per step, of the gradients of what every stage holds: embedding and loss head. ``shared`` are what
    layers read of earlier stacks, ``weights`` are as the ``optimizer`` has them.
    """

    program: Program
    blocks: tuple[BlockSteps, ...]
    update: tuple[Step, ...]
    declared: dict[str, ShardedArray]
    keeps: tuple[str, ...]
    boundary: tuple[Step, ...] = ()
    ahead: bool = False
    ends: tuple[Step, ...] = ()
    shared: dict[str, SharedInput] = {}
    weights: dict[str, Updated] = {}
    optimizer: str = "adamw"

    @property
    def shards(self) -> dict[str, ShardedArray]:
        """Maps each weight to the shard that one device updates."""
        return {name: weight.shard for name, weight in self.weights.items()}

    @property
    def num_layers(self) -> int:
        """Repeats of the blocks that pipeline stages share out."""
        return sum(block.repeat for block in self.blocks if block.is_layer)

    def steps(self, num_microbatches: Any = 1) -> Iterable[tuple[Step, Any]]:
        """Returns every step with the number of times that it runs in one training step.

        Gradient sums of scope "step" and the optimizer run once for each layer, whatever the microbatches.
        """
        for block in self.blocks:
            # weights of the last turn of layers are still gathered from the forward pass
            stay = block.block.last_turn if self.ahead and block.is_layer and block.segment is None else 0
            for step in (*block.forward, *block.backward):
                weight = self.program.variables.get(step.result.name)
                again = weight is not None and weight.role in WEIGHTS and step.phase == "backward"
                times = block.repeat - stay * again
                yield step, times if step.scope == "step" else times * num_microbatches
        repeats = {name: b.repeat for b in self.blocks for name in b.block.reads}
        for step in self.update:
            yield step, 1 if self.is_stacked(step) else repeats.get(step.result.name, 1)

    def is_stacked(self, step: Step) -> bool:
        """True if a step of the update works on all layers at once: its arrays have a dim that counts them."""
        layers = {layers_dim(block.name) for block in self.blocks if block.is_layer}
        return any(dim.removesuffix("E") in layers for array in (step.result, *step.inputs) for dim in array.dims)
