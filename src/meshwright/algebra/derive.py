"""`derive(program, strategy)`: the one place where the steps of a program, collectives included, come from."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.table import KINDS
from meshwright.algebra.program import Block, Program
from meshwright.algebra.rewrites.collective_matmul import with_collective_matmuls
from meshwright.algebra.steps import Phase, Scope, Step
from meshwright.core.errors import InputError, nearest
from meshwright.spec.strategy import Strategy, assign

KEPT_NAMES: dict[str, tuple[str, ...]] = {
    "selective": (
        *("qr", "kr", "v", "o", "x1", "g", "u", "logits"),
        *("r", "xe", "ge", "ue", "gs", "us", "cq", "ckv"),
    ),
    "matmuls": (
        *("q", "k", "v", "a", "g", "u", "logits"),
        *("r", "ge", "ue", "ye", "gs", "us", "ys", "cq", "ckv", "kn", "kpe"),
    ),
    "block": ("logits",),
    "full": (),
}
"""Remat policy -> results that are kept for the backward pass, besides each block's input. "none" keeps
every result and every gathered activation, and so do "sqrt" and "every-C" inside the segment of layers that is
being run again. The loss head keeps all but its logits under every policy."""


class BlockSteps(msgspec.Struct, frozen=True):
    """Derived steps of one block, executed ``repeat`` times for every microbatch.

    ``kept`` are the forward results held until the backward pass that really uses them, the block's input
    among them. With a ``segment`` ("sqrt": of the repeats that a device holds) a backward pass begins
    with the forward steps again: they are held for one segment, and only the input of each segment for all.
    """

    block: Block
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[ShardedArray, ...]
    segment: int | Literal["sqrt"] | None = None

    @property
    def repeat(self) -> int:
        return self.block.repeat


class Derived(msgspec.Struct, frozen=True):
    """Everything that one training step does, and the declared sharding of every variable.

    ``update`` are the steps after the last microbatch: the loss and the gradient norm summed over devices,
    the optimizer. Sums of gradients over replicas, and their way to the optimizer's shards, stand in their
    block's backward pass, with scope "step".
    ``keeps`` lists the tags (see `tag`) that the backward pass may keep. ``boundary`` are the sends of the stream
    and of its cotangent from one pipeline stage to the next, none without that axis; how often they run is the
    schedule's matter. With ``ahead`` weights are gathered before their layer runs, and those of the last turn of layers
    are not gathered again for the backward pass. ``ends`` are the sums over the pipeline, once per step, of the
    gradients of what every stage holds: embedding and loss head.
    """

    program: Program
    blocks: tuple[BlockSteps, ...]
    update: tuple[Step, ...]
    declared: dict[str, ShardedArray]
    keeps: tuple[str, ...]
    boundary: tuple[Step, ...] = ()
    ahead: bool = False
    ends: tuple[Step, ...] = ()

    @property
    def num_layers(self) -> int:
        """Repeats of the blocks that pipeline stages share out."""
        return sum(block.repeat for block in self.blocks if block.block.carry)

    def tag(self, array: ShardedArray) -> str:
        """How a result is named in a saved set: its name where it has its declared sharding, else all of it."""
        return array.name if self.declared.get(array.name) == array else str(array)

    def steps(self, num_microbatches: Any = 1) -> Iterable[tuple[Step, Any]]:
        """Every step with the number of times that it runs in one training step.

        Gradient sums of scope "step" and the optimizer run once for each layer, whatever the microbatches.
        """
        for block in self.blocks:
            for step in (*block.forward, *block.backward):
                times = block.repeat - self._stays(block, step)
                yield step, times if step.scope == "step" else times * num_microbatches
        repeats = {name: b.repeat for b in self.blocks for op in b.block.ops for name in op.inputs}
        for step in self.update:
            yield step, repeats.get(step.result.name, 1)

    def _stays(self, block: BlockSteps, step: Step) -> int:
        """Repeats whose weights are still there from the forward pass when a backward step would gather them."""
        weight = self.program.variables.get(step.result.name)
        moved = weight is not None and weight.role in ("weight", "vector") and step.phase == "backward"
        return block.block.last_turn if self.ahead and moved and block.block.carry and block.segment is None else 0


class _Trace:
    """Collects the steps of one pass over one block, each result once."""

    def __init__(self, shardings: "_Shardings", block: Block, phase: Phase, available: Iterable[ShardedArray]) -> None:
        self.shardings, self.block, self.phase = shardings, block, phase
        self.slice_axes = shardings.strategy.slice_axes
        self.keeps_logits = shardings.keeps_logits
        self.scope: Scope = "layer" if block.carry else "microbatch"
        self.start = set(available)
        self.available = set(self.start)
        self.used: list[ShardedArray] = []
        self.steps: list[Step] = []
        self.producers: dict[ShardedArray, Step] = {}
        self.contributions: dict[str, list[ShardedArray]] = {}

    def declared(self, name: str) -> ShardedArray:
        return self.shardings.declared(name)

    def cotangent(self, name: str) -> ShardedArray:
        return self.shardings.cotangent(name)

    def add(self, *steps: Step) -> None:
        for step in steps:
            moves = step.is_collective or step.op == "slice"
            if moves and step.result in self.available:
                continue
            self.need(*step.inputs)
            attributes = step.attributes
            if not moves and step.result in self.available:
                attributes = (*attributes, ("accumulate", "true"))
            self._emit(msgspec.structs.replace(step, attributes=attributes), self.phase)

    def _emit(self, step: Step, phase: Phase, *, scope: Scope | None = None) -> None:
        source = step.inputs[0] if step.inputs else step.result
        is_weight = self.shardings.is_weight(step.result.name)
        # a block of keys on its way round a ring passes behind the attention to the one before it
        moves = step.is_collective and step.op != "permute"
        waits = moves and not is_weight and (phase == "forward" or source not in self.start)
        if phase == "recompute" and is_weight:
            phase = "backward"
        fields = {"block": self.block.name, "phase": phase, "scope": scope or self.scope, "critical": waits}
        self.steps.append(msgspec.structs.replace(step, **fields))
        for array in (step.result, *step.more):
            self.available.add(array)

    def need(self, *arrays: ShardedArray) -> None:
        for array in arrays:
            if array in self.start and array not in self.used:
                self.used.append(array)
            if array in self.available:
                continue
            step = self.producers.get(array)
            if step is None:
                raise AssertionError(f"{self.block.name}: nothing makes {array}")
            self.need(*step.inputs)
            self._emit(step, "recompute")

    def contribute(self, name: str, array: ShardedArray) -> None:
        addends = self.contributions.setdefault(name, [])
        if array not in addends:
            addends.append(array)
        uses = sum(op.inputs.count(name) for op in self.block.ops)
        if uses == 1 and self.shardings.is_weight(name):
            self.finish(name)

    def finish(self, name: str) -> None:
        """Addends of one cotangent, summed as soon as they are split alike, in its primal's sharding.

        Addends that are split differently go there in turns, the longest way first: they meet on the way.
        What one was before it met the last is a part of the sum only, and must not be shared.
        """
        addends = self.contributions.pop(name, [])
        target = self._summed(name, addends)
        waiting = {a: reshard(a, target) for a in addends}
        while left := {a: steps for a, steps in waiting.items() if steps}:
            source = max(left, key=lambda a: len(left[a]))
            step = waiting.pop(source)[0]
            if waiting:
                self.available.discard(source)
            if step.result in waiting:
                step = msgspec.structs.replace(step, attributes=(*step.attributes, ("accumulate", "true")))
            self._emit(step, self.phase)
            waiting[step.result] = reshard(step.result, target)
        if addends and self.shardings.is_weight(name):
            for step in reshard(target, self.shardings.optimizer(name).replace(name=target.name)):
                self._emit(step, self.phase, scope="step")

    def _summed(self, name: str, addends: list[ShardedArray]) -> ShardedArray:
        """A cotangent as its block leaves it. Of a weight's gradient, the sum over axes that do not split it waits:
        it is done once per step, on what has accumulated over the microbatches."""
        cotangent = self.cotangent(name)
        later = {tuple(a for a in addend.unreduced if a not in cotangent.spread) for addend in addends}
        wait = self.shardings.is_weight(name) and len(later) == 1
        return cotangent.replace(unreduced=later.pop()) if wait else cotangent


class _Shardings:
    """The declared sharding of every variable and cotangent under one strategy."""

    def __init__(self, program: Program, strategy: Strategy, keep_axes: Sequence[str] | None) -> None:
        self.program, self.strategy, self.keep_axes = program, strategy, keep_axes
        self.kept_names = _kept_names(program, strategy)
        self.keeps_logits = self.kept_names is None or "logits" in self.kept_names
        self._arrays: dict[str, ShardedArray] = {}

    def declared(self, name: str) -> ShardedArray:
        if name not in self._arrays:
            variable = self.program.variables[name]
            made = self._make(name, variable.dims, variable.role)
            self._arrays[name] = made.replace(dtype=variable.dtype) if variable.dtype else made
        return self._arrays[name]

    def cotangent(self, name: str) -> ShardedArray:
        variable = self.program.variables[name]
        role = "grad" if variable.role == "weight" else variable.role
        return self._make(f"d{name}", variable.dims, role)

    def optimizer(self, name: str) -> ShardedArray:
        """The part of a weight that one device updates."""
        variable = self.program.variables[name]
        return self._make(name, variable.dims, "optimizer" if variable.role == "weight" else variable.role)

    def _make(self, name: str, dims: tuple[str, ...], role: str) -> ShardedArray:
        axes = assign(self.strategy.rules(role), dims, keep=self.keep_axes)
        dtype = {"input": "int32", "position": "int32"}.get(role, "")
        return ShardedArray(name, dims, axes, dtype="fp32" if name in ("loss", "logits") else dtype)

    def is_weight(self, name: str) -> bool:
        """Whether a name is a weight or the gradient of one."""
        variables = self.program.variables
        return any(n in variables and variables[n].role in ("weight", "vector") for n in (name, name.removeprefix("d")))

    def is_activation(self, name: str) -> bool:
        """Whether a name is a result that a block hands to the next."""
        return name in self.program.variables and self.program.variables[name].role == "activation"

    def keeps(self, array: ShardedArray, block: Block) -> bool:
        """Whether the saved set holds a forward result; a gathered weight only until the next block runs.

        The backward pass of the block that ends in the loss follows its forward pass at once, so there
        everything stays, the gathered table too; only logits are made again unless they are kept by name.
        """
        if block.ops[-1].out == "loss":
            return array.name != "logits" or self.keeps_logits
        if self.is_weight(array.name):
            return False
        if self.kept_names is None:
            return True
        if array.name == "lse":  # attention's backward pass needs it wherever it needs the result
            return "o" in self.kept_names
        declared = array.name in self.program.variables and self.declared(array.name).axes == array.axes
        return declared and not array.unreduced and array.name in self.kept_names


def _again(step: Step, shardings: _Shardings) -> Step:
    """A forward step as a segment's second run has it: only gathers of weights count as the backward pass's own."""
    gathers = step.is_collective and shardings.is_weight(step.result.name)
    phase: Phase = "backward" if gathers else "recompute"
    parts = tuple(msgspec.structs.replace(part, phase=phase) for part in step.parts)
    return msgspec.structs.replace(step, phase=phase, parts=parts)


def _boundary(program: Program, shardings: _Shardings) -> tuple[Step, ...]:
    """The stream sent to the next stage, and its cotangent sent back.

    Where the stream is whole over ``tensor`` each of its devices sends a part, which the next stage gathers.
    """
    axes = shardings.strategy.mesh if shardings.keep_axes is None else shardings.keep_axes
    stream = next((block.carry for block in program.blocks if block.carry), "")
    if "pipeline" not in axes or not stream:
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


def _ends(program: Program, shardings: _Shardings) -> tuple[Step, ...]:
    """Gradients of the weights outside the layers, which come from the first and the last stage, summed over all."""
    axes = shardings.strategy.mesh if shardings.keep_axes is None else shardings.keep_axes
    if "pipeline" not in axes:
        return ()
    outside = dict.fromkeys(n for block in program.blocks if not block.carry for op in block.ops for n in op.inputs)
    steps = []
    for name in (n for n in outside if shardings.is_weight(n)):
        total = shardings.optimizer(name).replace(name=f"d{name}")
        part = total.replace(unreduced=("pipeline",))
        steps.append(Step(op="all_reduce", inputs=(part,), result=total, axes=("pipeline",), scope="step"))
    return tuple(msgspec.structs.replace(s, block="stage", phase="backward") for s in steps)


def _kept_names(program: Program, strategy: Strategy) -> tuple[str, ...] | None:
    """Names in the saved set; None for every name. Raises InputError for a name that is not a result."""
    if isinstance(strategy.remat, str):
        kept = KEPT_NAMES.get(strategy.remat)
        # without rope or a bias the products themselves enter attention
        plain = strategy.remat == "selective" and "qr" not in program.variables
        return (*kept, "q", "k") if kept is not None and plain else kept
    results = {op.out for block in program.blocks for op in block.ops} | {"logits"}
    for name in strategy.remat:
        if name not in results:
            raise InputError(f"remat keeps {name!r}, which is not a result of the program.{nearest(name, results)}")
    return tuple(strategy.remat)


def derive(program: Program, strategy: Strategy, *, symbolic: bool = False) -> Derived:
    """Forward, backward and update steps of a program under a strategy's assignment.

    Mesh axes of one device are left out, so that what is derived is exactly what runs; with ``symbolic``
    every axis stays, and sizes (arrays, if wanted) are filled in by whoever prices the steps.
    Raises InputError where an assignment cannot work (conflicting axes, a norm over a split D).
    """
    keep = None if symbolic else strategy.active_axes
    shardings = _Shardings(program, strategy, keep)
    blocks: list[BlockSteps] = []
    keeps: list[ShardedArray] = []
    for block in program.blocks:
        forward = _forward(block, shardings)
        kept = [a for s in forward.steps for a in (s.result, *s.more) if shardings.keeps(a, block)]
        backward = _backward(block, shardings, forward, kept)
        keeps.extend(kept)
        held = tuple(a for a in backward.used if a in kept or shardings.is_activation(a.name))
        segment = strategy.segment if block.carry else None
        there = _in_blocks(forward.steps, shardings, held)
        again = () if segment is None else tuple(_again(step, shardings) for step in there)
        back = _in_blocks(backward.steps, shardings)
        blocks.append(BlockSteps(block, there, (*again, *back), held, segment))
    blocks = _summed_once(blocks)
    declared = {name: shardings.declared(name) for name in program.variables}
    update, boundary = tuple(_update(program, shardings)), _boundary(program, shardings)
    ends = _ends(program, shardings)
    result = Derived(program, tuple(blocks), update, declared, (), boundary, strategy.prefetch, ends)
    tags = tuple(dict.fromkeys(result.tag(a) for a in keeps))
    return msgspec.structs.replace(result, keeps=tags)


def derive_forward(program: Program, strategy: Strategy, *, symbolic: bool = False) -> Derived:
    """Forward steps of a program that is never differentiated: no backward pass, no update, nothing held."""
    keep = None if symbolic else strategy.active_axes
    shardings = _Shardings(program, msgspec.structs.replace(strategy, remat="none"), keep)
    passes = ((block, _in_blocks(_forward(block, shardings).steps, shardings)) for block in program.blocks)
    blocks = tuple(BlockSteps(block, steps, (), ()) for block, steps in passes)
    return Derived(program, blocks, (), {name: shardings.declared(name) for name in program.variables}, ())


def _in_blocks(steps: Sequence[Step], shardings: _Shardings, kept: tuple[ShardedArray, ...] = ()) -> tuple[Step, ...]:
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


def _inputs(block: Block, shardings: _Shardings) -> set[ShardedArray]:
    """What is there before a block starts: weights, inputs of the job, and the stream."""
    made = {op.out for op in block.ops}
    used = {name for op in block.ops for name in op.inputs}
    return {shardings.declared(name) for name in used - made}


def _forward(block: Block, shardings: _Shardings) -> _Trace:
    trace = _Trace(shardings, block, "forward", _inputs(block, shardings))
    for op in block.ops:
        KINDS[op.kind][0](op, trace)
    trace.producers = {a: s for s in trace.steps for a in (s.result, *s.more)}
    return trace


def _backward(block: Block, shardings: _Shardings, forward: _Trace, kept: list[ShardedArray]) -> _Trace:
    start = {*_inputs(block, shardings), *kept}
    trace = _Trace(shardings, block, "backward", start)
    trace.producers = forward.producers
    trace.available.add(shardings.cotangent(block.ops[-1].out))
    for op in reversed(block.ops):
        trace.finish(op.out)
        KINDS[op.kind][1](op, trace)
    for name in list(trace.contributions):
        trace.finish(name)
    return trace


def _update(program: Program, shardings: _Shardings) -> list[Step]:
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
    for weight in program.of_role("weight", "vector"):
        array, shard = shardings.declared(weight.name), shardings.optimizer(weight.name)
        adamw = Step(op="adamw", inputs=(shard.replace(name=f"d{weight.name}"), shard), result=shard)
        steps.extend((*reshard(array, shard), adamw, *reshard(shard, array)))
    return [msgspec.structs.replace(step, phase="update", scope="step", block="update") for step in steps]
