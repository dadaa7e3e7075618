"""`meshwright convert`: weights of a run, of a checkpoint or of a Hugging Face folder as a Hugging Face folder."""

from pathlib import Path
from typing import Any, Literal

from meshwright.cli.verb import Bytes, Options, argument, option, verb
from meshwright.core.digests import write_sums
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_bytes, format_params
from meshwright.report.answer import Answer, Fact, Facts
from meshwright.spec.catalogue import has_weights
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model
from meshwright.spec.weights import frozen_base, num_params, without_mtp_words


class Given(Options):
    source: Path = argument(metavar="FROM")
    folder: Path = argument(metavar="TO")
    dtype: Literal["fp32", "bf16", "fp16"] | None = option("Dtype of the written weights. Default: unchanged.")
    step: int | None = option("Take the run's checkpoint of this step instead of its last weights.")
    merge: bool = option("Add an adapter to its base; else the adapter alone is written, as PEFT does.")
    file_size: Bytes = option("Most bytes of one file of weights.", default="5GB")


@verb(Given, needs="run")
def command(given: Given) -> Answer:
    """Write the weights of FROM as a Hugging Face folder TO, which transformers, train and generate read.

    FROM is the folder of a run, finished or not, a Hugging Face folder with safetensors files, or a GGUF file. Tensors
    get the names and shapes in which the family is published. One tensor is in memory at a time.
    """
    folder = given.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already and is not an empty folder. Give a new one.")
    from meshwright.nn.hf.beside import copy_beside
    from meshwright.nn.hf.files import open_checkpoint
    from meshwright.nn.hf.gguf import as_folder

    source_folder = as_folder(given.source)
    if not source_folder.is_dir():
        raise InputError(f"{source_folder} is no folder. Give the folder of a run or of a Hugging Face model.")
    try:
        model, step, files = _convert(given, source_folder)
        write_sums(folder, copy_beside(source_folder, folder))
    except OSError as error:
        raise CannotRunError(f"{folder} cannot be written: {error.strerror or error}. Give another one.") from None
    with open_checkpoint(folder) as tensors:
        dtype = str(next(iter(tensors.values())).dtype)
    facts: Facts = {
        "model": model.name,
        "family": model.family,
        "source": given.source,
        "folder": folder,
        "num_params": num_params(model),
        "dtype": dtype,
        "num_bytes": sum(file.stat().st_size for file in files),
        "files": [file.name for file in files],
        "step": step,
    }
    step_text, size = "" if step is None else f" (checkpoint after step {step})", format_params(facts["num_params"])
    return Answer(
        facts,
        [
            Fact("model", f"{model.name}, family {model.family}, {size} parameters{without_mtp_words(model)}"),
            Fact("from", f"{given.source}{step_text}"),
            Fact("to", f"{folder}: {counted(len(files), 'file')} of weights"),
            Fact("size", f"{format_bytes(facts['num_bytes'])} in {facts['dtype']}"),
        ],
    )


def _convert(given: Given, source: Path) -> tuple[Model, int | None, list[Path]]:
    """Writes the weights. Returns their model, the checkpoint's step (or None), and the files. Raises InputError for a
    source without weights, and for --merge without an adapter."""
    from meshwright.nn.hf.adapter import adapted_model, base_folder, is_adapter
    from meshwright.nn.hf.weights import convert_hf, merged, open_source, save_adapter, with_stored_mtp, write_hf
    from meshwright.train.weights import checkpoint_steps, end_of_text, open_run_checkpoint

    folder, dtype = given.folder, given.dtype
    write_options: Facts = {"dtype": dtype, "max_shard_bytes": int(given.file_size)}
    if given.step is None and is_adapter(source):
        base_path = base_folder(source)
        model = adapted_model(model_from_config(base_path / "config.json", source.resolve().name), source)
        if given.merge:
            model = with_stored_mtp(model, source)
            return frozen_base(model), None, convert_hf(model, source, folder, **write_options)
        with open_source(model, source) as (fetch, dtypes):
            return model, None, save_adapter(model, fetch, dtypes, folder, base=str(base_path.resolve()), dtype=dtype)
    if given.step is None and has_weights(source):
        _require_adapter(given, None)
        model = with_stored_mtp(model_from_config(source / "config.json", source.resolve().name), source)
        return model, None, convert_hf(model, source, folder, **write_options)
    if given.step is None and not checkpoint_steps(source):
        raise InputError(
            f"{source} has neither config.json with *.safetensors nor checkpoints. Give a run or a Hugging Face model."
        )
    with open_run_checkpoint(source, given.step) as saved:
        _require_adapter(given, saved.model)
        write_options["config"] = end_of_text(saved.model, source)
        if saved.model.lora is None:
            return saved.model, saved.step, write_hf(saved.model, saved.fetch, saved.dtypes, folder, **write_options)
        if not given.merge:
            base_name = str(saved.base.resolve())
            paths = save_adapter(saved.model, saved.fetch, saved.dtypes, folder, base=base_name, dtype=dtype)
            return saved.model, saved.step, paths
        model = frozen_base(saved.model)
        with open_source(model, saved.base) as (fetch_base, dtypes):

            def fetch(name: str, index: tuple[int, ...]) -> Any:
                return (saved.fetch if name in saved.dtypes else fetch_base)(name, index)

            paths = write_hf(model, merged(saved.model, fetch), dtypes, folder, **write_options)
        return model, saved.step, paths


def _require_adapter(given: Given, model: Model | None) -> None:
    if given.merge and (model is None or model.lora is None):
        raise InputError(f"{given.source} has no adapter to merge. Leave --merge out.")
