"""`meshwright convert`: weights of a run, of a checkpoint or of a Hugging Face folder as a Hugging Face folder."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from meshwright.cli.output import emit_json, json_option, print_fact
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes, format_params, parse_bytes
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model
from meshwright.spec.weights import num_params

if TYPE_CHECKING:
    from meshwright.train.weights import CheckpointWeights

BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
"""Files that go along as they are, where the source has them."""


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What one conversion did. ``step`` is that of the checkpoint that was read, if it was one."""

    model: str
    family: str
    source: str
    folder: str
    num_params: int
    dtype: str
    num_bytes: int
    files: list[str]
    step: int | None = None


@click.command()
@click.argument("source", metavar="FROM", type=click.Path(path_type=Path))
@click.argument("folder", metavar="TO", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Of the weights; as they are by default.")
@click.option("--step", type=int, help="Take the run's checkpoint after this step instead of its last weights.")
@click.option("--file-size", default="5GB", show_default=True, help="The largest file of weights.")
@json_option
def command(source: Path, folder: Path, dtype: str | None, step: int | None, file_size: str, as_json: bool) -> None:
    """Write the weights of FROM as a Hugging Face folder TO, which transformers, train and generate read.

    FROM is the folder of a run, finished or not, or any Hugging Face folder with safetensors files: fused, stacked or
    prefixed names come out as they are published. One tensor is in memory at a time.
    """
    _require_empty(folder)
    try:
        done = _convert(source, folder, dtype=dtype, step=step, max_bytes=int(parse_bytes(file_size)))
    except OSError as error:
        raise CannotRunError(f"{folder} cannot be written: {error.strerror or error}. Give another one.") from None
    if as_json:
        emit_json(msgspec.to_builtins(done))
        return
    after = "" if done.step is None else f" (checkpoint after step {done.step})"
    print_fact("model", f"{done.model}, family {done.family}, {format_params(done.num_params)} parameters")
    print_fact("from", f"{done.source}{after}")
    print_fact("to", f"{done.folder}: {len(done.files)} {'file' if len(done.files) == 1 else 'files'} of weights")
    print_fact("size", f"{format_bytes(done.num_bytes)} in {done.dtype}")


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already and is not an empty folder. Give a new one.")


def _convert(source: Path, folder: Path, *, dtype: str | None, step: int | None, max_bytes: int) -> Converted:
    from meshwright.train.weights import checkpoint_steps, has_weights, open_checkpoint

    if not source.is_dir():
        raise InputError(f"{source} is no folder. Give that of a run or of a Hugging Face model.")
    if step is None and has_weights(source):
        return _from_files(source, folder, dtype=dtype, max_bytes=max_bytes)
    if step is None and not checkpoint_steps(source):
        raise InputError(
            f"{source} has neither config.json with *.safetensors nor checkpoints. Give a run or a Hugging Face model."
        )
    with open_checkpoint(source, step) as found:
        return _from_checkpoint(found, source, folder, dtype=dtype, max_bytes=max_bytes)


def _from_files(source: Path, folder: Path, *, dtype: str | None, max_bytes: int) -> Converted:
    from meshwright.nn.hf.weights import convert_hf

    model = model_from_config(source / "config.json", source.resolve().name)
    files = convert_hf(model, source, folder, dtype=dtype, max_shard_bytes=max_bytes)
    return _done(model, source, folder, files, step=None)


def _from_checkpoint(
    found: "CheckpointWeights", source: Path, folder: Path, *, dtype: str | None, max_bytes: int
) -> Converted:
    from meshwright.nn.hf.files import DTYPES
    from meshwright.nn.hf.weights import write_hf
    from meshwright.train.weights import end_of_text

    wanted = dict.fromkeys(found.dtypes, DTYPES[dtype]) if dtype else found.dtypes
    config = end_of_text(found.model, source)
    files = write_hf(found.model, found.fetch, wanted, folder, max_shard_bytes=max_bytes, config=config)
    return _done(found.model, source, folder, files, step=found.step)


def _done(model: Model, source: Path, folder: Path, files: list[Path], *, step: int | None) -> Converted:
    """The files that belong to the weights brought along, and what was done."""
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    return Converted(
        model=model.name,
        family=model.family,
        source=str(source),
        folder=str(folder),
        num_params=num_params(model),
        dtype=config["dtype"],
        num_bytes=sum(file.stat().st_size for file in files),
        files=[file.name for file in files],
        step=step,
    )
