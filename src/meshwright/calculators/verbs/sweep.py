"""`meshwright sweep`: one question asked over many sizes: clusters, models, batches, any field of a plan."""

from importlib import import_module

import click

PLANS = "plans"
"""The sweep that is meant where none is named."""

SWEEPS: dict[str, tuple[str, str]] = {
    PLANS: (
        "meshwright.calculators.verbs.sweep_plans",
        "The best plan as one or two fields change; the word may be left out.",
    ),
    "batch": (
        "meshwright.calculators.verbs.sweep_batch",
        "Communication against compute by batch size, and where they cross.",
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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = not args or args[0] in (*SWEEPS, *ctx.help_option_names)
        return super().parse_args(ctx, args if named else [PLANS, *args])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Sweeps"):
            formatter.write_dl([(name, text) for name, (_, text) in SWEEPS.items()])


@click.group(cls=_Sweeps)
def command() -> None:
    """One question over many sizes: a table, --json, --format csv, and a picture with --png FILE.

    \b
    meshwright sweep llama3-8b --on h100:8x1..8x64 batch=4Mi
    meshwright sweep 1B,7B,70B --on h100:8x1..8x64 batch=4Mi --figure tokens_per_s
    meshwright sweep llama3-8b --on h100:8x8 batch=1Mi remat tensor=1,2,4,8
    meshwright sweep llama3-8b --on h100:8x1 micro=1 seq_len --figure memory
    """
