"""Which functions of the package the verbs can reach, read off the sources by name.

Generous where names do not decide: an attribute reaches every method and property of that name.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import meshwright

SOURCE = Path(meshwright.__file__).parent

Place = tuple[str, str]
"""Module and name: ("meshwright.spec.chip", "peak") or ("meshwright.spec.chip", "Chip.memory_bytes")."""


class Module:
    """Definitions of one source file, and what its imported names stand for."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.definitions: dict[str, list[ast.AST]] = {}
        for node in tree.body:
            for label, part in _parts(node):
                self.definitions.setdefault(label, []).append(part)
        self.imports: dict[str, Place] = {}
        for found in ast.walk(tree):
            if isinstance(found, ast.ImportFrom) and not found.level:
                self.imports |= {a.asname or a.name: (found.module or "", a.name) for a in found.names}
            elif isinstance(found, ast.Import):
                self.imports |= {a.asname: (a.name, "") for a in found.names if a.asname}


def _parts(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """The names that a top-level statement defines, and the source of each; methods by themselves."""
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("__"):
                yield f"{node.name}.{inner.name}", inner
            else:
                yield node.name, inner
        yield from ((node.name, base) for base in node.bases)
    elif isinstance(node, ast.FunctionDef):
        yield node.name, node
    else:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


@functools.cache
def modules() -> dict[str, Module]:
    """Dotted name -> definitions, for every file of the package."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, ast.parse(path.read_text(encoding="utf-8")))
    return found


def _resolve(module: Module, name: str) -> Place | None:
    """Where a name of a module is defined: itself or through its imports; ("module", "") for a module."""
    if name in module.definitions:
        return module.name, name
    if name not in module.imports:
        return None
    source, original = module.imports[name]
    if f"{source}.{original}".rstrip(".") in modules():
        return f"{source}.{original}".rstrip("."), ""
    return _resolve(modules()[source], original) if source in modules() else None


@functools.cache
def _methods() -> dict[str, list[Place]]:
    """Name of a method or property -> every class that has it."""
    found: dict[str, list[Place]] = {}
    for module in modules().values():
        for label in module.definitions:
            if "." in label:
                found.setdefault(label.split(".")[1], []).append((module.name, label))
    return found


def _uses(module: Module, source: ast.AST) -> Iterator[Place]:
    """Places that one definition names."""
    for node in ast.walk(source):
        if isinstance(node, ast.Name) and (place := _resolve(module, node.id)):
            yield place
        elif isinstance(node, ast.Attribute):
            base = _resolve(module, node.value.id) if isinstance(node.value, ast.Name) else None
            if base and not base[1]:
                yield base[0], node.attr
            else:
                yield from _methods().get(node.attr, [])


VERBS = ("meshwright.cli.", "meshwright.calculators.verbs.")


@functools.cache
def reachable(roots: str | tuple[str, ...] = VERBS) -> set[Place]:
    """Every definition that the modules under ``roots`` use, and what these use in turn."""
    waiting = [(m.name, label) for m in modules().values() if m.name.startswith(roots) for label in m.definitions]
    found: set[Place] = set()
    while waiting:
        place = waiting.pop()
        module = modules().get(place[0])
        if place in found or module is None:
            continue
        found.add(place)
        for source in module.definitions.get(place[1], []):
            waiting.extend(_uses(module, source))
    return found
