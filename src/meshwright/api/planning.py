"""Makes settings and plans from the names and texts that a user writes."""

from pathlib import Path
from typing import Any

import msgspec

from meshwright.algebra.derive import derive as derive_program
from meshwright.algebra.derived import Derived
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.algebra.transformer import transformer
from meshwright.api.rates import rates_for
from meshwright.core.errors import InputError, nearest
from meshwright.core.fields import convert_fields
from meshwright.core.units import parse_count
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.legal import require_even_splits, require_legal
from meshwright.plan.plan_file import Plan
from meshwright.plan.result import plan_in
from meshwright.spec.calibration import Calibration
from meshwright.spec.catalogue import load_model, weights_of
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import Job, parse_batch
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh


def make_setting(
    model: str | Path | Model,
    cluster: str | Cluster,
    *,
    batch: int | str,
    seq_len: int | str,
    calibration: Calibration | Path | str | None = None,
    **job_fields: Any,
) -> Setting:
    """Returns the setting (model, cluster, job, calibration) in which strategies are priced.

    ``model`` is a name of the catalogue or a path to a config.json. ``cluster`` is a text like "v5p:16x20x28" or
    "h100:8x256". ``batch`` is in tokens ("4Mi", 4194304) or sequences ("1024seq") a step, ``seq_len`` in tokens
    ("4Ki", 4096). ``calibration`` is a `Calibration`, the path to one, or "datasheet"; the default is the chip's fitted
    rates, and "cpu:N" measures this machine once. ``job_fields`` are further fields of `Job`. Raises InputError for
    unknown names, and for a batch that is no whole number of sequences.
    """
    loaded_model = load_model(model) if isinstance(model, str | Path) else model
    parsed_cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    tokens_per_seq = parse_count(f"{seq_len}", what="seq_len", least=1)
    batch_seqs = parse_batch(f"{batch}", seq_len=tokens_per_seq)
    weights_folder = weights_of(str(model)) if isinstance(model, str | Path) else ""
    fields_of_job = {"batch_seqs": batch_seqs, "seq_len": tokens_per_seq, "weights": weights_folder, **job_fields}
    if not isinstance(calibration, Calibration):
        calibration = rates_for(parsed_cluster, None if calibration is None else Path(calibration), fitted=True)
    return Setting(loaded_model, parsed_cluster, convert_fields(fields_of_job, Job, section="job"), calibration)


def derive(model: str | Path | Model, strategy: Strategy | None = None, *, optimizer: str = "adamw") -> Derived:
    """Returns the local ops and collectives of one training step; without a strategy, of a step on one device.

    Raises CannotRunError for a mesh that does not divide the model's heads, widths or experts.
    """
    loaded_model = load_model(model) if isinstance(model, str | Path) else model
    strategy_with_heads = strategy_of_heads(strategy or Strategy(mesh=make_mesh({})), loaded_model.common_kv_heads)
    derivation = derive_program(transformer(loaded_model), strategy_with_heads, optimizer=optimizer)
    require_even_splits(derivation, loaded_model, strategy_with_heads.mesh)
    return derivation


def plan_of(setting: Setting, strategy: Strategy) -> Plan:
    """Returns the plan of a strategy, with its prediction and, on a torus, the placement of axes that programs follow.

    Raises CannotRunError, which names the broken rule, for a strategy that cannot run.
    """
    require_legal(setting, strategy)
    price = price_strategy(setting, strategy)
    if setting.cluster.kind == "torus":
        strategy = msgspec.structs.replace(strategy, placement=price.placement.describe())
    return plan_in(setting, strategy, price.estimate)


def changed_plan(plan: Plan, **changes: Any) -> Plan:
    """Returns the plan with some fields replaced (``strategy=``, ``job=``, ...), checked and predicted by `plan_of`.
    Raises InputError for a name that is no field, for ``predicted`` and for ``version``."""
    field_names = set(Plan.__struct_fields__) - {"predicted", "version"}
    if unknown := set(changes) - field_names:
        raise InputError(f"{min(unknown)!r} is no field of a plan that can change.{nearest(min(unknown), field_names)}")
    new_plan = msgspec.structs.replace(plan, **changes)
    return plan_of(new_plan.setting, new_plan.strategy)
