"""Layer programs: a transformer as a short list of ops over named dims, written in the notation."""

import re

import msgspec

from meshwright.algebra.notation import parse_array
from meshwright.core.errors import InputError

_LINE = re.compile(r"\s*(?P<out>[^=]+?)\s*=\s*(?P<rest>.+?)\s*")
_CALL = re.compile(r"(?P<kind>[a-z_]+)\((?P<args>.*)\)")
_ARG = re.compile(r"[\w']+\s*\[[^\]]*\]")


class Variable(msgspec.Struct, frozen=True):
    """A named array of a program: its dims, and the role that decides how it is split."""

    name: str
    dims: tuple[str, ...]
    role: str


class Op(msgspec.Struct, frozen=True):
    """``out = kind(inputs)``; ``inputs`` and ``out`` are names of variables."""

    kind: str
    inputs: tuple[str, ...]
    out: str


class Block(msgspec.Struct, frozen=True):
    """Ops that run in order, ``repeat`` times. A repeated block maps ``carry`` to ``result`` each time."""

    name: str
    ops: tuple[Op, ...]
    repeat: int = 1
    carry: str = ""
    result: str = ""


class Program(msgspec.Struct, frozen=True):
    """Blocks in order, and every variable they name. Plain data: no sizes, no shardings."""

    blocks: tuple[Block, ...]
    variables: dict[str, Variable]

    def of_role(self, *roles: str) -> tuple[Variable, ...]:
        """Variables of the roles, in order of first use."""
        return tuple(v for v in self.variables.values() if v.role in roles)


def parse_block(
    name: str, text: str, variables: dict[str, Variable], *, repeat: int = 1, carry: str = "", result: str = ""
) -> Block:
    """The block written as lines ``q[B,T,N,H] = h[B,T,D] * wq[D,N,H]`` or ``o[...] = attention(q[...], ...)``.

    Every variable is entered in ``variables`` as an activation unless it is there already with its role.
    Raises InputError when a line cannot be read or a variable is used with other dims than before.
    """
    ops = [_parse_line(line, variables) for line in text.strip().splitlines() if line.strip()]
    return Block(name, tuple(ops), repeat, carry, result)


def _parse_line(line: str, variables: dict[str, Variable]) -> Op:
    match = _LINE.fullmatch(line)
    if match is None:
        raise InputError(f"program line {line.strip()!r} is not 'out[dims] = ...'.")
    rest = match["rest"]
    call = _CALL.fullmatch(rest)
    kind, args = (call["kind"], call["args"]) if call else ("einsum", rest)
    inputs = tuple(_enter(found, variables) for found in _ARG.findall(args))
    if kind == "einsum" and len(inputs) != 2:
        raise InputError(f"program line {line.strip()!r} is not a product of two arrays.")
    return Op(kind, inputs, _enter(match["out"], variables))


def _enter(text: str, variables: dict[str, Variable]) -> str:
    array = parse_array(text)
    known = variables.get(array.name)
    if known is None:
        variables[array.name] = Variable(array.name, array.dims, "activation")
    elif known.dims != array.dims:
        raise InputError(f"{array.name} has dims {list(known.dims)} and is used as {text.strip()}.")
    return array.name
