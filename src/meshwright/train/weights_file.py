"""The weights of a run as a Hugging Face folder, and a run read back."""

from pathlib import Path

from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.nn.hf.files import INDEX, SINGLE
from meshwright.nn.hf.weights import CONFIG, load_params, save_hf
from meshwright.nn.weights import Params
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model
from meshwright.train.data.tokenizer import load_tokenizer, open_tokenizer

WEIGHTS, TOKENIZER = SINGLE, "tokenizer.json"


def save_weights(model: Model, params: Params, folder: Path) -> None:
    """``model.safetensors`` (several with an index where it is large) and ``config.json`` in a run's folder."""
    save_hf(model, params, folder, config=end_of_text(model, folder))


def end_of_text(model: Model, folder: Path) -> dict[str, int]:
    """The key of config.json that says where a generated text ends, by the tokenizer that lies in the folder."""
    if not (folder / TOKENIZER).is_file():
        return {}
    return {"eos_token_id": open_tokenizer(folder, vocab_size=model.vocab_size).end_id}


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights that `load_run` can read."""
    return (folder / CONFIG).is_file() and ((folder / INDEX).is_file() or any(folder.glob("*.safetensors")))


def load_model(folder: Path) -> Model:
    """The model of a run's folder or of any Hugging Face folder. Raises InputError when it has no weights."""
    if not has_weights(folder):
        raise InputError(f"{folder} has no {CONFIG} with {WEIGHTS}. Give the folder of a finished run or of a model.")
    return model_from_config(folder / CONFIG, folder.resolve().name)


def load_run(folder: Path) -> tuple[Model, Params, Tokenizer]:
    """Model, weights and tokenizer of a run's folder, on the first device.

    Raises InputError when the folder has no weights.
    """
    model = load_model(folder)
    return model, load_params(model, folder), load_tokenizer(folder / TOKENIZER)
