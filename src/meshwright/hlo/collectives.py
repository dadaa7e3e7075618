"""Collectives of a compiled program: kind, bytes, mesh axes, and how often each runs."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from meshwright.core.labels import StepLabel, find_label
from meshwright.hlo.groups import Groups, are_shifted, axes_of, group_size, permute_pairs, replica_groups, slice_groups
from meshwright.hlo.loops import runs_at_most_once, runs_further_rounds, trip_count
from meshwright.hlo.module import Instruction, Module, parse_module
from meshwright.hlo.products import fuses_compute, runs_beside_compute
from meshwright.hlo.shapes import parse_shapes, shape_bytes

Overlap = Literal["", "start/done", "async fusion", "windowed", "between slices"]
"""How a collective overlaps with compute; "" for an exposed one, for which the program waits."""

KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
"""Opcode -> kind."""

_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_DISGUISED = "all-reduce-scatter"
_PERMUTES = ("collective-permute", "collective-permute-start")
_PASSING = {
    *("bitcast", "copy", "copy-done", "copy-start", "reshape", "get-tuple-element", "all-reduce-done"),
    *("add", "convert", "multiply", "subtract"),
}
"""Elementwise and copying opcodes: a slice of their result needs only the same slice of their operand."""
MAX_STEPS_AWAY = 8
"""Most unlabelled instructions in a row that the search for the nearest label crosses."""


class CompiledCollective(msgspec.Struct, frozen=True):
    """One collective of a program.

    ``full_bytes`` is the size of the whole array on the group: the result of an all-gather, the operand of a
    reduce-scatter, either of an all-reduce, the blocks of the whole group for an all-to-all (for a ragged one the whole
    buffers, which its rows may not fill). ``trips`` is how often it runs in one call of the program, ``axes`` the mesh
    axes that its groups span (empty for groups that are not along axes), ``group_size`` the size of the largest group
    and ``group_sizes`` all sizes if they differ, ``num_arrays`` how many arrays it combines, ``dtype`` the largest
    array's. ``sliced``: an all-reduce of which each device keeps a slice, as a reduce-scatter would leave it.
    ``windowed``: a permute of a matmul that was cut to overlap with it. ``dcn``: between TPU slices, over the
    data-centre network. ``overlap``: how it overlaps with compute in the schedule; empty if it does not. ``label``: its
    derived step; if the compiler dropped the label, ``near`` is the closest step that reads or computes its array.
    """

    kind: str
    full_bytes: int
    axes: tuple[str, ...]
    trips: int
    num_arrays: int
    name: str
    in_conditional: bool = False
    dtype: str = ""
    group_size: int = 1
    group_sizes: tuple[int, ...] = ()
    is_async: bool = False
    sliced: bool = False
    windowed: bool = False
    dcn: bool = False
    overlap: Overlap = ""
    label: StepLabel | None = None
    near: StepLabel | None = None

    @property
    def total_bytes(self) -> int:
        """Returns ``full_bytes`` over all executions."""
        return self.full_bytes * self.trips

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the collective's special properties, a few words each."""
        truth_by_note = {
            "between slices": self.dcn,
            "cut matmul": self.windowed,
            "sliced after": self.sliced,
            "in a branch": self.in_conditional,
            f"groups of {' and '.join(map(str, self.group_sizes))}": self.group_sizes,
        }
        return tuple(note for note, truth in truth_by_note.items() if truth)

    @property
    def step(self) -> str:
        """The derived step as ``block:phase:result``, with "near " before the nearest one; empty if unknown."""
        label = self.label or self.near
        return f"{'' if self.label else 'near '}{label.block}:{label.phase}:{label.result}" if label else ""


def collectives(program: str | Module, mesh: Mapping[str, int]) -> tuple[CompiledCollective, ...]:
    """Returns every collective of an optimised HLO module, parsed or as text, with the trip counts of the loops around
    it, except further rounds of an expert exchange.

    ``mesh`` maps axis to size, major to minor; with an empty mesh the axes stay empty. The module's device numbers are
    assumed to be row-major over the mesh, as for a mesh built from ``jax.devices()`` in order, slice by slice if there
    are several. Raises ValueError for a loop around a collective whose trip count cannot be read.
    """
    module = parse_module(program) if isinstance(program, str) else program
    return tuple(_Walk(module, mesh).computation(_Around(computation=module.entry)))


class _Around(msgspec.Struct, frozen=True, kw_only=True):
    """Context in which a computation runs: its name, the caller, and how often it runs.

    ``start`` is the -start instruction around it, if it is part of an asynchronous operation; else None.
    """

    computation: str
    trips: int = 1
    in_conditional: bool = False
    start: Instruction | None = None
    caller: Instruction | None = None
    seen: set[str] = msgspec.field(default_factory=set)
    """Keys of asynchronous collectives already counted in this loop body; each has several pieces."""


class _Walk:
    """Walks a module from its entry and yields its collectives in order."""

    def __init__(self, module: Module, mesh: Mapping[str, int]) -> None:
        self.module, self.mesh = module, mesh
        self.num_devices = module.num_devices if module.num_devices > 1 else math.prod(mesh.values())
        self.reaching: dict[str, bool] = {}
        # Computations that start each asynchronous collective: its other pieces may run in a loop that it overlaps.
        self.begun: dict[str, set[str]] = defaultdict(set)
        for instruction in module:
            siblings = module.computations[instruction.computation].instructions if instruction.async_key else ()
            if any("AsyncCollectiveStart" in inner.target for inner in siblings):
                self.begun[instruction.async_key].add(instruction.computation)
        self.permutes = Counter(instruction.op_name for instruction in module if instruction.opcode in _PERMUTES)

    def computation(self, around: _Around) -> Iterator[CompiledCollective]:
        for instruction in self.module.computations[around.computation].instructions:
            # An asynchronous collective counts at its start.
            if instruction.opcode.endswith(("-done", "-update")):
                continue
            if self.counts(instruction):
                yield from self.collective(instruction, around)
                continue
            for role, name in instruction.called:
                if role != "condition" and self.reaches(name) and not runs_further_rounds(self.module, instruction):
                    yield from self.computation(self.inside(instruction, name, around))

    def inside(self, caller: Instruction, name: str, around: _Around) -> _Around:
        is_branch, own_trips = caller.opcode == "conditional", 1
        if caller.opcode == "while":
            is_branch = runs_at_most_once(self.module, caller)
            num_trips = 1 if is_branch else trip_count(self.module, caller)
            if num_trips is None:
                raise ValueError(
                    f"loop {caller.name} states no readable trip count; its collectives cannot be counted."
                )
            own_trips = num_trips
        return _Around(
            computation=name,
            trips=around.trips * own_trips,
            in_conditional=around.in_conditional or is_branch,
            start=around.start or (caller if caller.opcode.endswith("-start") else None),
            caller=caller,
            seen=around.seen if caller.opcode == "fusion" else set(),
        )

    def reaches(self, name: str) -> bool:
        """True if a computation, or one that it calls, contains a collective that `counts`."""
        if name not in self.reaching:
            body = self.module.computations.get(name)
            self.reaching[name] = body is not None and any(
                self.counts(i) or any(self.reaches(callee) for _, callee in i.called) for i in body.instructions
            )
        return self.reaching[name]

    def counts(self, one: Instruction) -> bool:
        """True for a collective, but not for later pieces of an asynchronous one, which may run in any loop."""
        computations = self.begun.get(one.async_key)
        is_collective = one.opcode.removesuffix("-start") in KINDS
        if one.opcode == "send":
            is_collective = "_xla_megascale_transfer_type" in one.attributes
        return is_collective and (computations is None or one.computation in computations)

    def collective(self, one: Instruction, around: _Around) -> Iterator[CompiledCollective]:
        async_key = one.async_key
        if async_key:
            if async_key in around.seen:
                return
            around.seen.add(async_key)
        op_name = one.op_name or (around.caller.op_name if around.caller else "")
        label = find_label(op_name)
        kind, groups = self.kind_and_groups(one)
        if around.caller and around.computation.startswith(_DISGUISED) and kind == "all_reduce":
            kind = "reduce_scatter"
        num_members, shape_texts = group_size(groups), self.given(one)
        full_bytes, num_arrays = self.bytes_and_arrays(one, shape_texts, kind, num_members)
        largest_shape = max(parse_shapes(";".join(shape_texts) or one.shape), key=lambda shape: shape.num_bytes)
        is_windowed = kind == "permute" and self.is_windowed(one)
        yield CompiledCollective(
            kind=kind,
            full_bytes=full_bytes,
            axes=axes_of(groups, self.mesh) if kind == "permute" or are_shifted(groups, self.mesh) else (),
            trips=around.trips,
            num_arrays=num_arrays,
            name=one.name,
            in_conditional=around.in_conditional,
            dtype=largest_shape.dtype,
            group_size=num_members,
            group_sizes=tuple(sorted(block.shape[1] for block in groups)) if len(groups) > 1 else (),
            is_async=bool(around.start or async_key) or one.opcode.endswith("-start") or one.opcode == "send",
            sliced=kind == "all_reduce" and _is_sliced(self.module, one),
            windowed=is_windowed,
            dcn=one.opcode == "send",
            overlap=self.overlap(one, around, full_bytes, windowed=is_windowed),
            label=label,
            near=None if label else nearest_step(self.module, self.running(one, around), kind=kind),
        )

    def overlap(self, one: Instruction, around: _Around, num_bytes: int, *, windowed: bool) -> Overlap:
        """Returns how a collective overlaps with compute, by the order of the instructions; "" if it is exposed."""
        if async_key := one.async_key:
            return "async fusion" if fuses_compute(self.module, async_key) else ""
        start_op = around.start or one
        if not start_op.opcode.endswith(("-start", "send")):
            return ""
        awaited_op = self.receive(one) if one.opcode == "send" else start_op
        users = self.module.computations[start_op.computation].users.get(awaited_op.name, ()) if awaited_op else ()
        done_name = next((user.name for user in users if user.opcode.endswith("-done")), "")
        if not runs_beside_compute(self.module, start_op, done_name, num_bytes=num_bytes):
            return ""
        return "between slices" if one.opcode == "send" else "windowed" if windowed else "start/done"

    def running(self, one: Instruction, around: _Around) -> Instruction:
        """Returns the instruction that runs a collective in its loop or the entry; of several pieces, the last."""
        caller = around.caller
        if caller is None or (caller.opcode != "fusion" and not caller.opcode.endswith("-start")):
            return one
        for candidate in self.module.computations[caller.computation].instructions if one.async_key else ():
            inners = self.module.inside(candidate) if candidate.opcode == "fusion" else ()
            has_done = any("AsyncCollectiveDone" in i.target for i in inners)
            if has_done and any(i.async_key == one.async_key for i in inners):
                return candidate
        return caller

    def kind_and_groups(self, one: Instruction) -> tuple[str, Groups]:
        if transfer_match := _TRANSFER.search(one.attributes):
            kind = "permute" if transfer_match[1] == "ONE_TO_ONE" else transfer_match[1].lower()
            return kind, slice_groups(one.attributes)
        kind = KINDS[one.opcode.removesuffix("-start")]
        if kind == "permute":
            return kind, permute_pairs(one.attributes)
        return kind, replica_groups(one.attributes, self.num_devices)

    def bytes_and_arrays(self, one: Instruction, shapes: Sequence[str], kind: str, size: int) -> tuple[int, int]:
        """Returns (full bytes, number of arrays) of a collective with operands of these shapes."""
        operand_bytes = [shape_bytes(shape) for shape in shapes]
        if one.opcode == "send":
            # an all-gather receives more than it sends
            received_bytes = receive_op.shapes[0].num_bytes if (receive_op := self.receive(one)) else 0
            return max(operand_bytes[0], received_bytes) * (size if kind == "all_to_all" else 1), 1
        if one.opcode.startswith("ragged"):
            # The second operand receives, the others are row offsets; the smaller of both has no spare rows.
            return min(operand_bytes[:2]) * size, 1
        if kind == "all_to_all":
            # An array may come as one operand, or as one for each device of the group.
            return sum(operand_bytes) * size, max(1, len(operand_bytes) // size)
        if kind == "all_gather":
            is_start = one.opcode.endswith("-start")
            return sum(operand_bytes) * size if is_start else shape_bytes(one.shape), len(operand_bytes)
        return sum(operand_bytes), len(operand_bytes)

    def given(self, one: Instruction) -> list[str]:
        """Returns the shapes of an instruction's operands; for a send only of the array that it sends."""
        computation = self.module.computations[one.computation]
        shape_texts = [computation.by_name[name].shape for name in one.operands if name in computation.by_name]
        return shape_texts[:1] if one.opcode == "send" else shape_texts

    def receive(self, send: Instruction) -> Instruction | None:
        """Returns the recv instruction of a send between slices, or None."""
        rendezvous_match = _RENDEZVOUS.search(send.attributes)
        for instruction in self.module.computations[send.computation].instructions:
            if rendezvous_match and instruction.opcode == "recv" and rendezvous_match[0] in instruction.attributes:
                return instruction
        return None

    def is_windowed(self, one: Instruction) -> bool:
        """True if a permute sends blocks of a collective matmul: in its loop, or as one of several permutes of its
        name.

        A single permute with a matmul's name only moves that matmul's operand."""
        if "windowed_dot_general" in one.computation:
            return True
        return "dot_general" in one.op_name.rpartition("/")[2] and self.permutes[one.op_name] > 1


def _is_sliced(module: Module, one: Instruction) -> bool:
    """True if all users of an all-reduce take a slice at a computed offset."""
    users = module.computations[one.computation].users.get(one.name, ())
    return bool(users) and all(_takes_slice(module, user, one) for user in users)


def _takes_slice(module: Module, user: Instruction, source: Instruction) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == source.name
    if user.opcode in _PASSING:
        return _is_sliced(module, user)
    if user.opcode != "fusion":
        return False
    parameters = module.body(user).parameters
    operand_indices = [index for index, name in enumerate(user.operands) if name == source.name]
    return all(index in parameters and _is_sliced(module, parameters[index]) for index in operand_indices)


# -- the nearest step of a collective without a label -------------------------------------------------


def nearest_step(module: Module, one: Instruction, *, kind: str) -> StepLabel | None:
    """Returns the label of the nearest step that reads a gather's result, or that computes another collective's
    operand.

    None if there is none near. XLA drops labels of the collectives that it rewrites: all between TPU slices, and those
    that it combines. ``one`` runs the collective: itself, or the fusion that ends one of several pieces."""
    is_gather = kind in ("all_gather", "broadcast")
    for neighbours in (_users, _makers) if is_gather else (_makers, _users):
        seen_keys, front = {(one.computation, one.name)}, [one]
        for _ in range(MAX_STEPS_AWAY):
            front = [b for node in front for b in neighbours(module, node) if (b.computation, b.name) not in seen_keys]
            for neighbour in front:
                if neighbour.label and neighbour.label.phase != "update":
                    return neighbour.label
            seen_keys |= {(neighbour.computation, neighbour.name) for neighbour in front}
    return None


def _users(module: Module, one: Instruction) -> Sequence[Instruction]:
    return [] if one.is_root else module.computations[one.computation].users.get(one.name, ())


def _makers(module: Module, one: Instruction) -> Sequence[Instruction]:
    """Returns the operands; for an element of a loop's state or result, the value that the body assigns to it."""
    computation = module.computations[one.computation]
    operands = [computation.by_name[name] for name in one.operands if name in computation.by_name]
    if one.opcode != "get-tuple-element" or not operands:
        return operands
    source_op, index = operands[0], one.number(one.attribute("index"))
    if source_op.opcode == "tuple":
        return [module.operand(source_op, index)]
    if source_op.opcode not in ("while", "parameter"):
        return operands
    body = module.body(source_op, "body") if source_op.opcode == "while" else computation
    maker_names = body.root.operands[index : index + 1] if body.root.opcode == "tuple" else ()
    return [body.by_name[name] for name in maker_names]


# -- rows of equal collectives ----------------------------------------------------------------------


class CollectiveRow(msgspec.Struct, frozen=True):
    """Identical collectives; ``times`` counts all their executions, in loops too."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    full_bytes: int
    times: int
    total_bytes: int
    is_async: bool
    notes: tuple[str, ...]
    steps: tuple[str, ...]
    """The collectives' derived steps, see `CompiledCollective.step`."""


def collective_rows(found: Iterable[CompiledCollective]) -> tuple[CollectiveRow, ...]:
    """Groups identical collectives into rows, most bytes first."""
    group_by_key = defaultdict(list)
    for collective in found:
        key = (collective.kind, collective.axes, collective.group_size, collective.dtype, collective.full_bytes)
        group_by_key[key, collective.is_async, collective.notes].append(collective)
    rows = []
    for (key, is_async, notes), group in group_by_key.items():
        num_times, step_texts = sum(c.trips for c in group), tuple(dict.fromkeys(c.step for c in group if c.step))
        rows.append(CollectiveRow(*key, num_times, group[0].full_bytes * num_times, is_async, notes, step_texts))
    return tuple(sorted(rows, key=lambda row: row.total_bytes, reverse=True))
