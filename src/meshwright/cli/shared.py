"""Options that several verbs share, and what they stand for."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cli.fields import job_of, parse_fields, take_axes, with_fields
from meshwright.cli.verb import option
from meshwright.spec.job import Job, require_training
from meshwright.spec.strategy import AS_RUN, Assumptions

BATCH = option("Tokens a step (4Mi) or sequences (1024seq).")
SEQ = option("Tokens of a sequence.", "--seq", default="4096")
SEQ_NEEDED = option("Tokens of a sequence.", "--seq")
DIMS = option("Sizes, such as B=1024,D=4096,F=16384.", "--dims")
AXES = option("Mesh axes to keep fixed, such as fsdp=1024,tensor=4.")
SET = option("A field: strategy.remat=block.", "--set", metavar="KEY=VALUE")
CALIBRATION = option("Rates of the chip (TOML), or datasheet.")
PNG = option("Draw the figures to this file (.png or .svg).")

OF_JOBS = ("strategy", "assumptions", "job")
"""What ``--set`` names in questions about plans of one job."""


def read_job(batch: str, seq_len: int, pairs: Sequence[str] = ()) -> Job:
    """The training job of ``--batch`` and ``--seq``, with fields of ``--set``."""
    job = job_of(batch, seq_len, parse_fields(pairs, sections=OF_JOBS)["job"])
    require_training(job, "")
    return job


def read_choices(
    axes: str | None, pairs: Sequence[str], *, sections: Sequence[str] = OF_JOBS
) -> tuple[Mapping[str, int], Mapping[str, Any], Assumptions]:
    """Fixed mesh axes, fixed fields of the strategy, and assumptions, of ``--axes`` and ``--set``."""
    fields = parse_fields(pairs, sections=sections)
    assumed = with_fields(AS_RUN, "assumptions", fields["assumptions"])
    return take_axes(axes, fields["strategy"]), fields["strategy"], assumed
