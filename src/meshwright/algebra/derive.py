"""`derive(program, strategy)`: the one place where the steps of a program, collectives included, come from."""

import msgspec

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import op_kind
from meshwright.algebra.program import Block, Program, layers_dim
from meshwright.algebra.rewrites.collective_matmul import in_blocks
from meshwright.algebra.rewrites.fused_head import with_chunked_head, with_fused_head
from meshwright.algebra.rewrites.pipeline import boundary, ends, require_stages
from meshwright.algebra.rewrites.remat import Saved, in_segments
from meshwright.algebra.rewrites.split_backward import with_split_backward
from meshwright.algebra.rewrites.stacks import shared_inputs
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Shardings, Trace
from meshwright.core.errors import InputError
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
    """Forward, backward and update steps of a program under a strategy's assignment, as they run.

    Mesh axes of one device are left out, so that what is derived is exactly what runs; with ``symbolic``
    every axis stays but those of ``without``, and whoever prices the steps fills in sizes (arrays, if wanted).
    Without ``fused_head`` a chunked loss head makes its logits in both passes, as other software does. ``optimizer`` is
    the op that updates the weights.
    Raises InputError where an assignment cannot work (conflicting axes, a norm over a split D), and CannotRunError for
    several stacks in a pipeline.
    """
    require_stages(program, strategy)
    keep = strategy.active_axes if not symbolic else None
    if symbolic and without:
        keep = tuple(axis for axis in strategy.mesh if axis not in without)
    shardings = Shardings(program, strategy, keep)
    saved = Saved(shardings)
    shardings.shared = shared_inputs(program, lambda block: _both_passes(block, shardings))
    blocks: list[BlockSteps] = []
    keeps: list[ShardedArray] = []
    for block in program.blocks:
        forward = forward_pass(block, shardings)
        kept = [a for s in forward.steps for a in (s.result, *s.more) if saved.keeps(a, block)]
        backward = _backward(block, shardings, forward, kept)
        keeps.extend(a for a in kept if saved.keeps_logits or a.name != "logits")
        given = program.further(block.name)
        held = tuple(a for a in backward.used if a.name not in given and (a in kept or shardings.is_activation(a.name)))
        steps = BlockSteps(block, tuple(forward.steps), tuple(backward.steps), held)
        if not saved.keeps_logits:
            steps = with_chunked_head(steps)
        steps = in_segments(in_blocks(steps, shardings), shardings)
        blocks.append(with_fused_head(steps) if fused_head else steps)
    declared = {name: shardings.declared(name) for name in program.variables}
    weights = _updated(program, shardings)
    result = Derived(
        program,
        tuple(blocks),
        update=tuple(_update(program, shardings, weights, optimizer)),
        declared=declared,
        keeps=tuple(dict.fromkeys(a.name if declared.get(a.name) == a else str(a) for a in keeps)),
        boundary=boundary(program, shardings),
        ahead=strategy.prefetch,
        ends=ends(program, shardings),
        shared=shardings.shared,
        weights=weights,
        optimizer=optimizer,
    )
    return with_split_backward(result) if result.boundary else result


def _inputs(block: Block, shardings: Shardings) -> set[ShardedArray]:
    """What is there before a block starts: weights, inputs of the job, and the stream."""
    made = {op.out for op in block.ops}
    used = {name for op in block.ops for name in op.inputs}
    return {array for name in used - made for array in shardings.as_read(name)}


def forward_pass(block: Block, shardings: Shardings) -> Trace:
    """The forward steps of one block, and which of them makes each result."""
    trace = Trace(shardings, block, "forward", _inputs(block, shardings))
    for trace.op in block.ops:
        op_kind(trace.op.kind).forward(trace)
    for array in shardings.as_read(block.ops[-1].out):
        trace.move(trace.declared(array.name), array)
    trace.producers = {a: s for s in trace.steps for a in (s.result, *s.more)}
    return trace


def _backward(block: Block, shardings: Shardings, forward: Trace, kept: list[ShardedArray]) -> Trace:
    trace = Trace(shardings, block, "backward", {*_inputs(block, shardings), *kept})
    trace.producers = forward.producers
    # what the layers after this one have left is added to
    further = [name for name in shardings.program.further(block.name) if name in shardings.shared]
    trace.available.update(shardings.as_left(name) for name in (block.ops[-1].out, *further))
    trace.contribute(block.ops[-1].out, shardings.as_left(block.ops[-1].out))
    for trace.op in reversed(block.ops):
        trace.finish(trace.op.out)
        op_kind(trace.op.kind).backward(trace)
    for name in (name for name in list(trace.contributions) if name not in further):
        trace.finish(name)
    return trace


def _both_passes(block: Block, shardings: Shardings) -> list[Step]:
    forward = forward_pass(block, shardings)
    return [*forward.steps, *_backward(block, shardings, forward, []).steps]


def _updated(program: Program, shardings: Shardings) -> dict[str, Updated]:
    """Every weight as its optimizer updates it."""
    stages = ("pipeline",) if "pipeline" in shardings.axes else ()
    blocks = {name: block for block in program.blocks if block.carry for op in block.ops for name in op.inputs}
    found = {}
    for weight in program.of_role("weight", "vector"):
        block = blocks.get(weight.name)
        found[weight.name] = Updated(
            shard=shardings.optimizer(weight.name),
            inputs=weight.inputs,
            batch=tuple(dim for dim in weight.dims if dim == "E" and weight.dims[0] == "E" and len(weight.dims) > 1),
            layers=layers_dim(block.name) if block else "",
            layer_axes=stages if block else (),
        )
    return found


def _update(program: Program, shardings: Shardings, weights: dict[str, Updated], optimizer: str) -> list[Step]:
    """The loss and the squared gradient norm summed over all devices, then the optimizer on each shard.

    Where the optimizer is split further than the weights, its shards are gathered afterwards (ZeRO-1 and 2).
    """
    steps, axes = list[Step](), shardings.axes
    stream = next((shardings.declared(block.carry).spread for block in program.blocks if block.carry), axes)
    # each device has the loss of its own tokens (the last stage, in a pipeline), and its own part of every gradient
    of_loss = tuple(a for a in axes if a in stream or a == "pipeline")
    for name, over in (("loss", of_loss), ("grad_norm", axes)):
        if over and (name != "loss" or name in program.variables):
            local = ShardedArray(name, (), (), over, "fp32")
            total = local.replace(unreduced=())
            steps.append(Step(op="all_reduce", inputs=(local,), result=total, axes=over))
    update = op_kind(optimizer).update
    if update is None:
        raise InputError(f"{optimizer!r} is not an optimizer. Use adamw, adafactor, lion or muon.")
    for name, weight in weights.items():
        array, shard = shardings.declared(name), weight.shard
        steps.extend((*reshard(array, shard), *update(weight), *reshard(shard, array)))
    return [msgspec.structs.replace(step, phase="update", scope="step", block="update") for step in steps]
