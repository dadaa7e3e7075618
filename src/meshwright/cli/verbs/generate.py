"""`meshwright generate`: text that continues prompts, from a finished run or a published model, on any mesh."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict, replace

from meshwright.api.running import USUAL_TOKENS, GeneratedText, TextOptions, generate_text
from meshwright.cli.engine import EngineGiven, folders_by_name, open_given, opened_options, prepare_devices, say_all
from meshwright.cli.verb import Count, option, verb
from meshwright.core.errors import InputError
from meshwright.core.files import read_text
from meshwright.core.units import counted, format_count, format_seconds
from meshwright.report.answer import Answer, Paragraph

if TYPE_CHECKING:
    from meshwright.serve.drawing.sampling import Sampling


class Given(EngineGiven, group="Prompts and sampling"):
    prompts: tuple[str, ...] = option("Text to continue; may be given several times.", "--prompt")
    prompt_file: Path | None = option(
        "A file with a prompt on each line, or JSON lines with prompt, max_tokens, sampling, adapter, id.", "--prompts"
    )
    out: Path | None = option(
        "File of the answers to JSON lines; lines that it has are kept and not generated again.", "-o", "--out"
    )
    max_tokens: Count | None = option("Most tokens after each prompt. Default: 128, or as many as fit.")
    temperature: float = option("Temperature; 0 takes the likeliest token each time.", default=0.0)
    top_k: int = option("Draw from this many likeliest tokens; 0 from all.", default=0)
    top_p: float = option("Draw from the likeliest tokens whose probabilities reach this sum.", default=1.0)
    seed: int = option("Seed of the draws.", default=0)


@verb(Given, needs="run")
def command(given: Given) -> Answer:
    """Continue prompts with the model of a FOLDER: a finished run, or config.json with safetensors files, or GGUF.

    Prints the text of a single prompt as it grows, and of several prompts when all are done. The engine is the one of
    serve.
    """
    if given.out is not None:
        return bulk(given)
    prompts = _prompts(given)
    options = opened_options(given)
    from meshwright.serve.drawing.sampling import Sampling

    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p, seed=given.seed)
    is_live = len(prompts) == 1 and given.form == "text"
    prompts_left = iter(prompts)
    generated_text = generate_text(
        given.what,
        prompts,
        TextOptions(**asdict(options), max_tokens=given.max_tokens, sampling=sampling),
        on_text=(lambda row, text: click.echo(next(prompts_left, "") + text, nl=False)) if is_live else None,
        on_loaded=lambda line: say_all([line]),
    )
    if is_live:
        click.echo(next(prompts_left, ""))
    return answer(generated_text, prompts, sampling, live=is_live)


def bulk(given: Given) -> Answer:
    """Generates the answer to each line of --prompts (JSON lines) and appends it to -o. Raises InputError otherwise."""
    if given.prompt_file is None or given.prompt_file.suffix != ".jsonl" or given.prompts:
        raise InputError("-o takes the answers to --prompts FILE.jsonl. Give such a file, and no --prompt.")
    from meshwright.serve.drawing.sampling import Sampling
    from meshwright.serve.model_folder import open_model
    from meshwright.serve.offline.bulk import USUAL, generate_file, read_work
    from meshwright.serve.request import RequestBounds

    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p, seed=given.seed)
    max_tokens = given.max_tokens or USUAL_TOKENS
    request, out = replace(USUAL, max_tokens=max_tokens, sampling=sampling), given.out
    assert out is not None
    # what cannot be read or run is said before anything compiles
    prepare_devices(given.on, given.axes)
    source = open_model(given.what, folders_by_name(given.adapters))
    bounds = RequestBounds.of(source.model, given.max_len or source.model.max_positions, source.adapters)
    read_work(source, bounds.check, (given.prompt_file, out), request)
    opened_engine = open_given(given, source)
    result = generate_file(opened_engine.source, opened_engine.engine, (given.prompt_file, out), request)
    facts = {"out": str(out), "written": result.written, "there": result.there}
    return Answer(
        facts, [Paragraph(f"{counted(result.written, 'line')} written to {out}, {result.there:,} were there", None)]
    )


def answer(found: GeneratedText, prompts: Sequence[str], sampling: "Sampling", *, live: bool) -> Answer:
    """Returns the answer, without texts if they were printed ``live``; prints times and tokens/s on standard error."""
    pace = found.generated.pace
    rate_text = "" if pace.tokens_per_s is None else f", then {format_count(round(pace.tokens_per_s, 1))} tokens/s"
    opened_text, first_text = format_seconds(found.opened_s), format_seconds(pace.first_token_s)
    ready_text = f"loaded and compiled in {opened_text}; first token after {first_text}"
    say_all([f"{ready_text}{rate_text}; {counted(pace.num_tokens, 'token')}"])
    completions = [
        {"prompt": prompt, "text": text, "tokens": completion.tokens, "finish": completion.finish}
        for prompt, text, completion in zip(prompts, found.texts, found.generated.completions, strict=True)
    ]
    texts = (f"{row['prompt']}{found.between}{row['text']}" for row in completions)
    lines = [Paragraph(f"[{index}] {text}", None) for index, text in enumerate(texts, 1)]
    return Answer(
        {
            "model": found.model,
            "mesh": {axis: size for axis, size in found.mesh.items() if size > 1},
            "sampling": sampling,
            "completions": completions,
            "opened_s": found.opened_s,
            "pace": pace,
        },
        [] if live else lines,
        raw=[completions],
    )


def _prompts(given: Given) -> list[str]:
    """Returns the prompts of the options, then those of the file. Raises InputError if there is none, or for JSON lines
    without -o, and for prompts that are not UTF-8."""
    prompts, file = list(given.prompts), given.prompt_file
    if file is not None and file.suffix == ".jsonl":
        raise InputError(f"{file} has JSON lines, whose answers go to a file. Give -o answers.jsonl.")
    if file is not None:
        lines = read_text(file, "Give a text file with a prompt on each line.").splitlines()
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise InputError("generate needs a prompt. Write: generate runs/NAME-001 --prompt 'The statement'.")
    for prompt_number, prompt in enumerate(prompts, start=1):
        # Python decodes bytes of an argument that are not UTF-8 as lone surrogates.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError(f"prompt {prompt_number} is not UTF-8. Give it as UTF-8 text.")
    return prompts
