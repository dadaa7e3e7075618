"""The errors of predictions in words: the table per group, and what was not predicted."""

from collections.abc import Iterator

from meshwright.accuracy.errors import Accuracy, Summary
from meshwright.cli.output import or_dash
from meshwright.report.answer import Piece, Table
from meshwright.report.tables import Cell

MAX_NAMED = 6
"""Records that a line of reasons names before it only counts."""


def accuracy_text(found: Accuracy, *, title: str) -> Iterator[Piece]:
    """The table per group, and what was not predicted."""
    yield Table(
        ["group", "records", "MAPE", "median", "bias", "interval holds"], summary_rows(found), title=f"{title}: errors"
    )
    pick = found.regret()
    if pick.regret is not None:
        yield (
            f"the pick: of the configurations measured for one job, the one predicted fastest takes {pick.regret:.1%} "
            f"longer than the fastest ({pick.num_jobs} jobs, right in {pick.right:.0%}); a random one {pick.random:.0%}"
        )
    unfitted = [one for one in found.predictions if not one.fitted]
    if unfitted and len(unfitted) < len(found.predictions):
        chips = ", ".join(dict.fromkeys(one.chip for one in unfitted))
        yield f"by data-sheet rates: {len(unfitted):,}, nothing is fitted for {chips}"
    for reason, ids in found.reasons().items():
        named = ", ".join(ids[:MAX_NAMED]) if len(ids) <= MAX_NAMED else f"{ids[0]} and {len(ids) - 1:,} more"
        yield f"not predicted: {len(ids):,}, {reason} ({named})"


def summary_rows(found: Accuracy) -> list[list[Cell]]:
    """One row per group, then core training and everything."""
    rows = [_row(group, found.summary(group=group)) for group in found.groups]
    rows = [row for row in rows if row[1] != "0"]
    return [*rows, _row("core training", found.summary(core=True)), _row("all", found.summary())]


def _row(name: str, at: Summary) -> list[Cell]:
    shares = [or_dash(value, lambda v: f"{v:.1%}") for value in (at.mape, at.median)]
    bias = or_dash(at.bias, lambda v: f"{v:+.1%}")
    return [name or "no group", f"{at.n:,}", *shares, bias, or_dash(at.coverage, lambda v: f"{v:.0%}")]
