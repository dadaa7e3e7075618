"""`meshwright generate`: text that continues prompts, from a finished run or a published model, on any mesh."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from meshwright.algebra.generation import WeightStorage, weight_dtype
from meshwright.api.running import GeneratedText, TextOptions, generate_text
from meshwright.cli.output import compiling, say
from meshwright.cli.verb import Count, MeshSizes, Options, argument, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import read_text
from meshwright.core.units import format_count, format_seconds
from meshwright.report.answer import Answer, Paragraph
from meshwright.spec.cluster import Cluster

if TYPE_CHECKING:
    from meshwright.serve.drawing.sampling import Sampling


class Given(Options):
    what: Path = argument(metavar="FOLDER")
    prompts: tuple[str, ...] = option("Text to go on from; give it again for more sequences.", "--prompt")
    prompt_file: Path | None = option(
        "A file with a prompt on each line, or JSON lines with prompt, max_tokens, sampling, id.", "--prompts"
    )
    out: Path | None = option(
        "Where the answers to JSON lines go, one by one; goes on with what is there.", "-o", "--out"
    )
    on: Cluster | None = option("Devices: cpu:4 is this machine as 4 emulated ones. Default: those that it has.")
    axes: MeshSizes | None = option("Mesh axes, such as tensor=2,data=2. Default: every device on tensor.")
    max_tokens: Count = option("Most tokens after each prompt.", default=128)
    temperature: float = option("0 takes the likeliest token each time.", default=0.0)
    top_k: int = option("Draw from this many likeliest tokens; 0 from all.", default=0)
    top_p: float = option("Draw from the likeliest tokens that have this probability together.", default=1.0)
    seed: int = option("Seed of the draws.", default=0)
    weights: WeightStorage = option("How weights are stored.", default="as they are")
    cache_dtype: Literal["bf16", "int8"] = option(
        "Dtype of keys and values; bf16: fp32 if weights are.", default="bf16"
    )


@verb(Given)
def command(given: Given) -> Answer:
    """Go on from prompts with the model of a FOLDER: a finished run, or config.json with safetensors files.

    The text of one prompt is printed as it grows, those of several prompts when all are done.
    """
    if given.out is not None:
        return bulk(given)
    prompts = _prompts(given)
    mesh = devices_of(given.on, given.axes)
    from meshwright.serve.drawing.sampling import Sampling

    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p, seed=given.seed)
    live = len(prompts) == 1 and given.form == "text"

    def loaded(line: str) -> None:
        say(line)
        if live:
            click.echo(prompts[0], nl=False)

    found = generate_text(
        given.what,
        prompts,
        TextOptions(
            max_tokens=given.max_tokens,
            sampling=sampling,
            mesh=mesh,
            weights=given.weights,
            cache_int8=given.cache_dtype == "int8",
        ),
        on_text=(lambda row, text: click.echo(text, nl=False)) if live else None,
        on_loaded=loaded,
    )
    if live:
        click.echo()
    return answer(found, prompts, sampling, live=live)


def bulk(given: Given) -> Answer:
    """Goes on from every line of a file, through the engine of a server."""
    if given.prompt_file is None or given.prompt_file.suffix != ".jsonl" or given.prompts:
        raise InputError("-o takes the answers to --prompts FILE.jsonl. Give such a file, and no --prompt.")
    mesh = devices_of(given.on, given.axes)
    from msgspec.structs import replace

    from meshwright.serve.drawing.sampling import Sampling
    from meshwright.serve.offline.bulk import USUAL, generate_file
    from meshwright.serve.opening import EngineOptions, open_engine

    dtype = "int8" if given.cache_dtype == "int8" else ""
    options = EngineOptions(mesh=mesh, weights=weight_dtype(given.weights), cache_dtype=dtype)
    opened = open_engine(given.what, options, on_shape=compiling())
    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p, seed=given.seed)
    usual, said, out = replace(USUAL, max_tokens=given.max_tokens, sampling=sampling), set[int](), given.out
    assert out is not None

    def tell(done: int, all: int) -> None:
        if (tenth := 10 * done // all) not in said:
            said.add(tenth)
            say(f"{done:,} of {all:,} lines")

    done = generate_file(opened.source, opened.engine, (given.prompt_file, out), usual, tell)
    found = {"out": str(out), "written": done.written, "there": done.there}
    return Answer(found, [Paragraph(f"{done.written:,} lines written to {out}, {done.there:,} were there", None)])


def answer(found: GeneratedText, prompts: Sequence[str], sampling: "Sampling", *, live: bool) -> Answer:
    """Returns the texts, not printed again if they are ``live``; says the pace on standard error."""
    pace = found.generated.pace
    rate = "" if pace.tokens_per_s is None else f", then {format_count(round(pace.tokens_per_s, 1))} tokens/s"
    say(
        f"compiled in {format_seconds(pace.compile_s)}; first token after {format_seconds(pace.first_token_s)}{rate}; "
        f"{pace.num_tokens} tokens"
    )
    completions = [
        {"prompt": prompt, "text": text, "tokens": one.tokens, "finish": one.finish}
        for prompt, text, one in zip(prompts, found.texts, found.generated.completions, strict=True)
    ]
    lines = [Paragraph(f"[{number}] {one['prompt']}{one['text']}", None) for number, one in enumerate(completions, 1)]
    return Answer(
        {
            "model": found.model,
            "mesh": {axis: size for axis, size in found.mesh.items() if size > 1},
            "sampling": sampling,
            "completions": completions,
            "pace": pace,
        },
        [] if live else lines,
        raw=[completions],
    )


def _prompts(given: Given) -> list[str]:
    """Returns all prompts, those of the file last. Raises InputError if there is none."""
    texts, file = list(given.prompts), given.prompt_file
    if file is not None:
        lines = read_text(file, "Give a text file with a prompt on each line.").splitlines()
        texts += [line for line in lines if line.strip()]
    if not texts:
        raise InputError("generate needs a prompt. Write: generate runs/NAME-001 --prompt 'The statement'.")
    for number, text in enumerate(texts, start=1):
        # Python decodes bytes of an argument that are not UTF-8 as lone surrogates.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"prompt {number} is not UTF-8. Give it as UTF-8 text.")
    return texts


def devices_of(cluster: Cluster | None, axes: dict[str, int] | None) -> dict[str, int] | None:
    """Returns the mesh asked for, None for the default, and emulates devices for ``--on cpu:N``.

    Raises InputError if ``--axes`` and ``--on`` differ, CannotRunError if this machine has too few devices.
    """
    wanted = math.prod(axes.values()) if axes else None
    words = f"--on {cluster.short_name}" if cluster else ""
    if axes:
        words = f"--axes {','.join(f'{axis}={size}' for axis, size in axes.items())}"
    if cluster is not None:
        if wanted is not None and wanted != cluster.num_chips:
            raise InputError(
                f"{words} is {wanted} devices and --on {cluster.short_name} is {cluster.num_chips}. Make the two agree."
            )
        wanted = cluster.num_chips
        if cluster.kind == "host":
            from meshwright.parallel.mesh import emulate_devices

            emulate_devices(wanted)
    import jax

    there = len(jax.devices())
    if cluster is not None and cluster.kind != "host" and jax.devices()[0].platform == "cpu":
        raise CannotRunError(
            f"{cluster.short_name} is not this machine, which has {there} of platform cpu. Use --on cpu:8 to emulate."
        )
    if wanted is not None and wanted > there:
        raise CannotRunError(
            f"{words} is {wanted} devices and this machine has {there}. Use smaller axes, or emulate them: "
            f"--on cpu:{wanted}."
        )
    return axes or ({"tensor": wanted} if wanted else None)
