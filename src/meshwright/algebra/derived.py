"""The result of a derivation: the steps of every block, of the update, and of a pipeline between its stages."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import WEIGHTS, Block, Program, layers_dim
from meshwright.algebra.rewrites.pipeline import SplitBackward
from meshwright.algebra.rewrites.reruns import Rerun
from meshwright.algebra.rewrites.stacks import SharedInput
from meshwright.algebra.steps import Step


class BlockSteps(msgspec.Struct, frozen=True):
    """Derived steps of one block, executed ``repeat`` times for every microbatch.

    ``kept`` are the forward results, and the block's input, that are stored until its backward pass uses them. With a
    ``segment`` (a number of layers; "sqrt": the square root of the layers on a device) only each segment's input is
    stored, and the backward pass begins with ``num_again`` steps of the forward pass. These run once per layer, or as
    often as ``rerun`` says. ``split`` is the backward pass of a pipeline's layer in two parts; the schedule says which
    microbatches use it.
    """

    block: Block
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[ShardedArray, ...]
    segment: int | Literal["sqrt"] | None = None
    num_again: int = 0
    rerun: Rerun | None = None
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

    def times_again(self, runs: Any = 1) -> Any:
        """Returns how often all layers of the block together run the first ``num_again`` steps of ``backward`` for a
        microbatch; ``runs`` is the number of chunks of a pipeline, over all stages."""
        return self.repeat if self.rerun is None else self.rerun.times(self.repeat, runs)


class Derived(msgspec.Struct, frozen=True):
    """All steps of one training step or server step, and the declared sharding of every variable.

    ``update`` are the steps after the last microbatch: the loss and the gradient norm summed over devices, the
    optimizer. Sums of gradients over replicas, and their scatter to the optimizer's shards, are in their block's
    backward pass, with scope "step". ``boundary`` are the steps that send the stream to the next stage and its
    cotangent back, none without stages; the schedule says how often they run. With ``ahead`` weights are prefetched:
    gathered before their layer runs; weights of a loop's last iteration stay gathered until the backward pass. ``ends``
    are the sums over stages, once per step, of the gradients of weights that every stage has: embedding and loss head.
    ``shared`` are results that later layers read, ``weights`` says how ``optimizer`` updates each weight. ``beside``
    are blocks of another program whose weights the devices also hold. ``outer`` are the sums between islands, each with
    an `OuterSum` as its details; hosts run them, no compiled program.
    """

    program: Program
    blocks: tuple[BlockSteps, ...]
    update: tuple[Step, ...]
    declared: dict[str, ShardedArray]
    boundary: tuple[Step, ...] = ()
    ahead: bool = False
    ends: tuple[Step, ...] = ()
    shared: dict[str, SharedInput] = {}
    weights: dict[str, Updated] = {}
    optimizer: str = "adamw"
    beside: tuple[Block, ...] = ()
    outer: tuple[Step, ...] = ()

    @property
    def shards(self) -> dict[str, ShardedArray]:
        """Maps each weight to the shard that one device updates."""
        return {name: weight.shard for name, weight in self.weights.items()}

    @property
    def num_layers(self) -> int:
        """Number of layers: the repeats of all blocks that pipeline stages share out."""
        return sum(block.repeat for block in self.blocks if block.is_layer)

    def steps(self, num_microbatches: Any = 1, runs: Any = 1) -> Iterable[tuple[Step, Any]]:
        """Yields pairs of each step of the blocks and the update, and how often a training step runs it. ``runs`` is
        the number of pipeline chunks, as in `BlockSteps.times_again`.

        Gradient sums of scope "step" and updates run once per layer, stacked updates once, for any number of
        microbatches."""
        for block in self.blocks:
            # weights of the loop's last iteration are still gathered from the forward pass
            stay = block.block.num_in_last_iterations if self.ahead and block.is_layer and block.segment is None else 0
            start_i, times_again = len(block.forward), block.times_again(runs)
            for i, step in enumerate((*block.forward, *block.backward)):
                weight = self.program.variables.get(step.result.name)
                is_gather = weight is not None and weight.role in WEIGHTS and step.phase == "backward"
                num_runs = times_again if start_i <= i < start_i + block.num_again else block.repeat - stay * is_gather
                yield step, num_runs if step.scope == "step" else num_runs * num_microbatches
        repeat_of = {name: b.repeat for b in self.blocks for name in b.block.reads}
        for step in self.update:
            yield step, 1 if self.is_stacked(step) else repeat_of.get(step.result.name, 1)

    def is_stacked(self, step: Step) -> bool:
        """True if a step of the update works on all layers at once: its arrays have a dim that counts them."""
        layers_dims = {layers_dim(block.name) for block in self.blocks if block.is_layer}
        return any(dim.removesuffix("E") in layers_dims for array in (step.result, *step.inputs) for dim in array.dims)
