"""The weights of a run as a safetensors file with Hugging Face's names, and a run read back."""

from collections.abc import Iterator
from pathlib import Path

import jax
import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole, write_whole
from meshwright.nn.weights import Params, is_stacked, params_from_hf, rows
from meshwright.spec.hf import config_from_model, model_from_config
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight
from meshwright.train.tokenizer import load_tokenizer

WEIGHTS, CONFIG, TOKENIZER = "weights.safetensors", "config.json", "tokenizer.json"


def hf_tensors(model: Model, params: Params) -> dict[str, np.ndarray]:
    """Every weight gathered on the host under its Hugging Face name; undoes `nn.weights.params_from_hf`."""
    tensors: dict[str, np.ndarray] = {}
    for name, weight in rows(model).items():
        tensors.update(_layers(weight, np.asarray(jax.device_get(params[name]))))
    return tensors


def _layers(weight: Weight, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if not is_stacked(weight):
        yield weight.hf_name, _as_stored(weight, array)
        return
    for layer, one in enumerate(array):
        yield weight.hf_name.format(layer=layer, expert="{expert}"), _as_stored(weight, one)


def _as_stored(weight: Weight, array: np.ndarray) -> np.ndarray:
    """Hugging Face stores a linear layer as [out, in], with the heads of a projection in one dim."""
    if weight.kind == "vector" or weight.part == "embedding":
        return np.ascontiguousarray(array)
    # The last dims go out for q, k, v and the feed-forward; `wo` takes heads in: its first two dims are one.
    num_in = 2 if weight.dims[0] == "N" else 1
    inputs = int(np.prod(array.shape[:num_in]))
    # safetensors writes the buffer as it lies, so a transposed view would be stored wrong.
    return np.ascontiguousarray(array.reshape(inputs, -1).T)


def save_weights(model: Model, params: Params, folder: Path) -> None:
    """``weights.safetensors`` and ``config.json`` in a run's folder."""
    tensors = hf_tensors(model, params)
    write_whole(folder / WEIGHTS, lambda part: save_file(tensors, part, metadata={"format": "pt"}))
    config = msgspec.json.format(msgspec.json.encode(config_from_model(model)))
    write_text_whole(folder / CONFIG, config.decode() + "\n")


def load_run(folder: Path) -> tuple[Model, Params, Tokenizer]:
    """Model, weights and tokenizer of a run's folder, on the first device.

    Raises InputError when the folder has no weights.
    """
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} has no {WEIGHTS}. Give the folder of a finished run.")
    model = model_from_config(folder / CONFIG, folder.name)
    return model, params_from_hf(model, load_file(folder / WEIGHTS)), load_tokenizer(folder / TOKENIZER)
