"""TOML with lines: every fault at once, and writing back."""

import msgspec
import pytest

from meshwright.core.errors import InputError
from meshwright.core.toml_file import decode_toml, dump_toml, load_toml, parse_toml
from tests.speed import took


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int
    note: str | None = None


class Whole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    rate: float = 1.0
    mesh: dict[str, int] = {}
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    names: tuple[str, ...] = ()


TEXT = """name = "a"   # a comment = with signs
names = [
  "x = 1", # not a key
  "[y]",
]
mesh.data = 4
[part]
size = 3
[[parts]]
size = 1
[[parts]]
size = 2
note = \"\"\"
size = 9
\"\"\"
"""


def test_lines_of_keys():
    file = parse_toml(TEXT, path="f.toml")
    assert file.lines["names",] == 2
    assert file.lines["mesh", "data"] == 6
    assert file.lines["part", "size"] == 8
    assert (file.lines["parts", 0, "size"], file.lines["parts", 1, "size"]) == (10, 12)
    assert file.where(("parts", 1, "absent")) == "f.toml:11"


def test_round_trip():
    whole = decode_toml(parse_toml(TEXT), Whole)
    assert whole.parts[1].note == "size = 9\n"
    assert decode_toml(parse_toml(dump_toml(whole)), Whole) == whole
    odd = {"a key": 'quote " back\\slash\n\x7f é', "flag": True, "big": 1e50, "of": {"x y": [1.5, 2]}}
    assert parse_toml(dump_toml(odd)).data == odd


def test_all_faults_come_at_once_with_lines():
    text = 'nam = "a"\nrate = "fast"\nmesh.data = 1.5\n[part]\nsize = "big"\n[[parts]]\nsize = 1\nsiz = 2\n'
    with pytest.raises(InputError) as caught:
        decode_toml(parse_toml(text, path="f.toml"), Whole)
    message = str(caught.value)
    for fault in (
        "f.toml:1: nam is not a field. Did you mean 'name'?",
        "f.toml: needs the field 'name'.",
        "f.toml:2: rate is 'fast'. Give a finite number.",
        "f.toml:3: mesh.data is 1.5. Give a whole number.",
        "f.toml:5: part.size is 'big'. Give a whole number.",
        "f.toml:8: parts.0.siz is not a field. Did you mean 'size'?",
    ):
        assert fault in message
    assert "\n" not in message


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(No such"):
        load_toml(tmp_path / "absent.toml", Whole)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not text in UTF-8"):
        load_toml(tmp_path / "binary.toml", Whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = \n", "f.toml:1: not valid TOML"),
        ("a = 1\na = 2\n", "f.toml:2: not valid TOML: cannot overwrite"),
        ("a = " + "[" * 100_000 + "]" * 100_000, "f.toml is nested too deeply"),
        ("a = " + "9" * 5000, "f.toml has an impossible date, or a number of thousands of digits"),
        ("b = 1\na = nan", "f.toml:2: a is nan: give a finite number, at most 1e.60"),
        (
            "[t]\na = [1, -inf]\nb = 1" + "0" * 400,
            "f.toml:2: t.a.1 is -inf: .*; f.toml:3: t.b is a number of 401 digits",
        ),
    ],
)
def test_broken_toml_and_numbers_and_depths_that_make_no_sense(text, message):
    with pytest.raises(InputError, match=message):
        parse_toml(text, path="f.toml")


def test_lines_after_a_long_array_are_found_quickly():
    text = "a = [\n" + "    [1, 2],\n" * 20_000 + "]\nb = 1\n"
    with took() as cpu:
        assert parse_toml(text).lines["b",] == 20_003
    assert cpu.yardsticks < 50
