"""`derive(program, strategy)`: the one place where the steps of a program, collectives included, come from."""

from collections.abc import Sequence

import msgspec

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import op_kind
from meshwright.algebra.program import Block, Program
from meshwright.algebra.rewrites.collective_matmul import with_collective_matmuls
from meshwright.algebra.rewrites.fused_head import with_chunked_head, with_fused_head
from meshwright.algebra.rewrites.remat import Saved, run_again
from meshwright.algebra.rewrites.split_backward import with_split_backward
from meshwright.algebra.steps import Phase, Step
from meshwright.algebra.trace import Shardings, SharedInput, Trace, moved
from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.strategy import Strategy

NO_PIPELINE = "an encoder with a decoder does not run in a pipeline in this version. Use pipeline=1."


def _boundary(program: Program, shardings: Shardings) -> tuple[Step, ...]:
    """The stream sent to the next stage, and its cotangent sent back.

    Where the stream is whole over ``tensor`` each of its devices sends a part, which the next stage gathers.
    """
    axes = shardings.strategy.mesh if shardings.keep_axes is None else shardings.keep_axes
    stream = next((block.carry for block in program.blocks if block.carry), "")
    if "pipeline" not in axes or not stream or len(program.stacks) > 1:
        return ()
    steps: list[Step] = []
    sides: tuple[tuple[Phase, ShardedArray], ...] = (
        ("forward", shardings.declared(stream)),
        ("backward", shardings.cotangent(stream)),
    )
    for phase, whole in sides:
        apart = whole
        if "tensor" in axes and "tensor" not in whole.spread and "T" in whole.dims:
            apart = whole.resharded({"T": (*whole.axes_of("T"), "tensor")})
        sent = Step(op="permute", inputs=(apart,), result=apart, axes=("pipeline",))
        for step in (sent, *reshard(apart, whole)):
            steps.append(msgspec.structs.replace(step, block="stage", phase=phase, critical=True))
    return tuple(steps)


def _ends(program: Program, shardings: Shardings) -> tuple[Step, ...]:
    """Gradients of the weights outside the layers, which come from the first and the last stage, summed over all."""
    axes = shardings.strategy.mesh if shardings.keep_axes is None else shardings.keep_axes
    if "pipeline" not in axes or len(program.stacks) > 1:
        return ()
    outside = dict.fromkeys(n for block in program.blocks if not block.carry for op in block.ops for n in op.inputs)
    steps = []
    for name in (n for n in outside if shardings.is_weight(n)):
        total = shardings.optimizer(name).replace(name=f"d{name}")
        part = total.replace(unreduced=("pipeline",))
        steps.append(Step(op="all_reduce", inputs=(part,), result=total, axes=("pipeline",), scope="step"))
    return tuple(msgspec.structs.replace(s, block="stage", phase="backward") for s in steps)


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
    if len(program.stacks) > 1 and strategy.mesh.get("pipeline", 1) > 1:
        raise CannotRunError(NO_PIPELINE)
    keep = strategy.active_axes if not symbolic else None
    if symbolic and without:
        keep = tuple(axis for axis in strategy.mesh if axis not in without)
    shardings = Shardings(program, strategy, keep)
    saved = Saved(shardings)
    shardings.shared = _shared_inputs(program, shardings)
    blocks: list[BlockSteps] = []
    keeps: list[ShardedArray] = []
    for block in program.blocks:
        forward = _forward(block, shardings)
        kept = [a for s in forward.steps for a in (s.result, *s.more) if saved.keeps(a, block)]
        backward = _backward(block, shardings, forward, kept)
        keeps.extend(kept)
        given = program.further(block.name)
        held = tuple(a for a in backward.used if a.name not in given and (a in kept or shardings.is_activation(a.name)))
        segment = strategy.segment if block.carry else None
        steps = BlockSteps(block, tuple(forward.steps), tuple(backward.steps), held, segment)
        if not saved.keeps_logits:
            steps = with_chunked_head(steps)
        there, back = _in_blocks(steps.forward, shardings, steps.kept), _in_blocks(steps.backward, shardings)
        again = () if segment is None else run_again(there, shardings)
        steps = msgspec.structs.replace(steps, forward=there, backward=(*again, *back))
        blocks.append(with_fused_head(steps) if fused_head else steps)
    blocks = _summed_once(blocks)
    declared = {name: shardings.declared(name) for name in program.variables}
    weights = _updated(program, shardings)
    update, boundary = tuple(_update(program, shardings, weights, optimizer)), _boundary(program, shardings)
    ends = _ends(program, shardings)
    ahead, shared = strategy.prefetch, shardings.shared
    result = Derived(program, tuple(blocks), update, declared, (), boundary, ahead, ends, shared, weights, optimizer)
    tags = tuple(dict.fromkeys(result.tag(a) for a in keeps if saved.keeps_logits or a.name != "logits"))
    result = msgspec.structs.replace(result, keeps=tags)
    return with_split_backward(result) if boundary else result


def derive_forward(program: Program, strategy: Strategy, *, symbolic: bool = False) -> Derived:
    """Forward steps of a program that is never differentiated: no backward pass, no update, nothing held."""
    keep = None if symbolic else strategy.active_axes
    shardings = Shardings(program, strategy, keep)
    passes = ((block, _in_blocks(_forward(block, shardings).steps, shardings)) for block in program.blocks)
    blocks = tuple(BlockSteps(block, steps, (), ()) for block, steps in passes)
    return Derived(program, blocks, (), {name: shardings.declared(name) for name in program.variables}, ())


def _in_blocks(steps: Sequence[Step], shardings: Shardings, kept: tuple[ShardedArray, ...] = ()) -> tuple[Step, ...]:
    """The steps of one pass, with collective matmuls where the strategy asks for them.

    Where the strategy splits no positions (rows of one, in generation) sums are not cut along them either.
    """
    ways, along = shardings.strategy.ring_ways, "T" if "T" in shardings.strategy.rules("activation") else ""
    weights = {variable.name for variable in shardings.program.of_role("weight", "vector")}
    if not ways:
        return tuple(steps)
    return with_collective_matmuls(steps, ways=ways, kept=kept, weights=weights, along=along)


def _summed_once(blocks: list[BlockSteps]) -> list[BlockSteps]:
    """A weight of several blocks (tied embeddings) is summed over its replicas once, when its first block is done."""
    result, owners = [], dict[str, str]()
    for block in blocks:
        for name in (name for op in block.block.ops for name in op.inputs):
            owners.setdefault(f"d{name}", block.block.name)
        kept = tuple(s for s in block.backward if s.scope != "step" or owners.get(s.result.name) == block.block.name)
        result.append(msgspec.structs.replace(block, backward=kept))
    return result


def _inputs(block: Block, shardings: Shardings) -> set[ShardedArray]:
    """What is there before a block starts: weights, inputs of the job, and the stream."""
    made = {op.out for op in block.ops}
    used = {name for op in block.ops for name in op.inputs}
    given = {shardings.shared[name].given for name in used - made if name in shardings.shared}
    return {shardings.declared(name) for name in used - made} | given


def _forward(block: Block, shardings: Shardings) -> Trace:
    trace = Trace(shardings, block, "forward", _inputs(block, shardings))
    for op in block.ops:
        op_kind(op.kind).forward(op, trace)
    result = block.ops[-1].out
    if result in shardings.shared:
        moved(trace, trace.declared(result), shardings.shared[result].given)
    trace.producers = {a: s for s in trace.steps for a in (s.result, *s.more)}
    return trace


def _backward(block: Block, shardings: Shardings, forward: Trace, kept: list[ShardedArray]) -> Trace:
    start = {*_inputs(block, shardings), *kept}
    trace = Trace(shardings, block, "backward", start)
    trace.producers = forward.producers
    result, shared = block.ops[-1].out, shardings.shared
    if result in shared:
        trace.available.add(shared[result].cotangent)
        trace.contribute(result, shared[result].cotangent)
    else:
        trace.available.add(shardings.cotangent(result))
    further = [name for name in shardings.program.further(block.name) if name in shared]
    # what the layers after this one have left is added to
    trace.available.update(shared[name].cotangent for name in further)
    for op in reversed(block.ops):
        trace.finish(op.out)
        op_kind(op.kind).backward(op, trace)
    for name in (name for name in list(trace.contributions) if name not in further):
        trace.finish(name)
    return trace


def _shared_inputs(program: Program, shardings: Shardings) -> dict[str, SharedInput]:
    """How layers want what they read of earlier stacks, so that it is brought there once for all of them; and the
    cotangent as each layer leaves it before any sum over devices, which is done once too."""
    found = {}
    for stack in program.stacks:
        for name in stack.inputs:
            blocks = [block for block in program.blocks if block.name in stack.layers]
            read, left = set[ShardedArray](), set[ShardedArray]()
            for block in blocks:
                forward = _forward(block, shardings)
                backward = _backward(block, shardings, forward, [])
                used = [s for s in (*forward.steps, *backward.steps) if not s.only_moves]
                read |= {array for step in used for array in step.inputs if array.name == name}
                left |= {step.result for step in used if step.result.name == f"d{name}"}
            if len(read) != 1 or len(left) != 1:
                raise InputError(f"layers want {', '.join(map(str, read | left))}; split heads and widths alike.")
            found[name] = SharedInput(given=read.pop(), cotangent=left.pop())
    return found


def _updated(program: Program, shardings: Shardings) -> dict[str, Updated]:
    """Every weight as its optimizer updates it."""
    axes = shardings.strategy.mesh if shardings.keep_axes is None else shardings.keep_axes
    stages = ("pipeline",) if "pipeline" in axes else ()
    blocks = {name: block for block in program.blocks if block.carry for op in block.ops for name in op.inputs}
    found = {}
    for weight in program.of_role("weight", "vector"):
        block = blocks.get(weight.name)
        found[weight.name] = Updated(
            shard=shardings.optimizer(weight.name),
            inputs=weight.inputs,
            batch=tuple(dim for dim in weight.dims if dim == "E" and weight.dims[0] == "E" and len(weight.dims) > 1),
            layers=block.layers_dim if block else "",
            layer_axes=stages if block else (),
        )
    return found


def _update(program: Program, shardings: Shardings, weights: dict[str, Updated], optimizer: str) -> list[Step]:
    """The loss and the squared gradient norm summed over all devices, then the optimizer on each shard.

    Where the optimizer is split further than the weights, its shards are gathered afterwards (ZeRO-1 and 2).
    """
    axes = tuple(shardings.strategy.mesh if shardings.keep_axes is None else shardings.keep_axes)
    steps: list[Step] = []
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
