"""Predicts published serving measurements: the time per output token under steady load, from a priced decode step and a
priced prefill."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from meshwright.accuracy.batches import CaseBatch, batches, calibrations
from meshwright.accuracy.cases import NUM_FOLDS, Case, Unpredicted, cases_of, chip_of, model_of
from meshwright.accuracy.errors import Accuracy, accuracy_of
from meshwright.accuracy.fit import Problem, fit, folds_of, held_out, rounded, with_intervals
from meshwright.accuracy.records import Record
from meshwright.core.errors import InputError
from meshwright.cost.formulas.serving import waiting_s
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import strategy_placements
from meshwright.cost.work.kernel_times import MEMORY
from meshwright.plan.serving.storing import WEIGHT_DTYPES, StoredDtypes
from meshwright.spec.assumptions import Assumptions, EngineName
from meshwright.spec.calibration import Calibration
from meshwright.spec.chip import Chip, known
from meshwright.spec.cluster import make_cluster
from meshwright.spec.efficiency import KERNEL_NUMBERS, family, fitted_numbers, generation_numbers
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

PRIORS: dict[str, tuple[float, float]] = {
    "compute.blackwell": (0.6, 0.2),
    "attention.gpu": (0.4, 0.3),
    "engine_s.TensorRT-LLM": (5e-4, 0.7),
    "engine_s.vLLM": (1e-3, 0.7),
    "engine_s.SGLang": (1e-3, 0.7),
}
"""Fitted number of generation -> (prior value, standard deviation of its logarithm), estimates."""

_KERNELS = fitted_numbers(KERNEL_NUMBERS).numbers
CONSTANTS = {
    "overlap": 2.0,
    "hbm.gpu": MEMORY["gpu"],
    "compute.gpu": _KERNELS["compute.gpu"],
    "kernel_s.gpu": _KERNELS["start_s"],
}
"""Numbers that are not fitted but known from measured kernels: exponent of the overlap of a kernel's compute and memory
(2: root of squares), shares of the memory's rate and, before Blackwell, of the peak, and seconds to start a kernel."""

ENGINES: dict[str, EngineName] = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
"""Backend of a record -> engine."""

STORED = {"unstated": "bf16", "bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4"}
"""Precision of a record -> dtype of weights; products have it too on chips that support it, else 16 bits."""

PREFILL_FIRST = ("sglang",)
"""Backends that prefill all waiting prompts before they decode again. With a client of fixed concurrency prompts then
arrive in waves, and on average half of a wave is prefilled after a sequence's own prompt, which delays its tokens."""

NARROW_CACHES = ("trtllm",)
"""Backends that store keys and values in fp8 on all chips if weights are fp8 or fp4; other backends do so only on
Blackwell, else in 16 bits (--kv-cache-dtype in InferenceX's benchmarks/*.sh)."""


MOST_DEVICES = 16
"""Most devices of an engine; records with larger ones are not predicted."""

MEMORY_SHARE = 0.9
"""Share of the memory that engines fill by default: vLLM's gpu_memory_utilization, TensorRT-LLM's free fraction."""

TIGHT_SHARE = 0.95
"""Share of the memory that is assumed if `MEMORY_SHARE` leaves no room for all requests of the client, as InferenceX
sets it for DeepSeek-R1 in fp8 on four B200 (benchmarks/dsr1_fp8_b200.sh)."""


class ServedCase(msgspec.Struct, frozen=True, kw_only=True):
    """One record: its prefill of one prompt on each replica of attention, its decode step, and what was measured.

    Of the record's ``replicas`` of attention each runs ``batch`` sequences at a time, has cache for ``room`` sequences,
    and serves ``clients`` requests in flight: the record's concurrency over the replicas."""

    record: Record
    prefill: Case
    decode: Case
    batch: float
    room: int
    clients: int
    replicas: int
    prompt_len: int
    output_len: int

    @property
    def chip(self) -> Chip:
        """The chip that was measured."""
        return self.decode.chip


class ServedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Cases with the batches that price them; the batches' ``numbers`` index ``cases``."""

    cases: tuple[ServedCase, ...]
    prefill: tuple[CaseBatch, ...]
    decode: tuple[CaseBatch, ...]

    def seconds(self, *points: Mapping[str, float]) -> np.ndarray:
        """Returns predicted seconds per output token [points, cases] for several sets of numbers."""
        return self.times(*points)[0]

    def times(self, *points: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """Returns predicted seconds per output token, and seconds of one prompt's prefill [points, cases]."""
        # prompts of a client come in waves and fill steps, so that the starts of their kernels are hidden
        decode_s, prefill_s = np.empty((2, len(points), len(self.cases)))
        for out_s, groups, changes in ((decode_s, self.decode, {}), (prefill_s, self.prefill, {"host_kernel_s": 0.0})):
            calibration_tables = [served_calibrations(self.cases, {**numbers, **changes}) for numbers in points]
            for case_batch in groups:
                out_s[:, case_batch.numbers] = case_batch.seconds(*calibration_tables)
        batch_seqs = np.array([case.batch for case in self.cases])
        output_lens = np.array([case.output_len for case in self.cases])
        wave_share = np.array([0.5 if case.record.backend in PREFILL_FIRST else 1.0 for case in self.cases])
        return decode_s + wave_share * waiting_s(prefill_s, batch=batch_seqs, output_len=output_lens), prefill_s


def served_accuracy(records: Sequence[Record]) -> Accuracy:
    """Compares all serving records with predictions from the shipped numbers of generation."""
    cases, refusals = served_cases(records)
    return _compared(cases, served_batch(cases).seconds({})[0], {}, refusals)


class FittedServing(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers fitted on all records, with intervals, and ``errors`` by name: with numbers fitted without the case's
    configuration, chip or engine, and with ``numbers``. ``held_out`` has, for each case, the calibrations by chip that
    were fitted without its configuration."""

    numbers: dict[str, float]
    errors: dict[str, Accuracy]
    cases: tuple[ServedCase, ...]
    unpredicted: tuple[Unpredicted, ...]
    held_out: tuple[Mapping[str, Calibration], ...]


def fit_served(records: Sequence[Record]) -> FittedServing:
    """Fits the numbers of generation to times per output token, and cross-validates them. Raises InputError if fewer
    than 2 * `NUM_FOLDS` records can be predicted."""
    cases, refusals = served_cases(records)
    if len(cases) < 2 * NUM_FOLDS:
        raise InputError(f"{len(cases)} records can be predicted; a fit needs at least {2 * NUM_FOLDS}.")
    batch, weights = served_batch(cases), np.ones(len(cases))
    problem = Problem(
        cases=tuple(case.decode for case in cases),
        seconds=lambda points: batch.seconds(*points),
        measured_s=np.array([case.decode.measured_s for case in cases]),
        weights=weights,
        priors=PRIORS,
    )
    fold_of_case = folds_of([configuration(case) for case in cases])
    numbers_by_fold = {fold: fit(problem, fold_of_case != fold) for fold in np.unique(fold_of_case).tolist()}
    seconds_by_name = {
        "served": held_out(problem, fold_of_case, fitted=numbers_by_fold),
        "served-chips": held_out(problem, np.array([case.chip.name for case in cases])),
        "served-engines": held_out(problem, np.array([case.record.backend for case in cases])),
    }
    has_experts = np.array([case.decode.setting.model.num_experts > 0 for case in cases])
    numbers = rounded(fit(problem, np.ones(len(cases), dtype=bool)))
    numbers |= with_intervals(seconds_by_name["served"], problem.measured_s, weights, has_experts) | CONSTANTS
    seconds_by_name["served-fitted"] = batch.seconds(numbers)[0]
    calibrations_by_fold = {fold: served_calibrations(cases, numbers) for fold, numbers in numbers_by_fold.items()}
    return FittedServing(
        numbers=numbers,
        errors={name: _compared(cases, seconds, numbers, refusals) for name, seconds in seconds_by_name.items()},
        cases=cases,
        unpredicted=refusals,
        held_out=tuple(calibrations_by_fold[fold] for fold in fold_of_case.tolist()),
    )


def _compared(
    cases: Sequence[ServedCase], seconds: np.ndarray, numbers: Mapping[str, float], unpredicted: Sequence[Unpredicted]
) -> Accuracy:
    decode_cases = [case.decode for case in cases]
    return accuracy_of(decode_cases, seconds, served_calibrations(cases, numbers), unpredicted, what="decode")


def served_calibrations(cases: Sequence[ServedCase], numbers: Mapping[str, float]) -> dict[str, Calibration]:
    """Maps each chip's name to its calibration: the shipped numbers, `CONSTANTS`, and ``numbers`` over both."""
    return calibrations([case.decode for case in cases], generation_numbers().numbers | CONSTANTS | dict(numbers))


def configuration(case: ServedCase) -> tuple[object, ...]:
    """Returns the key of near duplicates: engine, model, chip, mesh sizes and precision, whatever lengths and batch."""
    record, mesh = case.record, case.decode.strategy.mesh
    return (record.group, case.decode.setting.model.name, case.chip.name, tuple(mesh.values()), record.precision)


def served_cases(records: Sequence[Record]) -> tuple[tuple[ServedCase, ...], tuple[Unpredicted, ...]]:
    """Splits records into cases and records that are not predicted, with reasons; a measurement that several records
    list counts once."""
    seen_keys = set[tuple[object, ...]]()

    def once(record: Record) -> ServedCase:
        case = engine_case(record)
        case_key = (*configuration(case), case.batch, record.isl, record.osl, record.measured)
        if case_key in seen_keys:
            raise InputError("the measurement is listed twice")
        seen_keys.add(case_key)
        return case

    return cases_of(records, once)


def served_batch(cases: Sequence[ServedCase]) -> ServedBatch:
    """Returns the cases with their prefills and decode steps in batches of one pattern each."""
    prefills, decodes = (batches([getattr(case, kind) for case in cases]) for kind in ("prefill", "decode"))
    return ServedBatch(cases=tuple(cases), prefill=prefills, decode=decodes)


def engine_case(record: Record, *, most_devices: int = MOST_DEVICES) -> ServedCase:
    """Returns the case of a record of one engine. Raises InputError or CannotRunError if it cannot be predicted."""
    if record.kind != "decode":
        raise InputError(f"kind {record.kind}: only engines that prefill and decode are predicted in this version")
    engine_name = ENGINES.get(record.backend)
    tpot_ms, prompt_len, output_len, model_shape = record.measured.tpot_ms, record.isl, record.osl, record.model
    if engine_name is None or not tpot_ms or not prompt_len or not output_len or not model_shape:
        raise InputError("no time per output token of a known engine")
    if record.precision not in STORED:
        raise InputError(f"precision {record.precision!r} is not known")
    block_kind = "experts" if model_shape.moe else "dense"
    record = msgspec.structs.replace(record, group=f"{engine_name}, {block_kind}")
    chip, model = chip_of(record), model_of(model_shape, prompt_len + output_len)
    tensor_size, num_replicas = _degrees(record)
    if tensor_size * num_replicas > most_devices:
        raise InputError(f"attention over more than {most_devices} devices: the record is of a pool, not of one engine")
    cluster = make_cluster(chip, (tensor_size * num_replicas, 1))
    weight_dtype = STORED[record.precision]
    product_dtype = WEIGHT_DTYPES[weight_dtype]
    is_narrow_cache = product_dtype and (record.backend in NARROW_CACHES or family(chip) == "blackwell")
    stored_dtypes = StoredDtypes(weight_dtype, "fp8" if is_narrow_cache else "bf16")
    strategy = Strategy(
        mesh=make_mesh({"expert" if model.num_experts else "data": num_replicas, "tensor": tensor_size}),
        assignment=standard_assignment(zero=0, sequence_parallel=False),
        precision=product_dtype if product_dtype in chip.peak_flops else "",
    )
    strategy = msgspec.structs.replace(strategy, placement=strategy_placements(cluster, strategy)[0].describe())
    assumptions = Assumptions(software="served", engine=engine_name, empty_slots=False)
    full_cache_job = Job(kind="decode", batch_seqs=num_replicas, seq_len=prompt_len + output_len)
    setting = Setting(model, cluster, full_cache_job, storage=stored_dtypes.storage, assumptions=assumptions)
    concurrency = max(1, round(record.concurrency or record.global_batch_seqs or 1))
    seqs_that_fit = sequences_that_fit(setting, strategy)
    if seqs_that_fit * num_replicas < concurrency:
        seqs_that_fit = sequences_that_fit(setting, strategy, TIGHT_SHARE)
    if seqs_that_fit < 1:
        raise InputError("weights and one sequence do not fit the devices that are listed")
    running_seqs = min(concurrency, seqs_that_fit * num_replicas)

    def case(kind: str, batch_seqs: int, seq_len: int) -> Case:
        job = Job(kind=kind, batch_seqs=batch_seqs, seq_len=seq_len)
        return Case(
            record=record,
            setting=msgspec.structs.replace(setting, job=job),
            strategy=strategy,
            measured_s=tpot_ms / 1e3,
        )

    return ServedCase(
        record=record,
        prefill=case("prefill", num_replicas, prompt_len),
        decode=case("decode", max(running_seqs, num_replicas), prompt_len + output_len // 2),
        batch=max(running_seqs / num_replicas, 1.0),
        room=seqs_that_fit,
        clients=max(round(concurrency / num_replicas), 1),
        replicas=num_replicas,
        prompt_len=prompt_len,
        output_len=output_len,
    )


def sequences_that_fit(setting: Setting, strategy: Strategy, share: float = MEMORY_SHARE) -> int:
    """Returns how many sequences of the job's length fit into the cache of one replica of attention, if weights and
    cache fill ``share`` of the memory. The setting's job must be decode of one sequence per replica."""
    memory_bytes = setting.memory(strategy)
    return int((share * known(setting.cluster.chip, "hbm_bytes") - memory_bytes["weights"]) / memory_bytes["kv_cache"])


def _degrees(record: Record) -> tuple[int, int]:
    """Returns the devices that split a layer's attention, and the number of attention replicas.

    Some records count each chip e times: attention degree e * e, expert degree e and tensor degree e inside experts
    mean e chips, as equal measurements with e chips show.
    """
    degrees = record.parallelism
    tp_size, num_replicas, ep_size, moe_tp_size = degrees.tp or 1, degrees.dp or 1, degrees.ep or 1, degrees.moe_tp or 1
    if ep_size == moe_tp_size > 1 and tp_size * num_replicas == ep_size**2:
        return (tp_size // ep_size, 1) if tp_size > 1 else (1, num_replicas // ep_size)
    if record.model and record.model.moe and ep_size * moe_tp_size != tp_size * num_replicas:
        raise InputError("degrees of attention and experts disagree")
    return tp_size, num_replicas
