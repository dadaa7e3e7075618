"""What the sweeps share on the command line: the job and fixed choices they read, and the picture they write."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from meshwright.cli.fields import parse_fields, take_axes, with_fields
from meshwright.cli.output import say
from meshwright.core.units import parse_count
from meshwright.report.figure import Spec, save
from meshwright.spec.job import Job, parse_batch, require_training
from meshwright.spec.strategy import AS_RUN, Assumptions

png_option = click.option(
    "--png", type=click.Path(path_type=Path), help="Draw the figures to this file (.png or .svg)."
)
batch_option = click.option("--batch", required=True, help="Tokens a step (4Mi) or sequences (1024seq).")
seq_option = click.option("--seq", "seq_len", default="4096", show_default=True, help="Tokens of a sequence.")
axes_option = click.option("--axes", help="Mesh axes to keep fixed, such as tensor=8.")
set_option = click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A field: strategy.remat=block.")
calibration_option = click.option(
    "--calibration", type=click.Path(path_type=Path), help="Rates of the chip (TOML), or datasheet."
)


OF_JOBS = ("strategy", "assumptions", "job")
"""What ``--set`` names in sweeps over plans of one job."""


def read_job(batch: str, seq_len: str, pairs: tuple[str, ...] = ()) -> Job:
    """The job of ``--batch`` and ``--seq``, with fields of ``--set``."""
    length = parse_count(seq_len, what="seq")
    job = Job(batch_seqs=parse_batch(batch, seq_len=length), seq_len=length)
    job = with_fields(job, "job", parse_fields(pairs, sections=OF_JOBS)["job"])
    require_training(job, "sweep")
    return job


def read_choices(
    axes: str | None, pairs: tuple[str, ...], *, sections: tuple[str, ...] = ("strategy", "assumptions")
) -> tuple[Mapping[str, int], Mapping[str, Any], Assumptions]:
    """Fixed mesh axes, fixed fields of the strategy, and assumptions, of ``--axes`` and ``--set``."""
    fields = parse_fields(pairs, sections=sections)
    assumed = with_fields(AS_RUN, "assumptions", fields["assumptions"])
    return take_axes(axes, fields["strategy"]), fields["strategy"], assumed


def draw(png: Path | None, figure: Callable[[], Spec]) -> None:
    """Write the picture where one is asked for."""
    if png is not None:
        say(f"wrote {save(figure(), png)}")
