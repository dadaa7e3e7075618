"""`meshwright simulate`: fleets that are too large to own."""

import click

from meshwright.cli.group import VerbGroup, subverbs

FLEET = (
    "The cluster of a plan, whose parts fail while it trains, under several policies.",
    "simulate fleet plan.toml --days 54 --rates llama3 --spares 2%",
)


@click.group(cls=VerbGroup, verbs=subverbs("simulate", {"fleet": FLEET}))
def command() -> None:
    """Simulate training over weeks, with failures."""
