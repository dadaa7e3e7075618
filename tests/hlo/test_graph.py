"""The graph of a layer: steps as nodes, dataflow as edges."""

import pytest

from meshwright.core.errors import InputError
from meshwright.hlo.graph import ComputationGraph, block_graphs, computation_graph
from meshwright.hlo.module import parse_module
from tests.hlo.programs import module


def texts(graph: ComputationGraph) -> set[tuple[str, str]]:
    named = {node.key: node.text for node in graph.nodes}
    return {(named[a], named[b]) for a, b in graph.edges}


def test_a_llama_layer_by_its_labels():
    (graph,) = block_graphs(module("cpu_layer"), "layer")
    kinds = {node.text: node.kind for node in graph.nodes}
    assert len(graph.nodes) == 26
    assert kinds["o = attention"] == "attention"
    assert {text for text, kind in kinds.items() if kind == "matmul"} == {
        *("q = einsum", "k = einsum", "v = einsum", "a = einsum"),
        *("g = einsum", "u = einsum", "y = einsum"),
    }
    edges = texts(graph)
    for wanted in [
        ("h = rms_norm", "h = all_gather"),
        ("h = all_gather", "q = einsum"),
        ("wq = all_gather", "q = einsum"),
        ("q = einsum", "qr = rope"),
        ("qr = rope", "o = attention"),
        ("v = einsum", "o = attention"),
        ("o = attention", "a = einsum"),
        ("a = einsum", "a = reduce_scatter"),
        ("m = silu_mul", "y = einsum"),
        ("y = reduce_scatter", "x2 = add"),
    ]:
        assert wanted in edges
    # it follows from the way through attention
    assert ("h = all_gather", "o = attention") not in edges
    order = {node.key: number for number, node in enumerate(graph.nodes)}
    assert all(order[a] < order[b] for a, b in graph.edges)


def test_a_program_without_labels():
    """A collective beside a matmul that hides it is not fed by it, and feeds the matmul behind."""
    (graph,) = block_graphs(module("v5e_forward"), None)
    assert graph.times == 5
    edges = texts(graph)
    gathered = "all_gather bf16[1,1024,1024]"
    assert {b for a, b in edges if a == gathered} == {"matmul bf16[4,512,1024]"}
    assert not any(b == gathered for _, b in edges)
    assert ("matmul bf16[4,512,1024]", "reduce_scatter bf16[4,512,1024]") in edges
    assert sum(node.kind == "collective" for node in graph.nodes) == 6


def test_choosing_what_to_draw():
    read = module("cpu_layer")
    body = "wide.region_2.13_spmd.clone.clone"
    whole = computation_graph(read, body)
    assert {"layer: h = rms_norm"} <= {node.text for node in whole.nodes}
    with pytest.raises(InputError, match=r"no computation 'wide\.region_2'"):
        computation_graph(read, "wide.region_2")
    with pytest.raises(InputError, match="no matmul, collective or labelled step"):
        computation_graph(module("v5e_forward"), next(n for n in module("v5e_forward").computations if "add" in n))
    with pytest.raises(InputError, match=r"block 'layers'. Did you mean 'layer'"):
        block_graphs(read, "layers")
    with pytest.raises(InputError, match="carry no steps; use --computation"):
        block_graphs(module("v5e_forward"), "layer")


def layer(name: str, last: str) -> str:
    return f"""
%{name} (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %{name}_dot = f32[8,8]{{1,0}} dot(%x, %x), metadata={{op_name="jit(f)/layer:forward:q=einsum/dot"}}
  ROOT %{name}_sum = f32[8,8]{{1,0}} all-reduce(%{name}_dot), metadata={{op_name="jit(f)/{last}/psum"}}
}}
"""


def test_computations_alike_are_drawn_once():
    parts = [layer(f"part_{n}", "layer:forward:a=all_reduce") for n in (1, 2)] + [
        layer("part_3", "layer:forward:b=all_reduce")
    ]
    calls = "\n".join(
        f"  %c{n} = f32[8,8] call(%{f'c{n - 1}' if n > 1 else 'x'}), to_apply=%part_{n}" for n in (1, 2, 3)
    )
    entry = f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8] parameter(0)\n{calls}\n}}\n"
    graphs = block_graphs(parse_module(f"HloModule m\n{''.join(parts)}\n{entry}"), "layer")
    assert [(graph.name, graph.alike, graph.times) for graph in graphs] == [
        ("part_1", ("part_2",), 2),
        ("part_3", (), 1),
    ]


def test_a_part_of_a_collective_has_its_colour():
    """What takes one of several results out of a combined collective carries the label of that one."""
    label = 'metadata={op_name="jit(f)/layer:backward:dnorm=all_reduce/psum"}'
    own = f"  ROOT %mine = f32[8,8]{{1,0}} negate(%part_sum), {label}\n}}\n"
    text = layer("part", "layer:forward:a=all_reduce").replace("ROOT ", "")
    text = text[: text.rindex("}\n")] + own
    call = "  %x = f32[8,8] parameter(0)\n  %c = f32[8,8] call(%x), to_apply=%part\n"
    entry = f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n{call}}}\n"
    (graph,) = block_graphs(parse_module(f"HloModule m\n{text}\n{entry}"), "layer")
    assert {node.text: node.kind for node in graph.nodes}["dnorm = all_reduce"] == "collective"
