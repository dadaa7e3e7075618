"""Turns a mask and a score rule into functions of one tile of scores, and the arrays that these read.

A rule is traced once. Its lookups, divisions and remainders that depend on queries only, or on keys only, become arrays
that are computed before the kernel runs; the rest is elementwise arithmetic on a tile, unless a table is indexed by
queries and keys together.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import Array, Float, Int

from meshwright.masks.mods import Terms
from meshwright.masks.ranges import AnyArray, Index
from meshwright.masks.table import BlockLists as BlockLists

DynamicInt = Array | int
"""An integer, which may be known only when the program runs."""

Place = tuple[DynamicInt, DynamicInt]
"""Index of a sequence, and of a head."""

_Node = int | Literal
"""Number of a result in a traced rule, or a constant."""
_Origin = tuple[JaxprEqn, int, tuple[Any, ...]]


class Mod(NamedTuple):
    """A mask or a score rule: ``make(*arrays)`` returns the function of indices (`masks.mods`).

    ``terms`` maps names of catalogued masks to their parameters, if the mask is the conjunction of these.
    """

    make: Callable[..., Callable[..., Index]]
    arrays: tuple[AnyArray, ...] = ()
    terms: Terms = {}  # noqa: RUF012

    def __call__(self, *index: Index) -> Index:
        return self.make(*self.arrays)(*index)


class Tile(NamedTuple):
    """Operands of one tile of scores, queries x keys, of one sequence and head.

    ``query`` and ``key`` are the indices of its rows and columns. All arrays broadcast against the tile: a value of a
    row is [bq, 1] or [bq, bk], of a column [1, bk] or [bq, bk], of a head a scalar or [bq, bk]. ``tables`` are whole
    arrays, indexed by ``place``, the sequence and head, among others.
    """

    query: Int[Array, "..."]
    key: Int[Array, "..."]
    heads: tuple[Array, ...] = ()
    rows: tuple[Array, ...] = ()
    columns: tuple[Array, ...] = ()
    tables: tuple[Array, ...] = ()
    place: Place = (0, 0)
    learns: bool = False


class TileRule(NamedTuple):
    """A mask and a score rule as functions of a tile.

    Lookups in captured arrays by sequence and head, and by query or key, are done beforehand: ``heads`` are [B | 1, N |
    1], ``rows`` [B | 1, N | 1, T], ``columns`` [B | 1, N | 1, S], of any dtype but booleans. ``score`` maps scaled
    scores (float32) to scores; both functions are elementwise and, unless there are ``tables``, free of gathers. None:
    all keys are seen, scores stay. With ``learns`` cotangents of the score rule's arrays are computed.
    """

    heads: tuple[Array, ...] = ()
    rows: tuple[Array, ...] = ()
    columns: tuple[Array, ...] = ()
    mask: Callable[[Tile], Array] | None = None
    score: Callable[[Float[Array, "bq bk"], Tile], Array] | None = None
    tables: tuple[Array, ...] = ()
    learns: bool = False

    def widened(self) -> "TileRule":
        """Returns the rule with float32 and int32 arrays: scalars and registers of kernels have at least 32 bits."""

        def words(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
            dtypes = (jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32 for x in arrays)
            return tuple(x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True))

        return self._replace(heads=words(self.heads), rows=words(self.rows), columns=words(self.columns))


class TileSizes(NamedTuple):
    """Queries and keys of a block, the indices of all queries and keys, the first head, and how many listed blocks are
    processed together; 0: all, with the loops over tiles unrolled."""

    q_block: int
    kv_block: int
    q_idx: Array
    kv_idx: Array
    first_head: DynamicInt = 0
    each: int = 1


class Head(NamedTuple):
    """A rule's arrays for one sequence and head, and the lists of its blocks."""

    rule: TileRule
    lists: BlockLists
    place: Place

    def tile(
        self, sizes: TileSizes, rows: Callable[..., Array], columns: Callable[..., Array], *, turned: bool
    ) -> Tile:
        """Returns the operands of a tile; ``rows`` and ``columns`` slice the tile's part of an array of queries, or of
        keys, and insert a dim. In a ``turned`` tile keys are the rows."""
        row, column = (0, 1) if turned else (1, 0)
        own_rows, own_columns = (rows(x, row) for x in self.rule.rows), (columns(x, column) for x in self.rule.columns)
        head_place = self.place[0], sizes.first_head + self.place[1]
        return Tile(
            rows(sizes.q_idx, row),
            columns(sizes.kv_idx, column),
            self.rule.heads,
            tuple(own_rows),
            tuple(own_columns),
            self.rule.tables,
            head_place,
        )


HEAVY = {"gather", "dynamic_slice", "div", "rem", "floor", "sort"}
"""Primitives that a kernel should not run for every pair of query and key."""

_LAYOUT = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
_CALLS = {"pjit", "jit", "closed_call", "core_call"}
_CALLED = ("jaxpr", "call_jaxpr")


class _Graph:
    """A traced rule: its operations in order, with calls inlined, and on which inputs each depends.

    Inputs are "a" (arrays), "b", "h", "q", "k" and "s" (scores).
    """

    def __init__(self, function: Callable[..., Index], args: Sequence[object], names: Sequence[str]) -> None:
        self.made_by: list[_Origin | None] = []
        self.deps: list[frozenset[str]] = []
        self.heavy: list[bool] = []
        self.avals: list[Any] = []
        self.consts: dict[int, AnyArray] = {}
        closed_jaxpr = jax.make_jaxpr(function)(*args)
        self.jaxpr, self.debug_info = closed_jaxpr.jaxpr, closed_jaxpr.jaxpr.debug_info.with_unknown_names()
        self.leaves = [self._leaf(x, {name}) for x, name in zip(closed_jaxpr.in_avals, names, strict=True)]
        const_nodes = [self._constant(value) for value in closed_jaxpr.consts]
        self.out = self._run(closed_jaxpr.jaxpr, const_nodes, self.leaves)[0]

    def _add(self, made_by: _Origin | None, deps: Iterable[str], aval: Any, *, heavy: bool) -> int:
        self.made_by.append(made_by)
        self.deps.append(frozenset(deps))
        self.heavy.append(heavy)
        self.avals.append(aval)
        return len(self.deps) - 1

    def _leaf(self, aval: Any, deps: set[str]) -> int:
        return self._add(None, deps, aval, heavy="a" in deps)

    def _constant(self, value: AnyArray) -> int:
        node = self._leaf(jax.typeof(value), {"a"} if jnp.ndim(value) else set())
        self.consts[node] = value
        return node

    def _run(self, jaxpr: Jaxpr, consts: Sequence[int], args: Sequence[_Node]) -> list[_Node]:
        node_of_var = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            input_nodes = tuple(var if isinstance(var, Literal) else node_of_var[var] for var in eqn.invars)
            inner_jaxpr = next((eqn.params[name] for name in _CALLED if name in eqn.params), None)
            if eqn.primitive.name in _CALLS and inner_jaxpr is not None:
                inner_consts = [self._constant(value) for value in getattr(inner_jaxpr, "consts", ())]
                nodes = self._run(getattr(inner_jaxpr, "jaxpr", inner_jaxpr), inner_consts, input_nodes)
            else:
                computed_inputs = [x for x in input_nodes if isinstance(x, int)]
                deps = frozenset().union(*(self.deps[x] for x in computed_inputs))
                is_heavy = eqn.primitive.name in HEAVY or any(self.heavy[x] for x in computed_inputs)
                numbered_vars = enumerate(eqn.outvars)
                nodes = [self._add((eqn, n, input_nodes), deps, var.aval, heavy=is_heavy) for n, var in numbered_vars]
            node_of_var.update(zip(eqn.outvars, nodes, strict=True))
        return [var if isinstance(var, Literal) else node_of_var[var] for var in jaxpr.outvars]

    def parts(self) -> tuple[list[int], list[int]]:
        """Returns the nodes that are computed before the kernel (heavy, dependent on one side only, and read by the
        kernel), and the arrays that the kernel indexes."""
        before_kernel: set[int] = set()
        table_nodes: set[int] = set()
        visited_nodes: set[int] = set()
        pending_nodes = [self.out]
        while pending_nodes:
            node = pending_nodes.pop()
            if not isinstance(node, int) or node in visited_nodes:
                continue
            visited_nodes.add(node)
            deps, made_by = self.deps[node], self.made_by[node]
            if made_by is None:
                if "a" in deps:
                    (table_nodes if self.avals[node].ndim else before_kernel).add(node)
            elif deps and self.heavy[node] and "s" not in deps and not {"q", "k"} <= deps:
                before_kernel.add(self._before_layout(node))
            else:
                pending_nodes += made_by[2]
        return sorted(before_kernel), sorted(table_nodes)

    def _before_layout(self, node: int) -> int:
        """Returns the node that a node only reshapes or broadcasts."""
        made_by = self.made_by[node]
        while made_by and made_by[0].primitive.name in _LAYOUT and self.made_by[made_by[2][0]] is not None:
            # before a broadcast there is a value for each row, after it one for each pair
            node = made_by[2][0]
            made_by = self.made_by[node]
        return node

    def layouts_of(self, node: int) -> list[int]:
        """Returns a node, and all nodes that only reshape or broadcast it."""
        nodes = [node]
        for later_node in range(node + 1, len(self.made_by)):
            made_by = self.made_by[later_node]
            if made_by and made_by[0].primitive.name in _LAYOUT and made_by[2][0] in nodes:
                nodes.append(later_node)
        return nodes

    def evaluate(self, wanted: _Node, env: dict[int, Any]) -> Array:
        """Returns the value of a node from the values of earlier nodes in ``env``, to which it adds."""
        if not isinstance(wanted, int):
            return wanted.val
        if wanted not in env:
            made_by = self.made_by[wanted]
            if made_by is None:
                return self.consts[wanted]
            eqn, out_index, inputs = made_by
            var_inputs = zip(eqn.invars, inputs, strict=True)
            value_of_var = {var: self.evaluate(x, env) for var, x in var_inputs if not isinstance(var, Literal)}
            one_eqn_jaxpr = self.jaxpr.replace(
                constvars=(), invars=list(value_of_var), outvars=eqn.outvars, eqns=[eqn], debug_info=self.debug_info
            )
            env[wanted] = jax.core.eval_jaxpr(one_eqn_jaxpr, (), *value_of_var.values())[out_index]
        return env[wanted]


class _Part:
    """A mask or a score rule: its arrays from before the kernel, and its value on a tile."""

    def __init__(self, mod: Mod, *, has_score: bool) -> None:
        self.mod, self.has_score = mod, has_score
        small_graph = self._graph((2, 1), (1, 2))
        early_nodes, table_nodes = small_graph.parts()
        self.sides = [next((side for side in ("q", "k") if side in small_graph.deps[node]), "") for node in early_nodes]
        self.apart = [small_graph.deps[node] for node in early_nodes]
        self.tables = [small_graph.leaves.index(node) for node in table_nodes if node in small_graph.leaves]

    def _graph(self, row_shape: tuple[int, ...], column_shape: tuple[int, ...]) -> _Graph:
        scalar_struct = jax.ShapeDtypeStruct((), jnp.int32)
        index_structs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (row_shape, column_shape)]
        shape = jnp.broadcast_shapes(row_shape, column_shape)
        scores = [jax.ShapeDtypeStruct(shape, jnp.float32)] if self.has_score else []
        array_avals, num_arrays = [jax.typeof(jnp.asarray(x)) for x in self.mod.arrays], len(self.mod.arrays)

        def function(*args: Array) -> Index:
            return self.mod.make(*args[:num_arrays])(*args[num_arrays:])

        leaf_names = ["a"] * num_arrays + ["s"] * self.has_score + ["b", "h", "q", "k"]
        return _Graph(function, [*array_avals, *scores, scalar_struct, scalar_struct, *index_structs], leaf_names)

    def before(self, arrays: Sequence[Array], q_idx: Array, kv_idx: Array, places: tuple[Array, Array]) -> list[Array]:
        """Returns the arrays computed before the kernel: [B | 1, N | 1], with T for queries, S for keys."""
        dummy_index = jnp.zeros(2, jnp.int32)
        indices = {"q": (q_idx, dummy_index), "k": (dummy_index, kv_idx), "": (dummy_index, dummy_index)}
        graphs = {side: self._graph((len(q), 1), (1, len(k))) for side, (q, k) in indices.items() if side in self.sides}
        early_values = []
        for node_index, (side, node_deps) in enumerate(zip(self.sides, self.apart, strict=True)):
            graph, (q, k) = graphs[side], indices[side]

            def value(
                b: Array, h: Array, graph: _Graph = graph, q: Array = q, k: Array = k, node_index: int = node_index
            ) -> Array:
                # scores are not read here
                args = [*arrays, *[None] * self.has_score, b, h, q[:, None], k[None]]
                node_value = graph.evaluate(graph.parts()[0][node_index], dict(zip(graph.leaves, args, strict=True)))
                return node_value.astype(jnp.int32) if node_value.dtype == bool else node_value

            value_of_heads = jax.vmap(value, (None, 0))
            b, h = (x if letter in node_deps else x[:1] for x, letter in zip(places, "bh", strict=True))
            values = jax.vmap(value_of_heads, (0, None))(b, h)
            early_values.append(values.reshape(*values.shape[:2], -1) if side else values.reshape(values.shape[:2]))
        return early_values

    def on_tile(self, values: Sequence[Array], tile: Tile, score: Array | None = None) -> Array:
        """Returns the rule's value on a tile; ``values`` are the tile's parts of the arrays from `before`."""
        graph = self._graph(jnp.shape(tile.query), jnp.shape(tile.key))
        table_by_index = dict(zip(self.tables, tile.tables, strict=True))
        captured_arrays = [table_by_index.get(array_index) for array_index in range(len(self.mod.arrays))]
        leaf_values = *captured_arrays, *([] if score is None else [score]), *tile.place, tile.query, tile.key
        value_of_node: dict[int, Any] = dict(zip(graph.leaves, leaf_values, strict=True))
        for node, value in zip(graph.parts()[0], values, strict=True):
            value = value != 0 if graph.avals[node].dtype == bool else value
            if jnp.size(value) == graph.avals[node].size:
                value_of_node[node] = value.reshape(graph.avals[node].shape)
            else:
                # broadcast already, as whatever reads it would
                value_of_node |= dict.fromkeys(graph.layouts_of(node), value)
        return graph.evaluate(graph.out, value_of_node)


def tile_rule(
    mask: Mod | None,
    score: Mod | None,
    *,
    q_idx: Int[Array, " T"],
    kv_idx: Int[Array, " S"],
    batch: int,
    heads: int,
    first_head: Array | int = 0,
) -> TileRule:
    """Returns the tile rule for queries and keys of these indices, and ``heads`` heads from ``first_head`` on."""
    batch_heads = jnp.arange(batch, dtype=jnp.int32), first_head + jnp.arange(heads, dtype=jnp.int32)
    values_by_side: dict[str, list[Array]] = {"": [], "q": [], "k": []}
    all_tables: list[Array] = []
    functions: list[Callable[..., Array] | None] = [None, None]
    for mod_index, mod in enumerate((mask, score)):
        if mod is None:
            continue
        rule_part = _Part(mod, has_score=mod_index == 1)
        num_by_side = {side: len(values) for side, values in values_by_side.items()}
        arrays = [jnp.asarray(x) for x in mod.arrays]
        for side, value in zip(rule_part.sides, rule_part.before(arrays, q_idx, kv_idx, batch_heads), strict=True):
            values_by_side[side].append(value)
        functions[mod_index] = _function(rule_part, num_by_side, len(all_tables))
        all_tables += [arrays[table_index] for table_index in rule_part.tables]
    head_values, rows, columns = (tuple(values) for values in values_by_side.values())
    return TileRule(head_values, rows, columns, functions[0], functions[1], tuple(all_tables))


def _function(rule_part: _Part, start_of: dict[str, int], first_table: int) -> Callable[..., Array]:
    """Returns the function of a tile of one rule; the tile may have arrays of other rules too."""

    def function(*args: Any) -> Array:
        *score, tile = args
        iter_by_side = {side: iter(values[start_of[side] :]) for side, values in zip(start_of, tile[2:5], strict=True)}
        values = [next(iter_by_side[side]) for side in rule_part.sides]
        own_tile = tile._replace(tables=tile.tables[first_table : first_table + len(rule_part.tables)])
        return rule_part.on_tile(values, own_tile, *score)

    return function
