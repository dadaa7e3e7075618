"""Declared shardings, and the tape that rules of ops add their steps to.

A rule says in which shardings its op can work locally and calls `Tape.move` (or `reshard`), which adds collectives.
Only the loss head and ring attention write a collective themselves.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import LOSSES, WEIGHTS, Block, Op, Program
from meshwright.algebra.rewrites.frozen import differentiated
from meshwright.algebra.rewrites.stacks import SharedInput
from meshwright.algebra.steps import Phase, Scope, Step
from meshwright.core.errors import InputError
from meshwright.spec.strategy import Strategy, assign

Details = TypeVar("Details", bound=msgspec.Struct)


ALIKE = {"S": "T", "Nx": "N", "Kx": "K", "Fx": "F", "Dc": "F", "Dl": "D", "Vl": "V"}
"""Dim of an encoder or of per-layer embeddings -> the dim whose rule it follows, unless it has a rule of its own."""


class Shardings:
    """The declared sharding of every variable and cotangent under one strategy."""

    def __init__(self, program: Program, strategy: Strategy, axes: Sequence[str]) -> None:
        self.program, self.strategy, self.axes = program, strategy, tuple(axes)
        self.shared: dict[str, SharedInput] = {}
        self.differentiated = differentiated(program)
        self.first_use = {n: b.name for b in reversed(program.blocks) for op in b.ops for n in op.inputs}
        self._arrays: dict[tuple[str, str], ShardedArray] = {}

    def declared(self, name: str) -> ShardedArray:
        """Returns the array of a variable in its declared sharding."""
        return self._array(name, "weight")

    def cotangent(self, name: str) -> ShardedArray:
        """Returns the cotangent of a variable, named d + its name, in its declared sharding."""
        return self._array(name, "grad")

    def optimizer(self, name: str) -> ShardedArray:
        """Returns the shard of a weight that one device updates."""
        return self._array(name, "optimizer")

    def as_read(self, name: str) -> tuple[ShardedArray, ...]:
        """Returns the arrays in which blocks may read a result: as declared, and as later layers share it."""
        return (self.declared(name), *([self.shared[name].given] if name in self.shared else []))

    def as_left(self, name: str) -> ShardedArray:
        """Returns the cotangent of a result in the sharding in which the blocks that read the result leave it."""
        return self.shared[name].cotangent if name in self.shared else self.cotangent(name)

    def _array(self, name: str, weight_role: str) -> ShardedArray:
        """Returns the array of a variable under the rules of its role; for a weight, of ``weight_role``."""
        if (name, weight_role) in self._arrays:
            return self._arrays[name, weight_role]
        variable = self.program.variables[name]
        role, dims = weight_role if variable.role == "weight" else variable.role, variable.dims
        rules = self.strategy.rules(role)
        # an encoder's dim has the decoder dim's rule, and its position among the rules
        alias_of = {ALIKE[dim]: dim for dim in dims if dim in ALIKE and dim not in rules and ALIKE[dim] not in dims}
        rules = {dim: axes for rule_dim, axes in rules.items() for dim in (alias_of.get(rule_dim, rule_dim), rule_dim)}
        group_rules = {dim: rules[dim[:-1]] for dim in dims if dim[-1] == "g" and dim[:-1] in rules}
        rules = {**group_rules, **rules}  # groups of entries are split as the entries are
        array_name = f"d{name}" if weight_role == "grad" else name
        is_fp32 = array_name in (*LOSSES, "logits") or dims == ("E", "C")
        dtype = "fp32" if is_fp32 else "int32" if variable.is_whole_numbers else ""
        if weight_role == "weight":
            dtype = variable.dtype or dtype
        array = ShardedArray(array_name, dims, assign(rules, dims, keep=self.axes), dtype=dtype)
        self._arrays[name, weight_role] = array
        return array

    def is_weight(self, name: str) -> bool:
        """True if a name is a weight or the gradient of one."""
        variables = self.program.variables
        return any(n in variables and variables[n].role in WEIGHTS for n in (name, name.removeprefix("d")))


class Tape:
    """Collects the steps of one pass over one block, each result once. A rule gets the tape `at` its op.

    ``used`` are the arrays of ``start`` that steps read, ``producers`` the forward step of each result, ``left`` the
    finished cotangents of the block's inputs.
    """

    op: Op
    inputs: list[ShardedArray]
    dinputs: list[ShardedArray]

    def __init__(self, shardings: Shardings, block: Block, phase: Phase, available: Iterable[ShardedArray]) -> None:
        self.shardings, self.block, self.phase = shardings, block, phase
        self.declared, self.cotangent = shardings.declared, shardings.cotangent
        self.slice_axes = shardings.strategy.slice_axes
        self.role = shardings.program.block_role(block.name)
        self.start = set(available)
        self.available = set(self.start)
        self.used: list[ShardedArray] = []
        self.steps: list[Step] = []
        self.producers: dict[ShardedArray, Step] = {}
        self.contributions: dict[str, list[ShardedArray]] = {}
        self.parts: dict[str, list[ShardedArray]] = {}
        self.left: set[ShardedArray] = set()

    def at(self, op: Op) -> "Tape":
        """Moves the tape to an op: its inputs and result as declared, and their cotangents. Returns the tape itself."""
        self.op, self.out, self.dout = op, self.declared(op.out), self.cotangent(op.out)
        self.inputs, self.dinputs = ([getter(name) for name in op.inputs] for getter in (self.declared, self.cotangent))
        return self

    def details(self, form: type[Details]) -> Details:
        """Returns the attributes of the op as a ``form``, the struct that its module declares; absent ones have its
        defaults.

        Raises InputError for an attribute that the op does not have, or a value that cannot be read.
        """
        try:
            return msgspec.convert(dict(self.op.attributes), form, strict=False)
        except msgspec.ValidationError as error:
            attribute_text = ", ".join(map("=".join, self.op.attributes))
            raise InputError(f"{self.op.out} = {self.op.kind}(...; {attribute_text}): {error}") from None

    def move(self, array: ShardedArray, target: ShardedArray) -> ShardedArray:
        """Adds the steps that reshard ``array`` to ``target`` and returns ``target``."""
        self.add(*reshard(array, target))
        return target

    def run(self, name: str, inputs: Iterable[ShardedArray], *results: ShardedArray, details: Any = None) -> None:
        """Adds a local step: each device runs it on its parts of the arrays."""
        self.add(Step(op=name, inputs=tuple(inputs), result=results[0], more=results[1:], details=details))

    def run_backward(
        self,
        inputs: Iterable[ShardedArray],
        cotangents: Iterable[tuple[str, ShardedArray]],
        *,
        dout: ShardedArray | None = None,
        details: Any = None,
    ) -> None:
        """Adds the op's backward step, from the result's cotangent and ``inputs`` to the cotangents of variables."""
        names, results = zip(*cotangents, strict=True)
        parts = (results[0], *self.as_parts(results[1:]))
        self.run(f"{self.op.kind}_backward", (dout or self.dout, *inputs), *parts, details=details)
        self.join_parts(parts, results)
        for name, cotangent in zip(names, results, strict=True):
            self.contribute(name, cotangent)

    def as_parts(self, cotangents: Iterable[ShardedArray]) -> list[ShardedArray]:
        """Returns cotangents, each renamed to NAME_part if an array of its name exists already, because several layers
        read the variable; `join_parts` adds the parts."""
        return [array.replace(name=f"{array.name}_part") if array in self.available else array for array in cotangents]

    def join_parts(self, parts: Iterable[ShardedArray], cotangents: Iterable[ShardedArray]) -> None:
        """Adds the steps that add each part from `as_parts` to the cotangent that exists already."""
        for part, array in zip(parts, cotangents, strict=True):
            if part != array:
                self.run("copy", (part,), array)

    def add(self, *steps: Step) -> None:
        """Adds steps, each after steps that recompute its missing inputs; skips moves whose result exists."""
        for step in steps:
            has_result = step.result in self.available
            if step.only_moves and has_result:
                continue
            self.need(*step.inputs)
            accumulates = step.accumulates or (not step.only_moves and has_result)
            self._emit(replace(step, accumulates=accumulates), self.phase)

    def _emit(self, step: Step, phase: Phase, *, scope: Scope | None = None) -> None:
        source_array = step.inputs[0] if step.inputs else step.result
        is_weight = self.shardings.is_weight(step.result.name)
        # the permute of a ring overlaps with the attention to the block of keys before it
        moves_data = step.is_collective and step.op != "permute"
        emitted_step = replace(
            step,
            block=self.block.name,
            role=self.role,
            phase="backward" if phase == "recompute" and is_weight else phase,
            scope=scope or ("layer" if self.block.carry else "microbatch"),
            critical=moves_data and not is_weight and (phase == "forward" or source_array not in self.start),
        )
        self.steps.append(emitted_step)
        self.available.update(step.results)

    def complete(self, product: ShardedArray) -> None:
        """Reshards the op's local product to its declared result. If several ops of the block have this result, the
        last of them sums all their products first."""
        makers, parts = [op for op in self.block.ops if op.out == self.op.out], self.parts.setdefault(self.op.out, [])
        if product not in parts:
            parts.append(product)
        if self.op is makers[-1]:
            self._sum(parts, self.out)

    def need(self, *arrays: ShardedArray) -> None:
        """Adds the forward steps that recompute arrays which are not available, and first what these steps need."""
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
        """Records an addend of a variable's cotangent; ignores variables that depend on no trained weight."""
        if name not in self.shardings.differentiated:
            return
        addends = self.contributions.setdefault(name, [])
        if array not in addends:
            addends.append(array)
        num_uses = sum(op.inputs.count(name) for op in self.block.ops)
        if num_uses == 1 and self.shardings.is_weight(name):
            self.finish(name)

    def finish(self, name: str) -> None:
        """Adds the steps that sum the contributions to a cotangent in its declared sharding.

        Contributions sharded differently are resharded one collective at a time, the one that needs most collectives
        first, and added as soon as their shardings agree. A partial sum is no longer available to other steps.
        """
        addends = self.contributions.pop(name, [])
        target, is_weight = self.cotangent(name), self.shardings.is_weight(name)
        # a weight's gradient is summed once per step over axes that do not split it, if all addends agree on these
        axes_left = {tuple(a for a in addend.unreduced if a not in target.spread) for addend in addends}
        if is_weight and len(axes_left) == 1:
            target = target.replace(unreduced=axes_left.pop())
        if all(op.out != name for op in self.block.ops):
            self.left.add(target)
        self._sum(addends, target)
        # the backward pass of the first block that uses a weight (tied embeddings have two) is the last to add to it
        is_first_user = self.shardings.first_use.get(name) == self.block.name
        if addends and is_first_user and is_weight:
            for step in reshard(target, self.shardings.optimizer(name).replace(name=target.name)):
                self._emit(step, self.phase, scope="step")

    def _sum(self, addends: Iterable[ShardedArray], target: ShardedArray) -> None:
        """Adds the steps that reshard arrays to a target, and sums them as soon as their shardings agree."""
        moves_of = {a: reshard(a, target) for a in addends}
        while unfinished_moves := {a: steps for a, steps in moves_of.items() if steps}:
            source_array = max(unfinished_moves, key=lambda a: len(unfinished_moves[a]))
            step = moves_of.pop(source_array)[0]
            if moves_of:
                self.available.discard(source_array)
            if step.result in moves_of:
                step = replace(step, accumulates=True)
            self._emit(step, self.phase)
            moves_of[step.result] = reshard(step.result, target)


def axes_beside(array: ShardedArray, other: ShardedArray) -> tuple[str, ...]:
    """Returns the mesh axes on the dims of ``array`` that ``other`` lacks: where ``other`` is broadcast, its cotangent
    is a sum over them."""
    return tuple(axis for dim in array.dims if dim not in other.dims for axis in array.axes_of(dim))


def require_whole(array: ShardedArray, dim: str, kind: str) -> None:
    """Raises InputError if ``array`` is split along ``dim``, over which the op ``kind`` reduces."""
    if array.axes_of(dim):
        raise InputError(
            f"{kind} needs {dim} whole, and {array} splits it over {', '.join(array.axes_of(dim))}. "
            f"Assign those axes to another dim (T, for the residual stream)."
        )
