"""`meshwright simulate published`: published fleets beside their simulation."""

from collections.abc import Iterator

from msgspec.structs import asdict

from meshwright.cli.verb import Count, Options, option, verb
from meshwright.report.answer import Answer, Fact, Facts, Paragraph, Piece, Table
from meshwright.simulate.fleet.published import MOST_POINTS, PublishedFleet, published_fleets

RAW = ("name", "figure", "published", "simulated_p5", "simulated_p95", "points", "verdict")


class Given(Options):
    seeds: Count = option("Random runs at either end of what is swept.", default="20")
    inputs: bool = option("Every input, with its source.")


@verb(Given)
def command(given: Given) -> Answer:
    """Published fleets beside their simulation. What a source does not give is a range, of which both ends are
    simulated: the interval is from the 5th percentile at the worst end to the 95th at the best."""
    rows = [_row(fleet, given.seeds) for fleet in published_fleets()]
    raw = [{name: row[name] for name in RAW} for row in rows]
    return Answer({"fleets": rows}, _text(rows, given.inputs), raw=[raw])


def _row(fleet: PublishedFleet, seeds: int) -> Facts:
    low, high = fleet.simulate(seeds)
    is_met = fleet.is_met(low, high)
    verdict = "reproduced" if is_met else "not reproducible"
    return {
        **asdict(fleet),
        "simulated_p5": low,
        "simulated_p95": high,
        "points": 100 * (high - low),
        "verdict": verdict,
    }


def _text(rows: list[Facts], with_inputs: bool) -> Iterator[Piece]:
    yield Table.of(
        rows,
        {
            "fleet": "name",
            "figure": "figure",
            "published": "said",
            "simulated": (lambda row: f"{row['simulated_p5']:.1%}-{row['simulated_p95']:.1%}", None),
            "points": ("points", "{:.1f}".format),
            "": "verdict",
        },
    )
    for row in rows:
        if row["verdict"] != "reproduced":
            why = row["reason"] or f"the published figure is not in an interval of {MOST_POINTS:g} points"
            yield Fact(row["name"], f"not reproducible: {why}")
    for row in rows if with_inputs else ():
        yield ""
        yield f"{row['name']}, {row['said']}: {row['source']}"
        for given in row["inputs"]:
            values = given.value if isinstance(given.value, tuple) else (given.value,)
            shown = "-".join(f" {value:g}" for value in values if value is not None)
            yield Paragraph(f"  {given.name}{shown.replace('- ', '-')}: {given.source}", indent=4)
