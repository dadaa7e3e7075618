"""Finds and opens a compiled program: an HLO text, a dump folder, or StableHLO, which is not compiled yet."""

import re
from collections import Counter
from pathlib import Path

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.files import read_text
from meshwright.hlo.module import Module, parse_module, require_readable

_OPTIMISED = re.compile(r"after_optimizations\.txt$")
_OPERATION = re.compile(
    r"\bstablehlo\.(all_gather|all_reduce|reduce_scatter|all_to_all|collective_permute|collective_broadcast)\b"
)
_NAME = re.compile(r"^module @([\w.\-]+)", re.MULTILINE)
_PARTITIONS = re.compile(r"mhlo\.num_partitions = (\d+)")
_MESH = re.compile(r"sdy\.mesh @\w+ = <\[(.*?)\]")
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
WRITTEN = " = "  # of an instruction, and in no file's name
_FIRST_CHARACTERS, MOST_PROGRAM = 20_000, 2**30


class StableHlo(msgspec.Struct, frozen=True):
    """Summary of a StableHLO text; ``collectives`` counts the explicit ones by kind."""

    name: str
    num_partitions: int
    num_functions: int
    mesh: str
    collectives: dict[str, int]


def hlo_file(path: Path) -> Path:
    """Returns ``path`` (file or instruction text), or a dump's largest optimised module. Raises InputError if none."""
    if WRITTEN in str(path) or path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"there is no file or folder {path}. Give HLO text, or a folder that XLA dumped into.")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for candidates in ([f for f in files if _OPTIMISED.search(f.name)], [f for f in files if f.suffix == ".hlo"]):
        if candidates:
            return max(candidates, key=lambda file: file.stat().st_size)
    raise InputError(f"{path} has no *after_optimizations.txt and no *.hlo. Dump with --xla_dump_hlo_as_text.")


def read_hlo(path: Path, *, stablehlo: bool = False) -> Module | StableHlo:
    """Returns the program in a file; ``stablehlo`` says that it is StableHLO, whatever its name.

    Raises InputError for text that is neither HLO nor StableHLO, or that is cut off.
    """
    advice = "Give optimised HLO as text, such as compiled.as_text()."
    text = str(path) if WRITTEN in str(path) else read_text(path, advice, most=MOST_PROGRAM)
    if not (stablehlo or path.suffix == ".mlir" or "stablehlo." in text[:_FIRST_CHARACTERS]):
        module = read_module(text, path)
        entry_match = _ENTRY.search(text)
        if entry_match and entry_match[1] not in module.computations:
            raise InputError(f"{path} breaks off inside its ENTRY computation. Give the whole text.")
        return module
    if "func.func" not in text:
        raise InputError(f"{path} is not StableHLO: it has no function. Give lowered.as_text() or optimised HLO.")
    name_match, partitions_match, mesh_match = (pattern.search(text) for pattern in (_NAME, _PARTITIONS, _MESH))
    return StableHlo(
        name=name_match[1] if name_match else "?",
        num_partitions=int(partitions_match[1]) if partitions_match else 1,
        num_functions=text.count("func.func"),
        mesh=mesh_match[1].replace('"', "") if mesh_match else "",
        collectives=dict(Counter(_OPERATION.findall(text))),
    )


def read_module(text: str, source: Path | str) -> Module:
    """Parses HLO text; errors name its ``source``. Raises InputError if it has no computation, or is damaged."""
    try:
        if re.search(r"\d{400}", text):
            raise ValueError("it has a number of hundreds of digits.")
        return require_readable(parse_module(text))
    except ValueError as error:
        raise InputError(f"{source} is not a complete HLO text: {error} Give compiled.as_text() or a dump.") from None


def has_entry(text: str) -> bool:
    """True if an HLO text has an ENTRY computation; without one it is a part of a program, or cut off."""
    return _ENTRY.search(text) is not None
