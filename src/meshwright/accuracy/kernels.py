"""Compares measured kernels with `cost.work.kernel_times`: chosen rows, the fit, errors on held-out shapes."""

import csv
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from meshwright.accuracy.cases import NUM_FOLDS
from meshwright.core.errors import InputError
from meshwright.core.files import read_text
from meshwright.cost.work import kernel_times as times
from meshwright.cost.work.kernel_times import KernelRates, kernel_rates
from meshwright.spec.chip import chip as find_chip

MOST_NUMBERS = 28
GOAL, GENERATION_GOAL, FEWEST_ROWS = 0.08, 0.10, 10
"""Largest median error that meets the goal, for an operation of training and of token generation on a chip; fewest rows
for which a goal is judged."""

PRIORS = {
    **{"compute.gpu": 0.82, "compute.blackwell": 0.7, "compute.128": 0.9, "compute.256": 0.75, "pallas.tpu7x": 0.7},
    **{"power": 0.6, "half": 100.0, "narrow": 0.9, "start_s": 4e-6, "call_s": 1.5e-5, "paged.h100": 0.9},
    **{"head_half": 30.0, "head_half_backward": 80.0, "grid_s": 2e-7, "softmax": 1500.0},
    **{"link": 0.9, "collective_s": 8e-6, "member_s": 1e-6, "ramp_s": 2e-5, "quick.h100": 0.65},
    **{"step_s": 5e-10, "decode_s": 1e-5, "block_s": 1.2e-6, "latent.blackwell": 0.8, "streams.a100": 0.8},
    **{"experts_s": 2.5e-5, "reduce_s": 4e-6, "peers": 0.4},
}
"""Fitted number -> start of the fit and mode of its weak prior."""

PRIOR_SPREAD, ERROR_SCALE, USUAL_ROWS = 10.0, 0.05, 30
"""Standard deviation of the prior of a number's logarithm (ten: weak); the error of log time above which errors count
linearly; the number of rows as which each chip and operation is weighted, however many it has."""

CORES_MEASURED = {"tpu7x": 1}
"""Chip -> cores of a measured device, where that is no whole chip: JAX lists each core of an Ironwood as a device."""

CHIPS = {"a100": "a100-80gb"}

PREFILL = {"B": "batch_size", "T": "isl", "N": "num_heads", "G": "num_key_value_heads", "H": "head_dim"}
ATTENTION = {"B": "batch", "T": "length", "N": "heads", "G": "kv_heads", "H": "head_dim", "causal": "causal"}
PRODUCTS = {"M": "rows", "K": "contracted", "N": "columns", "G": "groups", "copied": "copied"}
GEMM = {"M": "m", "N": "n", "K": "k"}
CACHED = {"B": "batch", "T": "length", "N": "heads", "bits": "bits"}
GROUPED = {"G": "kv_heads", "H": "head_dim", "window": "window"}
EXPERTS = {"M": "rows", "G": "met", "K": "hidden", "N": "inner"}

TENSORRT, SGLANG, VLLM, NCCL = (f"AIConfigurator {name}" for name in ("TensorRT-LLM", "SGLang", "vLLM", "NCCL"))
COLUMNS = {TENSORRT: "seconds_trtllm", SGLANG: "seconds_sglang", VLLM: "seconds_vllm"}
"""Column of a library's seconds in tables of several libraries; other tables have ``seconds``."""

CUDNN, PALLAS, XLA = (f"tokamax {name}" for name in ("cuDNN", "Pallas", "XLA"))
_FLASH, _RAGGED, _GATED = "flash_attention", "ragged_dot", "gated_linear_unit"
_SERVED = {"chip": "a100_sxm h200_sxm b200_sxm gb200 gb300", "source": "sglang/0.5.10 sglang/0.5.14"}
_TRAINED = ("tokamax_attention", ATTENTION)
_MADE = ("tokamax_products", PRODUCTS)


def _kernel(kernel_name: str, chip_names: str, phase: str, **where: str) -> dict[str, str]:
    return {"kernel": kernel_name, "chip": chip_names, "pass": phase, "dtype": "bf16", **where}


def _generated(operation: str, source: str, dtype: str, time_fn: Callable[..., Any], **how: Any) -> Any:
    file_and_columns = ("generation_products", GEMM) if time_fn is times.product_s else ("generation_experts", EXPERTS)
    return operation, source, file_and_columns, {"dtype": dtype}, functools.partial(time_fn, **how)


def _decode(suffix: str, source: str, chips: str, **where: str) -> Any:
    file_and_columns = ("generation_attention", CACHED | GROUPED)
    return f"decode attention{suffix}", source, file_and_columns, {"chip": chips, **where}, times.generation_attention_s


_HOPPER, _BLACKWELL = "h100_sxm h200_sxm", "b200_sxm gb200 b300_sxm gb300"
_GPU, _TPU, _LOSS = "pallas_mosaic_gpu_", "pallas_mosaic_tpu_", "linear_softmax_cross_entropy_loss"
_backward = functools.partial(times.attention_s, phase="backward")
_CHOSEN: tuple[tuple[str, str, tuple[str, dict[str, str]], dict[str, str], Callable[..., Any]], ...] = (
    ("products", TENSORRT, ("gemm_bf16", GEMM), {}, times.product_s),
    ("fp8 products", TENSORRT, ("gemm_fp8", GEMM), {"dtype": "fp8", "source": "trtllm/1.3.0rc20"},
     functools.partial(times.product_s, narrow=True)),
    ("attention forward", SGLANG, ("attention_prefill_bf16", PREFILL), _SERVED,
     functools.partial(times.attention_s, paged=True)),
    ("attention forward", CUDNN, _TRAINED, _kernel("jax_nn_dot_product_attention", "h100", "forward"),
     times.attention_s),
    ("attention forward", PALLAS, _TRAINED, _kernel(_TPU + _FLASH, "v5p v6e tpu7x", "forward"), times.attention_s),
    ("attention backward", PALLAS, _TRAINED, _kernel(_GPU + _FLASH, "h100", "backward", head_dim="64 128 192"),
     _backward),
    ("attention backward", PALLAS, _TRAINED, _kernel(_TPU + _FLASH, "tpu7x", "backward"), _backward),
    ("grouped products", PALLAS, _MADE, _kernel(_GPU + _RAGGED, "h100 b200", "forward"), times.grouped_s),
    ("grouped products", PALLAS, _MADE, _kernel(_TPU + _RAGGED, "v5e v5p tpu7x", "forward"), times.grouped_s),
    ("gated units", PALLAS, _MADE, _kernel(_GPU + _GATED, "h100", "forward"),
     functools.partial(times.gated_s, fused=True)),
    ("gated units", XLA, _MADE, _kernel(_GATED, "v5p", "forward"), functools.partial(times.gated_s, fused=False)),
    ("loss forward", XLA, _MADE, _kernel(_LOSS, "h100 tpu7x v6e", "forward"), times.loss_s),
    ("loss backward", XLA, _MADE, _kernel(_LOSS, "h100 tpu7x", "backward"),
     functools.partial(times.loss_s, phase="backward")),
    ("collectives", NCCL, ("collectives_nvlink", {"op": "op_name", "n": "num_gpus", "bytes": "bytes"}), {},
     times.collective_s),
    _generated("few rows", TENSORRT, "bf16", times.product_s),
    _generated("few rows, fp8", TENSORRT, "fp8", times.product_s, narrow=True),
    _generated("few rows, fp8 blocks", TENSORRT, "fp8_block", times.product_s, narrow=True, blocks=True),
    _decode("", VLLM, "a100_sxm", bits="16", window="0"),
    _decode("", SGLANG, _HOPPER, bits="16", window="0"),
    _decode("", TENSORRT, _BLACKWELL, bits="16", window="0"),
    _decode(", fp8", TENSORRT, f"{_HOPPER} {_BLACKWELL}", bits="8", window="0"),
    _decode(", window", SGLANG, _HOPPER, bits="16", window="128"),
    _decode(", window", TENSORRT, _BLACKWELL, bits="16", window="128"),
    ("latent attention", TENSORRT, ("generation_latent_attention", CACHED),
     {"chip": f"{_HOPPER} {_BLACKWELL}"}, times.latent_attention_s),
    _generated("experts", TENSORRT, "bf16", times.experts_s),
    _generated("experts, fp8", TENSORRT, "fp8", times.experts_s, bits=8),
    _generated("experts, fp8 blocks", VLLM, "fp8_block", times.experts_s, bits=8, blocks=True),
    _generated("experts, nvfp4", VLLM, "nvfp4", times.experts_s, bits=4.5),
    ("small all-reduce", SGLANG, ("small_reduce", {"n": "gpus", "bytes": "bytes"}), {}, times.small_reduce_s),
)  # fmt: skip


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Selects a table's rows of one operation and kernel: ``where`` is column -> values, ``sizes`` letter -> column."""

    operation: str
    source: str
    file: str
    sizes: dict[str, str]
    where: dict[str, tuple[str, ...]]
    seconds_of: Callable[[Mapping[str, Any], KernelRates], Any]

    @property
    def goal(self) -> float:
        """Largest median error on a chip that meets the operation's goal."""
        return GENERATION_GOAL if self.file.startswith(("generation", "small")) else GOAL


CHOICES = tuple(
    Choice(
        operation=operation,
        source=source,
        file=file,
        sizes=sizes,
        where={column: tuple(values.split()) for column, values in where.items()},
        seconds_of=seconds_of,
    )
    for operation, source, (file, sizes), where, seconds_of in _CHOSEN
)
"""One kernel for each chip and operation: the one that users get by default, or the only one for the chip."""


class KernelGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The measured kernels of one chip and operation: sizes [rows] by letter, seconds [rows], and folds [rows]."""

    chip: str
    choice: Choice
    sizes: dict[str, np.ndarray]
    measured_s: np.ndarray
    folds: np.ndarray


class KernelErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Cross-validated errors of one chip and operation; ``fitted`` is the median error with the shipped numbers, which
    were fitted on all shapes. ``goal`` is "yes" if ``median`` meets the operation's goal, "" for too few rows."""

    operation: str
    chip: str
    rows: int
    median: float
    mape: float
    bias: float
    fitted: float
    goal: str
    source: str


def read_kernels(folder: Path) -> tuple[tuple[KernelGroup, ...], dict[str, int]]:
    """Returns the groups of a folder of tables, and the number of rows left out by reason.

    Raises InputError for a table that is missing, or a row without a number where one is needed.
    """
    kernel_groups, num_left_by_reason = [], Counter[str]()
    for file_name in dict.fromkeys(choice.file for choice in CHOICES):
        path = folder / f"{file_name}.csv"
        csv_text = read_text(path, "Name a folder with the tables of benchmarks/data/kernels.")
        rows = [{"_line": str(line_no)} | row for line_no, row in enumerate(csv.DictReader(csv_text.splitlines()), 2)]
        chosen_lines: set[str] = set()
        for choice in (choice for choice in CHOICES if choice.file == file_name):
            picked_rows = [row for row in rows if all(row.get(name) in values for name, values in choice.where.items())]
            time_column = COLUMNS[choice.source] if COLUMNS.get(choice.source) in rows[0] else "seconds"
            picked_rows = [row | {"seconds": row[time_column]} for row in picked_rows if row.get(time_column) != ""]
            chosen_lines |= {row["_line"] for row in picked_rows}
            chip_names = dict.fromkeys(row["chip"] for row in picked_rows)
            kernel_groups += [_group(choice, [r for r in picked_rows if r["chip"] == c], path) for c in chip_names]
        num_left_by_reason.update(_reason(row) for row in rows if row["_line"] not in chosen_lines)
    return tuple(kernel_groups), dict(num_left_by_reason)


def _reason(row: Mapping[str, str]) -> str:
    if row.get("dtype") == "f32":
        return "fp32 activations"
    if row.get("dtype") == "fp8_block" and "source" in row:
        return "fp8 with a scale for each block"
    if row.get("dtype") in ("nvfp4", "mxfp4"):
        return "4-bit weights that are not priced"
    if row.get("kernel", "").startswith("pallas_mosaic_gpu_flash") and row.get("pass") == "backward":
        return "attention backward with heads of 256 on h100"
    return "another kernel than the one chosen for the chip"


def _group(choice: Choice, rows: Sequence[Mapping[str, str]], path: Path) -> KernelGroup:
    values_by_letter: dict[str, list[Any]] = {letter: [] for letter in choice.sizes}
    measured_s = []
    for row in rows:
        try:
            for letter, column in choice.sizes.items():
                values_by_letter[letter].append(row[column] if letter == "op" else float(row[column]))
            measured_s.append(float(row["seconds"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}:{row['_line']}: {error}. Each row has sizes and seconds of a kernel.") from None
        if (
            not all(0 <= values_by_letter[letter][-1] < np.inf for letter in values_by_letter if letter != "op")
            or not 0 < measured_s[-1] < np.inf
        ):
            raise InputError(f"{path}:{row['_line']}: a size or a time is not a positive number.")
    array_by_letter = {letter: np.array(values) for letter, values in values_by_letter.items()}
    if choice.sizes is PREFILL:
        array_by_letter["causal"] = np.ones(len(rows))
    key_columns = [column for column in choice.sizes.values() if column != "copied"]
    row_keys = [",".join(row[column] for column in key_columns) for row in rows]
    return KernelGroup(
        chip=rows[0]["chip"].removesuffix("_sxm"),
        choice=choice,
        sizes=array_by_letter,
        measured_s=np.array(measured_s),
        folds=np.array([zlib.crc32(row_key.encode()) % NUM_FOLDS for row_key in row_keys]),
    )


def predicted_s(group: KernelGroup, numbers: Mapping[str, float]) -> np.ndarray:
    """Returns the predicted seconds of a group's kernels [rows]."""
    chip = find_chip(CHIPS.get(group.chip, group.chip))
    rates = kernel_rates(chip, numbers, cores=CORES_MEASURED.get(group.chip))
    return np.asarray(group.choice.seconds_of(group.sizes, rates))


def fit_kernels(groups: Sequence[KernelGroup], *, held_out: int = -1) -> dict[str, float]:
    """Returns the numbers that predict the rows outside the fold ``held_out`` best: least squares of log time.

    Errors beyond `ERROR_SCALE` count linearly, and every group counts as `USUAL_ROWS` rows.
    """
    log_priors = np.log(list(PRIORS.values()))

    def residuals(point: np.ndarray) -> np.ndarray:
        numbers = dict(zip(PRIORS, np.exp(point).tolist(), strict=True))
        residual_parts = [(point - log_priors) / PRIOR_SPREAD]
        for group in groups:
            scaled_errors = np.log(predicted_s(group, numbers) / group.measured_s) / ERROR_SCALE
            residual_parts.append((scaled_errors * np.sqrt(USUAL_ROWS / len(scaled_errors)))[group.folds != held_out])
        return np.concatenate(residual_parts)

    log_numbers = least_squares(residuals, log_priors, loss="soft_l1", max_nfev=40).x
    return {name: float(f"{value:.3g}") for name, value in zip(PRIORS, np.exp(log_numbers).tolist(), strict=True)}


def kernel_errors(groups: Sequence[KernelGroup], shipped: Mapping[str, float]) -> list[KernelErrors]:
    """Returns the errors of each group, each shape predicted by numbers fitted without its fold."""
    numbers_of_fold = [fit_kernels(groups, held_out=fold) for fold in range(NUM_FOLDS)]
    group_errors = []
    for group in groups:
        seconds_by_fold = np.stack([predicted_s(group, numbers) for numbers in numbers_of_fold])
        relative_errors = seconds_by_fold[group.folds, np.arange(len(group.folds))] / group.measured_s - 1
        median_error = float(np.median(np.abs(relative_errors)))
        group_errors.append(
            KernelErrors(
                operation=group.choice.operation,
                chip=group.chip,
                rows=len(relative_errors),
                median=median_error,
                mape=float(np.mean(np.abs(relative_errors))),
                bias=float(np.mean(relative_errors)),
                fitted=float(np.median(np.abs(predicted_s(group, shipped) / group.measured_s - 1))),
                goal="" if len(relative_errors) < FEWEST_ROWS else "yes" if median_error <= group.choice.goal else "no",
                source=group.choice.source,
            )
        )
    return group_errors
