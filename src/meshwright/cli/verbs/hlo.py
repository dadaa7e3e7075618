"""`meshwright hlo`: a compiled program read: collectives, loops, layouts, padding; one instruction in words, drawn."""

from pathlib import Path
from typing import Any

import click

from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.errors import InputError, nearest
from meshwright.report.answer import Answer, Fact, Paragraph


class Given(Options):
    file: Path = argument()
    mesh_text: str | None = option("Mesh axes, major to minor, such as fsdp=4,tensor=4.", "--mesh")
    op: str | None = option("Explain this instruction.")
    picture: Path | None = option("Draw the tiling of --op (.png or .svg).")
    graph: Path | None = option("Draw the graph of a layer (.png or .svg).")
    computation: str | None = option("The computation that --graph draws.")
    block: str | None = option("The block of the model that --graph draws, such as layer.", "--step-block")
    stablehlo: bool = option("FILE is StableHLO, whatever its name.")
    top: int = option("Rows of each table.", type=click.IntRange(1), default=8)


@verb(Given)
def command(given: Given) -> Answer:
    """Read the compiled program in FILE: HLO text, a folder that XLA dumped into, or StableHLO."""
    from meshwright.hlo.files import StableHlo, hlo_file, read_hlo

    if given.picture and not given.op:
        raise InputError("--picture draws one instruction. Name it with --op.")
    if (given.computation or given.block) and not given.graph:
        raise InputError("--computation and --step-block choose what --graph draws. Add --graph FILE.png.")
    path = hlo_file(given.file)
    read = read_hlo(path, stablehlo=given.stablehlo)
    if isinstance(read, StableHlo):
        if given.op or given.graph:
            raise InputError(f"{path} is StableHLO, which has no layouts yet. Compile it and give the optimised HLO.")
        return _stable(path, read)
    if given.op:
        return _explained(read, given.op, given.picture)
    if given.graph:
        return _drawn(read, given)
    from meshwright.cli.verbs.hlo_text import summary, summary_text
    from meshwright.hlo.files import has_entry

    found = {**summary(read, given.mesh_text), "whole": has_entry(path.read_text())}
    return Answer({"file": path, **found}, summary_text(found, given.top))


def _stable(path: Path, read: Any) -> Answer:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(read.collectives.items())) or "none"
    mesh = f" over a mesh of {read.mesh}" if read.mesh else ""
    names = ("num_partitions", "num_functions", "mesh", "collectives")
    facts = {"file": path, "format": "stablehlo", "module": read.name, **{name: getattr(read, name) for name in names}}
    return Answer(
        facts,
        [
            Fact(read.name, f"StableHLO for {read.num_partitions} partitions{mesh}, {read.num_functions} functions"),
            Fact("collectives", f"{kinds} written in the program; the compiler has added none yet"),
        ],
    )


def _explained(module: Any, name: str, picture: Path | None) -> Answer:
    from meshwright.cli.verbs.hlo_text import place_text
    from meshwright.hlo.words import explain_instruction

    one = module.find(name)
    if one is None:
        raise InputError(f"{module.name} has no instruction {name!r}.{nearest(name, (i.name for i in module))}")
    told = explain_instruction(module, one)
    facts: dict[str, Any] = {
        "name": one.name,
        "opcode": one.opcode,
        "computation": one.computation,
        "op_name": one.op_name or None,
        "step": str(one.label) if one.label else None,
        "source": [str(frame) for frame in module.source(one)],
        "operands": list(one.operands),
        "shapes": [{name.removeprefix("num_"): getattr(shape, name) for name in SHAPE} for shape in one.shapes],
        "facts": [list(fact) for fact in told],
    }
    if picture:
        facts["picture"] = picture
    text = [piece for what, said in told for piece in place_text(f"  {what}", said, column=13)]

    def draw() -> Any:
        from meshwright.report.arrays.tiling import tiling_figure

        return tiling_figure(_one_shape(one), name=one.name)

    return Answer(facts, [Paragraph(one.name, None), *text], {picture: draw})


SHAPE = ("dtype", "dims", "minor_to_major", "tiles", "memory_space", "num_bytes", "padded_bytes")


def _one_shape(one: Any) -> Any:
    """The array that a picture shows: the result, or the largest of a tuple."""

    shapes = one.shapes
    if not shapes:
        raise InputError(f"{one.name} makes no array to draw. Choose another instruction.")
    return max(shapes, key=lambda shape: shape.padded_bytes)


def _drawn(module: Any, given: Given) -> Answer:
    from meshwright.hlo.graph import block_graphs, computation_graph

    graphs = [computation_graph(module, given.computation)] if given.computation else block_graphs(module, given.block)
    what = given.block or ("its loops" if len(graphs) > 1 else "one computation")
    facts = {
        "graph": given.graph,
        "computations": [name for graph in graphs for name in (graph.name, *graph.alike)],
        "num_nodes": sum(len(graph.nodes) for graph in graphs),
        "num_edges": sum(len(graph.edges) for graph in graphs),
    }

    def draw() -> Any:
        from meshwright.report.arrays.hlo_graph import graph_figure

        return graph_figure(graphs, title=f"{module.name}: {what}")

    return Answer(facts, [], {given.graph: draw})
