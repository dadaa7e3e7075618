"""Console blocks of a Markdown page: found, run in this process, compared with what the page says.

A block begins with ```console and holds commands, each after "$ ", and what they print. A command is a call of
`meshwright`, which may go on behind a backslash and may be piped into grep, sed, head or tail. A block that begins
with ```toml title="NAME" is a file of that name for the blocks of its section. Blocks of one section share a folder. A
listing is a block ```python, before a block ```text with what it prints. The page of verbs is written from click.
"""

import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import click

from meshwright.cli.main import cli, run
from meshwright.cli.verb import HELP_ALL, PRINTING

WIDTH = "80"
FILTERS = ("grep", "sed", "head", "tail")
_FENCE = re.compile(r'^```(console|\w+ (title=")?(?P<name>[\w.-]+)"?)\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)
_LISTING = re.compile(
    r"^```python\n(?P<code>(?:(?!```).*\n)*)```\n\n```text\n(?P<said>(?:(?!```).*\n)*)```$", re.MULTILINE
)
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One command of a page, what the page says that it prints, and where in the page that stands."""

    command: str
    said: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Section:
    """What stands under one heading: files by name, and calls in order."""

    title: str
    calls: tuple[Call, ...]
    files: dict[str, str] = field(default_factory=dict)


def read_sections(page: str) -> list[Section]:
    """The sections of a page that have calls, in order."""
    headings = [(0, ""), *((m.start(), m.group(2)) for m in _HEADING.finditer(_without_fences(page)))]
    ends = [start for start, _ in headings[1:]] + [len(page)]
    found = []
    for (start, title), end in zip(headings, ends, strict=True):
        calls: list[Call] = []
        files = {}
        for fence in _FENCE.finditer(page, start, end):
            if fence.group("name"):
                files[fence.group("name")] = fence.group("text")
            else:
                calls.extend(_calls(page, fence.start("text"), fence.end("text")))
        if calls:
            found.append(Section(title=title, calls=tuple(calls), files=files))
    return found


def run_listings(page: str) -> list[tuple[re.Match[str], str]]:
    """The listings of a page with what they print, run in order in one namespace."""
    found, names = [], {"__name__": "listing"}
    for match in _LISTING.finditer(page):
        with redirect_stdout(io.StringIO()) as out:
            exec(match.group("code"), names)
        found.append((match, out.getvalue()))
    return found


def _without_fences(page: str) -> str:
    """The page with every block blanked, so that a hash inside one is no heading; positions stay."""
    return re.sub(r"^```.*?^```$", lambda m: " " * len(m.group()), page, flags=re.DOTALL | re.MULTILINE)


def _calls(page: str, start: int, end: int) -> Iterator[Call]:
    commands = list(_COMMAND.finditer(page, start, end))
    ends = [m.start() for m in commands[1:]] + [end]
    for match, stop in zip(commands, ends, strict=True):
        yield Call(command=match.group(1), said=page[match.end() : stop].rstrip("\n"), start=match.end(), end=stop)


def verbs_page(command: click.Command = cli, name: str = "meshwright") -> str:
    """The help of a verb, with its options as a table, and then of the verbs under it."""
    context = click.Context(command, info_name=name, terminal_width=80, **cli.context_settings)
    context.meta[HELP_ALL] = True
    text, children = command.get_help(context).removeprefix("Usage: "), list[str]()
    if isinstance(command, click.Group):
        verbs = ((verb, command.get_command(context, verb)) for verb in command.list_commands(context))
        children = [verbs_page(child, f"{name} {verb}") for verb, child in verbs if child]
    else:
        text = re.split(r"\n\n\S[^\n]*:\n", text)[0]
        records = (
            param.get_help_record(context) or ("", "")
            for param in command.get_params(context)
            if getattr(param, "group", PRINTING) != PRINTING
        )
        rows = ["| `{}` | {} |".format(*(cell.replace("|", "/") for cell in record)) for record in records if record[1]]
        children = ["\n".join(["| option | meaning |", "| --- | --- |", *rows])]
    return "\n\n".join([f"## {name.removeprefix('meshwright ')}", f"```text\n{text}\n```", *children])


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """The folder as the current one, and a terminal of 80 columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    try:
        with chdir(folder):
            yield
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def run_section(section: Section, folder: Path) -> list[str]:
    """What each call of a section prints in an empty folder."""
    for name, text in section.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    with in_folder(folder):
        return [printed(call.command) for call in section.calls]


def printed(command: str) -> str:
    """Messages and results of one command as a terminal shows them; a refusal is printed too, any fault raises."""
    line = command.replace("\\\n", " ")
    call, *filters = _split_pipe(line)
    name, *arguments = shlex.split(call)
    assert name == "meshwright", f"{command}: only meshwright is run"
    assert all(shlex.split(part)[0] in FILTERS for part in filters), f"{command}: only {FILTERS} may follow"
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(arguments)
    assert code in (0, 2, 3), f"{command}: exit code {code}: {err.getvalue()}"
    text = out.getvalue()
    if filters:
        done = subprocess.run(["sh", "-c", "|".join(filters)], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: nothing is left of\n{text}{done.stderr}"
        text = done.stdout
    return (err.getvalue() + text).rstrip("\n")


def _split_pipe(line: str) -> list[str]:
    """The parts of a command between the pipes that stand outside quotes."""
    parts = re.findall(r"""(?:"[^"]*"|'[^']*'|[^|"'])+""", line)
    return [part.strip() for part in parts]
