"""`meshwright generate`: text that continues prompts, from a finished run or a published model, on any mesh."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.fields import parse_axes
from meshwright.cli.output import emit_json, json_option, say
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import cache_folder
from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import Strategy, make_mesh, mesh_words

if TYPE_CHECKING:
    from meshwright.parallel.generate_step import GenerateStep
    from meshwright.serve.generate import Generated
    from meshwright.serve.model_folder import ModelFolder
    from meshwright.serve.sampling import Sampling


@click.command()
@click.argument("what", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="Text to go on from; give it again for more sequences.")
@click.option("--prompts", "prompt_file", type=click.Path(path_type=Path), help="A file with a prompt on each line.")
@click.option("--on", "on", help="Devices: cpu:4 is this machine as 4 emulated ones. Default: those that it has.")
@click.option("--axes", help="Mesh axes, such as tensor=2,data=2. Default: every device on tensor.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens after each prompt at most.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token each time.")
@click.option("--top-k", default=0, show_default=True, help="Draw from so many likeliest tokens; 0 from all.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the likeliest tokens of this probability.")
@click.option("--seed", default=0, show_default=True, help="Of the draws.")
@click.option("--int8", "int8", is_flag=True, help="Hold weights as int8.")
@click.option("--cache-int8", is_flag=True, help="Hold keys and values as int8.")
@json_option
def command(
    what: Path,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    on: str | None,
    axes: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    int8: bool,
    cache_int8: bool,
    as_json: bool,
) -> None:
    """Go on from prompts with the model of a FOLDER: a finished run, or config.json with safetensors files.

    One prompt is written out as it grows; several are written one after the other, each when all are done.
    """
    texts = _prompts(prompts, prompt_file)
    mesh = _devices(on, axes)
    from meshwright.serve.generate import generate
    from meshwright.serve.model_folder import TextStream, open_model
    from meshwright.serve.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    source = open_model(what)
    tokens = [source.text.encode(text) for text in texts]
    step, params = _loaded(source, mesh, tokens, max_tokens=max_tokens, int8=int8, cache_int8=cache_int8)
    streams = [TextStream(source.text, prompt) for prompt in tokens]
    live = len(texts) == 1 and not as_json
    if live:
        click.echo(texts[0], nl=False)

    def write(row: int, token: int) -> None:
        if live:
            click.echo(streams[row].push(token), nl=False)

    found = generate(
        step, params, tokens, max_tokens=max_tokens, sampling=sampling, end_tokens=source.end_tokens, on_token=write
    )
    if live:
        click.echo(streams[0].finish())
    show(found, source, texts, tokens, sampling=sampling, mesh=mesh, live=live, as_json=as_json)


def _prompts(given: Sequence[str], file: Path | None) -> list[str]:
    """All prompts, those of the file last. Raises InputError when there is none."""
    texts = list(given)
    if file is not None:
        try:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise InputError(f"{file} cannot be read: {why}. Give a text file with a prompt on each line.") from None
    if not texts:
        raise InputError("generate needs a prompt. Write: generate runs/NAME-001 --prompt 'The statement'.")
    for number, text in enumerate(texts, start=1):
        # What a shell hands over that is no text stands there as halves of characters.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"prompt {number} is not UTF-8. Give it as UTF-8 text.")
    return texts


def _devices(on: str | None, axes: str | None) -> dict[str, int]:
    """The mesh asked for, its devices emulated where ``on`` says so. Raises InputError where the two do not agree."""
    given = parse_axes(axes) if axes else {}
    wanted = math.prod(given.values()) if given else None
    if on is not None:
        cluster = parse_cluster(on)
        if wanted is not None and wanted != cluster.num_chips:
            raise InputError(
                f"--axes {axes} is {wanted} devices and --on {on} is {cluster.num_chips}. Make the two agree."
            )
        wanted = cluster.num_chips
        if cluster.kind == "host":
            from meshwright.parallel.mesh import emulate_devices

            emulate_devices(wanted)
    import jax

    there = len(jax.devices())
    if on is not None and cluster.kind != "host" and jax.devices()[0].platform == "cpu":
        raise CannotRunError(f"{on} is not this machine, which has {there} of platform cpu. Use --on cpu:8 to emulate.")
    wanted = there if wanted is None else wanted
    if wanted > there:
        raise CannotRunError(
            f"--axes {axes} is {wanted} devices and this machine has {there}. Use smaller axes, or emulate them: "
            f"--on cpu:{wanted}."
        )
    return make_mesh(given or {"tensor": wanted})


def _loaded(
    source: "ModelFolder",
    mesh: dict[str, int],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    int8: bool,
    cache_int8: bool,
) -> tuple["GenerateStep", dict]:
    """The step for these prompts, and the weights on its devices."""
    import jax.numpy as jnp

    from meshwright.nn.hf.weights import load_params
    from meshwright.parallel.generate_step import GenerateStep
    from meshwright.parallel.mesh import keep_compiled_programs
    from meshwright.serve.generate import require_prompts

    keep_compiled_programs(cache_folder())
    _require_positions(source, prompts, max_tokens)
    strategy = Strategy(mesh=mesh, state="fp32" if source.dtype == "fp32" else "bf16-adam")
    parts = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    step = GenerateStep(
        source.model,
        strategy,
        max_len=max(1, *map(len, prompts)) + max(1, max_tokens),
        batch_seqs=-(-len(prompts) // parts) * parts,
        cache_dtype="int8" if cache_int8 else source.dtype,  # type: ignore[arg-type]
        weights="int8" if int8 else "as they are",
    )
    require_prompts(step, prompts, max_tokens=max_tokens)
    dtype = jnp.float32 if source.dtype == "fp32" else jnp.bfloat16
    params = step.place(load_params(source.model, source.folder, step.param_shardings, dtype))
    held = sum(array.addressable_shards[0].data.nbytes for array in params.values())
    cache = sum(row.num_bytes for row in step.table) / math.prod(mesh.values())
    say(
        f"{source.model.name}: {mesh_words(mesh)}, {format_bytes(held)} of weights on each device, "
        f"{format_bytes(cache)} of keys and values over {step.batch_seqs} x {step.max_len} positions"
    )
    return step, params


def _require_positions(source: "ModelFolder", prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise InputError where a sequence would be longer than the model was made for: what comes then is no text."""
    longest, there = max(map(len, prompts)), source.model.max_positions
    if longest + max_tokens > there:
        raise InputError(
            f"a prompt of {longest:,} {'token' if longest == 1 else 'tokens'} and {max_tokens:,} more need "
            f"{longest + max_tokens:,} positions; {source.model.name} has {there:,}. Shorten the prompt, or give fewer "
            f"--max-tokens."
        )


def show(
    found: "Generated",
    source: "ModelFolder",
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    sampling: "Sampling",
    mesh: dict[str, int],
    live: bool,
    as_json: bool,
) -> None:
    """Texts on standard output unless they are there already, and the pace on standard error."""
    whole = [
        _continued(source, prompt, completion.tokens)
        for prompt, completion in zip(prompts, found.completions, strict=True)
    ]
    pace = found.pace
    if as_json:
        rows = zip(texts, whole, found.completions, strict=True)
        emit_json(
            {
                "model": source.model.name,
                "mesh": {axis: size for axis, size in mesh.items() if size > 1},
                "sampling": sampling,
                "completions": [
                    {"prompt": text, "text": new, "tokens": one.tokens, "finish": one.finish} for text, new, one in rows
                ],
                "pace": pace,
            }
        )
    elif not live:
        for number, (text, new) in enumerate(zip(texts, whole, strict=True), start=1):
            click.echo(f"[{number}] {text}{new}")
    rate = "" if pace.tokens_per_s is None else f", then {format_count(round(pace.tokens_per_s, 1))} tokens/s"
    say(
        f"compiled in {format_seconds(pace.compile_s)}; first token after {format_seconds(pace.first_token_s)}{rate}; "
        f"{pace.num_tokens} tokens"
    )


def _continued(source: "ModelFolder", prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that the tokens add to their prompt's."""
    from meshwright.serve.model_folder import TextStream

    stream = TextStream(source.text, prompt)
    return "".join([*(stream.push(token) for token in tokens), stream.finish()])
