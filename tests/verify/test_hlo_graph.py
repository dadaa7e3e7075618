"""The graph of a layer: steps as nodes, dataflow as edges."""

from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.verify.hlo_graph import Graph, block_graphs, computation_graph
from meshwright.verify.hlo_module import Module, parse_module

DATA = Path(__file__).parents[1] / "data" / "hlo"


def module(name: str) -> Module:
    return parse_module((DATA / f"{name}.hlo").read_text())


def texts(graph: Graph) -> set[tuple[str, str]]:
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
