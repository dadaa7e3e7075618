"""Rules that keep the house small: names with one meaning, few parameters, budgets of lines, dependencies in use."""

import ast
import re
import tomllib
from collections import defaultdict

from tests.test_architecture import ROOT, SOURCE, imports_of, source_modules

MOST_PARAMETERS = 6
TOO_MANY = {
    "accounting.attention_work", "transformer.parse_block", "linear_cross_entropy.logits_backward", "loop.train",
    "marks.spans", "search.search", "step_costs.op_sizes", "sweeps.curves_figure", "train_step.__init__",
    "transfer.channel_leg", "weights.write_hf",
}  # fmt: skip
"""Functions of before the rule. None may join, and one that is mended leaves the list."""

KERNELS = {
    *("table.block_table", "tiles.tile_rule", "flex.flex_attention", "scores.attend"),
    *("mosaic_gpu.forward", "mosaic_gpu.backward", "mosaic_gpu._sweep"),
    *("pallas_tpu._run", "pallas_tpu.forward", "pallas_tpu.backward", "pallas_tpu.add"),
}
"""Attention's kernels and its front door, which has PyTorch's parameters: operands, and what says how to compute."""

BUDGETS = {
    "core": 1_308, "masks": 1_235, "spec": 4_840, "algebra": 8_253, "cost": 6_665, "plan": 5_992, "nn": 10_120,
    "parallel": 3_837, "hlo": 2_041, "train": 6_090, "serve": 5_739, "verify": 1_740, "profile": 1_803,
    "accuracy": 2_008, "bench": 2_988, "report": 3_604, "api": 741, "cli": 10_086, "calculators": 5_274,
    "batching": 1_533, "simulate": 717, "islands": 1_994,
}  # fmt: skip
"""Lines of each package at most; a growth of over 100 needs a row in docs/decisions/house.md."""

SMALL_PATCH = 30
"""Lines that a patch may add before it has to raise the number."""

NOT_IMPORTED = {
    **{"vl-convert-python": "vl_convert", "orbax-checkpoint": "orbax", "tomli-w": "tomli_w"},
    **{"prometheus-client": "prometheus_client"},
}
"""Distribution -> the name that it is imported by, where that is another one."""


def types_by_name() -> dict[str, list[str]]:
    """Public classes and type aliases of all modules: name -> modules that define it."""
    found = defaultdict(list)
    for module, path in source_modules().items():
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [node.name] if isinstance(node, ast.ClassDef) else [getattr(t, "id", "") for t in targets]
            for name in names:
                if re.fullmatch(r"[A-Z][a-z]\w*", name):
                    found[name].append(module)
    return found


def test_a_public_type_name_has_one_meaning():
    """Each verb declares what it is given under the same name, as each op declares its OP."""
    twice = {name: where for name, where in types_by_name().items() if len(where) > 1 and name != "Given"}
    assert twice == {}
    assert all(".verbs." in where for where in types_by_name()["Given"])


def test_functions_have_few_parameters():
    found = set()
    for module, path in source_modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                own = bool(given) and given[0].arg in ("self", "cls")
                if len(given) - own > MOST_PARAMETERS:
                    found.add(f"{module.split('.')[-1]}.{node.name}")
    assert found == TOO_MANY | KERNELS


def test_packages_stay_within_their_lines():
    lines = {
        folder: sum(path.read_text().count("\n") for path in (SOURCE / folder).rglob("*.py")) for folder in BUDGETS
    }
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(BUDGETS)
    assert {folder: count for folder, count in lines.items() if count > BUDGETS[folder] + SMALL_PATCH} == {}


def test_every_dependency_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    wanted = {re.split(r"[\[>=<]", one)[0] for one in listed} - {"meshwright"}
    used = {
        found.target.split(".")[0]
        for module, path in source_modules().items()
        for found in imports_of(path.read_text(), module=module, is_package=path.name == "__init__.py")
    }
    assert {name for name in wanted if NOT_IMPORTED.get(name, name) not in used} == set()


def test_plurals_are_made_by_one_function():
    pattern = re.compile(r"\{'e?s' (\*|if) |\"e?s\" \* \(")
    found = {path.name for path in SOURCE.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))}
    assert found == {"units.py", "fields.py"}  # core.units reads core.fields
