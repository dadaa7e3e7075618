"""Verbs by name, each imported when it runs."""

from collections.abc import Mapping
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from meshwright.core.errors import nearest, path_errors
from meshwright.core.extras import extras_named

HEADINGS = ("Plan and prove", "Run", "Measure")
"""The first headings of `--help`; those that packages add follow."""
VerbRow = tuple[str, str, str, str]
"""A verb's module, its heading in `--help`, its line there, an example of its command line."""


def verb_tables() -> dict[str, VerbRow]:
    """Returns the verbs of every package that has some, as its ``VERBS`` say, by headings; no verb is imported."""
    rows: dict[str, VerbRow] = {}
    for path in sorted(Path(__file__).parents[1].glob("*/verbs/__init__.py")):
        home = f"meshwright.{path.parts[-3]}.verbs"
        for heading, verbs in import_module(home).VERBS.items():
            rows |= {name: (f"{home}.{name}", heading, *row) for name, row in verbs.items()}
    headings = [*HEADINGS, *(heading for _, heading, *_ in rows.values())]
    return dict(sorted(rows.items(), key=lambda item: headings.index(item[1][1])))


def subverbs(verb: str, rows: Mapping[str, tuple[str, str]]) -> dict[str, VerbRow]:
    """Returns the verbs below ``verb`` from name -> (line of the help, example). Their modules are in the folder of
    the module of ``verb`` and are called ``verb_name``."""
    return {name: (f"meshwright.cli.verbs.{verb}_{name}", "Verbs", *row) for name, row in rows.items()}


class VerbGroup(click.Group):
    """A verb made of ``verbs``, each the function `command` of its module, imported when it runs.

    A first word that names none of them goes to the verb ``otherwise``; without an ``otherwise`` it is a UsageError.
    """

    def __init__(self, *, verbs: Mapping[str, VerbRow], otherwise: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.verbs, self.otherwise = verbs, otherwise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return None
        return cast(click.Command, import_module(self.verbs[cmd_name][0]).command)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.otherwise and args and args[0] not in (*self.verbs, *ctx.help_option_names):
            args = [self.otherwise, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb; a file or folder that it cannot read or write, or a missing extra, is an InputError."""
        with path_errors(), extras_named("this"):
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.verbs and not args[0].startswith("-"):
            raise click.UsageError(f"there is no verb {args[0]!r}.{nearest(args[0], self.verbs)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rows in groupby(self.verbs.items(), lambda item: item[1][1]):
            with formatter.section(heading):
                verbs = list(rows)
                formatter.write_dl([(name, line) for name, (_, _, line, _) in verbs])
            if heading != "Verbs":
                formatter.write_text(f"  Example: meshwright {verbs[0][1][3]}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns the verbs that begin with ``incomplete``, without importing one, or the options of the group."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=row[2]) for name, row in self.verbs.items() if name.startswith(incomplete)]
