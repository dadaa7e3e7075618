"""Hostile changes to valid inputs: of values in JSON and TOML trees, of numbers and words in texts, of bytes."""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tomli_w

HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        7,
        2**31,
        2**63,
        10**18,
        10**40,
        10**400,
        -(10**400),
        0.5,
        -0.5,
        1e-300,
        1e300,
    ),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "x",
        "a\nb",
        "\0",
        "x" * 5000,
        " " * 5000,
        "é\u202e\ud800",
        "../../x",
    ),
    *([], [[1]], [None], [-1], [0] * 5000, ["x", 1], {}, {"a": 1}, {"": {"": []}}),
)
"""What takes the place of a value of a tree."""

PIECES = (
    *(
        "-1",
        "0",
        "1",
        "2",
        "1e400",
        "nan",
        "inf",
        "9" * 400,
        "9" * 5000,
        "99999999999",
        "4294967296",
        "0x10",
        "1_0",
        "-0",
    ),
    *(
        "",
        " ",
        "\n",
        "\0",
        "'",
        '"',
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        ",",
        "=",
        ":",
        "->",
        "*",
        "_",
        "..",
        "/",
        "\\",
        "#",
        "%",
    ),
    *("[[", "{{", "é", "\u202e", "x" * 300, " " * 3000, "(" * 300, "true", "null", "none"),
)
"""What takes the place of a word or a number of a text."""

_WORD = re.compile(r"\d+(?:\.\d+)?|\w+|[^\w\s]")


def mutated_tree(tree: Any, rng: random.Random, others: Sequence[Any] = ()) -> Any:
    """Returns a tree with one to three values replaced, removed, doubled, renamed or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return tree
        holder, key = rng.choice(places)
        how = rng.random()
        if how < 0.6:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif how < 0.7:
            del holder[key]
        elif how < 0.8:
            other, name = rng.choice(places)
            holder[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(holder[key])
        elif how < 0.9 and isinstance(holder, dict):
            holder[str(rng.choice(PIECES))] = holder.pop(key)
        elif isinstance(holder[key], int | float):
            holder[key] = rng.choice((-1, 2, 10, 1000)) * holder[key]
        else:
            holder[key] = [copy.deepcopy(holder[key])] * rng.randint(0, 3)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def mutated_text(text: str, rng: random.Random) -> str:
    """Returns a text with one to three of its words, numbers and marks replaced, removed, doubled or moved."""
    for _ in range(rng.randint(1, 3)):
        found = list(_WORD.finditer(text))
        if not found:
            return rng.choice(PIECES)
        one, other = rng.choice(found), rng.choice(found)
        new = rng.choice((*PIECES, other[0], other[0], "", one[0] * 2, one[0] + rng.choice(PIECES)))
        text = text[: one.start()] + new + text[one.end() :]
    return text


def mutated_lines(text: str, rng: random.Random) -> str:
    """Returns a text with a line removed, doubled, moved or cut, or a word of it changed."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at, to, how = rng.randrange(len(lines)), rng.randrange(len(lines)), rng.random()
        if how < 0.15 and len(lines) > 1:
            del lines[at]
        elif how < 0.3:
            lines.insert(to, lines[at])
        elif how < 0.4:
            lines[at] = lines[at][: rng.randint(0, len(lines[at]))]
        else:
            lines[at] = mutated_text(lines[at], rng)
    return "\n".join(lines)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Returns bytes with one to four of them changed, or a part removed, repeated or cut."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(found) + 1), rng.choice((1, 1, 1, 4, 30))
        how = rng.random()
        if how < 0.4 and at < len(found):
            found[at] = rng.randrange(256)
        elif how < 0.6:
            del found[at : at + size]
        elif how < 0.8:
            found[at:at] = rng.choice(
                (b"\0", b"\xff", b"{", b"[", b'"', b"9" * 30, b"-", b"e9", bytes(found[at : at + size]))
            )
        elif how < 0.9:
            found[at:at] = found[at : at + size] * 20
        else:
            del found[at:]
    return bytes(found)


def json_bytes(tree: Any) -> bytes:
    """The tree as Python's JSON, NaN and whole numbers of any size among it."""
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def toml_bytes(tree: Any) -> bytes:
    """The tree as TOML; what TOML has no form for is left out."""
    return tomli_w.dumps(_plain(tree)).encode("utf-8", "surrogatepass")


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(key): _plain(one) for key, one in tree.items() if one is not None}
    return [_plain(one) for one in tree if one is not None] if isinstance(tree, list) else tree


def of_trees(trees: Sequence[Any], write: Callable[[Any], bytes]) -> Callable[[random.Random], bytes]:
    """Makes files from trees: most with changed values, some with changed bytes."""

    def make(rng: random.Random) -> bytes:
        tree = rng.choice(trees)
        return write(mutated_tree(tree, rng)) if rng.random() < 0.8 else mutated_bytes(write(tree), rng)

    return make


def of_texts(texts: Sequence[str]) -> Callable[[random.Random], bytes]:
    """Makes files from texts: most with changed lines, some with changed bytes."""

    def make(rng: random.Random) -> bytes:
        text = rng.choice(texts)
        if rng.random() < 0.2:
            return mutated_bytes(text.encode(), rng)
        return mutated_lines(text, rng).encode("utf-8", "surrogatepass")

    return make
