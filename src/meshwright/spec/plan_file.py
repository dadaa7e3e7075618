"""The plan file: one TOML file with all of a plan, so that every verb can start from it."""

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from meshwright.core.fields import Checked, check_figures
from meshwright.core.files import write_text_whole
from meshwright.core.toml_file import TomlFile, decode_toml, read_toml, sealed_toml, warn_of_changes
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy

VERSION = 1
SERVICE = "service"
"""The table that a plan of a service has, and one of training has not."""
N = TypeVar("N")


def unmasked(reached: Any) -> float | None:
    """Returns the MFU without masked scores where the MFU is above 100% because it counts them; else None."""
    return reached.mfu_causal if reached.mfu is not None and reached.mfu > 1 else None


class Prediction(msgspec.Struct, Generic[N], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prediction of one training step; every number N may be an array with one entry per candidate.

    ``step_s_lower`` assumes perfect overlap of everything, ``step_s_upper`` none. The measured time of 8 in 10
    published steps was between ``step_s_p10`` and ``step_s_p90``, relative to ``step_s``; both are None for rates that
    are not fitted.

    ``flops`` is the number that all devices execute; ``hfu`` also counts attention's masked blocks, as ``mfu`` does.
    ``mfu_causal`` is the MFU without them (None in older plan files).
    ``memory`` is in bytes per chip. ``terms`` are seconds of each kind of work by itself, before any overlap: matmul,
    attention, elementwise, loss_head, optimizer, a collective per group of mesh axes, latency. ``train_days`` and
    ``cost_usd`` are for all tokens of the job, None where the tokens or the chip's price are not known.
    """

    step_s: N
    step_s_lower: N
    step_s_upper: N
    step_s_p10: N | None = None
    step_s_p90: N | None = None
    mfu: N
    hfu: N
    mfu_causal: N | None = None
    bound_by: str
    hbm_bytes_per_chip: N
    memory: dict[str, N]
    flops: N
    terms: dict[str, N] = {}
    train_days: float | None = None
    cost_usd: float | None = None

    def measured(self, step_s: float) -> dict[str, Any]:
        """Returns MFU, HFU and MFU without masked scores, by name, of a step that was measured to take ``step_s``."""
        prediction: Prediction[Any] = self
        shares = {"mfu": prediction.mfu, "hfu": prediction.hfu, "mfu_causal": prediction.mfu_causal}
        return {name: share and share * prediction.step_s / step_s for name, share in shares.items()}


class Plan(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, its cluster, job and strategy, and the prediction with its rates and assumptions."""

    version: int = VERSION
    model: Model
    cluster: Cluster
    job: Job
    strategy: Strategy
    assumptions: Assumptions = AS_RUN
    calibration: Calibration
    predicted: Prediction[float]


def save_plan(plan: Plan, path: Path | str) -> None:
    """Writes the plan atomically."""
    write_text_whole(Path(path), sealed_toml(plan))


def load_plan(path: Path | str) -> Plan:
    """Reads a plan. Raises one InputError for all faults, each with file:line and a remedy."""
    file = read_toml(Path(path))
    warn_of_changes(file)
    return decode_plan(file)


def decode_plan(file: TomlFile) -> Plan:
    """Returns the plan of a file that has been parsed, see `load_plan`."""
    require_version(file)
    if SERVICE in file.data:
        raise file.error(
            (SERVICE,),
            "this is the plan of a service, and one of training is needed here. Write one with meshwright plan; "
            "explain and verify take services.",
        )
    _move_assumptions(file)
    _move_bound(file)
    plan = decode_toml(file, Plan)
    with file.at(("predicted",)):
        check_figures(plan.predicted, "predicted", may_be_zero=Prediction.__struct_fields__)
    return plan


def require_version(file: TomlFile) -> None:
    """Raises InputError unless a file of any kind of plan has the version that is read here."""
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


def _move_bound(file: TomlFile) -> None:
    """Sets the strategy's bound on the slots of experts, which older files give as an imbalance."""
    strategy, assumptions = file.data.get("strategy"), file.data.get("assumptions")
    imbalance = assumptions.get("imbalance") if isinstance(assumptions, dict) else None
    if isinstance(strategy, dict) and isinstance(imbalance, int | float) and imbalance > 1:
        strategy.setdefault("capacity_factor", imbalance)


def _move_assumptions(file: TomlFile) -> None:
    """Moves assumptions out of the table of the strategy, where older files have them."""
    strategy = file.data.get("strategy")
    if "assumptions" in file.data or not isinstance(strategy, dict):
        return
    names = [name for name in Assumptions.__struct_fields__ if name in strategy]
    file.data["assumptions"] = {name: strategy.pop(name) for name in names}
    lines = {("assumptions", name): file.lines.get(("strategy", name)) for name in names}
    file.lines.update({key: line for key, line in lines.items() if line is not None})
