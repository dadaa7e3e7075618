"""Reads the header of GGUF files, as llama.cpp writes models, and their metadata as the keys of a config.json.

The header is parsed here, as the ``gguf`` package takes 12 s for a vocabulary of 262,144 tokens. Sources: the GGUF
specification (docs/gguf.md of ggml) and llama.cpp's conversion from Hugging Face (convert_hf_to_gguf.py).
"""

import itertools
import math
import mmap
import re
import struct
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.spec.hf.families import HfFields

VERSIONS, ALIGNMENT, MOST_DIMS = (2, 3), 32, 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
"""End of the name of a file that is one of several files of a model."""


class StoredBlocks(NamedTuple):
    """A tensor in a file: sizes of its dims, outermost first, the number of its GGUF type, the file and the offset."""

    shape: tuple[int, ...]
    kind: int
    file: Path
    start: int


class Gguf(NamedTuple):
    """The headers of a model's files: metadata by name, and the place of each tensor by name."""

    values: HfFields
    tensors: dict[str, StoredBlocks]


@cache
def gguf_names() -> dict[str, dict[str, str]]:
    """Returns the tables of data/gguf.toml."""
    return tomllib.loads((Path(__file__).parents[1] / "data" / "gguf.toml").read_text(encoding="utf-8"))


# -- files --------------------------------------------------------------------------------------------


def gguf_files(path: Path) -> list[Path]:
    """Returns the GGUF files of a model: of one of them, or of their folder; [] for another path.

    Raises InputError for a folder with several models, and for a model of which a file is missing.
    """
    files = [path] if path.suffix == ".gguf" and path.is_file() else []
    if path.is_dir():
        files = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))  # of a vision tower
    file_of = {gguf_name(file): file for file in files}
    if len(file_of) > 1:
        raise InputError(f"{path} has {len(file_of)} models: {', '.join(file_of)}. Give the file of one of them.")
    for name, file in file_of.items():
        if parts := _PART.search(file.stem):
            num_parts = int(parts[1])
            files = [file.with_name(f"{name}-{i + 1:05}-of-{num_parts:05}.gguf") for i in range(num_parts)]
            if missing_file := next((file for file in files if not file.is_file()), None):
                raise InputError(f"{missing_file} is missing, one of {num_parts} files of {name}. Fetch it.")
    return files


def is_gguf(path: Path) -> bool:
    """True for a GGUF file, and for a folder of such files without a config.json."""
    return not (path / "config.json").is_file() and bool(gguf_files(path))


def gguf_name(file: Path) -> str:
    """Returns the name of a model: the name of one of its files without the number of the part."""
    return _PART.sub("", file.stem)


def read_gguf(files: Sequence[Path]) -> Gguf:
    """Reads the headers of a model's files. Raises InputError for a file that is not GGUF or is cut short."""
    return _read(tuple((file.resolve(), file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=2)
def _read(files: tuple[tuple[Path, int], ...]) -> Gguf:
    value_by_key, tensors = HfFields(), dict[str, StoredBlocks]()
    for file, _ in files:
        with _whole(file):
            header = _Reader(file).header()
        if repeated_name := next(iter(tensors.keys() & header.tensors.keys()), None):
            raise InputError(f"{file} and {tensors[repeated_name].file} both have {repeated_name}. Remove one of them.")
        value_by_key, tensors = header.values | value_by_key, tensors | header.tensors
    return Gguf(value_by_key, tensors)


@contextmanager
def _whole(file: Path) -> Iterator[None]:
    """Turns errors that impossible metadata causes inside the block into an InputError that names the file."""
    try:
        yield
    except (TypeError, ArithmeticError, ValueError, OSError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} has metadata that no model has ({error}). Fetch it again.") from None


class _Reader:
    """Reads the values of a file's header one after another; raises InputError if the header is not valid."""

    def __init__(self, file: Path) -> None:
        self.file, self.at = file, 0
        with file.open("rb") as open_file:
            self.data = mmap.mmap(open_file.fileno(), 0, access=mmap.ACCESS_READ) if file.stat().st_size else b""

    def header(self) -> Gguf:
        if self.bytes(4) != b"GGUF":
            raise InputError(f"{self.file} is not a GGUF file. Fetch it again.")
        (version,) = self.take("I")
        if version not in VERSIONS:
            raise InputError(f"{self.file} is GGUF version {version:#x}; 2 and 3 are read, little-endian. Convert it.")
        num_tensors, num_values = self.take("QQ")
        values = {self.text(): self.value(self.take("I")[0]) for _ in range(num_values)}
        table = {}
        for _ in range(num_tensors):
            name, num_dims = self.text(), self.take("I")[0]
            if num_dims > MOST_DIMS or name in table:
                raise InputError(f"{self.file} has {name} twice, or with {num_dims} dims. Fetch it again.")
            table[name] = (self.take("Q" * num_dims)[::-1], *self.take("IQ"))
        alignment = values.get("general.alignment", ALIGNMENT)
        if bad_name := next((name for name, (*_, offset) in table.items() if offset % alignment), None):
            raise InputError(f"{self.file}: {bad_name} begins at no multiple of {alignment} bytes. Fetch it again.")
        base = -(-self.at // alignment) * alignment
        return Gguf(
            values, {n: StoredBlocks(shape, kind, self.file, base + start) for n, (shape, kind, start) in table.items()}
        )

    def bytes(self, number: int) -> bytes:
        data = self.data[self.at : self.at + number]
        if len(data) < number:
            raise InputError(f"{self.file} is cut short: it ends in its header. Fetch it again.")
        self.at += number
        return data

    def take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.bytes(self.take("Q")[0]).decode(errors="replace")

    def value(self, kind: int) -> Any:
        entry_kind, num_entries = self.take("IQ") if kind == _ARRAY else (kind, 1)
        if entry_kind == _STRING:
            values: list[Any] = [self.text() for _ in range(num_entries)]
        elif entry_kind in _SCALARS:
            values = list(self.take(f"{num_entries}{_SCALARS[entry_kind]}"))
        else:
            raise InputError(f"{self.file} has a value of type {entry_kind}, which GGUF does not have. Fetch it again.")
        if kind == _ARRAY or entry_kind != _FLOAT32 or not math.isfinite(values[0]):
            return values if kind == _ARRAY else values[0]
        # 1e-6, not the float64 of the float32 next to it
        roundings = (float(f"{values[0]:.{digits}g}") for digits in range(6, 9))
        return next((num for num in roundings if struct.unpack("f", struct.pack("f", num))[0] == values[0]), values[0])


def stored_bytes(path: Path) -> dict[str, int]:
    """Maps names of tensor types to their bytes in a model's GGUF files. Raises InputError for a file cut short."""
    tensors = sorted(read_gguf(gguf_files(path)).tensors.values(), key=lambda tensor: (tensor.file, tensor.start))
    bytes_by_type: dict[str, int] = {}
    for tensor, next_tensor in itertools.zip_longest(tensors, tensors[1:]):
        end_byte = next_tensor.start if next_tensor and next_tensor.file == tensor.file else tensor.file.stat().st_size
        if end_byte <= tensor.start:
            raise InputError(f"{tensor.file} is cut short: it ends before its last tensors. Fetch it again.")
        type_name = gguf_names()["types"].get(str(tensor.kind), f"type {tensor.kind}")
        bytes_by_type[type_name] = bytes_by_type.get(type_name, 0) + end_byte - tensor.start
    return bytes_by_type


# -- metadata as a config -----------------------------------------------------------------------------

_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the models whose scores are scaled by D / N in place of H; GGUF files do not say so."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of every published llama with stretched frequencies; GGUF files have only the resulting factors."""


def gguf_config(path: Path) -> HfFields:
    """Returns the keys of a config.json for the model of a GGUF file or its folder.

    Raises InputError for an architecture that is not known.
    """
    files = gguf_files(path)
    with _whole(files[0]):
        return _config(read_gguf(files), files[0])


def _config(gguf: Gguf, file: Path) -> HfFields:
    names, (values, tensors) = gguf_names(), gguf
    if (arch := str(values.get("general.architecture", "none"))) not in (known_names := names["architectures"]):
        raise InputError(f"{file}: the architecture {arch!r} is not read from GGUF. Known: {', '.join(known_names)}.")
    facts = {n.removeprefix(f"{arch}."): v for n, v in values.items() if n.startswith(f"{arch}.") and v not in (0, "")}
    if missing_keys := {"block_count", "embedding_length", "attention.head_count"} - facts.keys():
        raise InputError(f"{file}: its metadata lacks {arch}.{min(missing_keys)}, or has 0 there. Fetch it again.")
    keys = {key: value for name, value in facts.items() if (key := names["keys"].get(name, name))}
    keys |= {key: values[f"tokenizer.ggml.{n}"] for key, n in _TOKENS.items() if f"tokenizer.ggml.{n}" in values}
    keys |= {"model_type": names["architectures"][arch], "tie_word_embeddings": "output.weight" not in tensors}
    if "token_embd.weight" in tensors:
        keys["vocab_size"] = tensors["token_embd.weight"].shape[0]
    if arch == "gpt2":
        return keys | {"n_inner": keys.pop("intermediate_size", None)}
    d_model, num_heads = keys.get("hidden_size", 0), keys.get("num_attention_heads", 1)
    head_dim = keys.setdefault("head_dim", d_model // num_heads)
    keys.setdefault("rope_theta", 1e6 if arch == "gemma3" else 1e4)
    if arch == "llama":
        keys["model_type"] = "mixtral" if "num_experts" in keys else "llama"
        keys |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    if arch in _LAYERS_OF_27B:
        is_27b = keys.get("num_hidden_layers") == _LAYERS_OF_27B[arch]
        keys["query_pre_attn_scalar"] = d_model // num_heads if is_27b else head_dim
    if arch.endswith("moe"):
        keys |= {"norm_topk_prob": arch == "qwen3moe", "decoder_sparse_step": 1}
        keys.setdefault("intermediate_size", keys.get("moe_intermediate_size"))
    if (rotary_dims := facts.get("rope.dimension_count", head_dim)) != head_dim:
        keys["partial_rotary_factor"] = rotary_dims / head_dim
    return keys | _stretched(gguf, facts, file)


def _stretched(gguf: Gguf, facts: HfFields, file: Path) -> HfFields:
    """Returns the keys of rotary scaling, from the metadata or from the tensors with a factor for each frequency."""
    rope_type = facts.get("rope.scaling.type", "none")
    original_keys = {"original_max_position_embeddings": facts.get("rope.scaling.original_context_length")}
    if "rope_factors_long.weight" in gguf.tensors:
        factors_by_key = {f"{n}_factor": _floats(gguf, f"rope_factors_{n}.weight") for n in ("short", "long")}
        return original_keys | {"rope_scaling": {"type": "longrope", **factors_by_key}}
    if "rope_freqs.weight" in gguf.tensors:
        return {"rope_scaling": _llama3(_floats(gguf, "rope_freqs.weight"), gguf, file)}
    scaling = {"rope_type": rope_type, "factor": facts.get("rope.scaling.factor", 1.0)}
    return {} if rope_type == "none" else {"rope_scaling": scaling | (original_keys if rope_type == "yarn" else {})}


def _floats(gguf: Gguf, name: str) -> tuple[float, ...]:
    """Returns the values of a float32 tensor. Raises InputError if it has another type or is cut short."""
    tensor = gguf.tensors[name]
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        data = file.read(4 * math.prod(tensor.shape))
    if tensor.kind != 0 or len(data) != 4 * math.prod(tensor.shape):
        raise InputError(f"{tensor.file}: {name} is cut short, or not in float32. Fetch it again.")
    return struct.unpack(f"<{len(data) // 4}f", data)


def _llama3(factors: Sequence[float], gguf: Gguf, file: Path) -> HfFields:
    """Returns the rotary scaling of Llama 3.1 that gives these factors of frequencies; InputError if none does."""
    freq_base, low_factor, high_factor, original_len = (gguf.values.get("llama.rope.freq_base", 1e4), *_LLAMA3.values())
    factor = max(factors)
    turns = (original_len / (2 * math.pi * freq_base ** (i / len(factors))) for i in range(len(factors)))
    blends = (min(max((turn - low_factor) / (high_factor - low_factor), 0.0), 1.0) for turn in turns)
    expected_factors = (1 / ((1 - blend) / factor + blend) for blend in blends)
    if not all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(expected_factors, factors, strict=True)):
        raise InputError(f"{file}: rope_freqs differs from Llama 3.1 to 3.3. Give the model's safetensors.")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
