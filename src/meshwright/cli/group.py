"""Verbs by name, each imported when it runs."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from meshwright.core.errors import nearest, path_errors


class VerbGroup(click.Group):
    """A verb made of ``verbs``: name -> (package of its module, its line in `--help`).

    Each is the function `command` of ``PACKAGE.verbs.PREFIX + NAME``, imported when it runs. A first word that names
    none of them goes to the verb ``otherwise``; without an ``otherwise`` it is a UsageError.
    """

    def __init__(
        self, *, verbs: Mapping[str, tuple[str, str]], prefix: str = "", otherwise: str = "", **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.verbs, self.prefix, self.otherwise = verbs, prefix, otherwise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return None
        return import_module(f"meshwright.{self.verbs[cmd_name][0]}.verbs.{self.prefix}{cmd_name}").command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.otherwise and args and args[0] not in (*self.verbs, *ctx.help_option_names):
            args = [self.otherwise, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb; any file or folder that it cannot read or write is an InputError."""
        with path_errors():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.verbs and not args[0].startswith("-"):
            raise click.UsageError(f"there is no verb {args[0]!r}.{nearest(args[0], self.verbs)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in self.verbs.items()])
