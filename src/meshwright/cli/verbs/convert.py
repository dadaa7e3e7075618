"""`meshwright convert`: weights of a run, of a checkpoint or of a Hugging Face folder as a Hugging Face folder."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from meshwright.cli.verb import Bytes, Options, argument, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes, format_params
from meshwright.report.answer import Answer, Fact
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


class Given(Options):
    source: Path = argument(metavar="FROM")
    folder: Path = argument(metavar="TO")
    dtype: Literal["fp32", "bf16", "fp16"] | None = option("Of the weights; as they are by default.")
    step: int | None = option("Take the run's checkpoint after this step instead of its last weights.")
    file_size: Bytes = option("The largest file of weights.", default="5GB")


@verb(Given)
def command(given: Given) -> Answer:
    """Write the weights of FROM as a Hugging Face folder TO, which transformers, train and generate read.

    FROM is the folder of a run, finished or not, or any Hugging Face folder with safetensors files: fused, stacked or
    prefixed names come out as they are published. One tensor is in memory at a time.
    """
    _require_empty(given.folder)
    try:
        done = _convert(given.source, given.folder, dtype=given.dtype, step=given.step, max_bytes=int(given.file_size))
    except OSError as error:
        raise CannotRunError(
            f"{given.folder} cannot be written: {error.strerror or error}. Give another one."
        ) from None
    after = "" if done.step is None else f" (checkpoint after step {done.step})"
    return Answer(
        msgspec.structs.asdict(done),
        [
            Fact("model", f"{done.model}, family {done.family}, {format_params(done.num_params)} parameters"),
            Fact("from", f"{done.source}{after}"),
            Fact("to", f"{done.folder}: {len(done.files)} {'file' if len(done.files) == 1 else 'files'} of weights"),
            Fact("size", f"{format_bytes(done.num_bytes)} in {done.dtype}"),
        ],
    )


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
    from meshwright.nn.hf.weights import write_hf
    from meshwright.train.weights import end_of_text

    config = end_of_text(found.model, source)
    options: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": max_bytes, "config": config}
    files = write_hf(found.model, found.fetch, found.dtypes, folder, **options)
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
