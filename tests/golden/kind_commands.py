"""Golden kinds ``commands`` and ``proofs``: what commands print as JSON, and some as text.

What a command measures has another value each time: of it only the type is kept, as ``"number"``.
"""

import fnmatch
import json
import re
import shlex
from typing import Any

from tests.golden import product
from tests.golden.cases_file import Case, each
from tests.golden.environment import as_shipped, empty_folder
from tests.golden.files import Golden

MEASURED: dict[str, tuple[str, ...]] = {
    "verify": ("wall_s", "cpu_s", "max_rss_bytes"),
    "shard": ("run/time_s", "run/error", "run/seconds"),
    "bench": ("*",),
    "train": ("step_s", "tokens_per_s", "mfu*", "hfu", "compile_s", "goodput*", "memory*", "*_s", "*byte*", "machine*"),
    "generate": ("pace*", "*_s"),
}
"""Verb -> patterns over the paths of its measured values."""


def make() -> Golden:
    """All commands, in order, in one folder."""
    with empty_folder():
        return each("commands.txt", said_by)


def make_proofs() -> Golden:
    """The plans of ``cases/proofs.txt``, compiled for their chips."""
    with empty_folder(), as_shipped():
        return each("proofs.txt", said_by)


def can_make_proofs() -> str:
    """Which compilers are missing, in words; the empty text where none is."""
    missing = [platform for platform in ("tpu", "cuda") if not product.compiler_for(platform)]
    return f"no compiler for {' and '.join(missing)} is installed (make test-aot brings them)" if missing else ""


def said_by(case: Case) -> dict[str, Any]:
    """Exit code, and what stood on standard output; the words of an error where it failed."""
    command = case.parts[0]
    arguments = shlex.split(command)
    as_text = case.name.startswith("text-")
    said = product.call(arguments if as_text else [*arguments, "--json"])
    found: dict[str, Any] = {"command": command, "code": said.code}
    if as_text:
        found["lines"] = said.out.splitlines()
    elif said.out.strip():
        found["json"] = _without_measured(json.loads(said.out), MEASURED.get(arguments[0], ()))
    if said.code:
        found["error"] = re.sub(r"/tmp/\S+", "/tmp/...", said.err.strip()).splitlines()
    return found


def _without_measured(value: Any, patterns: tuple[str, ...], path: str = "") -> Any:
    """The same with types in the place of what is measured."""
    if isinstance(value, dict):
        # a file of the command's folder may be a key
        fields = {re.sub(r"^/tmp/[^/]+", "/tmp/...", key): item for key, item in value.items()}
        return {key: _without_measured(item, patterns, f"{path}/{key}".strip("/")) for key, item in fields.items()}
    measured = any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    if isinstance(value, list):
        if measured:
            return "list"
        return [_without_measured(item, patterns, f"{path}/{number}") for number, item in enumerate(value)]
    return _type(value) if measured else value


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return {int: "number", float: "number", str: "text"}.get(type(value), "null")
