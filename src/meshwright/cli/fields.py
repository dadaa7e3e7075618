"""Reads text of the command line: fields (``--set section.key=value``), mesh axes and sizes of dims."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from meshwright.core.dims import MESH_AXES
from meshwright.core.errors import InputError, nearest
from meshwright.core.fields import convert_fields, shown
from meshwright.core.units import MOST, parse_count
from meshwright.report.answer import Facts
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.job import Job, parse_batch
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, standard_assignment

PLANNED = ("model", "job", "strategy", "assumptions")
SECTIONS: tuple[str, ...] = (*PLANNED, "train")
"""Sections of ``--set``: those of a plan, and the settings of a training run."""
SECTION_OF: dict[str, str] = {
    **dict.fromkeys(Model.__struct_fields__, "model"),
    **dict.fromkeys(Job.__struct_fields__, "job"),
    **dict.fromkeys(Assumptions.__struct_fields__, "assumptions"),
    **dict.fromkeys((*Strategy.__struct_fields__, *MESH_AXES, "zero", "sequence_parallel"), "strategy"),
}
"""Section of each field that ``--set`` also takes without its section."""
_COMMAS = re.compile(r",(?![^\[{]*[\]}])")
"""Commas outside of brackets."""
MAX_TRAIN_TOKENS = 10**24

Thing = TypeVar("Thing", bound=msgspec.Struct)


def parse_fields(pairs: Sequence[str], *, sections: Sequence[str] = SECTIONS) -> dict[str, Facts]:
    """Returns section -> key -> value of texts such as ``strategy.remat=block`` or ``remat=block``.

    Values are TOML, or else plain text. Sizes of mesh axes (``strategy.tensor=4``) are gathered in
    ``result["strategy"]["mesh"]``; ``strategy.zero=1`` and ``strategy.sequence_parallel=false`` become the assignment
    that they stand for. The section ``strategy`` also takes assumptions, which it once held. Raises InputError for a
    text without section, key or value, naming the nearest section.
    """
    fields_by_section: dict[str, Facts] = {name: {} for name in sections}
    for pair in pairs:
        key, sep, text = pair.partition("=")
        section, name = field_name(key)
        if not sep:
            raise InputError(f"--set {pair!r} has no value. Write KEY=VALUE, such as strategy.remat=block.")
        if not section or not name:
            hint = nearest(name, SECTION_OF) or " Write the name of one, as in remat=block."
            raise InputError(f"--set {pair!r} names no field.{hint}")
        if section not in fields_by_section:
            raise InputError(f"--set {key}: there is no section {section!r} here.{nearest(section, sections)}")
        if section == "strategy" and SECTION_OF.get(field := name.partition(".")[0]) not in ("strategy", "assumptions"):
            valid_names = {member for member, home in SECTION_OF.items() if home == "strategy"} - {"mesh", "placement"}
            raise InputError(f"strategy.{field} is not a field.{nearest(field, valid_names)}")
        value = field_value(text.strip())
        if section == "strategy" and "assumptions" in fields_by_section and name in Assumptions.__struct_fields__:
            section = "assumptions"
        if section == "strategy" and name in MESH_AXES:
            name, value = "mesh", {name: value}
        if section == "strategy" and name == "mesh":
            if not isinstance(value, dict):
                raise InputError(f"--set {pair}: give the size of one axis, such as strategy.tensor=4.")
            value = {**fields_by_section[section].get("mesh", {}), **value}
        fields_by_section[section][name] = value
    if "strategy" in fields_by_section:
        _name_assignment(fields_by_section["strategy"])
    return fields_by_section


def field_name(key: str) -> tuple[str, str]:
    """Returns the section of a field, "" for an unknown one, and its name: ``strategy.mesh.tensor`` is ``tensor``,
    ``model.lora.rank`` is ``lora.rank``."""
    *sections, name = key.strip().split(".")
    section, *tables = [part for part in sections if part != "mesh"] or [SECTION_OF.get(name, "")]
    return section, ".".join((*tables, name))


def _name_assignment(strategy: Facts) -> None:
    """Replaces ``zero`` and ``sequence_parallel`` by the standard assignment that they stand for, in place."""
    fields = {name: strategy.pop(name) for name in ("zero", "sequence_parallel") if name in strategy}
    if not fields:
        return
    if "assignment" in strategy:
        raise InputError(f"strategy.{next(iter(fields))} and strategy.assignment say the same. Leave one of them out.")
    sequence_parallel = fields.get("sequence_parallel", True)
    if not isinstance(sequence_parallel, bool):
        raise InputError(f"strategy.sequence_parallel={sequence_parallel} is not true or false.")
    if isinstance(fields.get("zero"), bool):
        raise InputError("strategy.zero is a stage, not true or false. Use 0, 1, 2 or 3.")
    strategy["assignment"] = standard_assignment(**fields)


def field_value(text: str) -> Any:
    """Returns a TOML value, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def with_fields(thing: Thing, section: str, changes: Mapping[str, Any]) -> Thing:
    """Returns the frozen data with some fields changed. Raises InputError for an unknown field or a wrong value."""
    field_names = thing.__struct_fields__
    for name in changes:
        if name.partition(".")[0] not in field_names:
            raise InputError(f"{section}.{name} is not a field.{nearest(name, field_names)}")
        if isinstance(changes[name], int) and changes[name] > MOST:
            raise InputError(f"{section}.{name}={shown(changes[name])} is too large. Give at most {MOST:g}.")
    old_fields = msgspec.to_builtins(thing)
    changes = _nested(old_fields, changes)
    if isinstance(thing, Model) and "num_layers" in changes:
        layers_of = {n: getattr(thing, n) for n in ("sliding_layers", "dense_layers", "sparse_layers", "wide_layers")}
        num_layers = changes["num_layers"]
        if isinstance(num_layers, int):  # lists of layers lose those beyond the new number
            changes = {**{name: [n for n in layers if n < num_layers] for name, layers in layers_of.items()}, **changes}
    if isinstance(changes.get("mesh"), dict):
        changes = {**changes, "mesh": {**old_fields["mesh"], **changes["mesh"]}}
    return convert_fields({**old_fields, **changes}, type(thing), section=section)


def _nested(old_fields: Mapping[str, Any], changes: Mapping[str, Any]) -> Facts:
    """Returns the changes, with those of nested fields, such as ``lora.rank``, put into the dict of their field."""
    nested_changes = {name: value for name, value in changes.items() if "." not in name}
    for name, value in changes.items():
        field, dot, inner_name = name.partition(".")
        if dot:
            inner_fields = nested_changes.get(field, old_fields.get(field))
            nested_changes[field] = {**(inner_fields if isinstance(inner_fields, dict) else {}), inner_name: value}
    return nested_changes


def split_pairs(text: str, wanted: str, *, what: str) -> dict[str, str]:
    """Returns {"X": "4", "Y": "2"} for ``"X=4,Y=2"``.

    Errors read "``what`` ... is not ``wanted``.": ``what`` names the option, and ``wanted`` ends with an example.
    """
    value_by_name: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sep, value = (piece.strip() for piece in part.partition("="))
        if not sep or not name or not value:
            raise InputError(f"{what} {part!r} is not {wanted}.")
        if name in value_by_name:
            raise InputError(f"{what} {text!r}: {name} is given twice. Leave one out.")
        value_by_name[name] = value
    if not value_by_name:
        raise InputError(f"{what} {text!r} is not {wanted}.")
    return value_by_name


def parse_why_not(text: str, example: str = "tensor=16,remat=block") -> Facts:
    """Returns name -> value of ``"tensor=16,remat=block"``; values are TOML or else text."""
    text_by_name = split_pairs(text, f"name=value. Write for example {example}", what="--why-not")
    return {name: field_value(value) for name, value in text_by_name.items()}


def parse_mesh(text: str, what: str = "--mesh") -> dict[str, int]:
    """Returns {"X": 4, "Y": 2} for ``"X=4,Y=2"``, in the order given. Raises InputError for a size below 1."""
    return _sizes(text, "mesh axis", "fsdp=8,tensor=4" if what == "--axes" else "X=4,Y=2", what)


def dim_sizes(text: str, what: str = "--dims") -> dict[str, int]:
    """Returns sizes of dims from ``"B=1024,D=4096"``, each at most `units.MOST`."""
    return _sizes(text, "dim", "B=1024,D=4096", what)


def _sizes(text: str, kind: str, example: str, what: str) -> dict[str, int]:
    text_of = split_pairs(text, f"a {kind} size. Write {example}", what=what)
    return {name: parse_count(value, what=f"{what}: size of {kind} {name}", least=1) for name, value in text_of.items()}


def split_values(text: str, *, what: str, form: str = "FIELD=VALUES") -> tuple[str, ...]:
    """Returns the values of ``"batch=1Mi,4Mi"``, ``"B=1..4096"`` (doubling) or ``"offload=[],[optimizer]"``.

    Raises InputError for a text that is not of this ``form``; the error begins with ``what``.
    """
    name, _, values_text = text.partition("=")
    first, dots, last = values_text.partition("..")
    value_texts = [part.strip() for part in _COMMAS.split(values_text)]
    if dots:
        low, high = (parse_count(part.strip(), what=f"{what} {text}: {name}", least=1) for part in (first, last))
        value_texts = [f"{low << power}" for power in range(64) if low << power <= high]
        if not value_texts:
            raise InputError(f"{what} {text!r} ends before it begins. Write the smaller size first.")
    if not all(value_texts):
        raise InputError(f"{what} {text!r} is not {form}. Write for example {name}=1,16 or {name}=1..16.")
    return tuple(value_texts)


def take_axes(given: Mapping[str, int] | None, strategy: Facts) -> dict[str, int]:
    """Returns sizes of mesh axes from ``--axes`` and ``--set strategy.tensor=4``; removes these from ``strategy``."""
    size_by_axis = dict(given or {})
    for axis, size in strategy.pop("mesh", {}).items():
        if axis in size_by_axis:
            raise InputError(f"mesh axis {axis} is given in --axes and in --set. Leave one of them out.")
        if not isinstance(size, int) or isinstance(size, bool):
            raise InputError(f"--set strategy.{axis}={size} is not a whole number. Write strategy.{axis}=4, say.")
        size_by_axis[axis] = size
    return size_by_axis


def job_of(batch: str, seq_len: int, fields: Mapping[str, Any], tokens: int | None = None) -> Job:
    """Returns the job of ``--batch``, ``--seq`` and ``--tokens``, with fields of ``--set``."""
    job = Job(batch_seqs=parse_batch(batch, seq_len=seq_len), seq_len=seq_len, train_tokens=tokens)
    return check_tokens(with_fields(job, "job", fields))


def check_tokens(job: Job) -> Job:
    """Returns the same job. Raises InputError for a number of tokens that is out of bounds."""
    tokens = job.train_tokens
    if tokens is not None and not 1 <= tokens <= MAX_TRAIN_TOKENS:
        raise InputError(f"job.train_tokens={tokens:.4g} must be between 1 and {MAX_TRAIN_TOKENS:.0e}.")
    return job
