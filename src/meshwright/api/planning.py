"""Plans from names: a model, a cluster and a batch as a person writes them, and the plan that is best."""

from pathlib import Path
from typing import Any

import msgspec

from meshwright.algebra.derive import derive as derive_program
from meshwright.algebra.derived import Derived
from meshwright.algebra.transformer import transformer
from meshwright.api.rates import rates_for
from meshwright.core.errors import InputError, nearest
from meshwright.core.fields import convert_fields
from meshwright.core.units import parse_count
from meshwright.cost.setting import Setting, setting_of
from meshwright.cost.train_step import estimate_step
from meshwright.plan.legal import require_legal
from meshwright.plan.result import plan_in
from meshwright.spec.calibration import Calibration
from meshwright.spec.catalogue import load_model, weights_of
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job, parse_batch
from meshwright.spec.model import Model
from meshwright.spec.plan_file import Plan
from meshwright.spec.strategy import Strategy, make_mesh


def make_setting(
    model: str | Model,
    cluster: str | Cluster,
    *,
    batch: int | str,
    seq_len: int | str,
    calibration: Calibration | Path | str | None = None,
    **job: Any,
) -> Setting:
    """What strategies are priced in: the model, the cluster, the job and the rates.

    ``model`` is a name of the catalogue or a path to a config.json, ``cluster`` such as "v5p:16x20x28" or "h100:8x256",
    ``batch`` as the command's ``--batch``: tokens a step ("4Mi", or 4194304) or sequences ("1024seq"); ``seq_len`` the
    tokens of a sequence ("4Ki", or 4096). ``calibration`` is one, the path to one, or "datasheet"; without it the
    chip's fitted rates are taken, and for "cpu:N" this machine's, which are measured once.
    ``job`` are further fields of `Job`. Raises InputError for what is not known or does not divide.
    """
    found = load_model(model) if isinstance(model, str) else model
    chips = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    length = parse_count(f"{seq_len}", what="seq_len")
    sequences = parse_batch(f"{batch}", seq_len=length)
    weights = weights_of(str(model)) if isinstance(model, str | Path) else ""
    work = convert_fields({"batch_seqs": sequences, "seq_len": length, "weights": weights, **job}, Job, section="job")
    if not isinstance(calibration, Calibration):
        calibration = rates_for(chips, None if calibration is None else Path(calibration), fitted=True)
    return Setting(found, chips, work, calibration)


def derive(model: str | Model, strategy: Strategy | None = None, *, optimizer: str = "adamw") -> Derived:
    """The steps of one training step under a strategy, on one device without one: local ops and collectives."""
    found = load_model(model) if isinstance(model, str) else model
    return derive_program(transformer(found), strategy or Strategy(mesh=make_mesh({})), optimizer=optimizer)


def plan_of(setting: Setting, strategy: Strategy) -> Plan:
    """The plan of a strategy in its setting, checked and predicted.

    Raises CannotRunError, with the rule that is broken, for a strategy that does not run.
    """
    require_legal(setting, strategy)
    return plan_in(setting, strategy, estimate_step(setting, strategy))


def changed_plan(plan: Plan, **changes: Any) -> Plan:
    """A plan with other parts (``strategy=``, ``job=``, ...), checked and predicted again as `plan_of` does."""
    if unknown := set(changes) - set(Plan.__struct_fields__):
        raise InputError(f"{min(unknown)!r} is no part of a plan.{nearest(min(unknown), Plan.__struct_fields__)}")
    found = msgspec.structs.replace(plan, **changes)
    return plan_of(setting_of(found), found.strategy)
