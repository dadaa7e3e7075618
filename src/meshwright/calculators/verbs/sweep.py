"""`meshwright sweep`: one question asked over many sizes: chips, models, batches, sequence lengths, nodes."""

from importlib import import_module

import click

from meshwright.core.errors import nearest

SWEEPS: dict[str, tuple[str, str]] = {
    "chips": ("meshwright.calculators.verbs.sweep_chips", "The best plan against the number of chips: scaling curves."),
    "grid": (
        "meshwright.calculators.verbs.sweep_grid",
        "The best plan of every model on every number of nodes: a heatmap.",
    ),
    "batch": (
        "meshwright.calculators.verbs.sweep_batch",
        "Communication against compute by batch size, and where they cross.",
    ),
    "memory": (
        "meshwright.calculators.verbs.sweep_memory",
        "Memory against tensor degree, sequence length or recomputation.",
    ),
    "bandwidth": ("meshwright.calculators.verbs.sweep_bandwidth", "The bandwidth of every collective against chips."),
    "streams": (
        "meshwright.calculators.verbs.sweep_streams",
        "Compute and communication of a few layers side by side.",
    ),
}
"""Sweep -> (module with the function `command`, what `--help` says of it)."""


class _Sweeps(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SWEEPS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_module(SWEEPS[cmd_name][0]).command if cmd_name in SWEEPS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in SWEEPS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no sweep {args[0]!r}.{nearest(args[0], SWEEPS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Sweeps"):
            formatter.write_dl([(name, text) for name, (_, text) in SWEEPS.items()])


@click.group(cls=_Sweeps)
def command() -> None:
    """One question over many sizes: a table, --json, and a picture with --png FILE."""
