"""Tensors of GGUF files under their published names, and a Hugging Face folder for each model in such files."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.core.errors import InputError
from meshwright.core.extras import require
from meshwright.core.files import cache_folder, write_json_whole, write_text_whole
from meshwright.nn.hf.chat_template import TEMPLATE, read_chat_templates
from meshwright.nn.hf.files import DTYPES, PICKLED, Tensor, open_checkpoint
from meshwright.nn.hf.gguf_tokenizer import gguf_tokenizer
from meshwright.nn.hf.tokenizer import CONFIG, GENERATION, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from meshwright.spec.hf.gguf import StoredBlocks, gguf_config, gguf_files, gguf_name, gguf_names, is_gguf, read_gguf
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight, weight_table


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in blocks of few bits, widened to float32 when indexed: only the blocks of the indexed rows.

    ``dtype`` is the dtype of the weights once loaded. ``rows`` are the stored rows in their published order. ``shift``
    is added to all values. ``transposed``: the published matrix is the stored one transposed.
    """

    data: np.ndarray  # [..., bytes of a row]
    kind: Any
    dtype: np.dtype
    rows: np.ndarray | None = None
    shift: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        block_len, num_bytes = _block(self.kind)
        stored_shape = (*self.data.shape[:-1], self.data.shape[-1] // num_bytes * block_len)
        return stored_shape[::-1] if self.transposed else stored_shape

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        from gguf.quants import dequantize

        if self.transposed:
            return replace(self, transposed=False)[box[::-1]].T
        if self.rows is not None and len(box) == 1:  # a bias
            return replace(self, rows=None)[slice(0, len(self.rows)),][self.rows[box]]
        *leading_slices, columns = box
        size, num_bytes = _block(self.kind)
        first_block, end_block = columns.start // size, -(-columns.stop // size)
        row_index = leading_slices if self.rows is None else [self.rows[leading_slices[0]]]
        block_bytes = self.data[*row_index, slice(first_block * num_bytes, end_block * num_bytes)]
        floats: np.ndarray = dequantize(np.ascontiguousarray(block_bytes), self.kind)
        floats = floats[..., columns.start - first_block * size : columns.stop - first_block * size : columns.step]
        return floats + np.float32(self.shift) if self.shift else floats  # -0.0 stays what it is


def _block(kind: Any) -> tuple[int, int]:
    """Returns the number of values and of bytes in a block of a type."""
    from gguf.constants import GGML_QUANT_SIZES

    len_and_bytes: tuple[int, int] = GGML_QUANT_SIZES[kind]
    return len_and_bytes


# -- tensors ------------------------------------------------------------------------------------------


@contextmanager
def open_files(folder: Path) -> Iterator[Mapping[str, Tensor]]:
    """Yields the tensors of a folder's weight files by name; of its GGUF files if there are no others."""
    has_weights = any(file for pattern in ("*.safetensors", f"{PICKLED}*") for file in folder.glob(pattern))
    if not has_weights and (files := gguf_files(folder)):
        yield gguf_tensors(files, model_from_config(folder))
    else:
        with open_checkpoint(folder) as tensors:
            yield tensors


def gguf_tensors(files: list[Path], model: Model) -> dict[str, Tensor]:
    """Returns the tensors of a model's files by their published names; unknown tensors keep their own names.

    Undoes llama.cpp's conversion of weights: it orders rows of a llama's q and k by rotated pairs, adds 1 to the norms
    of a gemma, transposes the linear layers of GPT-2 and stacks experts.
    """
    entries, names = read_gguf(files).tensors, gguf_names()
    embed_entry = entries.get("token_embd.weight")
    dtype = {0: DTYPES["fp32"], 1: DTYPES["fp16"]}.get(embed_entry.kind if embed_entry else 0, DTYPES["bf16"])
    unread = {name: _blocks(name, tensor, dtype) for name, tensor in entries.items() if not name.startswith("rope_f")}
    tensors: dict[str, Tensor] = {}
    num_sharing = Counter((weight.hf_name, weight.layers) for weight in weight_table(model) if not weight.tied_to)
    for weight in weight_table(model):
        gguf_name_of = names["weights"] | (names["joined"] if num_sharing[weight.hf_name, weight.layers] > 1 else {})
        leaf_name = gguf_name_of.get(weight.name.removeprefix("layers."), "")
        for layer in weight.layers or (0,):
            name = f"blk.{layer}.{leaf_name}" if weight.layers else leaf_name
            if name not in unread:  # a part of a tensor that is found; others are refused where weights are read
                continue
            tensor = _published(model, weight, unread.pop(name))
            if "{expert}" in weight.hf_name:
                for expert, expert_data in enumerate(tensor.data):
                    tensors[weight.hf_name.format(layer=layer, expert=expert)] = replace(tensor, data=expert_data)
            else:
                tensors[weight.hf_name.format(layer=layer)] = tensor
    return {**unread, **tensors}


def _published(model: Model, weight: Weight, stored: GgufTensor) -> GgufTensor:
    """Returns a stored tensor with the published order of rows, offset and orientation."""
    weight_name, row_order, data = weight.name.removeprefix("layers."), None, stored.data
    if model.family in ("llama", "mixtral") and weight_name in ("wq", "wk", "bq", "bk"):
        row_order = np.arange(stored.shape[0]).reshape(-1, model.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    return replace(
        stored,
        data=data[None] if weight_name == "shared.gate" and data.ndim == 1 else data,
        rows=row_order,
        shift=-1.0 if model.norm_unit_offset and weight.part == "norm" else 0.0,
        transposed=model.family == "gpt2" and bool(weight.layers) and weight.kind == "matrix",
    )


def _blocks(name: str, tensor: StoredBlocks, dtype: np.dtype) -> GgufTensor:
    """Returns a file's tensor as stored. Raises InputError if its type is unknown or the file is cut short, and without
    the package ``gguf``."""
    require("gguf", f"reading the weights of {tensor.file}")
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    file, shape = tensor.file, tensor.shape
    try:
        kind = GGMLQuantizationType(tensor.kind)
        block_len, num_bytes = _block(kind)
        dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise InputError(
            f"{file}: {name} is of type {tensor.kind}, which the installed package gguf does not widen. Quantise the "
            f"model as another type, or install a newer gguf."
        ) from None
    needed_bytes, present_bytes = math.prod(shape) // block_len * num_bytes, file.stat().st_size - tensor.start
    if not shape or shape[-1] % block_len or not 0 < needed_bytes <= present_bytes:
        raise InputError(
            f"{file} is cut short or damaged: {name}, {' x '.join(map(str, shape))} in blocks of {block_len}, needs "
            f"{needed_bytes:,} bytes and has {max(present_bytes, 0):,}. Fetch it again."
        )
    stored_shape = (*shape[:-1], shape[-1] // block_len * num_bytes)
    return GgufTensor(np.memmap(file, np.uint8, "r", tensor.start, stored_shape), kind, dtype)


# -- a folder -----------------------------------------------------------------------------------------

_BESIDE = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE, GENERATION)
"""Files next to a GGUF file that take precedence over its own metadata."""
_VERSION = 1
"""Increased when the format of a cached folder changes, so that earlier folders are not used."""


def as_folder(path: Path) -> Path:
    """Returns a Hugging Face folder for a GGUF file, or for a folder of one; any other path unchanged.

    The folder is in the cache. It has the file's config and tokenizer, and links to the file and to files next to it
    that take precedence.
    """
    if not is_gguf(path):
        return path
    files = gguf_files(path)
    linked_files = [*files, *(file for name in _BESIDE if (file := files[0].with_name(name)).is_file())]
    file_stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in linked_files]
    digest = hashlib.sha256(repr((_VERSION, file_stats)).encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / digest / gguf_name(files[0])
    if (folder / CONFIG).is_file():  # written last
        return folder
    config, metadata = gguf_config(path), read_gguf(files).values
    model_from_config(config, gguf_name(files[0]))
    folder.mkdir(parents=True, exist_ok=True)
    for file in linked_files:
        temp_link = folder / f".{file.name}.{os.getpid()}"
        temp_link.symlink_to(file.resolve())
        temp_link.replace(folder / file.name)
    if not (folder / TOKENIZER).exists() and (converted := gguf_tokenizer(metadata)):
        write_text_whole(folder / TOKENIZER, converted.tokenizer.to_str())
        if not (folder / TOKENIZER_CONFIG).exists():
            write_json_whole(folder / TOKENIZER_CONFIG, converted.config)
        if not (folder / GENERATION).exists():
            templates, end_ids = (read_chat_templates(folder), converted.generation.get("eos_token_id", []))
            # files need not name it
            turn_end = converted.tokenizer.token_to_id(templates.turn_end) if templates else None
            end_ids += [] if turn_end is None or turn_end in end_ids else [turn_end]
            write_json_whole(folder / GENERATION, converted.generation | ({"eos_token_id": end_ids} if end_ids else {}))
    write_json_whole(folder / CONFIG, config)
    return folder
