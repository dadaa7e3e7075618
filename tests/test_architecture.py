"""Imports point down only: the layers, what each half may load, and the README's tree."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.ops import op_kind, op_names, step_kinds
from meshwright.algebra.transformer import transformer
from meshwright.spec import catalogue
from meshwright.spec.strategy import Strategy

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "meshwright"
SOURCE = ROOT / "src" / PACKAGE

PLANNING = ("core", "masks", "spec", "algebra", "cost", "plan", "batching")
RUNTIME = ("nn", "parallel")
PRODUCTS = ("train", "serve", "verify", "profile", "accuracy")
LAYERS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in PLANNING),
    *((name,) for name in RUNTIME),
    ("hlo",),
    ("simulate",),
    ("islands",),
    PRODUCTS,
    ("bench",),
    ("report",),
    ("api",),
    ("web",),
    ("cli",),
    ("calculators",),
)
"""Bottom to top. A folder imports itself and the lines before its own; folders on one line are siblings."""

RANK = {folder: rank for rank, line in enumerate(LAYERS) for folder in line}
ENTRY = "__main__"
ACCELERATOR_STACK = {
    *("jax", "jaxlib", "jaxtyping", "optax", "orbax", "flax", "grain"),
    *("torch", "transformers", "tensorflow"),
}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One module named by an import, and the line that names it."""

    target: str
    line: int


def folder_of(module: str) -> str:
    """``"cost"`` of ``meshwright.cost.train``; the empty text for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(source: str, *, module: str, is_package: bool) -> Iterator[Import]:
    """Every module named by an import anywhere in the source, also inside functions and `import_module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(target=alias.name, line=node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*kept, *([base] if base else [])])
            yield from (Import(target=f"{base}.{alias.name}", line=node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(target=argument.value, line=node.lineno)


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def faults_of(source: str, *, module: str, is_package: bool = False) -> list[str]:
    """What this module imports that its place in the house forbids, one line each."""
    folder = folder_of(module)
    faults = []
    for found in imports_of(source, module=module, is_package=is_package):
        top = found.target.split(".")[0]
        if top == PACKAGE:
            reason = _fault_inside(folder, folder_of(found.target))
        else:
            stack = top in ACCELERATOR_STACK and (folder in PLANNING or folder == "")
            reason = "the planning half must not load the accelerator stack" if stack else ""
        if reason:
            faults.append(f"{module}:{found.line} imports {found.target}: {reason}")
    return faults


def _fault_inside(importer: str, imported: str) -> str:
    if imported not in RANK:
        # Names of the package itself, such as __version__, are below everything.
        return ""
    if importer == "":
        return "the package itself imports nothing, so that every part of it starts fast"
    if importer in RUNTIME and imported in ("cost", "plan"):
        return "the runtime half never imports cost or plan"
    if importer in (imported, ENTRY) or RANK[imported] < RANK[importer]:
        return ""
    return f"{imported} is a sibling of {importer} or above it"


def source_modules() -> dict[str, Path]:
    """Dotted name -> file, for every Python file of the package."""
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def folders() -> set[str]:
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def find_ring(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one import ring in order, the first repeated at the end; empty when there is none."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for following in sorted(graph.get(node, ())):
            ring = visit(following, [*trail, node])
            if ring:
                return ring
        done.add(node)
        return []

    return next((ring for start in sorted(graph) if (ring := visit(start, []))), [])


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports at any level (imports inside functions count)."""
    modules = source_modules()
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = imports_of(path.read_text(), module=module, is_package=path.name == "__init__.py")
        targets = {entry.target for entry in found}
        known = {t if t in modules else t.rpartition(".")[0] for t in targets}
        graph[module] = {target for target in known if target in modules and target != module}
    return graph


def test_every_folder_has_its_place():
    assert folders() <= set(RANK), "add the new folder to LAYERS, at its place"
    strays = {path.parent for path in SOURCE.rglob("*.py")} - {path.parent for path in SOURCE.rglob("__init__.py")}
    assert not strays, "folders with modules need an __init__.py"
    loose = {path.stem for path in SOURCE.glob("*.py")}
    assert loose <= {"__init__", ENTRY}, "a module belongs into a folder"


def test_imports_point_down():
    faults = [
        fault
        for module, path in source_modules().items()
        for fault in faults_of(path.read_text(), module=module, is_package=path.name == "__init__.py")
    ]
    assert not faults, "\n".join(faults)


MOST_MODULES = 12
REGISTRIES = ("ops", "rewrites", "schedules", "verbs", "families", "optimizers")
"""Folders that hold one row of a table in each file: they may have as many as there are rows."""


def test_folders_are_small():
    sizes = Counter(path.parent for path in source_modules().values() if path.stem != "__init__")
    large = {str(folder): size for folder, size in sizes.items() if size > MOST_MODULES}
    assert not {name: size for name, size in large.items() if Path(name).name not in REGISTRIES}


OF_OPS = ("meshwright.algebra.ops", "meshwright.nn.ops", "meshwright.algebra.rewrites")
"""Folders that may tell local steps by the names of their ops; everyone else asks for what an op states of itself."""


def ops_named_in(source: str, names: set[str]) -> list[int]:
    """Lines that compare an attribute ``op`` with the name of a local step."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = {one.value for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)}
            if any(isinstance(side, ast.Attribute) and side.attr == "op" for side in sides) and words & names:
                found.append(node.lineno)
    return found


def test_local_steps_are_told_by_what_their_op_states():
    names = set(step_kinds()) - {"slice"}  # as collectives, a move that the algebra itself makes
    faults = {
        module: lines
        for module, path in source_modules().items()
        if not module.startswith(OF_OPS) and (lines := ops_named_in(path.read_text(), names))
    }
    assert faults.keys() <= {"meshwright.algebra.steps"}, "which writes a product as A * B"
    example = "if step.op in ('copy', 'add'): pass\nif a.op == b: pass\nif step.op != 'einsum': pass"
    assert ops_named_in(example, names) == [1, 3]


MOST_CORE_LINES = 1_991
"""Of what somebody reads to follow `derive` on a dense Llama from end to end."""

BESIDE_THE_CORE = ("meshwright.algebra.rewrites", "meshwright.algebra.schedules")
"""What works on derived steps, or on the order of passes; a derivation is understood without."""


def core_modules() -> dict[str, int]:
    """Module -> lines: all of `algebra` that `derive` imports, and the ops that a dense Llama and AdamW are made of."""
    derived = derive(transformer(catalogue.load_model("llama3-8b")), Strategy(mesh={}), fused_head=False)
    kinds = {op.kind for block in derived.program.blocks for op in block.ops}
    made_by = {step: op for op in op_names() for step in op_kind(op).steps}
    ops = {*kinds, *(made_by[step.op] for step, _ in derived.steps())}
    graph, modules, found = import_graph(), source_modules(), dict[str, int]()
    left = ["meshwright.algebra", "meshwright.algebra.derive", *(f"meshwright.algebra.ops.{op}" for op in ops)]
    while left:
        module = left.pop()
        if module not in found and folder_of(module) == "algebra" and not module.startswith(BESIDE_THE_CORE):
            found[module] = len(modules[module].read_text().splitlines())
            left += graph[module]
    return found


def test_the_core_of_the_algebra_is_small():
    core = core_modules()
    listed = "\n".join(f"{lines:5} {module}" for module, lines in sorted(core.items(), key=lambda row: -row[1]))
    assert sum(core.values()) <= MOST_CORE_LINES, f"{sum(core.values())} lines:\n{listed}"


def test_the_core_is_named_in_its_reading_order():
    order = (SOURCE / "algebra" / "__init__.py").read_text()
    unnamed = {module for module in core_modules() if f"`{module.removeprefix('meshwright.algebra.')}`" not in order}
    assert unnamed <= {"meshwright.algebra"}


def test_no_import_rings():
    assert find_ring(import_graph()) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("meshwright.spec.chip", "from meshwright.cost import roofline", "above it"),
        ("meshwright.spec.chip", "from ..plan.search import best", "above it"),
        ("meshwright.train.loop", "def run():\n    import meshwright.verify.proof", "sibling"),
        ("meshwright.cost.train", "def f():\n    import jax.numpy as jnp", "accelerator"),
        ("meshwright.plan.search", "from importlib import import_module\nimport_module('jax')", "accelerator"),
        ("meshwright.nn.ops.elementwise", "from meshwright import plan", "runtime half"),
        ("meshwright.parallel.step", "from meshwright.cost.memory import total", "runtime half"),
        ("meshwright", "from meshwright.spec.model import Model", "package itself"),
        ("meshwright.report.figure", "from meshwright.cli.main import main", "above it"),
        ("meshwright.cli.verbs.plan", "from meshwright.calculators.links import routes", "above it"),
    ],
)
def test_a_forbidden_import_is_found(module, source, reason):
    faults = faults_of(source, module=module, is_package=module == PACKAGE)
    assert len(faults) == 1
    assert reason in faults[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("meshwright.cost.train", "from meshwright.algebra.einsum import derive\nimport numpy"),
        ("meshwright.nn.ops.elementwise", "import jax\nfrom meshwright.batching.pages import Page"),
        ("meshwright.train.loop", "from meshwright.plan.search import best\nfrom .data import rows"),
        ("meshwright.cli.main", "def run():\n    import jax\n    from meshwright.train import loop"),
        ("meshwright.cli.main", "from meshwright import __version__"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert faults_of(source, module=module) == []


def test_a_ring_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert find_ring(graph) == ["b", "c", "b"]
    assert find_ring({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def _loaded_by_importing(modules: list[str]) -> set[str]:
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_planning_loads_no_accelerator_stack():
    planning = [module for module in source_modules() if folder_of(module) in PLANNING]
    assert planning
    assert _loaded_by_importing(planning) & ACCELERATOR_STACK == set()


def test_the_command_line_starts_without_jax():
    assert _loaded_by_importing(["meshwright.cli.main"]) & ACCELERATOR_STACK == set()


def tree_folders(readme: str) -> list[str]:
    """Folder names directly under ``src/meshwright/`` in the README's tree, in its order."""
    lines = iter(readme.splitlines())
    names: list[tuple[int, str]] = []
    root = next((len(m.group(1)) for line in lines if (m := _tree_line(line, r"src/meshwright"))), None)
    if root is None:
        return []
    for line in lines:
        entry = _tree_line(line, r"\w+")
        if line.strip() == "```" or (entry and len(entry.group(1)) <= root):
            break
        if entry:
            names.append((len(entry.group(1)), entry.group(2)))
    first = min((indent for indent, _ in names), default=0)
    return [name for indent, name in names if indent == first]


def _tree_line(line: str, name: str) -> re.Match[str] | None:
    return re.match(rf"([\s│├└─]*)({name})/(?:\s|$)", line)


def test_tree_folders_are_read_from_either_style():
    plain = "```\nsrc/meshwright/\n  cli/    verbs\n  core/   units\ntests/   mirror\n```\n"
    drawn = "```\nsrc/meshwright/   the package\n├── cli/    verbs\n│   └── verbs/  each\n└── core/   units\n```\n"
    assert tree_folders(plain) == tree_folders(drawn) == ["cli", "core"]
    assert tree_folders("no tree") == []


def test_readme_tree_equals_the_folders():
    named = tree_folders((ROOT / "README.md").read_text())
    assert sorted(named) == sorted(folders())
    ranks = [RANK[name] for name in named]
    assert ranks == sorted(ranks, reverse=True), "the README lists the layers from top to bottom"
