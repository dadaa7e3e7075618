"""The service file: one TOML file with all of a planned service, whose two phases are settings and strategies.

What works on a `Setting` and a `Strategy` (prices, listings, proofs) works on either phase of a service.
"""

from pathlib import Path
from typing import Literal, get_args

import msgspec

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import Checked, check_figures
from meshwright.core.files import write_text_whole
from meshwright.core.toml_file import TomlFile, decode_toml, read_toml, sealed_toml, warn_of_changes
from meshwright.cost.formulas.serving import expected_tokens
from meshwright.cost.setting import Setting
from meshwright.plan.legal import MEMORY_RULE, legal
from meshwright.plan.serving.engines import phase_setting
from meshwright.plan.serving.result import EnginePool, ServiceFigures, ServicePlan, ServiceResult
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes, stored_dtypes
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.plan_file import SERVICE, VERSION, require_version
from meshwright.spec.strategy import Strategy

GenerationPhase = Literal["decode", "prefill"]
PHASES: tuple[GenerationPhase, ...] = get_args(GenerationPhase)
POOLS = ("generate", "prefill")
"""Tables of the engines of each phase."""


class ServiceFile(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A planned service with the model, the cluster, the rates and the assumptions that it was planned with.

    The engines that ``generate`` also prefill unless the service ``has_pools``; then those of ``prefill`` do. A step
    checks ``num_drafts`` tokens of each sequence.
    """

    version: int = VERSION
    has_pools: bool
    weights: str
    cache: str
    num_drafts: int = 0
    service: Service
    model: Model
    cluster: Cluster
    assumptions: Assumptions = AS_RUN
    calibration: Calibration
    generate: EnginePool
    prefill: EnginePool
    predicted: ServiceFigures

    @property
    def setting(self) -> Setting:
        """The setting that the service was planned in; its job is one step of one sequence."""
        job = Job(kind="decode", batch_seqs=1, seq_len=1)
        return Setting(self.model, self.cluster, job, self.calibration, assumptions=self.assumptions)

    @property
    def stored(self) -> StoredDtypes:
        """The dtypes of weights and caches."""
        return StoredDtypes(self.weights, self.cache)

    @property
    def step_tokens(self) -> float:
        """Tokens of a sequence that a step makes in the mean."""
        speculation = self.service.speculation
        return float(expected_tokens(speculation.acceptance, self.num_drafts)) if speculation else 1.0

    @property
    def plan(self) -> ServicePlan:
        """The planned service."""
        return ServicePlan(
            has_pools=self.has_pools,
            weights=self.weights,
            cache=self.cache,
            generate=self.generate,
            prefill=self.prefill,
            num_drafts=self.num_drafts,
            step_tokens=self.step_tokens,
            **msgspec.structs.asdict(self.predicted),
        )

    def pool(self, phase: GenerationPhase) -> EnginePool:
        """Returns the engines of a phase."""
        return self.generate if phase == "decode" else self.prefill

    def phase(self, phase: GenerationPhase, num_positions: int | None = None) -> tuple[Setting, Strategy]:
        """Returns a step of one engine: decode with a cache for whole sequences, or for ``num_positions``, prefill of
        the new tokens of prompts."""
        pool, service = self.pool(phase), self.service
        length, num_known = num_positions or service.max_len, 0
        if phase == "prefill":
            length, num_known = service.new_prompt_tokens, service.prompt_len - service.new_prompt_tokens
        on_part = self.setting.on(pool.part)
        return phase_setting(on_part, phase, self.stored, length, pool.batch_seqs, known=num_known), pool.strategy

    def require_legal(self) -> None:
        """Raises CannotRunError for a phase whose sizes do not divide or whose engine has too little memory."""
        for phase, name in zip(PHASES, POOLS, strict=True):
            for refusal in legal(*self.phase(phase)):
                message = refusal.message
                if refusal.rule == MEMORY_RULE:
                    message = f"{message.partition(' Use ')[0]} Lower {name}.batch_seqs, or plan the service again."
                raise CannotRunError(f"[{name}]: {message}")


def service_file(result: ServiceResult, plan: ServicePlan) -> ServiceFile:
    """Returns one of the plans of a result as a file."""
    if result.service.chunk_len or result.service.itl_s:
        raise CannotRunError("services with chunks are planned, not written to files, in this version. Leave out -o.")
    setting = result.setting
    return ServiceFile(
        has_pools=plan.has_pools,
        weights=plan.weights,
        cache=plan.cache,
        num_drafts=plan.num_drafts,
        service=result.service,
        model=setting.model,
        cluster=setting.cluster,
        assumptions=setting.assumptions,
        calibration=setting.rates,
        generate=plan.generate,
        prefill=plan.prefill,
        predicted=ServiceFigures(**{name: getattr(plan, name) for name in ServiceFigures.__struct_fields__}),
    )


def save_service(found: ServiceFile, path: Path | str) -> None:
    """Writes the file atomically; the chips of a part are those of the cluster, and are written once."""
    table = msgspec.to_builtins(found)
    for name in POOLS:
        del table[name]["part"]["chip"]
    write_text_whole(Path(path), sealed_toml(table))


def load_service(path: Path | str) -> ServiceFile:
    """Reads a file. Raises one InputError for all faults, each with file:line and a remedy."""
    file = read_toml(Path(path))
    warn_of_changes(file)
    return _decode(file)


def is_service_file(path: Path | str) -> bool:
    """True if this is a TOML file with the table of a service."""
    return str(path).endswith(".toml") and Path(path).is_file() and SERVICE in read_toml(Path(path)).data


def _decode(file: TomlFile) -> ServiceFile:
    require_version(file)
    if SERVICE not in file.data:
        message = "this is a plan of training, and one of a service is needed here; write it with service -o."
        raise file.error((SERVICE,), message)
    for name in POOLS:
        pool, cluster = (file.data.get(key) for key in (name, "cluster"))
        if isinstance(pool, dict) and isinstance(pool.get("part"), dict) and isinstance(cluster, dict):
            pool["part"].setdefault("chip", cluster.get("chip"))
    decoded = decode_toml(file, ServiceFile)
    with file.at(("weights",)):
        stored_dtypes((decoded.weights,), (decoded.cache,), chip=decoded.cluster.chip)
    if decoded.calibration.chip != decoded.cluster.chip.name:
        rates_text = f"rates of {decoded.calibration.chip}, and the chips are {decoded.cluster.chip.name}"
        raise file.error(("calibration", "chip"), f"{rates_text}. Give rates of these.")
    for name in POOLS:
        with file.at((name,)):
            _check_pool(name, getattr(decoded, name), decoded)
    alike = all(getattr(decoded.generate, name) == getattr(decoded.prefill, name) for name in ("part", "num_engines"))
    if not (decoded.has_pools or alike):
        message = "without pools the engines that generate prefill. Give both the same part and num_engines."
        raise file.error(("prefill",), message)
    speculation = decoded.service.speculation
    if decoded.num_drafts not in (speculation.tried if speculation else (0,)):
        words = "as many as service.speculation allows" if speculation else "0: the service has no speculation"
        raise file.error(("num_drafts",), f"num_drafts={decoded.num_drafts} must be {words}.")
    pools = (decoded.generate, decoded.prefill) if decoded.has_pools else (decoded.generate,)
    total, size = sum(pool.num_chips for pool in pools), decoded.cluster.num_chips
    if total > size:
        raise file.error(("generate",), f"the engines have {total:,} chips, but {decoded.cluster.short_name} {size:,}.")
    with file.at(("predicted",)):
        check_figures(decoded.predicted, "predicted", may_be_zero=ServiceFigures.__struct_fields__)
    return decoded


def _check_pool(name: str, pool: EnginePool, found: ServiceFile) -> None:
    cluster, precision = found.cluster, found.stored.precision
    check_figures(pool, name, may_be_zero=("bounds_s", "memory", "chunks"))
    if pool.part.chip != cluster.chip:
        raise InputError(f"{name}.part has other chips than the cluster. Give a part of {cluster.short_name}.")
    if pool.strategy.precision != precision:
        products = f"products in {precision}" if precision else "products in the dtype of activations"
        raise InputError(f"weights in {found.weights} have {products}. Set {name}.strategy.precision={precision!r}.")
    if pool.strategy.num_chips != pool.part.num_chips:
        raise InputError(
            f"the mesh has {pool.strategy.num_chips} devices, but {name}.part {pool.part.num_chips} chips. Make them "
            f"equal."
        )
