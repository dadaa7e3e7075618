"""A verb of the command line: its options declared as a class, its answer printed in one place."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
import msgspec
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from meshwright.cli.fields import dim_sizes, parse_mesh
from meshwright.cli.output import answer_markdown, emit_json, say, width
from meshwright.cli.progress import progress_shown
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.extras import lacking, require
from meshwright.core.fields import LARGEST
from meshwright.core.units import counted, parse_bytes, parse_count
from meshwright.plan.serving.service import parse_load, parse_target
from meshwright.report.answer import MORE, Answer, Facts, Piece, as_csv, as_text
from meshwright.report.figure import save
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.chip import Chip, chip, chips
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.model import Model

FORMATS = ("text", "json", "csv", "markdown")
PRINTING = "Printing"
HELP_ALL = "meshwright.help_all"
PRINTED: dict[str, tuple[str, str, Facts]] = {
    "--notes": ("more_notes", "Print every condition that the answer rests on.", {}),
    "--symbols": ("more_symbols", "Print what each symbol stands for.", {}),
    "--all": ("more_all", "Print every row, step, part and condition.", {}),
    "--format": ("form", "How to print: text by default.", {"type": click.Choice(FORMATS)}),
    "--json": ("as_json", "One JSON object on standard output.", {}),
}
"""Options of every verb that say how its answer is printed: flag -> (name, help, settings of click)."""


class TextType(click.ParamType):  # type: ignore[type-arg]  # click before 8.5 has none
    """The type of options whose text ``read(text, what=flag)`` turns into a value; its InputErrors are the verb's."""

    def __init__(self, name: str, read: Callable[..., Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        option_name = param.opts[0] if isinstance(param, click.Option) else str(param and param.human_readable_name)
        return self.read(value, what=option_name) if isinstance(value, str) else value


Count = Annotated[int, TextType("count", partial(parse_count, least=1))]
"""A whole number of at least 1, such as 4096, 4Mi or 15T."""
Bytes = Annotated[float, TextType("bytes", lambda text, what: parse_bytes(text))]
"""A size, such as 80GB or 16GiB."""
TargetTime = Annotated[float, TextType("time", parse_target)]
"""Seconds above 0, such as 1s, 20ms."""
Load = Annotated[float, TextType("rate", parse_load)]
"""Requests a second, such as 20/s or 600/min."""
MeshSizes = Annotated[dict[str, int], TextType("axis=n,...", parse_mesh)]
DimSizes = Annotated[dict[str, int], TextType("dim=n,...", dim_sizes)]
_TYPES: dict[Any, Any] = {
    Path: click.Path(path_type=Path),
    Model: TextType("model", lambda text, what: load_model(text)),
    Chip: TextType("chip", lambda text, what: chip(text)),
    Cluster: TextType("cluster", lambda text, what: parse_cluster(text)),
}


class Parameter(msgspec.Struct, frozen=True):
    """An option or argument; its name and type are those of the attribute of `Options` that it is assigned to."""

    build: type[click.Parameter]
    flags: tuple[str, ...]
    settings: Facts
    needs: dict[str, str] = {}
    extra: str = ""
    group: str = ""
    is_rare: bool = False


def option(
    help: str = "",
    *flags: str,
    needs: dict[str, str] | None = None,
    extra: str = "",
    group: str = "",
    is_rare: bool = False,
    **settings: Any,
) -> Any:
    """Declares an attribute of `Options` that is given as ``--name``, or as ``flags``.

    A bool is a flag, a tuple may be given several times, a Literal is a choice; an attribute that may not be None and
    has no ``default`` is required. ``needs`` maps other attributes or properties to their names in the error: if all
    of them are empty, the option would change nothing and is refused. ``extra`` is what it needs of `EXTRAS`.
    ``group`` is its heading in the help, where an option that ``is_rare`` stands under ``--help-all`` only.
    ``settings`` go to `click.Option`.
    """
    return Parameter(click.Option, flags, {"help": help, **settings}, needs or {}, extra, group, is_rare)


def argument(**settings: Any) -> Any:
    """Declares an attribute of `Options` that is given by its position; ``settings`` go to `click.Argument`."""
    return Parameter(click.Argument, (), settings)


BATCH = option("Tokens a step (4Mi) or sequences (1024seq).")
SEQ = option("Tokens of a sequence.", "--seq", default="4096")
SEQ_NEEDED = option("Tokens of a sequence.", "--seq")
MESH = option("Mesh axes, major to minor, such as X=4,Y=2.")
DIMS = option("Sizes, such as B=1024,D=4096,F=16384.")
CALIBRATION = option("Rates of the chip (TOML), or datasheet.")
PNG = option("Draw the figures to this file (.png or .svg).", group="Results")
"""Options that several verbs share."""


class VerbOption(click.Option):
    """An option with its heading in the help; one that ``is_rare`` is listed by ``--help-all`` only."""

    def __init__(self, *args: Any, group: str = "Options", is_rare: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group, self.is_rare = group, is_rare


class VerbCommand(click.Command):
    """The command of a verb: after an option with pairs ``a=b ...`` all pairs that follow are its values."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options by group, then an example."""
        shows_all, groups, num_rare = bool(ctx.meta.get(HELP_ALL)), dict[str, list[tuple[str, str]]](), 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, VerbOption) and record:
                if shows_all or not param.is_rare:
                    group = "Needed" if param.required else param.group
                    groups.setdefault(group, []).append((record[0], record[1].removesuffix("  [required]")))
                else:
                    num_rare += param.group != PRINTING
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)
        formatter.write_paragraph()
        if example := _example(ctx):
            formatter.write_text(f"Example: {example}")
        if not shows_all and any(
            getattr(param, "group", "") == PRINTING and param.name != "help_all" for param in self.params
        ):
            more_text = f"{counted(num_rare, 'more option')}, and " * bool(num_rare)
            formatter.write_text(f"--help-all lists {more_text}how to print: {', '.join(PRINTED)}.")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {flag for param in self.params for flag in param.opts}
        for param in self.params:
            if getattr(param, "hidden", False) and set(param.opts) & set(args):  # what has moved says where
                raise InputError(f"{param.opts[0]}: {getattr(param, 'help', '')}")
        for flag in (arg.partition("=")[0] for arg in args):
            if flag[:1] == "-" and flag not in flags and f"-{flag}" in flags:  # click would read -out as -o ut
                raise click.NoSuchOption(flag, possibilities=[f"-{flag}"], ctx=ctx)
        many_flags = {flag for param in self.params if str(param.metavar).endswith(" ...") for flag in param.opts}
        expanded_args, last_flag = list[str](), ""
        for previous_arg, arg in zip(["", *args], args, strict=False):
            if arg.startswith("-") or "=" not in arg:
                flag = arg.partition("=")[0]
                last_flag = flag if flag in many_flags else ""
            elif last_flag and previous_arg != last_flag:
                expanded_args.append(last_flag)
            expanded_args.append(arg)
        return super().parse_args(ctx, expanded_args)


class Options:
    """The options of a verb: one attribute per option or argument, in the order of its help; ``form``: its format."""

    form = "text"

    def __init_subclass__(cls, group: str = "Options") -> None:
        """Puts the options that the class declares without a group under ``group``."""
        for name, parameter in vars(cls).copy().items():
            if isinstance(parameter, Parameter) and not parameter.group:
                setattr(cls, name, msgspec.structs.replace(parameter, group=group))

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


_Given = TypeVar("_Given", bound=Options)


def verb(
    options: type[_Given], *, help: str | None = None, needs: str = "", passes_on: bool = False
) -> Callable[[Callable[[_Given], Answer | None]], click.Command]:
    """Returns a decorator that makes a click command of a function from options to an answer.

    The function's docstring is the default ``help``. The command also takes ``--json`` and ``--format``, and prints the
    answer as they say; a verb that prints for itself returns None. With ``passes_on`` unknown options are arguments.
    ``needs`` names extras without which it says so before it does anything.
    """
    hints = get_type_hints(options, include_extras=True)
    hints = {name: hints[name] for name in [*options.__annotations__, *hints]}  # its own before those it shares
    params = [_parameter(name, hint, getattr(options, name)) for name, hint in hints.items()]
    every_name = next((param.name for param in params if "--all" in param.opts), "")
    print_options = [
        VerbOption(
            [flag, name], help=help_text, group=PRINTING, is_rare=True, is_flag="type" not in settings, **settings
        )
        for flag, (name, help_text, settings) in PRINTED.items()
        if not (every_name and flag == "--all")
    ]
    help_option = VerbOption(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_help_all,
        help="Show every option.",
        group=PRINTING,
        is_rare=True,
    )

    def decorate(function: Callable[[_Given], Answer | None]) -> click.Command:
        def callback(form: str | None = None, as_json: bool = False, **given: Any) -> None:
            more = [name for name in MORE if given.pop(f"more_{name}", name == "all" and given.get(every_name))]
            if as_json and form not in (None, "json"):
                raise InputError(f"--json and --format {form} both say how to print. Leave one of them out.")
            ctx = click.get_current_context()
            for extra in needs.split():
                require(extra, ctx.command_path.removeprefix("meshwright "))
            option_set = options(**given, form="json" if as_json else form or "text")
            for name, param in zip(hints, params, strict=True):
                value = given[name]
                for item in value if isinstance(value, tuple) else (value,):
                    if isinstance(item, int | float) and not 0 <= item <= LARGEST:
                        raise InputError(f"{param.opts[0]} {item}: give a finite number that is not negative.")
                needed, extra = getattr(options, name).needs, getattr(options, name).extra
                is_given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
                if extra and is_given and value:
                    require(extra, param.opts[0])
                if needed and is_given and not any(getattr(option_set, attribute) for attribute in needed):
                    needs_text = " or ".join(needed.values())
                    raise InputError(f"{param.opts[0]} changes nothing here: it is for {needs_text}.")
            with progress_shown(option_set.form == "text"):
                try:
                    answer = function(option_set)
                except (InputError, CannotRunError) as error:
                    raise type(error)(_with_flags(str(error), params)) from error
                if answer is not None:
                    emit(answer, option_set.form, more)
                    if answer.error is not None:
                        raise answer.error

        settings = {"ignore_unknown_options": passes_on}
        return VerbCommand(
            None,
            settings,
            callback,
            [*params, *([] if passes_on else print_options), help_option],
            help=help or function.__doc__,
        )

    return decorate


def _with_flags(text: str, params: Sequence[click.Parameter]) -> str:
    """Returns a message with the options of a verb in place of the names that Python has for them. One about a line of
    a file keeps them: they are its fields."""
    if re.match(r"\S+:\d+: ", text):
        return text
    for param in params:
        if param.name and "_" in param.name and isinstance(param, click.Option):
            text = re.sub(rf"(?<![\w.-]){param.name}=", f"{param.opts[0]} ", text)
            text = re.sub(rf"(?<![\w.-]){param.name}(?![\w.(])", param.opts[0], text)
    return text


def _help_all(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _example(ctx: click.Context) -> str:
    """Returns the command line that the table of verbs gives as an example of the verb of ``ctx``."""
    rows = getattr(ctx.parent.command, "verbs", {}) if ctx.parent else {}
    return f"meshwright {rows[ctx.info_name][3]}" if ctx.info_name in rows else ""


def emit(answer: Answer, form: str, more: Sequence[str] = MORE) -> None:
    """Draws the pictures of an answer and prints it; CSV has only its tables. ``more`` names the parts that a text
    prints whole. Raises InputError, after it has printed, if a picture is asked for and the extra to draw is missing.
    """
    wanted = {path: draw for path, draw in answer.pictures.items() if path is not None}
    draw_by_path = {} if lacking("draw") else wanted
    for path, draw in draw_by_path.items():
        say(f"wrote {save(draw(), path)}")
    if form == "json":
        emit_json({**answer.facts, "pictures": list(draw_by_path)} if draw_by_path else answer.facts)
    elif form == "text":
        show(answer.pieces, more)
    else:
        block_texts = answer_markdown(answer.pieces) if form == "markdown" else map(as_csv, answer.tables())
        click.echo("\n".join(block_texts), nl=False)
    if wanted:
        require("draw", f"drawing {', '.join(map(str, wanted))}")


def show(pieces: Iterable[Piece], more: Sequence[str] = MORE) -> None:
    """Prints a text as wide as the terminal."""
    for text in as_text(pieces, width(), more):
        click.echo(text)


def _names_of(read: Callable[[], Iterable[str]], *, or_file: bool) -> Callable[..., list[CompletionItem]]:
    """Returns what completes a word by the names that ``read`` returns, and by files too if ``or_file``."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in read() if name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")] * or_file

    return complete


COMPLETED = dict.fromkeys(("model", "models", "what"), _names_of(models, or_file=True))
COMPLETED |= {"on": _names_of(chips, or_file=False)}
"""Parameter -> what completes its words in a shell."""


def _parameter(name: str, hint: Any, parameter: Parameter) -> click.Parameter:
    member_types = [member for member in get_args(hint) if member is not NoneType]
    is_optional = len(member_types) < len(get_args(hint)) and get_origin(hint) is not Annotated
    py_type = member_types[0] if is_optional else hint
    click_settings = {"shell_complete": COMPLETED.get(name), **parameter.settings}
    is_many = get_origin(py_type) is tuple
    if is_many:
        click_settings |= {"nargs": -1} if parameter.build is click.Argument else {"multiple": True}
        py_type = get_args(py_type)[0]
    if py_type is bool:
        click_settings.setdefault("is_flag", True)
    else:
        click_type = click.Choice(get_args(py_type)) if get_origin(py_type) is Literal else _TYPES.get(py_type, py_type)
        click_settings.setdefault("type", py_type.__metadata__[0] if get_origin(py_type) is Annotated else click_type)
        click_settings.setdefault("required", not (is_optional or is_many or "default" in click_settings))
    if parameter.build is click.Argument:
        return click.Argument([name], **click_settings)
    click_settings.setdefault("show_default", py_type is not bool and "default" in click_settings)
    flags = [*(parameter.flags or (f"--{name.replace('_', '-')}",)), name]
    return VerbOption(flags, group=parameter.group, is_rare=parameter.is_rare, **click_settings)
