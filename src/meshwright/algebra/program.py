"""Layer programs: a transformer as a short list of ops over named dims, written in the notation."""

import re
from collections.abc import Mapping

import msgspec

from meshwright.algebra.notation import parse_array
from meshwright.algebra.steps import Role
from meshwright.core.errors import InputError

_LINE = re.compile(r"\s*(?P<out>[^=]+?)\s*=\s*(?P<rest>.+?)\s*")
_CALL = re.compile(r"(?P<kind>[a-z_]+)\((?P<args>[^;]*)(?:;(?P<attributes>.*))?\)")
_ARG = re.compile(r"[\w']+\s*\[[^\]]*\]")


class Variable(msgspec.Struct, frozen=True):
    """A named array of a program: its dims, the role that decides how it is split, and its dtype where that is not
    the one of the role. ``inputs`` are the dims of a weight that go into its matrices, () for a vector."""

    name: str
    dims: tuple[str, ...]
    role: str
    dtype: str = ""
    inputs: tuple[str, ...] = ()


class Op(msgspec.Struct, frozen=True):
    """``out = kind(inputs; attributes)``; ``inputs`` and ``out`` are names of variables.

    ``attributes`` are facts that no array holds, such as the window of an attention.
    """

    kind: str
    inputs: tuple[str, ...]
    out: str
    attributes: tuple[tuple[str, str], ...] = ()


class Block(msgspec.Struct, frozen=True):
    """Ops that run in order, ``repeat`` times. A repeated block maps ``carry`` to ``result`` each time.

    ``last_turn`` of the repeats stand in the last turn of a loop over layers (`algebra.transformer`).
    """

    name: str
    ops: tuple[Op, ...]
    repeat: int = 1
    carry: str = ""
    result: str = ""
    last_turn: int = 1

    @property
    def layers_dim(self) -> str:
        """The dim that counts the layers of this kind: L, or Lmoe, Llocal where a model has several kinds."""
        return layers_dim(self.name)


def layers_dim(block: str) -> str:
    """The dim that counts the layers of a block of this name."""
    return "L" + block.removeprefix("layer").replace("_", "")


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that hand on one stream, by the names of their blocks.

    ``first`` makes the stream ``carry``, ``layers`` are the blocks of the layers in order, one name for each, and
    ``last`` ends the stream. ``inputs`` are what earlier stacks end in, and what every layer of this one reads.
    """

    first: str
    layers: tuple[str, ...]
    last: str
    carry: str
    inputs: tuple[str, ...] = ()


class Program(msgspec.Struct, frozen=True):
    """Blocks in order, every variable they name, and the stacks that the blocks make up: one of a decoder, two of an
    encoder and a decoder. Plain data: no sizes, no shardings.

    Blocks alone make a program too, which is derived and priced; what runs whole models goes by the stacks.
    """

    blocks: tuple[Block, ...]
    variables: dict[str, Variable]
    stacks: tuple[Stack, ...] = ()

    def role(self, block: str) -> Role:
        """What a block is in its stack; the last block of the last stack is the head."""
        for stack in self.stacks:
            if block == stack.first:
                return "first"
            if block == stack.last:
                return "head" if stack is self.stacks[-1] else "last"
        return "layer"

    def further(self, block: str) -> tuple[str, ...]:
        """What a block reads of earlier stacks, in every repeat."""
        return next((stack.inputs for stack in self.stacks if block in stack.layers), ())

    def of_role(self, *roles: str) -> tuple[Variable, ...]:
        """Variables of the roles, in order of first use."""
        return tuple(v for v in self.variables.values() if v.role in roles)


def parse_block(
    name: str,
    text: str,
    variables: dict[str, Variable],
    *,
    repeat: int = 1,
    last_turn: int = 1,
    carry: str = "",
    result: str = "",
    renamed: Mapping[str, str] = {},
) -> Block:
    """The block written as lines ``q[B,T,N,H] = h[B,T,D] * wq[D,N,H]`` or ``o[..] = attention(q[..], ..; window=8)``.

    Every variable is entered in ``variables`` as an activation unless it is there already with its role.
    ``renamed`` gives names of the text another name in the program: weights of two blocks are two variables.
    Raises InputError when a line cannot be read or a variable is used with other dims than before.
    """
    ops = [_parse_line(line, variables, renamed) for line in text.strip().splitlines() if line.strip()]
    return Block(name, tuple(ops), repeat, carry, result, last_turn)


def _parse_line(line: str, variables: dict[str, Variable], renamed: Mapping[str, str]) -> Op:
    match = _LINE.fullmatch(line)
    if match is None:
        raise InputError(f"program line {line.strip()!r} is not 'out[dims] = ...'.")
    rest = match["rest"]
    call = _CALL.fullmatch(rest)
    kind, args = (call["kind"], call["args"]) if call else ("einsum", rest)
    inputs = tuple(_enter(found, variables, renamed) for found in _ARG.findall(args))
    if kind == "einsum" and len(inputs) != 2:
        raise InputError(f"program line {line.strip()!r} is not a product of two arrays.")
    attributes = _parse_attributes(call["attributes"] or "") if call else ()
    return Op(kind, inputs, _enter(match["out"], variables, renamed), attributes)


def _parse_attributes(text: str) -> tuple[tuple[str, str], ...]:
    """``"window=128, sinks"`` -> (("window", "128"), ("sinks", "true"))."""
    pairs = (part.strip().partition("=") for part in text.split(",") if part.strip())
    return tuple((name.strip(), value.strip() or "true") for name, _, value in pairs)


def _enter(text: str, variables: dict[str, Variable], renamed: Mapping[str, str]) -> str:
    array = parse_array(text)
    name = renamed.get(array.name, array.name)
    known = variables.get(name)
    if known is None:
        variables[name] = Variable(name, array.dims, "activation")
    elif known.dims != array.dims:
        raise InputError(f"{name} has dims {list(known.dims)} and is used as {text.strip()}.")
    return name
