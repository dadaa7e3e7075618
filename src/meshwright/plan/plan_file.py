"""The plan file: one TOML file with all of a plan, of training or of a service, so that every verb can start from it.

A plan of training, or one phase of a service's plan, gives the `Setting` and the `Strategy` that prices, listings and
proofs take.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, overload

import msgspec

from meshwright.core.dims import MESH_AXES
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.fields import Checked, KeyPath, check_figures
from meshwright.core.files import write_text_whole
from meshwright.core.toml_file import TomlFile, decode_toml, read_toml, sealed_toml, warn_of_changes
from meshwright.cost.formulas.serving import expected_tokens
from meshwright.cost.setting import Setting
from meshwright.plan.legal import MEMORY_RULE, legal
from meshwright.plan.serving.engines import phase_setting
from meshwright.plan.serving.fleet import engine_words, layout_of
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes, stored_dtypes
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.prediction import Prediction
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, REPEATED_HEADS, Strategy

VERSION = 2
READ_VERSIONS = (1, VERSION)
"""Versions of plan files that can be read. Version 1 lacks the chunk length of a service."""

SERVICE = "service"
"""Name of the table that only the plan of a service has."""
GenerationPhase = Literal["decode", "prefill"]
PHASES: tuple[GenerationPhase, ...] = get_args(GenerationPhase)
POOLS = ("generate", "prefill")
"""Names of the tables with the engines that decode and the engines that prefill, in the order of `PHASES`."""

GENERATION_JOB = Job(kind="decode", batch_seqs=1, seq_len=1)
"""The job in the setting of a service: a decode step of one sequence."""


class PlanFile(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The fields of every plan: the model, its cluster, and the rates and assumptions behind the prediction."""

    version: int = VERSION
    model: Model
    cluster: Cluster
    assumptions: Assumptions = AS_RUN
    calibration: Calibration

    @staticmethod
    def fields_of(setting: Setting) -> dict[str, Any]:
        """Returns the model, cluster, assumptions and calibration of a setting, by their names in a plan."""
        value_by_name = {name: getattr(setting, name) for name in ("model", "cluster", "assumptions")}
        return {**value_by_name, "calibration": setting.rates}

    def setting_for(self, job: Job) -> Setting:
        """Returns the setting of a job with the model, cluster, rates and assumptions of the plan."""
        return Setting(self.model, self.cluster, job, self.calibration, assumptions=self.assumptions)


class Plan(PlanFile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan of training: a job, its strategy, and the prediction of a step."""

    job: Job
    strategy: Strategy
    predicted: Prediction[float]

    @cached_property
    def setting(self) -> Setting:
        """The setting in which the strategy was planned; its cluster has the chips that the strategy uses."""
        return self.setting_for(self.job)

    @property
    def num_chips(self) -> int:
        """Chips of the strategy's cluster."""
        return self.cluster.num_chips

    @property
    def usd_per_token(self) -> float | None:
        """Dollars that all chips cost for one token; None without a price."""
        usd_per_hour = self.cluster.chip.price_usd_per_hour
        return usd_per_hour and usd_per_hour * self.num_chips / 3600 * self.predicted.step_s / self.job.tokens_per_step

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of the strategy and of its prediction as plain data, with the keys of `plan --json`."""
        fields = msgspec.to_builtins(self.strategy) | msgspec.to_builtins(self.predicted)
        facts = {"zero": self.strategy.zero, "precision": self.strategy.matmul_dtype, "num_chips": self.num_chips}
        return {"axes": fields.pop("mesh"), **fields, **facts}


class EnginePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``num_engines`` equal engines and one step of each: ``batch_seqs`` sequences in ``step_s`` seconds.

    ``bounds_s`` are the seconds of each part of the step without overlap, ``bound_by`` names the longest part;
    ``memory`` is in bytes per chip.
    """

    num_engines: int
    part: Cluster
    strategy: Strategy
    batch_seqs: int
    step_s: float
    bound_by: str
    bounds_s: dict[str, float]
    memory: dict[str, float]

    @property
    def words(self) -> str:
        """The number of engines and the mesh of each, ``"8 x tp8"``."""
        return f"{self.num_engines} x {engine_words(self.strategy)}"

    @property
    def num_chips(self) -> int:
        """Chips of all engines."""
        return self.num_engines * self.part.num_chips

    def to_json(self) -> dict[str, Any]:
        """Returns the engines and their step as plain data, one object of `service --json`."""
        value_by_name = {name: getattr(self, name) for name in ("num_engines", "batch_seqs", "step_s", "bound_by")}
        size_by_axis = {axis: size for axis, size in self.strategy.mesh.items() if size > 1}
        engine_values = {
            "part": self.part.short_name,
            "axes": size_by_axis,
            "layout": layout_of(self.strategy),
            "placement": self.strategy.placement,
        }
        return {**value_by_name, **engine_values, "bounds_s": self.bounds_s, "memory": self.memory}


class ServiceFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of a planned service; see `plan.serving.search` for the formulas.

    ``tpot_s`` holds in the steady state, ``ttft_s`` at low load. ``requests_per_s`` is the capacity, ``served_per_s``
    at most the load; tokens and dollars count served requests and all ``num_chips`` that are paid for, idle ones too.
    A million input tokens pay for prefill, a million output tokens for decode; None without a price. ``itl_s`` is the
    longest time between two tokens, None unless the service has a target for it or a chunk length.
    """

    ttft_s: float
    tpot_s: float
    transfer_s: float
    requests_per_s: float
    served_per_s: float
    tokens_per_s_per_chip: float
    num_chips: int
    free_bytes: float
    usd_per_m_input: float | None = None
    usd_per_m_output: float | None = None
    itl_s: float | None = None


class ServicePlan(PlanFile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of a service.

    ``generate`` are the engines that decode; ``prefill`` are the same engines or, if the plan ``has_pools``, a separate
    pool. ``weights`` and ``cache`` are the dtypes in which weights and KV caches are stored. A decode step checks
    ``num_drafts`` drafts of each sequence. Prompts are cut into chunks of ``chunk_len`` tokens; 0: they are not cut.
    """

    has_pools: bool
    weights: str
    cache: str
    num_drafts: int = 0
    chunk_len: int = 0
    service: Service
    generate: EnginePool
    prefill: EnginePool
    predicted: ServiceFigures

    @cached_property
    def setting(self) -> Setting:
        """The setting that the service was planned in."""
        return self.setting_for(GENERATION_JOB)

    @property
    def stored(self) -> StoredDtypes:
        """The dtypes of weights and caches."""
        return StoredDtypes(self.weights, self.cache)

    @property
    def step_tokens(self) -> float:
        """Mean number of tokens that a decode step makes for each sequence: 1, or more with drafts."""
        speculation = self.service.speculation
        return float(expected_tokens(speculation.acceptance, self.num_drafts)) if speculation else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, with the keys of `service --json`."""
        figure_by_name = msgspec.structs.asdict(self.predicted)
        itl_s = figure_by_name.pop("itl_s")
        choice_by_name = {name: getattr(self, name) for name in ("has_pools", "weights", "cache")}
        pool_by_name = {name: getattr(self, name).to_json() for name in POOLS}
        step_values = {name: getattr(self, name) for name in ("num_drafts", "step_tokens", "chunk_len")}
        return {**figure_by_name, **choice_by_name, **pool_by_name, **step_values, "itl_s": itl_s}

    def pool(self, phase: GenerationPhase) -> EnginePool:
        """Returns the engines of a phase."""
        return self.generate if phase == "decode" else self.prefill

    def phase(self, phase: GenerationPhase, num_positions: int | None = None) -> tuple[Setting, Strategy]:
        """Returns the setting and strategy of one engine's step: decode with a cache of ``num_positions`` (default:
        whole sequences), or prefill of the new tokens of prompts."""
        pool, service = self.pool(phase), self.service
        seq_len, known_len = num_positions or service.max_len, service.prompt_len if self.model.encoder else 0
        if phase == "prefill":
            seq_len, known_len = service.new_prompt_tokens, service.prompt_len - service.new_prompt_tokens
        part_setting = self.setting.on(pool.part)
        return phase_setting(part_setting, phase, self.stored, seq_len, pool.batch_seqs, known=known_len), pool.strategy

    def require_legal(self) -> None:
        """Raises CannotRunError for a phase whose sizes do not divide or whose engine has too little memory."""
        for phase, name in zip(PHASES, POOLS, strict=True):
            for refusal in legal(*self.phase(phase)):
                message = refusal.message
                if refusal.rule == MEMORY_RULE:
                    message = f"{message.partition(' Use ')[0]} Lower {name}.batch_seqs, or plan the service again."
                raise CannotRunError(f"[{name}]: {message}")

    def require_whole_prompts(self) -> None:
        """Raises CannotRunError if the service has a chunk length or ITL target, which files and `explain` lack."""
        if self.service.chunk_len or self.service.itl_s:
            message = "a service with chunked prompts or an ITL target cannot be written to a file yet. Leave out -o."
            raise CannotRunError(message)


def save_plan(plan: PlanFile, path: Path | str) -> None:
    """Writes a plan to a TOML file atomically. Writes the chip of a service once, in its cluster's table.

    Raises CannotRunError for a service with a chunk length or an ITL target."""
    table = msgspec.to_builtins(plan)
    if isinstance(plan, ServicePlan):
        plan.require_whole_prompts()
        for name in POOLS:
            del table[name]["part"]["chip"]
    write_text_whole(Path(path), sealed_toml(table))


PlanKind = TypeVar("PlanKind", bound=PlanFile)


@overload
def load_plan(path: Path | str) -> Plan: ...
@overload
def load_plan(path: Path | str, kind: type[PlanKind]) -> PlanKind: ...
def load_plan(path: Path | str, kind: Any = Plan) -> Any:
    """Reads a plan file: of training by default, of a service with ``kind=ServicePlan``, of either with `PlanFile`.

    Raises one InputError for all faults, each with file:line and a remedy; also if the file has another kind of plan.
    """
    file = read_toml(Path(path))
    warn_of_changes(file)
    return decode_plan(file, kind)


def decode_plan(file: TomlFile, kind: Any = Plan) -> Any:
    """Returns the plan in a parsed TOML file. Raises InputError as `load_plan` does."""
    version = file.data.get("version")
    verb = SERVICE if SERVICE in file.data else "plan"
    if version is None:
        message = f"this is not a plan file: it has no version. Write one with {verb} -o, or set version = {VERSION}."
        raise file.error(("version",), message)
    if version not in READ_VERSIONS:
        raise file.error(
            ("version",),
            f"plan version {version!r} is not known; this meshwright reads version {VERSION}. "
            f"Make the plan again with {verb} -o.",
        )
    file_kind = ServicePlan if SERVICE in file.data else Plan
    if not issubclass(file_kind, kind):
        raise file.error((SERVICE,), _OTHER_KIND[file_kind])
    if file_kind is Plan:
        _move_assumptions(file)
        _move_bound(file)
    plan = decode_toml(file, Plan) if file_kind is Plan else _service_plan(file)
    file.refuse(_unknown_names(plan))
    if plan.calibration.chip != plan.cluster.chip.name:
        rates_text = f"the rates are of {plan.calibration.chip}, but the chips are {plan.cluster.chip.name}"
        raise file.error(("calibration", "chip"), f"{rates_text}. Give rates of {plan.cluster.chip.name}.")
    with file.at(("predicted",)):
        check_figures(plan.predicted, "predicted", may_be_zero=plan.predicted.__struct_fields__)
    return plan


def _unknown_names(plan: Plan | ServicePlan) -> Iterator[tuple[KeyPath, str]]:
    """Yields the key and the fault of every name in a strategy that is no mesh axis, or no dim of a model's arrays."""
    strategy_of: dict[KeyPath, Strategy] = {("strategy",): plan.strategy} if isinstance(plan, Plan) else {}
    if isinstance(plan, ServicePlan):
        strategy_of = {(name, "strategy"): getattr(plan, name).strategy for name in POOLS}
    dims = {
        *plan.model.dims,
        *"BTSC",
        *REPEATED_HEADS,
        *(dim for rules in DEFAULT_ASSIGNMENT.values() for dim in rules),
    }
    for key, strategy in strategy_of.items():
        axes: list[tuple[KeyPath, str]] = [((*key, "mesh", axis), axis) for axis in strategy.mesh]
        for role, rules in strategy.assignment.items():
            role_key = (*key, "assignment", role)
            axes += [((*role_key, dim), axis) for dim, dim_axes in rules.items() for axis in dim_axes]
            yield from (
                ((*role_key, dim), f"{dim!r} is no dim.{nearest(dim, dims)}") for dim in rules if dim not in dims
            )
        for axis_key, axis in axes:
            if axis not in MESH_AXES:
                yield axis_key, f"{axis!r} is no mesh axis.{nearest(axis, MESH_AXES)}"


_OTHER_KIND: dict[type[PlanFile], str] = {
    ServicePlan: "this is the plan of a service, but a plan of training is needed here. Write one with "
    "meshwright plan; explain and verify take services.",
    Plan: "this is a plan of training, but the plan of a service is needed here. Write one with service -o.",
}


# -- plans of training ------------------------------------------------------------------------------------


def _move_bound(file: TomlFile) -> None:
    """Sets ``strategy.capacity_factor`` from ``assumptions.imbalance`` above 1, where older files have it."""
    strategy_table, assumption_table = file.data.get("strategy"), file.data.get("assumptions")
    imbalance = assumption_table.get("imbalance") if isinstance(assumption_table, dict) else None
    if isinstance(strategy_table, dict) and isinstance(imbalance, int | float) and imbalance > 1:
        strategy_table.setdefault("capacity_factor", imbalance)


def _move_assumptions(file: TomlFile) -> None:
    """Moves assumptions from the table ``strategy``, where older files have them, to ``assumptions``."""
    strategy_table = file.data.get("strategy")
    if "assumptions" in file.data or not isinstance(strategy_table, dict):
        return
    names = [name for name in Assumptions.__struct_fields__ if name in strategy_table]
    file.data["assumptions"] = {name: strategy_table.pop(name) for name in names}
    line_by_key = {("assumptions", name): file.lines.get(("strategy", name)) for name in names}
    file.lines.update({key: line for key, line in line_by_key.items() if line is not None})


# -- plans of services ------------------------------------------------------------------------------------


def _service_plan(file: TomlFile) -> ServicePlan:
    for name in POOLS:
        pool_table, cluster = (file.data.get(key) for key in (name, "cluster"))
        if isinstance(pool_table, dict) and isinstance(pool_table.get("part"), dict) and isinstance(cluster, dict):
            pool_table["part"].setdefault("chip", cluster.get("chip"))
    plan = decode_toml(file, ServicePlan)
    with file.at(("weights",)):
        stored_dtypes((plan.weights,), (plan.cache,), chip=plan.cluster.chip)
    for name in POOLS:
        with file.at((name,)):
            _check_pool(name, getattr(plan, name), plan)
    is_alike = all(getattr(plan.generate, name) == getattr(plan.prefill, name) for name in ("part", "num_engines"))
    if not (plan.has_pools or is_alike):
        message = "without pools the engines that generate prefill. Give both the same part and num_engines."
        raise file.error(("prefill",), message)
    speculation = plan.service.speculation
    if plan.num_drafts not in (speculation.tried if speculation else (0,)):
        allowed_text = "as many as service.speculation allows" if speculation else "0: the service has no speculation"
        raise file.error(("num_drafts",), f"num_drafts={plan.num_drafts} must be {allowed_text}.")
    pools = (plan.generate, plan.prefill) if plan.has_pools else (plan.generate,)
    num_chips, cap = sum(pool.num_chips for pool in pools), plan.cluster.num_chips
    if num_chips > cap:
        raise file.error(("generate",), f"the engines have {num_chips:,} chips, {plan.cluster.short_name} has {cap:,}.")
    return plan


def _check_pool(name: str, pool: EnginePool, plan: ServicePlan) -> None:
    cluster, precision = plan.cluster, plan.stored.precision
    check_figures(pool, name, may_be_zero=("bounds_s", "memory", "chunks"))
    if pool.part.chip != cluster.chip:
        raise InputError(f"{name}.part has other chips than the cluster. Give a part of {cluster.short_name}.")
    if pool.strategy.precision != precision:
        matmul_text = f"products in {precision}" if precision else "products in the dtype of activations"
        raise InputError(f"weights in {plan.weights} have {matmul_text}. Set {name}.strategy.precision={precision!r}.")
    if pool.strategy.num_chips != pool.part.num_chips:
        raise InputError(
            f"the mesh has {pool.strategy.num_chips} devices, but {name}.part has {pool.part.num_chips} chips. Make "
            f"them equal."
        )
