"""Adapters in PEFT's format: ``adapter_config.json``, which names the folder of the base weights, and
``adapter_model.safetensors``."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.transformer import rows
from meshwright.core.digests import require_intact
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import read_json
from meshwright.nn.hf.files import DTYPES, Tensors
from meshwright.nn.hf.format import stored_parts
from meshwright.nn.hf.gguf import as_folder, open_files
from meshwright.nn.hf.published import with_floats
from meshwright.nn.hf.tokenizer import CONFIG
from meshwright.nn.weights import sinusoids
from meshwright.spec.hf.published import Quantisation, quantisation_of
from meshwright.spec.model import LORA_TARGETS, Lora, Model
from meshwright.spec.weights import adapted, frozen_base, unsaved_tables, weight_table

ADAPTER_CONFIG, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"

_PLAIN = {"bias": "none", "use_dora": False}
_ABSENT = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication")
"""Keys of PEFT's config that must have this value, and keys that must be absent or empty."""


def is_adapter(folder: Path) -> bool:
    """True if a folder has an adapter's config."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """Returns the folder of an adapter's base weights; a relative path starts at the adapter's folder or, as in PEFT,
    at the current one. Raises InputError if it is not a folder."""
    base_id = read_json(folder / ADAPTER_CONFIG, "Give the folder of an adapter.").get("base_model_name_or_path") or ""
    base_path = Path(str(base_id)).expanduser()
    for base in map(as_folder, (folder / base_path, base_path)):
        if base_id and base.is_dir():
            return base
    raise InputError(
        f"{folder / ADAPTER_CONFIG} names the base model {base_id!r}, a folder that is neither in {folder} nor in "
        f"{Path.cwd()}. Write the folder of the base as base_model_name_or_path."
    )


# -- reading ------------------------------------------------------------------------------------------


def adapted_model(model: Model, folder: Path) -> Model:
    """Returns a base model with the adapter of a folder. Raises CannotRunError for a kind that is not supported."""
    return replace(model, lora=_lora(model, folder))


def model_with_adapters(model: Model, folders: Sequence[Path]) -> Model:
    """Returns a base model with the folders' adapters joined at equal rank. Raises InputError if one has none."""
    if model.lora:
        raise InputError(f"{model.name} is an adapter itself. Serve its base, with it as one of the adapters.")
    if plain_folder := next((folder for folder in folders if not is_adapter(folder)), None):
        raise InputError(f"{plain_folder} has no {ADAPTER_CONFIG}. Give the folder of an adapter in PEFT's format.")
    loras = [_lora(model, folder) for folder in folders]
    rank = len(folders) * max(lora.rank for lora in loras)
    targets = tuple(name for name, weight in LORA_TARGETS.items() if any(weight in lora.weights for lora in loras))
    return replace(model, lora=Lora(rank=rank, alpha=rank, targets=targets))


def _lora(model: Model, folder: Path) -> Lora:
    config = read_json(folder / ADAPTER_CONFIG, "Give the folder of an adapter.")
    plain_settings = {name: config.get(name, value) for name, value in _PLAIN.items()}
    faults = [f"{name}={plain_settings[name]!r}" for name, value in _PLAIN.items() if plain_settings[name] != value]
    faults += [f"{name}={config[name]!r}" for name in _ABSENT if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA" or faults:
        raise CannotRunError(f"{folder / ADAPTER_CONFIG} has {', '.join(faults) or 'another peft_type than LORA'}, "
                             f"which this version does not read. Merge the adapter with PEFT.")  # fmt: skip
    fields = {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "targets": _targets(model, config, folder)}
    try:
        lora = msgspec.convert(fields, Lora)
    except msgspec.ValidationError as error:
        raise InputError(f"{folder / ADAPTER_CONFIG}: {error}. Mend the file.") from None
    # rank-stabilised (Kalajdzievski 2023): products are scaled by alpha over the root of the rank
    return replace(lora, alpha=lora.alpha * math.sqrt(lora.rank)) if config.get("use_rslora") is True else lora


def _targets(model: Model, keys: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Returns the keys of the adapted weights in `LORA_TARGETS`. PEFT's config lists modules, by their whole names or
    last words, or has a regular expression."""
    targets, path = keys.get("target_modules") or (), folder / ADAPTER_CONFIG
    template_of = {name: _module(model, weight) for name, weight in LORA_TARGETS.items()}
    modules_of = {n: [t.format(layer=layer) for layer in range(model.num_layers)] for n, t in template_of.items() if t}

    def is_meant(module: str) -> bool:
        if isinstance(targets, str):
            return targets == "all-linear" or re.fullmatch(targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in targets)

    flags_of = {name: list(map(is_meant, modules)) for name, modules in modules_of.items()}
    all_modules = [module for modules in modules_of.values() for module in modules]
    target_names = () if isinstance(targets, str) else targets
    unknown = [t for t in target_names if not any(module == t or module.endswith(f".{t}") for module in all_modules)]
    unknown += [f"{name} in some layers only" for name, flags in flags_of.items() if any(flags) and not all(flags)]
    if unknown or not any(any(flags) for flags in flags_of.values()):
        raise CannotRunError(
            f"{path} targets {', '.join(unknown) or targets}: this version has adapters of {', '.join(modules_of)}, in "
            f"every layer. Merge the adapter with PEFT."
        )
    return tuple(name for name, flags in flags_of.items() if all(flags))


def _module(model: Model, weight: str) -> str:
    """Returns the published name of the module of a layer's weight, "" if the model has no such weight."""
    weights = weight_table(frozen_base(model))
    return next((row.hf_name.removesuffix(".weight") for row in weights if row.name == f"layers.{weight}"), "")


@contextmanager
def open_tensors(model: Model, folder: Path, adapters: Sequence[Path] = ()) -> Iterator[Tensors]:
    """Opens the tensors of a checkpoint, of an adapter with its base, or of a base with several ``adapters`` as one."""
    with ExitStack() as stack:

        def opened(path: Path) -> Tensors:
            require_intact(path := as_folder(path))
            return with_floats(stack.enter_context(open_files(path)), *_quantisation(model, path))

        folders = [base_folder(folder), folder] if model.lora and is_adapter(folder) else [folder]
        tensors: dict[str, Any] = {row.hf_name: sinusoids(*row.shape) for row in unsaved_tables(model)}
        tensors |= {name: tensor for weights_folder in folders for name, tensor in opened(weights_folder).items()}
        if adapters:
            tensors |= _side_by_side(model, [(adapter, opened(adapter)) for adapter in adapters], tensors)
        yield tensors


def _quantisation(model: Model, folder: Path) -> tuple[Quantisation | None, np.dtype]:
    """Returns the quantisation that a folder's config states, if any, and the dtype of its other weights."""
    config_path = folder / CONFIG
    config = read_json(config_path, "Give the folder of a model.") if config_path.is_file() else {}
    dtype_name = str(config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype"))
    float_dtype = {"float32": DTYPES["fp32"], "float16": DTYPES["fp16"]}.get(dtype_name, DTYPES["bf16"])
    return quantisation_of(config, family=model.family, what=str(config_path)), float_dtype


def _side_by_side(model: Model, adapters: Sequence[tuple[Path, Tensors]], base: Tensors) -> dict[str, np.ndarray]:
    """Returns the tensors of several adapters as one adapter's, with the factor alpha / rank of each in its B.

    Weights that an adapter lacks are zeros. Raises InputError for an adapter of another base.
    """
    joined_tensors = {name: np.zeros(shape, np.float32) for name, shape in _shapes(model, base).items()}
    loras = [_lora(frozen_base(model), folder) for folder, _ in adapters]
    rank = max(lora.rank for lora in loras)
    for index, (lora, (folder, tensors)) in enumerate(zip(loras, adapters, strict=True)):
        shape_of, rank_cols = _shapes(replace(model, lora=lora), base), slice(index * rank, index * rank + lora.rank)
        for name in sorted(shape_of.keys() | tensors.keys()):
            shape, expected = tuple(tensors[name].shape) if name in tensors else (), shape_of.get(name, ())
            if shape != expected:
                raise InputError(
                    f"{folder}: {name} is {shape or 'not there'}; {model.name} needs {expected or 'no such tensor'}. "
                    f"Give an adapter of this base."
                )
            factor = tensors[name][tuple(map(slice, shape))]
            if name.endswith(".lora_A.weight"):
                joined_tensors[name][rank_cols] = factor
            else:
                joined_tensors[name][:, rank_cols] = lora.scale * factor.astype(np.float32)
    return joined_tensors


def _shapes(model: Model, base: Tensors) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the stored tensors of a model's adapter, in the layout of a base."""
    table = rows(model)
    return {part.tensor: part.shape for part in stored_parts(model, base) if table[part.variable].part == "adapter"}


# -- writing ------------------------------------------------------------------------------------------


def adapter_config(model: Model, base: str) -> dict[str, Any]:
    """Returns the adapter_config.json object of a model's adapter; ``base`` is the folder of its base weights."""
    assert model.lora is not None
    module_names = [_module(model, weight) for weight in adapted(model)]
    alpha = model.lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": int(alpha) if alpha % 1 == 0 else alpha,
        "target_modules": sorted({".".join(module.split(".")[-2:]) for module in module_names}),
        "fan_in_fan_out": model.family == "gpt2",
        "inference_mode": True,
        "lora_dropout": 0.0,
        **_PLAIN,
    }
