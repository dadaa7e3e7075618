"""What `meshwright hlo FILE` says of a whole program: its collectives, loops, arrays, relayouts and padding."""

import math
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from meshwright.cli.fields import parse_mesh
from meshwright.cli.output import width
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes
from meshwright.hlo.collectives import CollectiveRow, collective_rows, module_collectives
from meshwright.hlo.layout import largest_arrays, paddings, relayouts
from meshwright.hlo.loops import loops
from meshwright.hlo.module import Module
from meshwright.report.answer import Fact, Paragraph, Piece, Table

MIN_PADDED_BYTES = 10_000
"""Arrays below it, single numbers above all, are left out of the table of padding."""
MAX_NAME = 28
MAX_BODY = 44
"""Characters of a name on one line: of an instruction, of a loop's body."""
_MAX_STEPS = 4


def summary(module: Module, mesh_text: str | None) -> dict[str, Any]:
    """All tables as one object; ``collectives`` is None where a loop's count cannot be read, and ``why`` says so."""
    mesh = parse_mesh(mesh_text) if mesh_text else {}
    _check_mesh(module, mesh)
    rows, why = _collective_rows(module, mesh)
    return {
        "format": "hlo",
        "module": module.name,
        "num_partitions": module.num_partitions,
        "num_replicas": module.num_replicas,
        "num_computations": len(module.computations),
        "num_instructions": module.num_instructions,
        "mesh": mesh or None,
        "collectives": None if rows is None else [_row(row) for row in rows],
        "why": why,
        "loops": loops(module),
        "largest": [_labelled(one) for one in largest_arrays(module)],
        "relayouts": [_labelled(one) | {"total_bytes": one.total_bytes} for one in relayouts(module)],
        "paddings": [_labelled(one) | {"wasted_share": one.wasted_share} for one in paddings(module)],
    }


def _check_mesh(module: Module, mesh: Mapping[str, int]) -> None:
    devices = math.prod(mesh.values())
    # A program that spans slices numbers the devices of one.
    if mesh and devices % module.num_devices:
        raise InputError(
            f"--mesh has {devices} devices and {module.name} is for {module.num_devices}. Give the mesh it is for."
        )


def _collective_rows(module: Module, mesh: Mapping[str, int]) -> tuple[tuple[CollectiveRow, ...] | None, str | None]:
    try:
        return collective_rows(module_collectives(module, mesh)), None
    except ValueError as error:
        return None, str(error)


def _row(row: CollectiveRow) -> dict[str, Any]:
    names = ("kind", "axes", "group_size", "dtype", "full_bytes", "times", "total_bytes", "is_async", "notes", "steps")
    return {name: getattr(row, name) for name in names}


def _labelled(one: Any) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    return fields | {"label": str(one.label) if one.label else None}


def summary_text(found: Mapping[str, Any], top: int) -> Iterator[Piece]:
    """The tables, ``top`` rows of each."""
    devices = f"{found['num_partitions']} partitions"
    if found["num_replicas"] > 1:
        devices += f" x {found['num_replicas']} replicas"
    counts = f"{found['num_computations']:,} computations, {found['num_instructions']:,} instructions"
    column = max(18, len(found["module"]) + 2)
    yield Fact(found["module"], f"HLO for {devices}: {counts}", column=column)
    if not found.get("whole", True):
        yield Fact("", "no ENTRY computation: a part of a program, or a text that is cut off", column=column)
    yield ""
    if found["collectives"] is None:
        yield Fact("collectives", found["why"])
        yield ""
    else:
        yield from _collectives_text(found["collectives"], top, bool(found["mesh"]))
    yield from _loops_text(found["loops"], top)
    yield from _largest_text(found["largest"], top)
    yield from _relayouts_text(found["relayouts"], top)
    yield from _paddings_text(found["paddings"], top)


def _titled(title: str, rows: Sequence[Any], shown: int) -> str:
    return f"{title} (the first {shown} of {len(rows)})" if len(rows) > shown else title


def _collectives_text(rows: Sequence[Mapping[str, Any]], top: int, has_mesh: bool) -> Iterator[Piece]:
    if not rows:
        yield Fact("collectives", "none")
        yield ""
        return
    cells = [
        [
            row["kind"],
            ", ".join(row["axes"]) or "-" if has_mesh else f"{row['group_size']}",
            _mb(row["full_bytes"]),
            row["times"],
            _mb(row["total_bytes"]),
            _stacked("; ".join([*(["async"] if row["is_async"] else []), *row["notes"]]), _steps(row["steps"])),
        ]
        for row in rows[:top]
    ]
    columns = ["collective", "over" if has_mesh else "devices", "MB each", "times", "MB", "how, for which step"]
    total = sum(row["total_bytes"] for row in rows)
    if any(step.startswith("near ") for row in rows for step in row["steps"]):
        columns[-1] += " (~ near it)"
    yield Table(
        *_without_empty(columns, cells), _titled(f"Collectives, {format_bytes(total)} in full arrays", rows, top)
    )


def _steps(steps: Sequence[str]) -> str:
    """``layer forward h, h1; embed forward x +3``: the first few, those of one pass of a block together."""
    passes: dict[str, list[str]] = {}
    for step in steps[:_MAX_STEPS]:
        where, _, result = step.replace("near ", "~").rpartition(":")
        passes.setdefault(where.replace(":", " "), []).append(result)
    more = f" +{len(steps) - _MAX_STEPS}" if len(steps) > _MAX_STEPS else ""
    return "; ".join(f"{where} {', '.join(results)}" for where, results in passes.items()) + more


def _loops_text(found: Sequence[Any], top: int) -> Iterator[Piece]:
    if not found:
        return
    rows = [
        [
            "  " * one.depth + one.name,
            "by data" if one.trips is None else f"{one.trips:,}",
            "by data" if one.total_trips is None else f"{one.total_trips:,}",
            _name(one.body, MAX_BODY),
        ]
        for one in found[:top]
    ]
    yield Table(["loop", "trips", "in all", "body"], rows, _titled("Loops", found, top))


def _largest_text(found: Sequence[Mapping[str, Any]], top: int) -> Iterator[Piece]:
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in found:
        alike.setdefault((one["name"], one["shape"], one["memory_space"], one["times"]), []).append(one)
    rows = [
        [
            _stacked(_name(group[0]["name"]), _step(group[0]["label"])),
            group[0]["shape"].split("{")[0],
            _mb(group[0]["padded_bytes"]),
            len(group),
            f"S({group[0]['memory_space']})" if group[0]["memory_space"] else None,
            group[0]["times"],
        ]
        for group in list(alike.values())[:top]
    ]
    columns = ["array", "shape", "MB", "arrays", "in", "times"]
    yield Table(*_without_empty(columns, rows), _titled("Arrays that it makes or is given", list(alike), top))


def _relayouts_text(found: Sequence[Mapping[str, Any]], top: int) -> Iterator[Piece]:
    if not found:
        return
    rows = [
        [
            _stacked(_name(one["name"]), "fused" if one["inside_fusion"] else "", _step(one["label"])),
            f"{_layout(one['before'])}\n-> {_layout(one['after']).split(chr(10))[-1]}",
            _mb(one["num_bytes"]),
            one["times"],
        ]
        for one in found[:top]
    ]
    total = sum(one["total_bytes"] for one in found if not one["inside_fusion"])
    alone = f", {format_bytes(total)} by those not fused" if total else ""
    yield Table(["copy", "array", "MB", "times"], rows, _titled(f"Copies to another layout{alone}", found, top))


def _paddings_text(every: Sequence[Mapping[str, Any]], top: int) -> Iterator[Piece]:
    found = [one for one in every if one["padded_bytes"] >= MIN_PADDED_BYTES]
    if not found:
        return
    rows = [
        [
            _stacked(_name(one["name"]), _step(one["label"]), one["shape"].replace("{", " {", 1)),
            _mb(one["num_bytes"]),
            _mb(one["padded_bytes"]),
            f"{one['wasted_share']:.0%}",
            one["num_arrays"],
        ]
        for one in found[:top]
    ]
    columns = ["array", "MB", "MB padded", "padding", "arrays"]
    yield Table(columns, rows, _titled("Padding that tiles add, largest first", found, top))


def place_text(label: str, text: str, *, column: int) -> Iterator[Piece]:
    """A fact whose long paths may be broken behind a slash."""
    lines = fill(
        f"{label:<{column}}{text.replace('/', '/ ')}",
        width(),
        subsequent_indent=" " * column,
        break_on_hyphens=False,
        break_long_words=False,
    )
    yield Paragraph(lines.replace("/ ", "/"), None)


def _stacked(*lines: str | None) -> str | None:
    """Lines of one cell, those that say something: side by side they would not fit 80 columns."""
    return "\n".join(line for line in lines if line) or None


def _without_empty(columns: list[str], rows: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
    """Without columns that say nothing."""
    said = [n for n in range(len(columns)) if any(row[n] for row in rows)]
    return [columns[n] for n in said], [[row[n] for n in said] for row in rows]


def _step(label: str | None) -> str | None:
    """A label without the operation, which the shape and the opcode tell."""
    return label.split("=")[0].replace(":", " ") if label else None


def _name(name: str, longest: int = MAX_NAME) -> str:
    """The name of an instruction or a computation, broken once where it is long."""
    if len(name) <= longest:
        return name
    at = max(name.rfind(mark, 0, longest) for mark in "-_.") + 1
    return f"{name[:at]}\n{name[at:]}" if at else name


def _layout(shape: str) -> str:
    """A shape above its layout."""
    return shape.replace("{", "\n{")


def _mb(num_bytes: int) -> str:
    megabytes = num_bytes / 1e6
    if 0 < megabytes < 0.001:
        return "<0.001"
    return f"{megabytes:,.0f}" if megabytes >= 100 else f"{megabytes:.3g}"
