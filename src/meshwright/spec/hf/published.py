"""Reads how the matrices of a published folder are quantised, from `quantization_config` in its config.json."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import read_json
from meshwright.core.units import format_bytes
from meshwright.spec.hf.families import HfFields
from meshwright.spec.hf.gguf import is_gguf
from meshwright.spec.model import GROUP, Model, StoredMatrices
from meshwright.spec.weights import weight_table

Method = Literal["fp8", "compressed-tensors", "awq", "gptq", "mxfp4"]
CONFIG_KEYS = ("quantization_config", "compression_config")
FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
"""Formats of compressed-tensors that are read."""


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How a matrix is stored: in ``dtype``, with a scale for ``outputs`` x ``inputs`` entries (0: all of them), and
    with zero points if it is not ``symmetric``. If groups are not ``in_order``, a list has the group of each input.
    """

    dtype: Literal["int8", "int4", "fp8", "fp4"]
    outputs: int = 1
    inputs: int = 0
    symmetric: bool = True
    in_order: bool = True

    @property
    def why_wide(self) -> str:
        """The reason why no product reads the matrix as it is stored; "" if products do."""
        reason = "zero points" if not self.symmetric else "" if self.in_order else "groups of inputs out of order"
        return "4-bit floats" if self.dtype == "fp4" else reason


class Quantisation(msgspec.Struct, frozen=True, kw_only=True):
    """The quantisation in a config: (pattern of module names, scheme), the first match counts; patterns of ``plain``
    modules; ``notes`` on what is not used. With ``zeros_less_one`` zero points are stored minus 1."""

    method: Method
    schemes: tuple[tuple[str, Scheme], ...]
    plain: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    zeros_less_one: bool = False

    def scheme(self, module: str) -> Scheme | None:
        """Returns the scheme of a module that is stored quantised; None if no pattern matches its name."""
        return next((scheme for pattern, scheme in self.schemes if _matches(pattern, module)), None)

    def is_plain(self, module: str) -> bool:
        """True if, by the config, a module is not quantised."""
        return self.scheme(module) is None or any(_matches(pattern, module) for pattern in self.plain)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == EVERY or f".{pattern}." in f".{module}."


EVERY = "Linear"
"""The pattern that matches every module with a matrix product."""


def quantisation_of(keys: HfFields, *, family: str, what: str) -> Quantisation | None:
    """Returns the quantisation of a config.json object; None without one. Raises InputError or CannotRunError, in one
    line, for a method, or a variant of a method, that is not read."""
    config = next((keys[key] for key in CONFIG_KEYS if keys.get(key)), None)
    if config is None:
        return None
    table = config if isinstance(config, Mapping) else {"quant_method": config}
    method = table.get("quant_method", "compressed-tensors" if "config_groups" in table else None)
    reader = _READERS.get(method) if isinstance(method, str) and isinstance(config, Mapping) else None
    if reader is None or (method == "mxfp4" and family != "gpt_oss"):
        fault = f"is {method!r}" if method else "names no quant_method"
        raise InputError(
            f"{what}: quantization_config {fault}. Only {', '.join(_READERS)} (of gpt_oss) is known here. Give the "
            f"weights in one of these or in bf16, or take quantization_config out to plan the shapes alone."
        )
    try:
        quantisation = reader(table)
        for pattern in (*quantisation.plain, *(pattern for pattern, _ in quantisation.schemes)):
            _matches(pattern, "")
        return quantisation
    except (InputError, CannotRunError) as error:
        raise type(error)(f"{what}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        reason = "a part has another form" if isinstance(error, TypeError | AttributeError) else str(error)
        cause = f"it lacks {error}" if isinstance(error, KeyError) else reason
        raise InputError(f"{what}: quantization_config of {method} is not understood ({cause}). Mend it.") from None


def _number(config: HfFields, key: str, allowed: tuple[int, ...], default: int) -> int:
    if (value := config.get(key, default)) not in allowed or isinstance(value, bool):
        raise InputError(f"quantization_config has {key}={value!r}. Only {' or '.join(map(str, allowed))} is read.")
    return int(value)


def _inputs(config: HfFields, default: int) -> int:
    """Returns the number of inputs of a group; 0 for all inputs, which files write as -1 or null."""
    size = config.get("group_size", default)
    if size not in (None, -1) and (not isinstance(size, int) or size < 1):
        raise InputError(f"quantization_config has group_size={size!r}. Write a positive number, or -1 for all inputs.")
    return 0 if size in (None, -1) else int(size)


def _block(config: HfFields, key: str) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs of a block with one scale."""
    block = config[key]
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise InputError(f"quantization_config has {key}={block!r}. Write outputs and inputs of a block: [128, 128].")
    return block[0], block[1]


def _require(config: HfFields, forms: tuple[str, ...], *keys: str) -> None:
    """Raises CannotRunError if the config has a value for one of ``keys`` that is not among ``forms``."""
    for key in keys:
        if (form := config.get(key)) and str(form).lower() not in forms:
            raise CannotRunError(f"weights with {key}={form!r} are not read in this version, only {', '.join(forms)}. "
                                 f"Give a folder in one of these.")  # fmt: skip


_ACTIVATIONS = "activations in {} are not executed: they stay in the model's dtype"


def _fp8(config: HfFields) -> Quantisation:
    num_outputs, num_inputs = _block(config, "weight_block_size") if config.get("weight_block_size") else (0, 0)
    scheme = Scheme(dtype="fp8", outputs=num_outputs, inputs=num_inputs)
    plain_patterns = ("lm_head", *(config.get("modules_to_not_convert") or ()))
    notes = (_ACTIVATIONS.format("fp8"),)
    return Quantisation(method="fp8", schemes=((EVERY, scheme),), plain=plain_patterns, notes=notes)


def _awq(config: HfFields) -> Quantisation:
    _require(config, ("gemm",), "version", "format", "checkpoint_format")
    _number(config, "bits" if "bits" in config else "w_bit", (4,), 4)
    group_size = _inputs(config, config.get("q_group_size", 128))
    scheme = Scheme(dtype="int4", inputs=group_size, symmetric=not config.get("zero_point", True))
    plain_patterns = ("lm_head", *(config.get("modules_to_not_convert") or ()))
    return Quantisation(method="awq", schemes=((EVERY, scheme),), plain=plain_patterns)


def _gptq(config: HfFields) -> Quantisation:
    _require(config, ("gptq", "gptq_v2"), "checkpoint_format", "format")
    patterns = config.get("dynamic") or ()
    if modules := [key for key in patterns if not key.startswith("-:")]:
        raise CannotRunError(f"dynamic has settings of its own for {modules[0]!r}, which this version does not read. "
                             f"Give a folder with one setting for all modules.")  # fmt: skip
    scheme = Scheme(
        dtype="int4" if _number(config, "bits", (4, 8), 4) == 4 else "int8",
        inputs=_inputs(config, 128),
        symmetric=bool(config.get("sym", True)),
        in_order=not config.get("desc_act", False),
    )
    plain = (*(key.replace("-:", "re:", 1) for key in patterns), *(() if config.get("lm_head") else ("lm_head",)))
    is_less_one = (config.get("checkpoint_format") or config.get("format") or "gptq").lower() == "gptq"
    return Quantisation(method="gptq", schemes=((EVERY, scheme),), plain=plain, zeros_less_one=is_less_one)


def _compressed(config: HfFields) -> Quantisation:
    _require(config, FORMATS, "format")
    _require(config.get("sparsity_config") or {}, ("dense",), "format")
    if config.get("transform_config"):
        raise CannotRunError("transform_config changes what is computed and is not read in this version. Give a folder "
                             "without it.")  # fmt: skip
    schemes, notes = list[tuple[str, Scheme]](), list[str]()
    for group_config in config["config_groups"].values():
        _require(group_config, FORMATS, "format")
        scheme = _scheme(group_config["weights"])
        schemes += [(pattern, scheme) for pattern in group_config.get("targets") or (EVERY,)]
        if activations := group_config.get("input_activations") or group_config.get("output_activations"):
            notes.append(_ACTIVATIONS.format(f"{activations.get('type', 'int')}{activations.get('num_bits', 8)}"))
    if config.get("kv_cache_scheme"):
        notes.append("kv_cache_scheme is not used: choose the cache's dtype with --cache-dtype")
    return Quantisation(
        method="compressed-tensors",
        schemes=tuple(sorted(schemes, key=lambda pair: pair[0] == EVERY)),
        plain=tuple(config.get("ignore") or ()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _scheme(setting_values: HfFields) -> Scheme:
    """Returns the scheme of a group of compressed-tensors."""
    dtype_by_format: Any = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}
    _require(setting_values, ("tensor", "channel", "group", "tensor_group", "block"), "strategy")
    group_size = _inputs(setting_values, -1)
    strategy = setting_values.get("strategy") or ("group" if group_size else "tensor")
    num_outputs = 0 if strategy == "tensor" else 1
    if strategy == "block":
        num_outputs, group_size = _block(setting_values, "block_structure")
    elif "group" not in strategy:
        group_size = 0
    elif not group_size:
        raise InputError(f"quantization_config has strategy={strategy!r} without a group_size. Add it.")
    return Scheme(
        dtype=dtype_by_format[setting_values.get("type", "int"), _number(setting_values, "num_bits", (4, 8), 8)],
        outputs=num_outputs,
        inputs=group_size,
        symmetric=bool(setting_values.get("symmetric", True)),
        in_order=setting_values.get("actorder") not in ("group", True),
    )


_MXFP4 = Quantisation(method="mxfp4", schemes=(("experts", Scheme(dtype="fp4", inputs=32)),))
_READERS = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq, "mxfp4": lambda table: _MXFP4}

SCALES = (".weight_scale_inv", ".weight_scale", ".scales")
"""Ends of the names of tensors that are scales."""
_BESIDE = (*SCALES, "_scale", "_scales", "_zero_point")
"""Ends of the names of tensors that are not weights: their dtype is not the dtype of weights."""


def stored_matrices(
    model: Model, quantisation: Quantisation, names: Collection[str] = ()
) -> tuple[StoredMatrices | None, dict[tuple[str, str], int]]:
    """Returns the matrices of a folder that generation keeps quantised, and the numbers of parameters that it widens,
    by (dtype, reason). The ``names`` of its tensors say which matrices are quantised; without names the config does."""
    narrow_rows, num_widened, group_size = list[tuple[str, Any, bool]](), dict[tuple[str, str], int](), 0
    for row in weight_table(model):
        if row.kind != "matrix" or row.tied_to or row.part in ("embedding", "router"):
            continue
        name = row.stored_name(names)
        indices = itertools.product(row.layers or (0,), range(model.num_experts if "{expert}" in name else 1))
        modules = [name.format(layer=layer, expert=expert).removesuffix(".weight") for layer, expert in indices]
        suffixes = *SCALES, "_scales"
        flags = [not any(m + end in names for end in suffixes) if names else quantisation.is_plain(m) for m in modules]
        schemes = {None if is_plain else quantisation.scheme(m) for m, is_plain in zip(modules, flags, strict=True)}
        if not (schemes_found := [scheme for scheme in schemes if scheme]):
            continue
        scheme = schemes_found[0]
        reason = scheme.why_wide or "layers that are stored in another form" * (len(schemes) > 1)
        if (is_grouped := scheme.inputs > 0 or scheme.dtype == "int4") and not reason:
            inputs = scheme.inputs or GROUP
            group_size = group_size or inputs
            width = math.gcd(group_size, model.dims[row.inputs[-1]])
            reason = f"groups of {inputs} inputs" * (inputs % width > 0 or (scheme.dtype == "int4" and width % 2 > 0))
        elif row.inputs[-1] == "Rkv" and "Hn" in row.dims:
            reason = reason or "scales of outputs over which generation sums"
        if reason:
            num_widened[scheme.dtype, reason] = num_widened.get((scheme.dtype, reason), 0) + row.num_params
        else:
            narrow_rows.append((row.name, scheme.dtype, is_grouped))
    return StoredMatrices(matrices=tuple(narrow_rows), group=group_size or GROUP) if narrow_rows else None, num_widened


class FolderWeights(NamedTuple):
    """The weights of a folder: the dtype in which plain and widened weights are served, the quantisation, the matrices
    that generation keeps quantised, and the numbers of parameters that it widens, by (dtype, reason)."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    quantisation: Quantisation | None = None
    stored: StoredMatrices | None = None
    wide: Mapping[tuple[str, str], int] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on stored data that is not used, and on quantised weights that are widened."""
        lines = (
            f"the {dtype} weights have {reason}, for which there is no kernel: served in {self.dtype}, "
            f"{format_bytes(num_params * DTYPE_BYTES[self.dtype])}"
            for (dtype, reason), num_params in self.wide.items()
        )
        return (*(self.quantisation.notes if self.quantisation else ()), *lines)


def folder_weights(model: Model, folder: Path, tensors: Mapping[str, Any]) -> FolderWeights:
    """Returns the weights of a folder, from its ``tensors`` and (unless it has GGUF files) its config.json. Their dtype
    is fp32 if some tensors are float32 and none is in 16 bits, else bf16."""
    file, base_model = folder / "config.json", replace(model, lora=None)
    keys = {} if is_gguf(folder) else read_json(file, "Give the folder of a model.")
    quant = quantisation_of(keys, family=model.family, what=str(file))
    dtype_names = {tensor.dtype.name for name, tensor in tensors.items() if not name.endswith(_BESIDE)}
    dtype: Any = "fp32" if "float32" in dtype_names and not dtype_names & {"bfloat16", "float16"} else "bf16"
    num_by_kind = Counter[tuple[str, str]]()
    for tensor in (tensor for tensor in tensors.values() if hasattr(tensor, "kind")):
        if (kind_name := tensor.kind.name) not in ("F32", "F16", "BF16"):
            num_by_kind[kind_name, "blocks of GGUF"] += math.prod(tensor.shape)
    return FolderWeights(dtype, quant, *(stored_matrices(base_model, quant, tensors) if quant else (None, num_by_kind)))
