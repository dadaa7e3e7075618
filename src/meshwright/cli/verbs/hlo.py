"""`meshwright hlo`: a compiled program read: collectives, loops, layouts, padding; one instruction in words, drawn."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict

from meshwright.cli.output import width
from meshwright.cli.verb import MESH, MeshSizes, Options, argument, option, verb
from meshwright.core.errors import InputError, nearest
from meshwright.core.units import counted, format_bytes
from meshwright.hlo.collectives import collective_rows, collectives
from meshwright.hlo.files import StableHlo, has_entry, hlo_file, read_hlo
from meshwright.hlo.graph import block_graphs, computation_graph
from meshwright.hlo.layout import largest_arrays, paddings, relayouts
from meshwright.hlo.loops import loops
from meshwright.hlo.module import LINES, Instruction, Module
from meshwright.hlo.shapes import Shape
from meshwright.hlo.words import explain_instruction
from meshwright.report.answer import Answer, Fact, Facts, Paragraph, Piece, Table, TableColumns, filled
from meshwright.report.arrays.hlo_graph import graph_figure
from meshwright.report.arrays.tiling import tiling_figure


class Given(Options):
    file: Path = argument()
    mesh: MeshSizes | None = MESH
    op: str | None = option("Explain this instruction.")
    png: Path | None = option("Draw the tiling of --op, or the graph of a layer without one (.png or .svg).")
    computation: str | None = option("The computation whose graph is drawn.", needs={"png": "--png"})
    block: str | None = option(
        "The block of the model whose graph is drawn, such as layer.", "--step-block", needs={"png": "--png"}
    )
    stablehlo: bool = option("FILE is StableHLO, whatever its name.")
    top: int | None = option("Rows of each table.", type=click.IntRange(1))


@verb(Given)
def command(given: Given) -> Answer:
    """Read the compiled program in FILE: HLO text, instructions alone, a folder that XLA dumped into, or StableHLO."""
    path = hlo_file(given.file)
    program = read_hlo(path, stablehlo=given.stablehlo)
    if isinstance(program, StableHlo):
        if given.op or given.png:
            raise InputError(f"{path} is StableHLO, which has no layouts yet. Compile it and give the optimised HLO.")
        return _stable(path, program)
    if given.op:
        return _explained(program, given.op, given.png)
    if program.entry == LINES:
        op_names = [instruction.name for instruction in program if instruction.opcode != "parameter"]
        rows = [_explained(program, name, None) for name in op_names[: given.top or 8]]
        return Answer({"instructions": [row.facts for row in rows]}, [piece for row in rows for piece in row.pieces])
    if given.png:
        return _drawn(program, given)
    summary = {**_summary(program, given.mesh or {}), "whole": has_entry(path.read_text())}
    return Answer({"file": path, **summary}, _summary_text(summary, given.top), raw=[summary[name] for name in RAW])


def _stable(path: Path, hlo: StableHlo) -> Answer:
    kinds_text = ", ".join(f"{count} {kind}" for kind, count in sorted(hlo.collectives.items())) or "none"
    mesh_text = f" over a mesh of {hlo.mesh}" if hlo.mesh else ""
    fields = ("num_partitions", "num_functions", "mesh", "collectives")
    facts = {"file": path, "format": "stablehlo", "module": hlo.name, **{name: getattr(hlo, name) for name in fields}}
    partitions_text, functions_text = counted(hlo.num_partitions, "partition"), counted(hlo.num_functions, "function")
    program_text = f"StableHLO for {partitions_text}{mesh_text}, {functions_text}"
    note = f"{kinds_text} written in the program; the compiler has added none yet"
    return Answer(facts, [Fact(hlo.name, program_text), Fact("collectives", note)])


def _explained(module: Module, name: str, png: Path | None) -> Answer:
    instruction = module.find(name)
    if instruction is None:
        raise InputError(f"{module.name} has no instruction {name!r}.{nearest(name, (i.name for i in module))}")
    label_values = explain_instruction(module, instruction)
    facts: Facts = {
        "name": instruction.name,
        "opcode": instruction.opcode,
        "computation": instruction.computation,
        "op_name": instruction.op_name or None,
        "step": str(instruction.label) if instruction.label else None,
        "source": [str(frame) for frame in module.source(instruction)],
        "operands": list(instruction.operands),
        "shapes": [{name.removeprefix("num_"): getattr(shape, name) for name in SHAPE} for shape in instruction.shapes],
        "facts": [list(fact) for fact in label_values],
    }
    # long paths may be broken after a slash
    lines = (filled(f"  {label:<11}{text.replace('/', '/ ')}", width(), 13) for label, text in label_values)
    pieces = [Paragraph(line.replace("/ ", "/"), None) for line in (instruction.name, *lines)]
    pictures = {png: lambda: tiling_figure(_one_shape(instruction), name=instruction.name)}
    return Answer(facts, pieces, pictures, [Table(["fact", "text"], label_values)])


SHAPE = ("dtype", "dims", "minor_to_major", "tiles", "memory_space", "num_bytes", "padded_bytes")


def _one_shape(instruction: Instruction) -> Shape:
    """Returns the array that a picture shows: the result, or the largest of a tuple."""
    shapes = instruction.shapes
    if not shapes:
        raise InputError(f"{instruction.name} makes no array to draw. Choose another instruction.")
    return max(shapes, key=lambda shape: shape.padded_bytes)


def _drawn(module: Module, given: Given) -> Answer:
    graphs = [computation_graph(module, given.computation)] if given.computation else block_graphs(module, given.block)
    subject = given.block or ("its loops" if len(graphs) > 1 else "one computation")
    facts = {
        "computations": [name for graph in graphs for name in (graph.name, *graph.alike)],
        "num_nodes": sum(len(graph.nodes) for graph in graphs),
        "num_edges": sum(len(graph.edges) for graph in graphs),
    }
    return Answer(facts, [], {given.png: lambda: graph_figure(graphs, title=f"{module.name}: {subject}")})


# -- a whole program ------------------------------------------------------------------------------------

MIN_PADDED_BYTES = 10_000
"""Smaller arrays, most of them single numbers, are left out of the table of padding."""
RAW = ("collectives", "loops", "largest", "relayouts", "paddings")
"""Tables of a summary. CSV has all their rows and fields."""
MAX_NAME = 28
MAX_BODY = 44
"""Most characters on one line of an instruction's name, and of a loop body's."""
_MAX_STEPS = 4
FIRST = {"collectives": 6, "loops": 4, "largest": 3, "relayouts": 1, "paddings": 2}
"""Rows of each table that a text has without --top and --all."""


def _summary(module: Module, mesh: Mapping[str, int]) -> Facts:
    """Returns all tables as one object; ``collectives`` is None if a loop's count, named in ``why``, is unreadable."""
    num_devices = math.prod(mesh.values())
    # A program that spans slices numbers the devices of one.
    if mesh and num_devices % module.num_devices:
        raise InputError(
            f"--mesh has {num_devices} devices and {module.name} is for {module.num_devices}. Give the mesh it is for."
        )
    reason = None
    try:
        rows = [asdict(row) for row in collective_rows(collectives(module, mesh))]
    except ValueError as error:
        rows, reason = None, str(error)
    return {
        "format": "hlo",
        "module": module.name,
        "num_partitions": module.num_partitions,
        "num_replicas": module.num_replicas,
        "num_computations": len(module.computations),
        "num_instructions": module.num_instructions,
        "mesh": mesh or None,
        "collectives": rows,
        "why": reason,
        "loops": loops(module),
        "largest": [_labelled(row) for row in largest_arrays(module)],
        "relayouts": [_labelled(row, "total_bytes") for row in relayouts(module)],
        "paddings": [_labelled(row, "wasted_share") for row in paddings(module)],
    }


def _labelled(struct: Any, *more_names: str) -> Facts:
    """Returns the fields of a struct and further attributes, with its label as text."""
    fields = asdict(struct) | {name: getattr(struct, name) for name in more_names}
    return fields | {"label": str(struct.label) if struct.label else None}


def _summary_text(summary: Mapping[str, Any], top: int | None) -> Iterator[Piece]:
    """Yields the tables, ``top`` rows of each, or the first ones."""
    devices_text = counted(summary["num_partitions"], "partition")
    if summary["num_replicas"] > 1:
        devices_text += f" x {counted(summary['num_replicas'], 'replica')}"
    names = ("computation", "instruction")
    counts_text = ", ".join(counted(summary[f"num_{name}s"], name) for name in names)
    column_width = max(18, len(summary["module"]) + 2)
    yield Fact(summary["module"], f"HLO for {devices_text}: {counts_text}", column=column_width)
    if not summary.get("whole", True):
        yield Fact("", "no ENTRY computation: a part of a program, or a text that is cut off", column=column_width)
    yield ""
    if summary["collectives"]:
        yield _collectives_table(summary["collectives"], top, bool(summary["mesh"]))
    else:
        yield Fact("collectives", summary["why"] or "none")
        yield ""
    for title, rows, columns, first in _tables(summary):
        if rows:
            yield _table(title, rows, top, columns, first)


def _table(title: str, rows: Sequence[Any], top: int | None, columns: TableColumns, first: int) -> Table:
    """Returns the ``top`` rows, or all with the ``first`` ones for a text, without empty columns."""
    top_text = f" (the first {top} of {len(rows)})" if top and len(rows) > top else ""
    return Table.of(rows[:top], columns, f"{title}{top_text}", None if top else first).known()


def _collectives_table(rows: Sequence[Mapping[str, Any]], top: int | None, has_mesh: bool) -> Table:
    has_near = any(step.startswith("near ") for row in rows for step in row["steps"])
    total_bytes = sum(row["total_bytes"] for row in rows)
    over_column = {"over": lambda row: ", ".join(row["axes"]) or "-"} if has_mesh else {"devices": "group_size"}
    columns: TableColumns = {
        "collective": "kind",
        **over_column,
        "MB each": ("full_bytes", _mb),
        "times": "times",
        "MB": ("total_bytes", _mb),
        f"how, for which step{' (~ near it)' if has_near else ''}": lambda row: _stacked(
            "; ".join([*(["async"] if row["is_async"] else []), *row["notes"]]), _steps(row["steps"])
        ),
    }
    title = f"Collectives, {format_bytes(total_bytes)}: bytes of the arrays"
    return _table(title, rows, top, columns, FIRST["collectives"])


def _steps(steps: Sequence[str]) -> str:
    """Returns ``layer forward h, h1; embed forward x +3``: the first few, grouped by block and phase."""
    results_by_pass: dict[str, list[str]] = {}
    for step in steps[:_MAX_STEPS]:
        pass_name, _, result = step.replace("near ", "~").rpartition(":")
        results_by_pass.setdefault(pass_name.replace(":", " "), []).append(result)
    rest_text = f" +{len(steps) - _MAX_STEPS}" if len(steps) > _MAX_STEPS else ""
    return "; ".join(f"{pass_name} {', '.join(results)}" for pass_name, results in results_by_pass.items()) + rest_text


def _mb(num_bytes: int) -> str:
    megabytes = num_bytes / 1e6
    if 0 < megabytes < 0.001:
        return "<0.001"
    return f"{megabytes:,.0f}" if megabytes >= 100 else f"{megabytes:.3g}"


LOOPS: TableColumns = {
    "loop": lambda loop: "  " * loop.depth + loop.name,
    "trips": lambda loop: "by data" if loop.trips is None else loop.trips,
    "in all": lambda loop: "by data" if loop.total_trips is None else loop.total_trips,
    "body": ("body", lambda body: _name(body, MAX_BODY)),
}
ARRAYS: TableColumns = {
    "array": lambda row: _stacked(_name(row["name"]), _step(row["label"])),
    "shape": ("shape", lambda shape: shape.split("{")[0]),
    "MB": ("padded_bytes", _mb),
    "arrays": "arrays",
    "in": (lambda row: row["memory_space"] or None, "S({})".format),
    "times": "times",
}
COPIES: TableColumns = {
    "copy": lambda row: _stacked(_name(row["name"]), "fused" if row["inside_fusion"] else "", _step(row["label"])),
    "array": lambda row: f"{_layout(row['before'])}\n-> {_layout(row['after']).split(chr(10))[-1]}",
    "MB": ("num_bytes", _mb),
    "times": "times",
}
PADDED: TableColumns = {
    "array": lambda row: _stacked(_name(row["name"]), _step(row["label"]), row["shape"].replace("{", " {", 1)),
    "MB": ("num_bytes", _mb),
    "MB padded": ("padded_bytes", _mb),
    "padding": ("wasted_share", "{:.0%}".format),
    "arrays": "num_arrays",
}


def _tables(summary: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any], TableColumns, int]]:
    """Yields title, rows, columns and first rows of the tables after the collectives."""
    yield "Loops", summary["loops"], LOOPS, FIRST["loops"]
    rows_by_array: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in summary["largest"]:
        rows_by_array.setdefault((row["name"], row["shape"], row["memory_space"], row["times"]), []).append(row)
    array_rows = [{**group[0], "arrays": len(group)} for group in rows_by_array.values()]
    yield "Largest arrays", array_rows, ARRAYS, FIRST["largest"]
    total_bytes = sum(row["total_bytes"] for row in summary["relayouts"] if not row["inside_fusion"])
    total_text = f", {format_bytes(total_bytes)} by those not fused" if total_bytes else ""
    yield f"Copies to another layout{total_text}", summary["relayouts"], COPIES, FIRST["relayouts"]
    padded_rows = [row for row in summary["paddings"] if row["padded_bytes"] >= MIN_PADDED_BYTES]
    yield "Padding of tiles", padded_rows, PADDED, FIRST["paddings"]


def _stacked(*lines: str | None) -> str | None:
    """Returns the lines that are not empty, as one cell: side by side they would not fit 80 columns."""
    return "\n".join(line for line in lines if line) or None


def _step(label: str | None) -> str | None:
    """Returns a label without its op, which the shape and the opcode show."""
    return label.split("=")[0].replace(":", " ") if label else None


def _name(name: str, longest: int = MAX_NAME) -> str:
    """Returns the name of an instruction or a computation, broken once if it is long."""
    if len(name) <= longest:
        return name
    break_at = max(name.rfind(mark, 0, longest) for mark in "-_.") + 1
    return f"{name[:break_at]}\n{name[break_at:]}" if break_at else name


def _layout(shape: str) -> str:
    """Returns a shape above its layout."""
    return shape.replace("{", "\n{")
