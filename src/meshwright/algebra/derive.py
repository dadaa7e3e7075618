"""`derive(program, strategy)` makes every step of a program, collectives included."""

import msgspec

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import op_kind
from meshwright.algebra.program import LOSSES, Block, Program, layers_dim
from meshwright.algebra.rewrites.collective_matmul import in_blocks
from meshwright.algebra.rewrites.frozen import needed_steps, trained
from meshwright.algebra.rewrites.fused_head import with_fused_head
from meshwright.algebra.rewrites.islands import across_islands
from meshwright.algebra.rewrites.pipeline import boundary, ends, require_stages
from meshwright.algebra.rewrites.remat import SavedSet, in_segments
from meshwright.algebra.rewrites.repeated_heads import repeating
from meshwright.algebra.rewrites.split_backward import with_split_backward
from meshwright.algebra.rewrites.stacks import shared_inputs
from meshwright.algebra.rewrites.torus import blocks_leg_by_leg, leg_by_leg
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Shardings, Tape
from meshwright.core.errors import require_known
from meshwright.spec.job import OPTIMIZERS
from meshwright.spec.strategy import Strategy


def derive(
    program: Program,
    strategy: Strategy,
    *,
    symbolic: bool = False,
    without: tuple[str, ...] = (),
    fused_head: bool = True,
    optimizer: str = "adamw",
) -> Derived:
    """Derives the forward, backward and update steps of a program under a strategy's assignment.

    The steps have only mesh axes of several devices; with ``symbolic`` they have all axes but ``without`` (used only
    then), whatever the sizes, so that the cost model can price sizes that are arrays. Without ``fused_head`` a chunked
    loss head computes its logits in both passes, as other software does. ``optimizer`` is the op that updates the
    weights. Raises InputError for an assignment, remat or optimizer that cannot work (two dims on one axis, a norm over
    a split D), and CannotRunError for a pipeline of a model that stages cannot run.
    """
    all_islands, strategy = strategy, strategy.inner()
    require_stages(program, strategy)
    program = repeating(program, strategy)
    kept_axes = tuple(axis for axis in strategy.mesh if axis not in without) if symbolic else strategy.active_axes
    shardings = Shardings(program, strategy, kept_axes)
    saved_set = SavedSet(shardings)
    shardings.shared = shared_inputs(program, lambda block: _both_passes(block, shardings))
    activations = {variable.name for variable in program.of_role("activation")}
    blocks: list[BlockSteps] = []
    for block in program.blocks:
        forward_tape = forward_pass(block, shardings)
        saved = [a for s in forward_tape.steps for a in s.results if saved_set.keeps(a, block)]
        backward = _backward(block, shardings, forward_tape, saved)
        shared_names = (*program.shared_inputs(block.name), *block.shares)
        kept = tuple(a for a in backward.used if a.name not in shared_names and (a in saved or a.name in activations))
        block_steps = BlockSteps(block, tuple(forward_tape.steps), tuple(backward.steps), kept)
        block_steps = in_segments(in_blocks(block_steps, shardings), shardings)
        blocks.append(with_fused_head(block_steps) if fused_head else block_steps)
    updated_weights = _updated(program, shardings)
    derived = Derived(
        program,
        blocks_leg_by_leg(blocks, strategy),
        update=leg_by_leg(_update(program, shardings, updated_weights, optimizer), strategy),
        declared={name: shardings.declared(name) for name in program.variables},
        boundary=boundary(program, shardings),
        ahead=strategy.prefetch,
        ends=ends(program, shardings),
        shared=shardings.shared,
        weights=updated_weights,
        optimizer=optimizer,
    )
    return across_islands(with_split_backward(derived) if derived.boundary else derived, all_islands)


def _inputs(block: Block, shardings: Shardings) -> set[ShardedArray]:
    """Returns the arrays that exist before a block starts: weights, inputs of the program, the stream."""
    return {array for name in block.reads.keys() - {op.out for op in block.ops} for array in shardings.as_read(name)}


def forward_pass(block: Block, shardings: Shardings) -> Tape:
    """Returns the tape of one block's forward steps; its ``producers`` map each result to the step that makes it."""
    tape = Tape(shardings, block, "forward", _inputs(block, shardings))
    for op in block.ops:
        op_kind(op.kind).forward(tape.at(op))
        for array in shardings.as_read(op.out) if op.out in block.shares else ():
            tape.move(tape.declared(op.out), array)
    for array in shardings.as_read(block.ops[-1].out):
        tape.move(tape.declared(array.name), array)
    tape.producers = {a: s for s in tape.steps for a in s.results}
    return tape


def _backward(block: Block, shardings: Shardings, forward: Tape, saved_arrays: list[ShardedArray]) -> Tape:
    """Returns the tape of one block's backward steps, including forward steps that recompute what is not saved."""
    results = [name for name in block.shares if name in shardings.shared]
    given_arrays = (shardings.shared[name].given for name in results)  # gathered once for the layers that read them
    tape = Tape(shardings, block, "backward", {*_inputs(block, shardings), *saved_arrays, *given_arrays})
    tape.producers = forward.producers
    # later layers have left partial cotangents; this block adds to them
    shared_names = [n for n in shardings.program.shared_inputs(block.name) if n in shardings.shared]
    results.append(block.ops[-1].out)
    tape.available.update(shardings.as_left(name) for name in (*results, *shared_names))
    for name in results:
        tape.contribute(name, shardings.as_left(name))
    for op in reversed(block.ops):
        tape.finish(op.out)
        if op.out in shardings.differentiated:
            op_kind(op.kind).backward(tape.at(op))
    for name in (name for name in list(tape.contributions) if name not in shared_names):
        tape.finish(name)
    if any(weight.frozen for weight in shardings.program.variables.values()):
        tape.left.update(shardings.as_left(name) for name in shared_names)
        tape.steps, needed_arrays = needed_steps(tape.steps, tape.left)
        tape.used = [array for array in tape.used if array in needed_arrays]
    return tape


def _both_passes(block: Block, shardings: Shardings) -> list[Step]:
    """Returns the forward and backward steps of a block that keeps no forward result, with the recomputation."""
    forward = forward_pass(block, shardings)
    return [*forward.steps, *_backward(block, shardings, forward, []).steps]


def _updated(program: Program, shardings: Shardings) -> dict[str, Updated]:
    """Maps each weight to how its optimizer updates it."""
    stage_axes = ("pipeline",) if "pipeline" in shardings.axes else ()
    layers_dim_of = {name: layers_dim(b.name) for b in program.blocks if b.carry for name in b.reads}
    return {
        weight.name: Updated(
            shard=shardings.optimizer(weight.name),
            inputs=weight.inputs,
            batch=("E",) if weight.dims[0] == "E" and len(weight.dims) > 1 else (),
            layers=layers_dim_of.get(weight.name, ""),
            layer_axes=stage_axes if weight.name in layers_dim_of else (),
        )
        for weight in trained(program)
    }


def _update(program: Program, shardings: Shardings, weights: dict[str, Updated], optimizer: str) -> list[Step]:
    """Returns the steps that sum losses and the squared gradient norm over devices, then the steps that update each
    shard.

    Where the optimizer is split further than the weights, the updated shards are gathered (ZeRO-1 and 2)."""
    require_known("optimizer", optimizer, OPTIMIZERS)
    steps, axes = list[Step](), shardings.axes
    stream_axes = next((shardings.declared(block.carry).spread for block in program.blocks if block.carry), axes)
    # each device has the loss of its own tokens (the last stage, in a pipeline), and its own part of every gradient
    axes_of = {n: tuple(a for a in axes if a in (*stream_axes, "pipeline")) for n in LOSSES if n in program.variables}
    for name, sum_axes in {**axes_of, "grad_norm": axes}.items():
        steps += reshard(ShardedArray(name, (), (), sum_axes, "fp32"), ShardedArray(name, (), (), dtype="fp32"))
    update_rule = op_kind(optimizer).update
    assert update_rule is not None, f"{optimizer} is an optimizer, but its op has no update"
    for name, weight in weights.items():
        array, shard = shardings.declared(name), weight.shard
        steps += (*reshard(array, shard), *update_rule(weight), *reshard(shard, array))
    return [msgspec.structs.replace(step, phase="update", scope="step", block="update") for step in steps]
