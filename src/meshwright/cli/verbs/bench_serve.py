"""`meshwright bench serve`: a server under load, beside the simulation of the same requests."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import asdict, replace

from meshwright.batching.record import LatencyTargets, ServingSummary
from meshwright.batching.traffic import RequestTraffic, load_trace, parse_lengths
from meshwright.cli.engine import EngineGiven, engine_options, say_all
from meshwright.cli.output import busy_words, say, three_digits, width
from meshwright.cli.verb import PNG, Count, TargetTime, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.progress import tracked
from meshwright.core.units import counted, format_seconds
from meshwright.plan.serving.service import parse_load
from meshwright.report.answer import Answer, Condition, Facts, Heading, Piece, Show, Table
from meshwright.report.figure import Figure

if TYPE_CHECKING:
    from meshwright.bench.serving.compare import RateResult
    from meshwright.bench.serving.server import BenchedServer

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
"""Request rates without --rate, as shares of the simulated capacity."""
FEWEST = 20
"""Fewest requests at a rate, without --requests."""
MOST = 400
"""Most requests at a rate, without --requests; as many find the capacity."""
DRIFT = 0.1
"""Relative change of the step's time since the engine was timed, above which the text says so."""
WIDE = 100
"""Width of the terminal from which the table of rates has columns of predictions."""


class Given(EngineGiven, group="Load"):
    what: Path | None = argument(metavar="[FOLDER]", required=False)  # type: ignore[assignment]
    url: str | None = option("Measure a running server; without a FOLDER nothing is predicted.")
    api_key: str = option("Key of the server at --url.", default="", is_rare=True)
    rate: str | None = option(
        "Requests a second, such as 5/s or 1/s,2/s,4/s. Default: 0.2 to 1.2 of the simulated capacity, or the trace's.",
        "--rate",
        "--rates",
    )
    prompt: str = option("Tokens of a prompt: 500, 1..999 or lognormal:500:0.8.", default="64")
    output: str = option("Tokens of an output, as --prompt.", default="64")
    trace: Path | None = option("Requests from a JSONL or CSV file, in place of lengths.")
    requests: Count | None = option("Requests at each rate.")
    seconds: float = option("Seconds at each rate, without --requests.", default=30.0)
    burstiness: float = option(
        "Shape of the gaps between requests: 1 is Poisson, less is burstier.", default=1.0, is_rare=True
    )
    ttft: TargetTime | None = option("Longest time to the first token of a request that counts as good.")
    tpot: TargetTime | None = option("Longest time per further token of a request that counts as good.")
    png: Path | None = PNG


@verb(Given, needs="serve")
def command(given: Given) -> Answer:
    """Measure a server under load: the model of a FOLDER in a process of its own, or the one at --url.

    Times the steps of the model's engine first; predictions are a simulation of the same requests with these times.
    Requests arrive whether or not others are done. TTFT counts from sending; the first tenth of the arrivals and all
    that happens after the last arrival do not count.
    """
    if given.what is None and given.url is None:
        raise InputError("there is nothing to measure. Name a FOLDER, or give the --url of a server.")
    rates = [parse_load(text, what="--rate") for text in given.rate.split(",")] if given.rate else []
    if given.what is None and not rates and given.trace is None:
        raise InputError("without a FOLDER no capacity is known. Give --rate, such as 5/s, or a --trace.")
    if given.seconds == 0 or given.burstiness == 0:
        raise InputError("--seconds and --burstiness are above 0. Give positive numbers, such as 30 and 1.")
    traced_traffic = load_trace(given.trace) if given.trace is not None else None
    parse_lengths(given.prompt), parse_lengths(given.output)
    with ExitStack() as stack:
        server = _started(given, stack) if given.what is not None else None
        url = given.url or (server.url if server else "")
        load_answer = asyncio.run(_measured(given, url, server, rates, traced_traffic))
    return load_answer.answer()


def _started(given: Given, stack: ExitStack) -> "BenchedServer":
    from meshwright.bench.serving.server import benched_server

    num_devices = given.on.num_chips if given.on is not None and given.on.kind == "host" else None
    mesh = given.axes or ({"tensor": given.on.num_chips} if given.on is not None else None)
    assert given.what is not None
    say("opening the model and timing the steps of its engine")
    server = stack.enter_context(
        benched_server(given.what, engine_options(given, mesh), num_devices=num_devices, serves=given.url is None)
    )
    say_all(server.lines)
    return server


async def _measured(
    given: Given, url: str, server: "BenchedServer | None", rates: list[float], traced: RequestTraffic | None
) -> "LoadAnswer":
    from meshwright.bench.serving.clock import capacity_per_s, simulate_engine
    from meshwright.bench.serving.compare import LoadShape, check_lengths, compare, over_http
    from meshwright.bench.serving.load import LoadClient

    client = LoadClient(url, api_key=given.api_key)
    facts = await client.facts()
    shape = LoadShape(
        prompt=parse_lengths(given.prompt), output=parse_lengths(given.output), burstiness=given.burstiness
    )
    sample_traffic = traced or shape.traffic(1.0, MOST)
    check_lengths(sample_traffic, facts)
    capacity = None
    if server is not None:
        clock = await over_http(client, facts, server.clock, server.limits.max_requests)
        server = replace(server, clock=clock)
        capacity = capacity_per_s(sample_traffic, server.limits, clock)
        say(f"simulated capacity: {three_digits(capacity)} requests a second")

    def at(rate: float) -> RequestTraffic:
        if traced is not None:
            return traced.at_rate(rate)
        return shape.traffic(rate, given.requests or min(max(round(rate * given.seconds), FEWEST), MOST))

    loads = [at(rate) for rate in rates or ([share * capacity for share in SHARES] if capacity and not traced else [])]
    latency_targets = LatencyTargets(ttft_s=given.ttft or np.inf, tpot_s=given.tpot or np.inf)
    rate_results = [
        await compare(client, load, latency_targets, server, say)
        for load in tracked(loads or [sample_traffic], "measuring rates")
    ]
    answer = LoadAnswer(given, facts.name, rate_results, server, capacity)
    if server is not None and given.png is not None:
        answer.between = [
            (rate, simulate_engine(at(rate), server.limits, server.clock).summary(latency_targets))
            for rate in (math.sqrt(a.rate_per_s * b.rate_per_s) for a, b in pairwise(rate_results))
        ]
    return answer


@dataclass
class LoadAnswer:
    """The measurements at each rate, and the answer of the verb with its text and picture.

    ``between`` has (rate, simulated summary) between the measured rates, for the curves of the picture.
    """

    given: Given
    name: str
    rows: "Sequence[RateResult]"
    server: "BenchedServer | None"
    capacity: float | None
    between: Sequence[tuple[float, ServingSummary]] = ()

    def answer(self) -> Answer:
        """Returns the facts, the text and the picture."""
        clock = self.server.clock if self.server else None
        facts = {
            "model": self.name,
            "capacity_per_s": self.capacity,
            "clock": vars(clock) if clock else None,
            "rates": [{**asdict(row), "ratios": _ratios(row)} for row in self.rows],
        }
        return Answer(facts, list(self.text()), {self.given.png: self.picture})

    def text(self) -> Iterator[Piece]:
        """Yields the load, the capacity, a table of one rate or of several, and what the predictions rest on."""
        lengths_text = f"prompts {self.given.prompt}, outputs {self.given.output} tokens"
        yield f"{self.name}: {lengths_text if self.given.trace is None else self.given.trace}"
        if self.capacity is not None:
            yield f"simulated capacity {three_digits(self.capacity)} requests/s"
        yield ""
        if len(self.rows) > 1:
            yield self._table()
        for row in self.rows if len(self.rows) == 1 else ():
            yield f"{counted(row.num_requests, 'request')}, {three_digits(row.rate_per_s)} a second"
            yield Table.compared(
                (name, read_figure(row.predicted) if row.predicted else None, read_figure(row.measured), show)
                for name, (read_figure, show) in FIGURES.items()
                if name != "goodput/s" or self.given.ttft or self.given.tpot
            ).known()
        drifts = [row.drift for row in self.rows if row.drift is not None]
        if max(map(abs, drifts), default=0.0) > DRIFT:
            yield (
                f"steps took {min(drifts):+.0%} to {max(drifts):+.0%} more than when the engine was timed: other "
                "work on the machine, which changes all figures"
            )
        yield from busy_words()
        for row in self.rows:
            if row.failures:
                yield f"{len(row.failures):,} of {counted(row.num_requests, 'request')} failed: {row.failures[0]}"
        if self.server is not None:
            clock = self.server.clock
            yield Condition(
                f"predictions simulate the engine with measured steps: {format_seconds(clock.decode_s[0])} "
                f"({counted(clock.decode_rows[0], 'row')}) to {format_seconds(clock.chunk_s[-1])} "
                f"({clock.chunk_rows[-1]:,}), median error {clock.error:.0%}"
            )
            added_times = (("request", clock.request_s), ("step", clock.served_s), ("token", clock.token_s))
            added_texts = [f"{format_seconds(seconds)} a {unit}" for unit, seconds in added_times if seconds]
            yield Condition(f"HTTP adds {', '.join(added_texts) or 'no measurable time'}")

    def _table(self) -> Table:
        columns: list[str | Heading] = [Heading("requests/s", three_digits, "rate_per_s"), "requests"]
        cell_rows: list[list[Any]] = [[row.rate_per_s, row.num_requests] for row in self.rows]
        if self.capacity is not None:
            columns[1] = Heading("load", "{:.0%}".format, "share")
            cell_rows = [[row.rate_per_s, row.rate_per_s / self.capacity] for row in self.rows]
        for name in CURVES:
            read_figure, show = FIGURES[name]
            if self.server is not None and width() >= WIDE:
                columns.append(Heading(f"{name} predicted", show))
            columns.append(Heading(f"{name} measured" if width() >= WIDE else name, show))
            columns += [Heading("ratio", "{:.2f}".format, f"{name} ratio")] if self.server is not None else []
            for row, cells in zip(self.rows, cell_rows, strict=True):
                predicted_cells = [read_figure(row.predicted)] if row.predicted and width() >= WIDE else []
                cells += [*predicted_cells, read_figure(row.measured), *([_ratios(row)[name]] if row.predicted else [])]
        return Table(columns, cell_rows, "Measured; ratios are to the simulation" if self.server is not None else "")

    def picture(self) -> Figure:
        """Draws throughput and median latencies over the rate."""
        from meshwright.report.machine.serving import load_figure

        def points(read_y: Callable[[ServingSummary], float], side: str) -> Sequence[tuple[float, float]]:
            summaries = sorted((row.rate_per_s, getattr(row, side)) for row in self.rows if getattr(row, side))
            return [(rate, read_y(summary)) for rate, summary in summaries]

        titles = ("output tokens/s", "median TTFT ({})", "median TPOT ({})")
        panels: Facts = {}
        for name, title, unit in zip(CURVES, titles, ("", "s", "s"), strict=True):
            read = FIGURES[name][0]
            simulated_points = [(rate, read(summary)) for rate, summary in self.between]
            panels[title] = unit, sorted([*points(read, "predicted"), *simulated_points]), points(read, "measured")
        subtitle = f"prompts {self.given.prompt}, outputs {self.given.output} tokens; dashed: simulated capacity"
        return load_figure(panels, capacity=self.capacity, title=f"{self.name} under load", subtitle=subtitle)


LATENCIES = ("TTFT p50", "TTFT p90", "TTFT p99", "TPOT p50", "TPOT p90", "ITL p50", "ITL p99", "latency p50")
FIGURES: dict[str, tuple[Callable[[ServingSummary], float], Show]] = {
    "requests/s": (attrgetter("requests_per_s"), three_digits),
    "tokens/s": (attrgetter("output_tokens_per_s"), three_digits),
    **{name: (attrgetter(name.lower().replace(" ", ".")), format_seconds) for name in LATENCIES},
    "goodput/s": (attrgetter("goodput_per_s"), three_digits),
}
"""Figure of one rate -> (its reader, its format)."""
CURVES = ("tokens/s", "TTFT p50", "TPOT p50")
"""Figures in the table over rates and in the picture."""


def _ratios(row: "RateResult") -> dict[str, float]:
    """Returns measured over predicted of each figure; {} without predictions."""
    if row.predicted is None:
        return {}
    pair_by_name = {name: (read(row.measured), read(row.predicted)) for name, (read, _) in FIGURES.items()}
    return {name: measured / predicted if predicted else np.nan for name, (measured, predicted) in pair_by_name.items()}
