"""`meshwright simulate`: fleets that are too large to own."""

import click

from meshwright.cli.group import VerbGroup

SIMULATIONS: dict[str, tuple[str, str]] = {
    "fleet": ("cli", "A plan's cluster that trains while its parts fail, under several policies."),
}
"""What is simulated -> (package of its module, its line in `--help`)."""


@click.group(cls=VerbGroup, verbs=SIMULATIONS, prefix="simulate_")
def command() -> None:
    """Simulate training over weeks, with failures: tables, --json, --format csv, and pictures with --png.

    \b
    meshwright simulate fleet plan.toml --days 54 --rates llama3 --spares 2%
    """
