"""Parses expressions of masks and score rules, as configuration and the command line write them.

``causal & document``, ``prefix_lm``, ``local(256) | causal``: names of the catalogue with parameters, joined by & and
|. Score rules are joined by + and applied left to right: ``alibi + softcap(30)``. The catalogue names the arrays that a
mask reads for each sequence (document numbers, prefix lengths); they come from data records.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.errors import InputError, nearest
from meshwright.masks import mods
from meshwright.masks.mods import Mask, Score, Terms
from meshwright.masks.ranges import AnyArray
from meshwright.masks.user import is_users, load_user


class NamedMask(NamedTuple):
    """A mask or score rule of the catalogue: its factory, names of the arrays and parameters it takes, a summary."""

    make: Callable[..., Mask | Score]
    data: tuple[str, ...]
    parameters: tuple[str, ...]
    summary: str


def _entry(make: Callable[..., Mask | Score], data: str = "", parameters: str = "", summary: str = "") -> NamedMask:
    return NamedMask(make, tuple(data.split()), tuple(parameters.split()), summary)


MASKS: dict[str, NamedMask] = {
    "noop": _entry(mods.noop, summary="all pairs"),
    "causal": _entry(mods.causal, summary="keys not later than the query"),
    "sliding_window": _entry(mods.sliding_window, "", "size", "causal, the last SIZE keys"),
    "chunked": _entry(mods.chunked, "", "size", "causal, within chunks of SIZE"),
    "local": _entry(mods.local, "", "radius", "keys within RADIUS on both sides"),
    "prefix_lm": _entry(mods.prefix_lm, "prefix", "", "causal, and a prefix that all see"),
    "document": _entry(mods.document, "documents", "", "pairs in one document"),
    "jagged": _entry(mods.jagged, "lengths", "", "the tokens that a padded row has"),
    "padded": _entry(mods.padded, "lengths", "", "keys that a padded row has"),
    "global_sliding": _entry(mods.global_sliding, "is_global", "radius", "within RADIUS, or a global token"),
    "tree": _entry(mods.tree, "enter leave", "", "ancestors and the token itself"),
    "graph": _entry(mods.graph, "distances", "reach", "nodes at most REACH edges away"),
    "neighbourhood": _entry(mods.neighbourhood, "", "length kernel", "KERNEL keys around, within LENGTH"),
    "neighbourhood_2d": _entry(mods.neighbourhood_2d, "", "width height kernel tile", "a square window on a canvas"),
    "shared_prefix": _entry(
        mods.shared_prefix, "documents starts prefix_of", "", "answers that share a prompt, causal"
    ),
    "transfusion": _entry(mods.transfusion, "spans", "", "causal, or in the same image"),
    "paged": _entry(
        lambda owner, page_len: mods.paged(mods.causal(), owner, page_len), "owner", "page_len", "causal, keys in pages"
    ),
}

SCORES: dict[str, NamedMask] = {
    "relative": _entry(mods.relative, "", "slope", "plus SLOPE times the distance"),
    "alibi": _entry(mods.alibi, "slopes", "", "minus a slope of each head times the distance"),
    "softcap": _entry(mods.softcap, "", "cap", "CAP tanh(score / CAP)"),
    "head_bias": _entry(mods.head_bias, "bias", "", "plus a number of each head"),
    "graph_bias": _entry(mods.graph_bias, "table distances", "", "plus a learnt number for each distance"),
    "edge_bias": _entry(mods.edge_bias, "edge_table kinds counts", "", "plus learnt numbers of the edges between"),
}


class Rule(NamedTuple):
    """A parsed mask or score rule: ``make(*arrays)`` returns its function, given the arrays that ``data`` names.

    ``terms``: name -> parameters of masks whose conjunction is the mask; empty if the expression has a | or repeats a
    name. ``page_len`` is the parameter of `paged`, 0 without it.
    """

    data: tuple[str, ...]
    make: Callable[..., Any]
    terms: Terms
    page_len: int = 0


MOST_TERMS = 32
"""Maximum number of names in one expression."""


def mask_named(text: str) -> Rule:
    """Parses a mask expression; a colon counts as a comma. ``module:function`` is a user's mask, imported only by
    ``make``.

    Raises:
        InputError: the text is not an expression, or a name or parameter is not in the catalogue.
    """
    if is_users(text):
        return Rule((), lambda: load_user(text), {})
    return _rule(text, MASKS, "a mask", {ast.BitAnd: mods.and_masks, ast.BitOr: mods.or_masks})


def score_named(text: str) -> Rule:
    """Parses an expression of score rules. Raises InputError as `mask_named` does."""
    return _rule(text, SCORES, "a score rule", {ast.Add: mods.then})


def _rule(text: str, entries: Mapping[str, NamedMask], what: str, joins: Mapping[type, Callable[..., Any]]) -> Rule:
    try:
        root_node = ast.parse(text.strip().replace(":", ","), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{what} {text!r} cannot be read. Write names like {_example(entries)}.") from error
    if sum(isinstance(node, ast.BinOp) for node in ast.walk(root_node)) >= MOST_TERMS:
        raise InputError(f"{what} {text!r} has more than {MOST_TERMS} names. Use fewer, or write a function.")
    data_names: dict[str, None] = {}
    terms: Terms = {}
    repeated_names: set[str] = set()

    def made(node: ast.AST) -> Callable[[Mapping[str, AnyArray]], Any]:
        if isinstance(node, ast.BinOp) and type(node.op) in joins:
            left_rule, right_rule, join = made(node.left), made(node.right), joins[type(node.op)]
            return lambda arrays: join(left_rule(arrays), right_rule(arrays))
        name, value_by_name = _term(node, text, what, entries)
        entry = entries[name]
        data_names.update(dict.fromkeys(entry.data))
        repeated_names.update({name} & terms.keys())
        terms[name] = tuple(value_by_name.values())
        return lambda arrays: entry.make(*(arrays[x] for x in entry.data), **value_by_name)

    build, array_names = made(root_node), tuple(data_names)
    page_len = terms.get("paged", (0,))[0]
    if repeated_names or any(isinstance(node, ast.BitOr) for node in ast.walk(root_node)):
        terms = {}
    if "sliding_window" in terms:
        terms |= {"causal": (), "window": terms.pop("sliding_window")}
    if "chunked" in terms:
        terms |= {"causal": (), "chunk": terms.pop("chunked")}
    return Rule(array_names, lambda *arrays: build(dict(zip(array_names, arrays, strict=True))), terms, page_len)


def _term(node: ast.AST, text: str, what: str, entries: Mapping[str, NamedMask]) -> tuple[str, dict[str, int | float]]:
    """Returns (name, parameters) of one term. Raises InputError if either is not in the catalogue or out of range."""
    name_node, args, keywords = (node.func, node.args, node.keywords) if isinstance(node, ast.Call) else (node, [], [])
    if not isinstance(name_node, ast.Name):
        raise InputError(f"{what} {text!r} cannot be read. Write names like {_example(entries)}.")
    name = name_node.id
    if name not in entries:
        raise InputError(f"{what} {text!r}: there is no {name!r}.{nearest(name, entries)} `meshwright mask` lists all.")
    parameters = entries[name].parameters
    nodes = [*args, *(keyword.value for keyword in keywords)]
    names = [*parameters[: len(args)], *(keyword.arg or "**" for keyword in keywords)]
    required_names = set(parameters) - {"slope", "tile"}
    if len(nodes) != len(names) or len(set(names)) < len(names) or not required_names <= set(names) <= set(parameters):
        raise InputError(f"{what} {text!r}: {name} has other parameters. Write {usage(name, parameters)}.")
    value_by_name = {}
    for key, value_node in zip(names, nodes, strict=True):
        value = _number(value_node)
        is_whole = key not in ("slope", "cap")
        if value is None or not abs(value) < 2**31 or (is_whole and (value != int(value) or value < (key != "tile"))):
            expected = f"a whole number of at least {int(key != 'tile')}" if is_whole else "a number"
            raise InputError(f"{what} {text!r}: {key} must be {expected}. Write {usage(name, parameters)}.")
        if key == "cap" and not value > 0:
            raise InputError(f"{what} {text!r}: cap={value:g} must be above 0.")
        value_by_name[key] = int(value) if is_whole else float(value)
    return name, value_by_name


def usage(name: str, parameters: Sequence[str]) -> str:
    """Returns the form of a term with its parameters, such as ``local(radius)``."""
    return f"{name}({', '.join(parameters)})" if parameters else name


def _number(node: ast.AST) -> float | None:
    try:
        literal = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return literal if isinstance(literal, int | float) and not isinstance(literal, bool) else None


def _example(entries: Mapping[str, NamedMask]) -> str:
    return "'causal & document' or 'sliding_window(1024)'" if entries is MASKS else "'alibi + softcap(30)'"


def example_data(rule: Rule, *, length: int, batch: int = 1, heads: int = 1, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Returns example arrays for ``rule.data``, partly random: about eight documents, a prefix of a quarter, two
    images, a tree of random ancestors, pages in random order."""
    rng, shape_2d, index = np.random.default_rng(seed), (batch, length), np.arange(length, dtype=np.int32)
    draw_by_name: dict[str, Callable[[], np.ndarray]] = {
        "prefix": lambda: np.full(batch, max(1, length // 4), np.int32),
        "documents": lambda: np.minimum(np.cumsum(rng.random(shape_2d) < 8 / length, 1), _MOST_DOCUMENTS - 1).astype(
            np.int32
        ),
        "lengths": lambda: rng.integers(length // 2, length, batch, endpoint=True),
        "is_global": lambda: np.broadcast_to(index % max(1, length // 4) == 0, shape_2d).astype(np.int32),
        "distances": lambda: np.broadcast_to(np.minimum(abs(index[:, None] - index), 7), (*shape_2d, length)),
        "spans": lambda: np.broadcast_to(
            sum(n * ((index >= t) & (index < t + length // 4)) for n, t in enumerate((length // 8, length // 2), 1)),
            shape_2d,
        ),
        "slopes": lambda: mods.alibi_slopes(heads),
        "bias": lambda: rng.normal(size=heads).astype(np.float32),
        "table": lambda: rng.normal(size=(heads, 8)).astype(np.float32),
        "edge_table": lambda: rng.normal(size=(heads, 3, 4)).astype(np.float32),
        "kinds": lambda: rng.integers(0, 4, (*shape_2d, length, 3), np.int32),
        "counts": lambda: rng.integers(0, 4, (*shape_2d, length), np.int32),
    }
    arrays = {name: draw_by_name[name]() for name in rule.data if name in draw_by_name}
    if "enter" in rule.data:
        parent_offsets = rng.integers(1, 8, shape_2d, endpoint=True)
        arrays["enter"], arrays["leave"] = mods.tree_walk(np.maximum(index - parent_offsets, -1))
    if "starts" in rule.data:
        doc_ids = np.arange(_MOST_DOCUMENTS + 1)
        arrays["starts"] = np.stack([np.searchsorted(row, doc_ids) for row in arrays["documents"]]).astype(np.int32)
        arrays["prefix_of"] = np.broadcast_to(doc_ids[:-1] // 4 * 4, (batch, len(doc_ids) - 1)).astype(np.int32)
    if "owner" in rule.data:
        arrays["owner"] = np.stack([rng.permutation(-(-length // rule.page_len)) for _ in range(batch)])
    return tuple(arrays[name] for name in rule.data)


_MOST_DOCUMENTS = 32
