"""`meshwright hlo`: a compiled program read: collectives, loops, layouts, padding; one instruction in words, drawn."""

from pathlib import Path
from typing import Any

import click

from meshwright.cli.output import emit_json, json_option, print_fact, say
from meshwright.core.errors import InputError, nearest


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--mesh", "mesh_text", help="Mesh axes, major to minor, such as fsdp=4,tensor=4.")
@click.option("--op", "op", help="Explain this instruction.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the tiling of --op (.png or .svg).")
@click.option("--graph", type=click.Path(path_type=Path), help="Draw the graph of a layer (.png or .svg).")
@click.option("--computation", help="The computation that --graph draws.")
@click.option("--step-block", "block", help="The block of the model that --graph draws, such as layer.")
@click.option("--stablehlo", is_flag=True, help="FILE is StableHLO, whatever its name.")
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="Rows of each table.")
@json_option
def command(
    file: Path,
    mesh_text: str | None,
    op: str | None,
    picture: Path | None,
    graph: Path | None,
    computation: str | None,
    block: str | None,
    stablehlo: bool,
    top: int,
    as_json: bool,
) -> None:
    """Read the compiled program in FILE: HLO text, a folder that XLA dumped into, or StableHLO."""
    from meshwright.hlo.files import StableHlo, hlo_file, read_hlo

    if picture and not op:
        raise InputError("--picture draws one instruction. Name it with --op.")
    if (computation or block) and not graph:
        raise InputError("--computation and --step-block choose what --graph draws. Add --graph FILE.png.")
    path = hlo_file(file)
    read = read_hlo(path, stablehlo=stablehlo)
    found: dict[str, Any]
    if isinstance(read, StableHlo):
        if op or graph:
            raise InputError(f"{path} is StableHLO, which has no layouts yet. Compile it and give the optimised HLO.")
        found = _stable(path, read, as_json)
    elif op:
        found = _explained(read, op, picture, as_json)
    elif graph:
        found = _drawn(read, graph, computation, block)
    else:
        found = _summary(path, read, mesh_text, top, as_json)
    if as_json:
        emit_json(found)


def _stable(path: Path, read: Any, as_json: bool) -> dict[str, Any]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(read.collectives.items())) or "none"
    if not as_json:
        mesh = f" over a mesh of {read.mesh}" if read.mesh else ""
        print_fact(read.name, f"StableHLO for {read.num_partitions} partitions{mesh}, {read.num_functions} functions")
        print_fact("collectives", f"{kinds} written in the program; the compiler has added none yet")
    return {
        "file": path,
        "format": "stablehlo",
        "module": read.name,
        "num_partitions": read.num_partitions,
        "num_functions": read.num_functions,
        "mesh": read.mesh,
        "collectives": read.collectives,
    }


def _explained(module: Any, name: str, picture: Path | None, as_json: bool) -> dict[str, Any]:
    from meshwright.cli.verbs.hlo_text import print_place
    from meshwright.hlo.words import explain_instruction

    one = module.find(name)
    if one is None:
        raise InputError(f"{module.name} has no instruction {name!r}.{nearest(name, (i.name for i in module))}")
    facts = explain_instruction(module, one)
    found: dict[str, Any] = {
        "name": one.name,
        "opcode": one.opcode,
        "computation": one.computation,
        "op_name": one.op_name or None,
        "step": str(one.label) if one.label else None,
        "source": [str(frame) for frame in module.source(one)],
        "operands": list(one.operands),
        "shapes": [_shape(shape) for shape in one.shapes],
        "facts": [list(fact) for fact in facts],
    }
    if not as_json:
        click.echo(one.name)
        for what, text in facts:
            print_place(f"  {what}", text, column=13)
    if picture:
        from meshwright.report.arrays.tiling import tiling_figure
        from meshwright.report.figure import save

        found["picture"] = save(tiling_figure(_one_shape(one), name=one.name), picture)
        say(f"wrote {picture}")
    return found


def _shape(shape: Any) -> dict[str, Any]:
    return {
        "dtype": shape.dtype,
        "dims": shape.dims,
        "minor_to_major": shape.minor_to_major,
        "tiles": shape.tiles,
        "memory_space": shape.memory_space,
        "bytes": shape.num_bytes,
        "padded_bytes": shape.padded_bytes,
    }


def _one_shape(one: Any) -> Any:
    """The array that a picture shows: the result, or the largest of a tuple."""

    shapes = one.shapes
    if not shapes:
        raise InputError(f"{one.name} makes no array to draw. Choose another instruction.")
    return max(shapes, key=lambda shape: shape.padded_bytes)


def _drawn(module: Any, path: Path, computation: str | None, block: str | None) -> dict[str, Any]:
    from meshwright.hlo.graph import block_graphs, computation_graph
    from meshwright.report.arrays.hlo_graph import graph_figure
    from meshwright.report.figure import save

    graphs = [computation_graph(module, computation)] if computation else block_graphs(module, block)
    what = block or ("its loops" if len(graphs) > 1 else "one computation")
    written = save(graph_figure(graphs, title=f"{module.name}: {what}"), path)
    say(f"wrote {written}")
    return {
        "graph": written,
        "computations": [name for graph in graphs for name in (graph.name, *graph.alike)],
        "num_nodes": sum(len(graph.nodes) for graph in graphs),
        "num_edges": sum(len(graph.edges) for graph in graphs),
    }


def _summary(path: Path, module: Any, mesh_text: str | None, top: int, as_json: bool) -> dict[str, Any]:
    from meshwright.cli.verbs.hlo_text import print_summary, summary
    from meshwright.hlo.files import has_entry

    found = {**summary(module, mesh_text), "whole": has_entry(path.read_text())}
    if not as_json:
        print_summary(found, top)
    return {"file": path, **found}
