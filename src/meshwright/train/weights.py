"""Writes the weights of a run as a Hugging Face folder, and reads only the weights of a checkpoint."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from meshwright.core.digests import require_intact, write_sums
from meshwright.core.errors import CannotRunError, FileWarning, InputError, first_line
from meshwright.core.files import write_whole
from meshwright.nn.hf.tokenizer import GENERATION, TOKENIZER, end_tokens, read_table
from meshwright.nn.hf.weights import Fetch, save_adapter, save_hf, source_of
from meshwright.nn.quantisation import dequantise_params, quantised_base
from meshwright.nn.weights import Params, param_shapes
from meshwright.spec.hf.write import TOKEN_KEYS
from meshwright.spec.model import Model
from meshwright.spec.weights import frozen_base
from meshwright.train.checkpoint import CHECKPOINTS, POSITION, STATE, UNCHECKED, Stored
from meshwright.train.data.tokenizer import open_tokenizer

BASE = "base"
"""Folder, inside a run's folder, of frozen weights that the run drew at random."""

_ARRAYS_AT_ONCE = 4
"""A tensor of the output may need up to three arrays (q, k and v)."""


class CheckpointWeights(NamedTuple):
    """A checkpoint's model, its step, a function that reads one weight, and the dtypes of the weights.

    Frozen weights are not in the checkpoint but in the folder ``base``.
    """

    model: Model
    step: int
    fetch: Fetch
    dtypes: dict[str, np.dtype]
    base: Path


def checkpoint_steps(run: Path) -> list[int]:
    """Returns the steps of a run's checkpoints, oldest first."""
    folder = run / CHECKPOINTS
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


@contextmanager
def open_run_checkpoint(run: Path, step: int | None = None) -> Iterator[CheckpointWeights]:
    """Opens one checkpoint of a run, by default the newest; the run may still be training.

    Arrays are read on demand, and the last few are cached. Raises InputError for a step without a checkpoint,
    CannotRunError for a damaged one.
    """
    steps = checkpoint_steps(run)
    if not steps:
        raise InputError(f"{run} has no checkpoint. Give the folder of a run that wrote one.")
    chosen_step = steps[-1] if step is None else step
    if chosen_step not in steps:
        raise InputError(f"{run} has no checkpoint of step {step}. It has: {', '.join(map(str, steps))}.")
    damaged_text = f"the checkpoint {run / CHECKPOINTS / str(chosen_step)} is damaged"
    others_text = ", ".join(str(other_step) for other_step in steps if other_step != chosen_step)
    remedy = f"There are checkpoints of steps {others_text}." if others_text else "There is no other checkpoint."
    try:
        if not require_intact(run / CHECKPOINTS / str(chosen_step)):
            warnings.warn(f"checkpoint {chosen_step} of {run} {UNCHECKED}.", FileWarning, stacklevel=3)
    except CannotRunError as error:
        raise CannotRunError(f"{damaged_text}: {error} {remedy}") from None
    # Orbax warns about default options when a folder is opened for reading only.
    logging.getLogger("absl").setLevel(logging.ERROR)
    options = ocp.CheckpointManagerOptions(read_only=True)
    with closing(ocp.CheckpointManager((run / CHECKPOINTS).absolute(), options=options)) as manager:

        def restore(**parts: Any) -> Any:
            try:
                return manager.restore(chosen_step, args=ocp.args.Composite(**parts))
            except Exception as error:  # Orbax and its storage raise many kinds
                raise CannotRunError(f"{damaged_text}: {first_line(error)[:200]}. {remedy}") from None

        try:
            stored_info = msgspec.convert(restore(**{POSITION: ocp.args.JsonRestore()})[POSITION], Stored)
            model = msgspec.convert(stored_info.position.model, Model)
        except msgspec.ValidationError as error:
            raise CannotRunError(f"{damaged_text}: {error}. {remedy}") from None
        text_by_path = stored_info.arrays
        param_structs = {n: struct for n, struct in param_shapes(model).items() if f".params['{n}']" in text_by_path}
        # ``bfloat16`` of ``bfloat16[2,32]``
        dtypes = {name: np.dtype(text_by_path[f".params['{name}']"].partition("[")[0]) for name in param_structs}

        @lru_cache(_ARRAYS_AT_ONCE)
        def read(name: str) -> np.ndarray:
            sharding = SingleDeviceSharding(jax.devices()[0])
            items = {"params": {name: jax.ShapeDtypeStruct(param_structs[name].shape, dtypes[name], sharding=sharding)}}
            arguments = ocp.args.PyTreeRestore(
                item=items, restore_args=ocp.checkpoint_utils.construct_restore_args(items), partial_restore=True
            )
            return np.asarray(restore(**{STATE: arguments})[STATE]["params"][name])

        base_path = Path(stored_info.position.settings.get("weights") or run / BASE)
        yield CheckpointWeights(model, chosen_step, lambda name, index: read(name)[index], dtypes, base_path)


def save_weights(model: Model, params: Params, folder: Path, *, base: str = "") -> None:
    """Writes ``model.safetensors`` (several files with an index if large) and ``config.json`` in a run's folder. Of a
    model with adapters it writes only the adapter, which names the folder ``base`` (by default the run's `BASE`)."""
    if model.lora:
        save_adapter(model, *source_of(params), folder, base=base or BASE)
    else:
        save_hf(model, params, folder, config=end_of_text(model, folder))


def save_base(model: Model, params: Params, folder: Path) -> None:
    """Writes the frozen weights of a run that drew them at random in its folder `BASE`, where `generate` and PEFT find
    them."""
    params, base_folder = dequantise_params(params, quantised_base(model), params["embed"].dtype), folder / BASE
    save_hf(frozen_base(model), params, base_folder, config=end_of_text(model, folder))
    if jax.process_index() == 0:
        write_whole(base_folder / TOKENIZER, partial(shutil.copyfile, folder / TOKENIZER))
        write_sums(base_folder, [base_folder / TOKENIZER])


def end_of_text(model: Model, folder: Path) -> dict[str, int | list[int]]:
    """Returns the token numbers for config.json from the generation config of the folder, else eos_token_id from its
    tokenizer; {} without a tokenizer."""
    if not (folder / TOKENIZER).is_file():
        require_intact(folder, [TOKENIZER])
        return {}
    tokenizer, end_id = open_tokenizer(folder, vocab_size=model.vocab_size)
    config_table = read_table(folder / GENERATION, remedy="remove it")
    end_ids = end_tokens(folder, tokenizer) if config_table else [end_id]
    token_ids = {key: config_table[key] for key in TOKEN_KEYS if key in config_table}
    return {**token_ids, "eos_token_id": end_ids if len(end_ids) > 1 else end_ids[0] if end_ids else end_id}
