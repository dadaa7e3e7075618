"""What `explain` prints alike for training and for services: numbered lines of derived steps, and terms of a step."""

from collections.abc import Iterator

from meshwright.cli.output import format_flop_count
from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.breakdown import term_words
from meshwright.plan.why.explain import Algorithm, ListedStep
from meshwright.report.answer import Paragraph, Piece, TableColumns

TERMS: TableColumns = {
    "work of one step": ("name", term_words),
    "alone": ("alone_s", format_seconds),
    "adds": ("added_s", lambda added: format_seconds(max(0.0, added))),
    "share": ("share", "{:.0%}".format),
}


def algorithm_text(part: Algorithm) -> Iterator[Piece]:
    yield Paragraph(f"\n{part.title[0].upper()}{part.title[1:]}", None)
    for line in part.lines:
        yield Paragraph(f"{line.number:>3}. {line.text}", indent=7)
        yield Paragraph(f"       {_measures(line)}", None)
    if part.num_left_out:
        yield Paragraph(f"     ({part.num_left_out} small local steps are not listed)", None)
    yield Paragraph(
        f"     compute {format_seconds(part.compute_s)}; communication that can hide {format_seconds(part.hidden_s)}, "
        f"on the critical path {format_seconds(part.critical_s)}",
        indent=5,
    )


def _measures(line: ListedStep) -> str:
    """Returns FLOPs if there are any, bytes, seconds, and whether the step can overlap."""
    amounts = [format_flop_count(line.flops)] if line.flops else []
    often = {0.0: "not on the busiest device", 1.0: ""}.get(line.times, f"{line.times:,.4g} times")
    words = (*amounts, format_bytes(line.num_bytes), format_seconds(line.time_s), often, line.overlaps)
    return ", ".join(word for word in words if word)
