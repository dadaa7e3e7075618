"""Generates from a file of prompts: one output line for each input line, in order of completion, resumable."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.fields import convert_fields
from meshwright.core.files import json_rows, read_text
from meshwright.core.progress import working
from meshwright.serve.drawing.sampling import LIKELIEST, Sampling
from meshwright.serve.engine import Engine
from meshwright.serve.group import EngineGroup
from meshwright.serve.model_folder import ModelFolder
from meshwright.serve.request import SourceFeatures, TokenRequest

AHEAD = 4
"""Maximum requests submitted to the engine, as a multiple of the requests that run at once."""


class PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the prompt file: text or tokens, and settings unlike the defaults; ``id`` is copied to the output."""

    prompt: str | list[int]
    id: Any = None
    max_tokens: int | None = None
    sampling: Sampling | None = None
    adapter: str = ""


class CompletionLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output file; ``line`` is the number of its prompt's line, from 1; ``digest`` hashes the model's
    name, the prompt and the settings."""

    line: int
    id: Any = None
    text: str
    tokens: list[int]
    finish: str
    digest: str


class AskedLine(NamedTuple):
    """A line of the prompt file: its number, its fields, its request, and the digest of model name and request."""

    number: int
    line: PromptLine
    request: TokenRequest
    digest: str


class BulkDone(NamedTuple):
    """How many output lines were written now, and how many the file had before."""

    written: int
    there: int


def generate_file(
    source: ModelFolder,
    engine: Engine | EngineGroup,
    files: tuple[Path, Path],
    usual: TokenRequest,
) -> BulkDone:
    """Generates from each prompt of ``files[0]`` (JSON lines) and appends `CompletionLine` rows to ``files[1]``.

    Prompts that ``files[1]`` has answers to are skipped and an incomplete last line is removed, so an interrupted call
    can be repeated. ``usual`` has the default settings of a line. Raises InputError for a line that cannot be read or
    can never run, before anything is generated.
    """
    waiting_lines, num_answered = read_work(source, engine.check, files, usual)
    num_done = num_answered
    tokens_of_line = [list[int]() for _ in waiting_lines]
    with files[1].open("a", encoding="utf-8") as out_file, working("generating", len(waiting_lines)) as work:
        requests = [asked_line.request for asked_line in waiting_lines]
        for outputs in engine.steps(requests, AHEAD * engine.limits.max_requests):
            num_done_before = num_done
            for line_index, output in outputs:
                asked_line, answer_tokens = waiting_lines[line_index], tokens_of_line[line_index]
                answer_tokens += [] if output.token is None else [output.token]
                if output.finish is not None:
                    answer_line = CompletionLine(
                        line=asked_line.number,
                        id=asked_line.line.id,
                        text=source.text.decode(answer_tokens),
                        tokens=answer_tokens,
                        finish=output.finish,
                        digest=asked_line.digest,
                    )
                    out_file.write(msgspec.json.encode(answer_line).decode() + "\n")
                    num_done += 1
            if num_done > num_done_before:
                out_file.flush()  # an interrupted call keeps finished answers
                work.done = num_done - num_answered
        os.fsync(out_file.fileno())
    return BulkDone(num_done - num_answered, num_answered)


def read_work(
    source: ModelFolder, check: Callable[[TokenRequest], None], files: tuple[Path, Path], usual: TokenRequest
) -> tuple[list[AskedLine], int]:
    """Returns the lines of ``files[0]`` that ``files[1]`` has no answers to, and the number of answers there. Raises
    InputError for a line that cannot be read or that ``check`` refuses, or for answers to other prompts."""
    asked_lines = read_prompts(source, check, files[0], usual)
    done_numbers = _lines_there(files[1], {asked_line.number: asked_line.digest for asked_line in asked_lines})
    return [asked_line for asked_line in asked_lines if asked_line.number not in done_numbers], len(done_numbers)


def read_prompts(
    source: ModelFolder, check: Callable[[TokenRequest], None], path: Path, usual: TokenRequest
) -> list[AskedLine]:
    """Returns the lines of a file of prompts. Raises InputError for a line that cannot be read or that ``check``
    refuses, or if there are no lines."""
    asked_lines = []
    for line_number, fields in json_rows(path, read_text(path, "Give a file with a JSON object on each line."), _LIKE):
        try:
            line = _prompt_line(fields)
            request = TokenRequest.of(
                source.encode(line.prompt) if isinstance(line.prompt, str) else line.prompt,
                max_tokens=usual.max_tokens if line.max_tokens is None else line.max_tokens,
                sampling=line.sampling or usual.sampling,
                stop_tokens=source.end_tokens,
                adapter=line.adapter,
            )
            check(request)
        except InputError as error:
            raise InputError(f"{path}:{line_number}: {error}") from None
        asked_lines.append(AskedLine(line_number, line, request, _digest(source, request)))
    if not asked_lines:
        raise InputError(f"{path} has no prompts. {_LIKE}")
    return asked_lines


_LIKE = 'A line is like {"prompt": "The statement", "id": 1}.'


def _prompt_line(fields: dict[str, Any]) -> PromptLine:
    try:
        return convert_fields(fields, PromptLine, section="line")
    except InputError as error:
        raise InputError(f"{error} {_LIKE}") from None


def _digest(source: ModelFolder, request: TokenRequest) -> str:
    features = request.source.digest.hex() if isinstance(request.source, SourceFeatures) else ""
    prompt = request.prompt or features
    facts = source.model.name, prompt, request.max_tokens, request.sampling, request.adapter
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def _lines_there(out: Path, digest_of_line: Mapping[int, str]) -> set[int]:
    """Returns the numbers of the lines that ``out`` answers; truncates ``out`` after its last complete line."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return set()
    line_numbers, intact_bytes = set[int](), 0
    for line in out.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            answer = msgspec.json.decode(line, type=CompletionLine)
        except msgspec.DecodeError:
            raise InputError(f"{out} has a line that no earlier run wrote. Name another file.") from None
        if digest_of_line.get(answer.line) != answer.digest:
            raise InputError(
                f"{out}: line {answer.line} of the prompts was answered with another prompt, other settings or another "
                f"model. Name another file."
            )
        line_numbers.add(answer.line)
        intact_bytes += len(line)
    os.truncate(out, intact_bytes)
    return line_numbers


USUAL = TokenRequest(prompt=(0,), max_tokens=128, sampling=LIKELIEST)
"""The default settings of a line."""
