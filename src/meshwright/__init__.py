"""meshwright: from a model and a cluster to a running, measured system.

``import meshwright as mw`` offers the names below. Each is imported when it is first used, so that planning never loads
JAX. docs/api.md shows them at work.
"""

from importlib import import_module
from inspect import isfunction
from typing import Any

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "meshwright.api.planning": ("changed_plan", "derive", "make_setting"),
    "meshwright.api.proving": ("ProofOptions", "prove_service", "prove_strategy"),
    "meshwright.api.running": ("TextOptions", "generate_text", "run_training"),
    "meshwright.cost.setting": ("Setting",),
    "meshwright.cost.train_step": ("price_strategy",),
    "meshwright.masks.table": ("block_table",),
    "meshwright.nn.attention.flex": ("flex_attention",),
    "meshwright.parallel.generation.packed_step": ("PackedStep",),
    "meshwright.parallel.train_step": ("TrainStep",),
    "meshwright.plan.plan_file": ("Plan", "ServicePlan", "load_plan", "save_plan"),
    "meshwright.plan.planner": ("rank_plans",),
    "meshwright.plan.serving.planner": ("plan_service",),
    "meshwright.plan.serving.service": ("Service",),
    "meshwright.plan.why.explain": ("explain",),
    "meshwright.plan.why.explain_service": ("explain_service",),
    "meshwright.serve.engine": ("Engine",),
    "meshwright.serve.opening": ("open_engine",),
    "meshwright.serve.options": ("EngineOptions",),
    "meshwright.serve.request": ("TokenRequest",),
    "meshwright.serve.offline.slots": ("SlotEngine",),
    "meshwright.spec.calibration": ("load_calibration",),
    "meshwright.spec.catalogue": ("load_model",),
    "meshwright.spec.cluster": ("parse_cluster",),
    "meshwright.spec.job": ("Job",),
    "meshwright.spec.model": ("Model",),
    "meshwright.spec.strategy": ("Strategy", "make_mesh"),
}
"""Module -> the names that it gives; ``__init__.pyi`` says the same to type checkers."""

_BORDER = "meshwright.core.fields"
"""Has `checked`, which functions are wrapped in."""

_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    try:
        found = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"meshwright.{name} needs {error.name}: pip install 'meshwright[run]'") from error
    if isfunction(found):
        found = import_module(_BORDER).checked(found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
