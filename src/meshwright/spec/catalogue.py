"""Published models by name: the facts of their config.json, one file each under ``data/models``."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import InputError, nearest
from meshwright.spec.hf.gguf import is_gguf
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model

_FOLDER = Path(__file__).parent / "data" / "models"


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter count that the makers state, as they write it (``"46.7B"``), and where."""

    params: str
    source: str
    active_params: str | None = None
    active_counts_embedding: bool | None = None  # False where makers leave out the input embedding


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the catalogue: the config with Hugging Face's keys, and where it was published."""

    source: str
    config: dict[str, Any]
    published: Published | None = None


def models() -> tuple[str, ...]:
    """Returns the names of the catalogue, sorted, without reading a file."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _FOLDER.glob("*.json")))


def entry(name: str) -> CatalogueEntry:
    """Returns the catalogue's entry of that name. Raises InputError with the nearest name if there is none."""
    file = _FOLDER / f"{name}.json"
    if "/" in name or not file.is_file():
        raise InputError(
            f"model {name!r} is neither in the catalogue nor a path to a config.json.{nearest(name, models())}"
        )
    return msgspec.convert(json.loads(file.read_text(encoding="utf-8")), CatalogueEntry)


@cache
def _catalogue_model(name: str) -> Model:
    return model_from_config(entry(name).config, name)


def has_weights(folder: Path) -> bool:
    """True if a folder has a model's config and files of its weights; also for GGUF files or their folder."""
    patterns = ("*.safetensors", "model.safetensors.index.json", "pytorch_model.bin*", "*.gguf")
    has_config = (folder / "config.json").is_file()
    return is_gguf(folder) or (has_config and any(file for pattern in patterns for file in folder.glob(pattern)))


def weights_of(name: str) -> str:
    """Returns the folder or the GGUF file with a model's weights, ``name`` as for `load_model`; "" for a model without
    weights, such as one of the catalogue."""
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" else path
    return str(folder.absolute()) if name not in models() and has_weights(folder) else ""


def load_model(name: str | Path) -> Model:
    """Returns the model of a catalogue name, or of a path to a config.json, to its folder or to a GGUF file.

    A catalogue name wins over a folder of the same name; write ``./name`` for the folder. Raises InputError for an
    unknown name, a plan file, and a config that `model_from_config` refuses."""
    name = str(name)
    if name in models():
        return _catalogue_model(name)
    if name.endswith(".toml"):
        raise InputError(
            f"{name} is no model. Name one, or its config.json; explain, verify, train and profile take plan files."
        )
    if "/" in name or "\\" in name or name.endswith(".json") or (name and Path(name).exists()):
        return model_from_config(Path(name))
    return _catalogue_model(name)
