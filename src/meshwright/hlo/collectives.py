"""Collectives of a compiled program: kind, bytes, mesh axes, and how often each runs."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from meshwright.core.labels import StepLabel, find_label
from meshwright.hlo.groups import Groups, axes_of, group_size, permute_pairs, replica_groups, slice_groups
from meshwright.hlo.loops import runs_at_most_once, trip_count
from meshwright.hlo.module import Instruction, Module, parse_module
from meshwright.hlo.near import ending, nearest_step
from meshwright.hlo.shapes import parse_shapes, shape_bytes

KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
"""Opcode -> kind."""

SLICE_KINDS = {
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_REDUCE": "all_reduce",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
}
"""Type of a transfer between TPU slices -> kind."""

_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_DISGUISED = "all-reduce-scatter"
_PERMUTES = ("collective-permute", "collective-permute-start")
_PASSING = {
    *("bitcast", "copy", "copy-done", "copy-start", "reshape", "get-tuple-element", "all-reduce-done"),
    *("add", "convert", "multiply", "subtract"),
}
"""What an all-reduce may meet before it is sliced: element by element, a slice of the result needs a slice of it."""


class Collective(msgspec.Struct, frozen=True):
    """One collective of a program.

    ``full_bytes`` are those of the whole array on the group, per device: the result of an all-gather, the
    operand of a reduce-scatter, either of an all-reduce, the blocks of the whole group for an all-to-all (for a
    ragged one the whole buffers, which its rows may not fill).
    ``trips`` is how often it runs in one call of the program, ``axes`` the mesh axes that its groups span,
    ``num_arrays`` how many arrays it combines. ``sliced``: an all-reduce of which each device keeps a slice, as a
    reduce-scatter would leave it. ``windowed``: a permute of a matmul that was cut to overlap with it. ``dcn``:
    between TPU slices, over the data-centre network. ``label``: the derived step that it came from; where
    the compiler dropped that, ``near`` is the closest step that takes or makes its array.
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
    is_async: bool = False
    sliced: bool = False
    windowed: bool = False
    dcn: bool = False
    label: StepLabel | None = None
    computation: str = ""
    op_name: str = ""
    near: StepLabel | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes over all the times that it runs."""
        return self.full_bytes * self.trips


def collectives(hlo_text: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective of an optimised HLO module, with the trip counts of the loops around it.

    ``mesh`` maps axis to size, major to minor; the module's device numbers are taken to run over it
    row-major, as they do for a mesh built from ``jax.devices()`` in order, slice by slice where there are
    several. Raises ValueError for a loop around a collective whose trip count cannot be read.
    """
    return module_collectives(parse_module(hlo_text), mesh)


def module_collectives(module: Module, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """As `collectives`, of a module that is parsed; an empty ``mesh`` leaves the axes empty."""
    walk = _Walk(module, mesh)
    return tuple(walk.computation(_Around(computation=module.entry)))


class _Around(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the place of an instruction: what runs it, and how often."""

    computation: str
    trips: int = 1
    in_conditional: bool = False
    is_async: bool = False
    caller: Instruction | None = None
    seen: set[tuple[str, ...]] = msgspec.field(default_factory=set)
    """Collectives of this loop body that are in several pieces, so that each counts once."""


class _Walk:
    """Follows the calls of a module from its entry and yields the collectives on the way."""

    def __init__(self, module: Module, mesh: Mapping[str, int]) -> None:
        self.module, self.mesh = module, mesh
        self.num_devices = module.num_devices if module.num_devices > 1 else math.prod(mesh.values())
        self.reaching: dict[str, bool] = {}
        # Its other pieces may run inside a loop that it overlaps with.
        self.begun: dict[tuple[str, ...], set[str]] = {}
        for one in module:
            if "async_collective_fusion_config" in one.attributes and _begins(module, one):
                self.begun.setdefault(_pieces_key(one), set()).add(one.computation)
        self.permutes = Counter(one.op_name for one in module if one.opcode in _PERMUTES)

    def computation(self, around: _Around) -> Iterator[Collective]:
        for one in self.module.computations[around.computation].instructions:
            # What began with a start is counted there.
            if one.opcode.endswith(("-done", "-update")):
                continue
            if _is_collective(one):
                yield from self.collective(one, around)
                continue
            for role, name in one.called:
                if role != "condition" and self.reaches(name):
                    yield from self.computation(self.inside(one, name, around))

    def inside(self, caller: Instruction, name: str, around: _Around) -> _Around:
        branch = caller.opcode == "conditional" or (caller.opcode == "while" and runs_at_most_once(self.module, caller))
        loop = caller.opcode == "while" and not branch
        return _Around(
            computation=name,
            trips=around.trips * trip_count(self.module, caller) if loop else around.trips,
            in_conditional=around.in_conditional or branch,
            is_async=around.is_async or caller.opcode.endswith("-start"),
            caller=caller,
            seen=around.seen if caller.opcode == "fusion" else set(),
        )

    def reaches(self, name: str) -> bool:
        """Whether a computation, or one that it calls, has a collective."""
        if name not in self.reaching:
            body = self.module.computations.get(name)
            self.reaching[name] = body is not None and any(
                _is_collective(one) or any(self.reaches(called) for _, called in one.called)
                for one in body.instructions
            )
        return self.reaching[name]

    def collective(self, one: Instruction, around: _Around) -> Iterator[Collective]:
        in_pieces = "async_collective_fusion_config" in one.attributes
        if in_pieces:
            key = _pieces_key(one)
            if key in around.seen or (key in self.begun and one.computation not in self.begun[key]):
                return
            around.seen.add(key)
        op_name = one.op_name or (around.caller.op_name if around.caller else "")
        label = find_label(op_name)
        kind, groups = self.kind_and_groups(one)
        if around.caller and around.computation.startswith(_DISGUISED) and kind == "all_reduce":
            kind = "reduce_scatter"
        size = group_size(groups)
        full_bytes, num_arrays = self.bytes_and_arrays(one, kind, size)
        yield Collective(
            kind=kind,
            full_bytes=full_bytes,
            axes=axes_of(groups, self.mesh),
            trips=around.trips,
            num_arrays=num_arrays,
            name=one.name,
            in_conditional=around.in_conditional,
            dtype=_dtype(self.shapes(one) or one.shape),
            group_size=size,
            is_async=around.is_async or in_pieces or one.opcode.endswith("-start") or one.opcode == "send",
            sliced=kind == "all_reduce" and _is_sliced(self.module, one),
            windowed=kind == "permute" and self.is_windowed(one),
            dcn=one.opcode == "send",
            label=label,
            computation=around.computation,
            op_name=op_name,
            near=None if label else nearest_step(self.module, self.running(one, around, in_pieces), kind=kind),
        )

    def running(self, one: Instruction, around: _Around, in_pieces: bool) -> Instruction:
        """The instruction that stands for a collective in the loop or entry that runs it."""
        caller = around.caller
        if caller is None or (caller.opcode != "fusion" and not caller.opcode.endswith("-start")):
            return one
        return ending(self.module, caller, one) if in_pieces else caller

    def kind_and_groups(self, one: Instruction) -> tuple[str, Groups]:
        if transfer := _TRANSFER.search(one.attributes):
            return SLICE_KINDS.get(transfer[1], transfer[1].lower()), slice_groups(one.attributes)
        kind = KINDS[one.opcode.removesuffix("-start")]
        if kind == "permute":
            return kind, permute_pairs(one.attributes)
        return kind, replica_groups(one.attributes, self.num_devices)

    def bytes_and_arrays(self, one: Instruction, kind: str, size: int) -> tuple[int, int]:
        """(full bytes, arrays) of a collective."""
        given = [shape_bytes(shape) for shape in self.shapes(one).split(";") if shape]
        if one.opcode == "send":
            given = [max(given[0], self.received_bytes(one))]
            return given[0] * (size if kind == "all_to_all" else 1), 1
        if kind == "ragged_all_to_all":
            # The operands behind the first are the buffer that receives and where the rows lie.
            return given[0] * size, 1
        if kind == "all_to_all":
            # An array may come as one operand, or as one for each device of the group.
            return sum(given) * size, max(1, len(given) // size)
        if kind == "all_gather":
            started = one.opcode.endswith("-start")
            return sum(given) * size if started else shape_bytes(one.shape), len(given)
        return sum(given), len(given)

    def shapes(self, one: Instruction) -> str:
        """The shapes of the arrays that an instruction is given, one behind another."""
        computation = self.module.computations[one.computation]
        known = [computation.by_name[name].shape for name in one.operands if name in computation.by_name]
        return ";".join(known[:1] if one.opcode == "send" else known)

    def received_bytes(self, send: Instruction) -> int:
        """Bytes of the receive that belongs to a send between slices: more than were sent, for an all-gather."""
        meeting = _MEETING.search(send.attributes)
        for one in self.module.computations[send.computation].instructions:
            if meeting and one.opcode == "recv" and meeting[0] in one.attributes:
                return one.shapes[0].num_bytes
        return 0

    def is_windowed(self, one: Instruction) -> bool:
        """Whether a permute passes the pieces of a matmul on: in a loop of its own, or one of several in a row.

        One alone that carries a matmul's name moves its operand to where it is needed.
        """
        if "windowed_dot_general" in one.computation:
            return True
        return "dot_general" in one.op_name.rpartition("/")[2] and self.permutes[one.op_name] > 1


def _is_collective(one: Instruction) -> bool:
    if one.opcode == "send":
        return "_xla_megascale_transfer_type" in one.attributes
    return one.opcode.removesuffix("-start") in KINDS


def _pieces_key(one: Instruction) -> tuple[str, ...]:
    """What the pieces of one asynchronous collective have in common."""
    return tuple(found[1] if (found := mark.search(one.attributes)) else "" for mark in (_CHANNEL, _CHAIN))


def _begins(module: Module, one: Instruction) -> bool:
    """Whether the fusion that holds this piece of a collective begins it."""
    inside = module.computations[one.computation].instructions
    return any("AsyncCollectiveStart" in other.attributes for other in inside if other.opcode == "custom-call")


def _dtype(shapes: str) -> str:
    """Element type of the largest array."""
    return max(parse_shapes(shapes), key=lambda shape: shape.num_bytes).dtype


def _is_sliced(module: Module, one: Instruction) -> bool:
    """Whether all that is used of an all-reduce is a slice whose place is computed."""
    users = module.computations[one.computation].users.get(one.name, ())
    return bool(users) and all(_takes_slice(module, user, one) for user in users)


def _takes_slice(module: Module, user: Instruction, value: Instruction) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == value.name
    if user.opcode in _PASSING:
        return _is_sliced(module, user)
    if user.opcode != "fusion":
        return False
    inside = module.computations[dict(user.called)["calls"]]
    numbers = [number for number, name in enumerate(user.operands) if name == value.name]
    return all(number in inside.parameters and _is_sliced(module, inside.parameters[number]) for number in numbers)


# -- rows of equal collectives ----------------------------------------------------------------------


class CollectiveRow(msgspec.Struct, frozen=True):
    """Collectives of one kind, group, size and manner; ``times`` counts all of them, in all their loops."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    full_bytes: int
    times: int
    is_async: bool
    notes: tuple[str, ...]
    steps: tuple[str, ...]
    """Labels of the derived steps that they came from, or that are near, without what makes them."""

    @property
    def total_bytes(self) -> int:
        """Full bytes over all the times."""
        return self.full_bytes * self.times


def collective_rows(found: Iterable[Collective]) -> tuple[CollectiveRow, ...]:
    """One row for collectives that are alike, most bytes first."""
    alike: dict[tuple[object, ...], list[Collective]] = {}
    for one in found:
        key = (one.kind, one.axes, one.group_size, one.dtype, one.full_bytes, one.is_async, collective_notes(one))
        alike.setdefault(key, []).append(one)
    rows = [
        CollectiveRow(
            kind=group[0].kind,
            axes=group[0].axes,
            group_size=group[0].group_size,
            dtype=group[0].dtype,
            full_bytes=group[0].full_bytes,
            times=sum(one.trips for one in group),
            is_async=group[0].is_async,
            notes=collective_notes(group[0]),
            steps=tuple(dict.fromkeys(step for one in group if (step := _step(one)))),
        )
        for group in alike.values()
    ]
    return tuple(sorted(rows, key=lambda row: row.total_bytes, reverse=True))


def collective_notes(one: Collective) -> tuple[str, ...]:
    """What is particular of a collective, a word each."""
    marks = {
        "between slices": one.dcn,
        "cut matmul": one.windowed,
        "sliced after": one.sliced,
        "in a branch": one.in_conditional,
    }
    return tuple(word for word, holds in marks.items() if holds)


def _step(one: Collective) -> str:
    label = one.label or one.near
    if label is None:
        return ""
    return f"{'' if one.label else 'near '}{label.block}:{label.phase}:{label.result}"
