"""Makes spec/data/config_fields.json from the installed transformers: `python -m tests.spec.hf.config_fields`.

It lists the fields of all configuration classes: which of them code of a model reads, family by family, and for the
rest of transformers whether any does. A field that is only mentioned counts as read.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.spec.hf.families import FIELDS_FILE
from meshwright.spec.model import FAMILIES

SHARED = (
    *("modeling_rope_utils.py", "masking_utils.py", "modeling_layers.py", "activations.py", "cache_utils.py"),
    *("integrations/sdpa_attention.py", "integrations/eager_attention.py", "integrations/moe.py"),
)
"""Modules that models of several families call with their configs."""


def fields_of(tree: ast.Module) -> set[str]:
    """The fields of a module's configuration classes, and their other names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
                    found.add(ast.unparse(line.target))
                elif isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "attribute_map":
                    found |= {key for pair in ast.literal_eval(line.value).items() for key in pair}
    return found


def mentioned(text: str) -> set[str]:
    """Attributes and texts of a module of code."""
    return {*re.findall(r"\.(\w+)", text), *re.findall(r"""["'](\w+)["']""", text)}


def mentioned_in_functions(tree: ast.Module) -> set[str]:
    """Attributes and texts of a configuration's functions, such as one that makes ``layer_types`` of a number."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {name for one in functions for name in mentioned(ast.unparse(one))}


def folders(package: Path) -> Iterator[tuple[str, set[str], set[str]]]:
    """Each model's folder, the fields of its configurations, and those that its code reads."""
    modules = filter(Path.is_file, (package / name for name in SHARED))
    shared = set[str]().union(*(mentioned(module.read_text()) for module in modules))
    for folder in sorted((package / "models").iterdir()):
        trees = [ast.parse(file.read_text()) for file in sorted(folder.glob("configuration_*.py"))]
        fields = set[str]().union(*map(fields_of, trees))
        code = set[str]().union(*(mentioned(file.read_text()) for file in sorted(folder.glob("modeling_*.py"))))
        code = code.union(shared, *map(mentioned_in_functions, trees))
        if fields:
            yield folder.name, fields, fields & code


def table() -> dict:
    import transformers

    package = Path(transformers.__file__).parent
    base = fields_of(ast.parse((package / "configuration_utils.py").read_text()))
    generation = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    found = {name: (fields, read) for name, fields, read in folders(package)}
    read_by_some = set[str]().union(*(read for _, read in found.values()))
    return {
        "transformers": transformers.__version__,
        "families": {
            name: {"read": sorted(found[name][1]), "not_read": sorted(found[name][0] - found[name][1])}
            for name in FAMILIES
        },
        "common": sorted((base | generation) - read_by_some),
        "read_by_some": sorted(read_by_some),
        "read_by_none": sorted(set[str]().union(*(fields for fields, _ in found.values())) - read_by_some),
    }


if __name__ == "__main__":
    FIELDS_FILE.write_text(json.dumps(table(), indent=1) + "\n")
