"""The plan file: one TOML file that holds a plan whole, so that every verb can start from it."""

from pathlib import Path

import msgspec

from meshwright.core.files import write_text_whole
from meshwright.core.toml_file import TomlFile, decode_toml, dump_toml, parse_toml, read_toml
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy

VERSION = 1


class Predicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the planner predicted for one training step, in the units of the names; None is not known."""

    step_s: float
    step_s_lower: float
    step_s_upper: float
    step_s_p10: float | None = None
    step_s_p90: float | None = None
    mfu: float
    hfu: float
    bound_by: str
    hbm_bytes_per_chip: float
    memory: dict[str, float]
    flops: float
    terms: dict[str, float] = {}
    train_days: float | None = None
    cost_usd: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, the chips it runs on, the job, how it is split, the rates that were used, and the prediction."""

    version: int = VERSION
    model: Model
    cluster: Cluster
    job: Job
    strategy: Strategy
    calibration: Calibration
    predicted: Predicted


def save_plan(plan: Plan, path: Path) -> None:
    """Write the plan. The file is complete or as it was before: it is written beside its place and moved there."""
    write_text_whole(Path(path), dump_toml(plan))


def load_plan(path: Path) -> Plan:
    """The plan of a file. Every fault comes back as one InputError with file:line and what to change."""
    return _decode(read_toml(Path(path)))


def parse_plan(text: str, *, path: str = "<text>") -> Plan:
    """The same for text that is not in a file."""
    return _decode(parse_toml(text, path=path))


def _decode(file: TomlFile) -> Plan:
    version = file.data.get("version")
    if version is None:
        raise file.error(
            ("version",),
            f"this is not a plan file: it has no version. Write one with plan -o, or set version = {VERSION}.",
        )
    if version != VERSION:
        raise file.error(
            ("version",),
            f"plan version {version!r} is not known; this meshwright reads version {VERSION}. "
            f"Make the plan again with plan -o.",
        )
    return decode_toml(file, Plan)
