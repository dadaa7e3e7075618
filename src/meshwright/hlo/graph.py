"""The data-flow graph of a layer in a compiled program, with all instructions of a derived step as one node."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec

from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import InputError, nearest
from meshwright.core.labels import StepLabel
from meshwright.hlo.collectives import KINDS
from meshwright.hlo.layout import executed
from meshwright.hlo.loops import times_run
from meshwright.hlo.module import NO_WORK, Computation, Instruction, Module
from meshwright.hlo.products import is_product
from meshwright.hlo.shapes import parse_shapes

NodeKind = Literal["collective", "matmul", "attention", "loop", "other"]

_ENDS = ("AsyncCollectiveStart", "AsyncCollectiveDone")
_ATTENTION = re.compile(r"attention|fmha|splash", re.IGNORECASE)
_QUIET_CALLS = ("AllocateBuffer", "Sharding", "AssumeGatherIndicesInBound", "ConcatBitcast")
_STRENGTH: tuple[NodeKind, ...] = ("collective", "attention", "matmul", "loop", "other")


class Node(msgspec.Struct, frozen=True):
    """One derived step, or one unlabelled instruction, with the number of instructions it represents."""

    key: str
    text: str
    kind: NodeKind
    num_instructions: int


class ComputationGraph(msgspec.Struct, frozen=True):
    """Nodes in execution order, and edges (from, to) by key; all edges point forward.

    ``alike`` names other computations with the same nodes and edges; ``times`` is how often all of them run in one call
    of the program."""

    name: str
    times: int
    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]
    alike: tuple[str, ...] = ()


def computation_graph(module: Module, name: str) -> ComputationGraph:
    """Builds the graph of one computation. Raises InputError if the module lacks it, or it has nothing to draw."""
    computation = module.computations.get(name.removeprefix("%"))
    if computation is None:
        raise InputError(f"{module.name} has no computation {name!r}.{nearest(name, module.computations)}")
    graph = _graph(module, computation, None)
    if not graph.nodes:
        raise InputError(f"{name} has no matmul, collective or labelled step to draw. Name a loop's body.")
    return graph


def block_graphs(module: Module, block: str | None) -> tuple[ComputationGraph, ...]:
    """Builds a graph for each computation that runs a block of the model: a layer's forward pass, then its backward.

    The default block is the one with most instructions; for a program without labels, the two loops with most nodes.
    Raises InputError for a block to which no instruction belongs.
    """
    blocks = Counter(label.block for op in module if (label := op.label) and label.phase != "update")
    if block and block not in blocks:
        hint = nearest(block, blocks) if blocks else " Its instructions carry no steps; use --computation NAME."
        raise InputError(f"no instruction of {module.name} belongs to block {block!r}.{hint}")
    if not blocks:
        graphs = [_graph(module, body, None) for body in executed(module) if body.name != module.entry]
        drawn_graphs = sorted((graph for graph in graphs if graph.nodes), key=lambda graph: -len(graph.nodes))[:2]
        drawn_graphs = drawn_graphs or [computation_graph(module, module.entry)]
        return tuple(sorted(drawn_graphs, key=lambda graph: _first(module, graph)))
    chosen_block = block or blocks.most_common(1)[0][0]
    # A loop inside one step, such as a loop over blocks of attention, is part of the step's node.
    names_in_steps = {name for name, caller in module.callers.items() if caller.label}
    graphs = [_graph(module, body, chosen_block) for body in executed(module) if body.name not in names_in_steps]
    # Steps that the compiler hoisted out of a loop have no edges.
    connected_graphs = [graph for graph in graphs if graph.edges] or [graph for graph in graphs if graph.nodes]
    return _without_copies(sorted(connected_graphs, key=lambda graph: _first(module, graph)))


def _without_copies(graphs: Sequence[ComputationGraph]) -> tuple[ComputationGraph, ...]:
    """Merges equal graphs: the loop over layers is compiled once for each microbatch and group of layers."""
    graph_of: dict[tuple[object, ...], ComputationGraph] = {}
    for graph in graphs:
        key = (tuple((node.text, node.kind) for node in graph.nodes), graph.edges)
        kept_graph = graph_of.setdefault(key, graph)
        if kept_graph is not graph:
            alike_names = (*kept_graph.alike, graph.name)
            graph_of[key] = msgspec.structs.replace(kept_graph, times=kept_graph.times + graph.times, alike=alike_names)
    return tuple(graph_of.values())


def _first(module: Module, graph: ComputationGraph) -> int:
    """Returns the position, in the entry, of the instruction that runs a computation; -1 for the entry itself."""
    callers, entry_names = list(module.around(graph.name)), list(module.computations[module.entry].by_name)
    return entry_names.index(callers[-1].name) if callers and callers[-1].name in entry_names else -1


def _graph(module: Module, computation: Computation, block: str | None) -> ComputationGraph:
    """Builds the graph: steps and heavy instructions are nodes, paths through other instructions are edges."""
    role_of = {i.name: _role(module, i) for i in computation.instructions if i.opcode not in NO_WORK}
    names_of: dict[str, list[str]] = defaultdict(list)
    text_of: dict[str, str] = {}
    keys_of: dict[str, frozenset[str]] = {}
    edges: set[tuple[str, str]] = set()
    hidden_keys_of: dict[str, set[str]] = defaultdict(set)
    fed_names: set[str] = set()
    for instruction in computation.instructions:
        source_keys = frozenset[str]().union(*(keys_of.get(name, frozenset()) for name in instruction.operands))
        start_op = instruction
        while start_op.opcode.endswith("-done") and start_op.operands:
            start_op = computation.by_name[start_op.operands[0]]
        # In the entry only labelled instructions belong to a block.
        key, text = _node(start_op.name, role_of.get(start_op.name), block, labelled=computation.name == module.entry)
        if not key:
            keys_of[instruction.name] = source_keys
            continue
        names_of[key].append(instruction.name)
        text_of.setdefault(key, text)
        fed_names |= {instruction.name} if source_keys else set()
        hidden_keys = role_of[instruction.name].beside
        hidden_keys_of[key] |= hidden_keys
        edges |= {(source_key, key) for source_key in source_keys if source_key != key}
        # A fusion passes on a buffer of an overlapping collective, which the collective computes.
        keys_of[instruction.name] = frozenset({key}) | (source_keys & hidden_keys)
    kind_of = {key: min((role_of[name].kind for name in names), key=_STRENGTH.index) for key, names in names_of.items()}
    index_of = {instruction.name: index for index, instruction in enumerate(computation.instructions)}
    position_of = {}
    for key, names in names_of.items():
        # Initial zeros and trailing copies carry the step's label too, but do not say when it runs.
        choices = [name for name in names if name in fed_names] or names
        position_of[key] = index_of[next((name for name in choices if role_of[name].kind == kind_of[key]), choices[0])]
    ordered_keys = sorted(names_of, key=lambda key: position_of[key])
    ordered_edges = {(u, v) for u, v in edges if u not in hidden_keys_of[v] and v not in hidden_keys_of[u]}
    forward_edges = {(u, v) for u, v in ordered_edges if position_of[u] < position_of[v]}
    nodes = [Node(key, text_of[key], kind_of[key], len(names_of[key])) for key in ordered_keys]
    return ComputationGraph(
        computation.name, times_run(module, computation.name), tuple(nodes), _reduced(forward_edges, ordered_keys)
    )


class _Role(msgspec.Struct, frozen=True):
    """How an instruction appears in a graph; ``text`` describes it if it has no label.

    The pieces that start and end an asynchronous TPU collective have its key as ``chain``. ``beside`` has the keys of
    collectives that overlap with a fusion, which only passes their buffers on.
    """

    kind: NodeKind
    text: str
    label: StepLabel | None
    chain: str
    beside: frozenset[str]


def _node(name: str, role: _Role | None, block: str | None, *, labelled: bool) -> tuple[str, str]:
    """Returns (key, text) of an instruction's node; empty strings if it has none."""
    if role is None:
        return "", ""
    if label := role.label:
        is_wanted = block is None or label.block == block
        text = f"{label.result} = {label.op}{' again' if label.phase == 'recompute' else ''}"
        return (str(label), text if block else f"{label.block}: {text}") if is_wanted else ("", "")
    return ("", "") if role.kind == "other" or (block and labelled) else (role.chain or name, role.text)


def _role(module: Module, op: Instruction) -> _Role:
    inner_ops = module.inside(op) if op.opcode == "fusion" or op.opcode.endswith("-start") else ()
    collective = next((i for i in (op, *inner_ops) if i.opcode.removesuffix("-start") in KINDS), None)
    is_end = any(end in i.target for i in inner_ops for end in _ENDS)
    chain = collective.async_key if collective and is_end else ""
    hidden_ops = [i for i in inner_ops if i.async_key] if op.opcode == "fusion" and not chain else []
    op_keys = frozenset(i.async_key for i in hidden_ops) | frozenset(str(i.label) for i in hidden_ops if i.label)
    has_product = any(is_product(i) for i in (module.fused(op) if op.opcode == "fusion" else (op,)))
    if collective is not None and (collective is op or chain or not has_product):
        kind: NodeKind = "collective"
        name = collective.opcode.removesuffix("-start").replace("-", "_")
        if any(called.startswith("all-reduce-scatter") for _, called in op.called):
            name = "reduce_scatter"
    else:
        collective, kind = None, _kind(op, has_product)
        name = kind if kind in ("matmul", "attention", "loop") else op.opcode.removesuffix("-start").replace("-", "_")
    shapes = (collective or op).shapes or parse_shapes("f32[]")
    # A fusion that overlaps with a collective lists its own result first, then the collective's buffers.
    shown_shape = shapes[0] if op_keys else max(shapes, key=lambda shape: shape.num_bytes)
    return _Role(kind, f"{name} {shown_shape}", collective.label if collective and chain else op.label, chain, op_keys)


def _kind(op: Instruction, multiplies: bool) -> NodeKind:
    target, label = op.target, op.label
    if op.opcode == "send" and "megascale" in op.attributes:
        return "collective"
    if _ATTENTION.search(label.op if label else target) or (target and _ATTENTION.search(op.op_name)):
        return "attention"
    if target in _QUIET_CALLS:
        return "other"
    if multiplies:
        return "matmul"
    if label and label.op in COLLECTIVES:
        # it extracts one array from a combined collective
        return "collective"
    return "loop" if op.opcode == "while" and not label else "other"


def _reduced(edges: set[tuple[str, str]], ordered_keys: list[str]) -> tuple[tuple[str, str], ...]:
    """Removes edges that longer paths imply (transitive reduction)."""
    followers: dict[str, list[str]] = {key: [] for key in ordered_keys}
    for u, v in edges:
        followers[u].append(v)

    reached_from: dict[str, frozenset[str]] = {}
    for key in reversed(ordered_keys):
        reached_from[key] = frozenset(followers[key]).union(*(reached_from[follower] for follower in followers[key]))
    position_of = {key: index for index, key in enumerate(ordered_keys)}
    direct_edges = [(u, v) for u, v in edges if not any(v in reached_from[w] for w in followers[u] if w != v)]
    return tuple(sorted(direct_edges, key=lambda edge: (position_of[edge[0]], position_of[edge[1]])))
