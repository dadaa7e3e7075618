"""`meshwright bench`: measures the devices at hand, or a server on them."""

import click

from meshwright.cli.group import VerbGroup, subverbs

BENCHES = {
    "machine": (
        "Rates of the devices, a calibration to plan with; the word may be left out.",
        "bench matmul copy --on cpu:8 -o rates.toml",
    ),
    "serve": ("A server under load, beside its simulation.", "bench serve FOLDER --prompt 128 --output 64"),
    "drafts": (
        "Speculative decoding with several numbers of drafts and without.",
        "bench drafts FOLDER --draft ngram --prompts prompts.jsonl",
    ),
}


class BenchGroup(VerbGroup):
    """The group of benches; `bench` without a name is `bench machine`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or [self.otherwise])


@click.group(cls=BenchGroup, verbs=subverbs("bench", BENCHES), otherwise="machine")
def command() -> None:
    """Measure the devices at hand, or a server on them."""
