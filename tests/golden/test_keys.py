"""Keys of `--json` last: one of the release before is still printed, or is in `RENAMED` beside its new name.

`python -m tests.golden.test_keys` writes the keys of a release, which the file that is read here then holds.
"""

import json
import re
from pathlib import Path

from meshwright import __version__
from meshwright.cli import output
from tests.golden.files import read

RELEASED = Path(__file__).parent / "released_keys.json"
IS_NAME = re.compile(r"[a-z][a-z0-9_]*").fullmatch


def keys_of(value):
    """Names of all fields, at any depth; a key that is no name, such as that of a model, is data."""
    if isinstance(value, dict):
        return {key for key in value if IS_NAME(key)}.union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def keys_by_verb():
    """Verb -> the keys in the answers of the golden commands."""
    found = {}
    for said in read("commands").values():
        found.setdefault(said["command"].split()[0], set()).update(keys_of(said.get("json")))
    return {verb: sorted(keys) for verb, keys in sorted(found.items())}


def test_no_key_of_the_release_is_gone_without_a_successor():
    released, now = json.loads(RELEASED.read_text()), keys_by_verb()
    gone = {(verb, key) for verb, keys in released.items() for key in {*keys} - {*now[verb], *output.RENAMED}}
    assert gone == set()


def test_a_renamed_key_is_printed_under_both_names_until_its_version(monkeypatch, capsys):
    monkeypatch.setattr(output, "RENAMED", {"step": ("step_s", "0.2")})
    output.emit_json({"plans": [{"step_s": 2.0, "mfu": 0.5}], "step_s": None})
    assert json.loads(capsys.readouterr().out) == {
        "plans": [{"step_s": 2.0, "mfu": 0.5, "step": 2.0}], "step_s": None, "step": None
    }  # fmt: skip


def test_old_names_go_with_the_version_that_drops_them():
    version = tuple(map(int, __version__.split(".")[:2]))
    assert {old for old, (_, last) in output.RENAMED.items() if tuple(map(int, last.split("."))) <= version} == set()


if __name__ == "__main__":
    lines = (f"  {json.dumps(verb)}: {json.dumps(keys)}" for verb, keys in keys_by_verb().items())
    RELEASED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
