"""Requests over time: their arrivals and lengths, sampled or read from a trace."""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from meshwright.batching.request import GenerationRequest
from meshwright.core.errors import InputError
from meshwright.core.fields import unknown_fields
from meshwright.core.files import json_rows, read_text
from meshwright.core.units import parse_count

Ints = NDArray[np.int64]
LengthSampler = Callable[[np.random.Generator, int], Ints]
"""Draws ``count`` lengths in tokens: (generator, count) -> lengths."""

LATEST_S = 1e9
"""Maximum arrival time, so that adding microseconds to the time still changes it in float64."""

LOGNORMAL_SIGMA = 1.0
"""Default standard deviation of the logarithm of a length."""


class RequestTraffic(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Requests by arrival: time, tokens of prompt and output, key of a shared prefix (-1: none) and its length."""

    arrival_s: NDArray[np.float64]
    prompt: Ints
    output: Ints
    prefix: Ints
    prefix_len: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean requests per second from first to last arrival; 0 if all arrive at once."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span_s if span_s else 0.0

    def at_rate(self, rate_per_s: float) -> "RequestTraffic":
        """Returns the requests with arrival times scaled to a mean of ``rate_per_s``; simultaneous ones stay
        simultaneous."""
        return replace(self, arrival_s=self.arrival_s * (self.rate_per_s or rate_per_s) / rate_per_s)

    def requests(self) -> Iterator[tuple[float, GenerationRequest]]:
        """Yields (arrival time in s, request) in order; requests are numbered from 0."""
        columns = (self.arrival_s, self.prompt, self.output, self.prefix, self.prefix_len)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for request_id, (arrival_s, prompt_len, output_len, prefix_key, prefix_len) in enumerate(rows):
            request = GenerationRequest(
                number=request_id,
                prompt=prompt_len,
                output=output_len,
                prefix=prefix_key if prefix_key >= 0 else None,
                prefix_len=prefix_len,
            )
            yield arrival_s, request


def traffic_of(
    arrival_s: ArrayLike,
    prompt: ArrayLike,
    output: ArrayLike,
    prefix: ArrayLike | None = None,
    prefix_len: ArrayLike | None = None,
) -> RequestTraffic:
    """Builds traffic from columns of equal length, sorted by arrival. Raises InputError for invalid values."""
    arrivals_s = np.asarray(arrival_s, float)
    num_requests = len(arrivals_s)
    if not num_requests:
        raise InputError("there is no request. Give at least one.")
    if not (arrivals_s.min() >= 0 and arrivals_s.max() <= LATEST_S):
        raise InputError(f"arrivals are seconds from the start. Give numbers from 0 to {LATEST_S:,.0f}.")
    arrival_order = np.argsort(arrivals_s, kind="stable")

    def column(values: ArrayLike) -> Ints:
        return np.broadcast_to(np.asarray(values, np.int64), num_requests)[arrival_order]

    table = RequestTraffic(
        arrival_s=arrivals_s[arrival_order],
        prompt=column(prompt),
        output=column(output),
        prefix=column(-1 if prefix is None else prefix),
        prefix_len=column(0 if prefix_len is None else prefix_len),
    )
    is_wrong = (table.prompt < 1) | (table.output < 1) | (table.prefix_len < 0) | (table.prefix_len > table.prompt)
    if is_wrong.any():
        next(request for _, request in table.requests() if is_wrong[request.number]).check()
    return table


MOST_REQUESTS = 10_000_000


def poisson(
    rate_per_s: float, *, duration_s: float, prompt: LengthSampler, output: LengthSampler, seed: int = 0
) -> RequestTraffic:
    """Samples Poisson arrivals (at least one) for ``duration_s``. Raises InputError for rates or times out of range."""
    if not (0 < rate_per_s < np.inf and 0 < duration_s < np.inf):
        raise InputError(f"a rate of {rate_per_s:g} requests/s for {duration_s:g} s. Give positive, finite numbers.")
    if rate_per_s * duration_s > MOST_REQUESTS:
        raise InputError(
            f"{rate_per_s:g} requests/s for {duration_s:g} s are {rate_per_s * duration_s:,.3g} requests; at most "
            f"{MOST_REQUESTS:,} are simulated. Give fewer seconds."
        )
    generator = np.random.default_rng(seed)
    num_requests = max(int(generator.poisson(rate_per_s * duration_s)), 1)
    arrival_s = np.sort(generator.uniform(0, duration_s, num_requests))
    return traffic_of(arrival_s, prompt(generator, num_requests), output(generator, num_requests))


def fixed(length: int) -> LengthSampler:
    """Returns a sampler whose lengths are all ``length``."""
    return uniform(length, length)


def uniform(least: int, most: int) -> LengthSampler:
    """Returns a uniform sampler of whole lengths from ``least`` to ``most``. Raises InputError if out of range."""
    if not 1 <= least <= most:
        raise InputError(f"lengths from {least:,} to {most:,} tokens. Give 1 or more, the smaller one first.")
    return lambda generator, count: generator.integers(least, most, size=count, endpoint=True)


def lognormal(mean: float, *, sigma: float = LOGNORMAL_SIGMA, most: int | None = None) -> LengthSampler:
    """Returns a sampler of lognormal lengths of this mean, clipped to 1 and ``most`` and rounded. Raises InputError if
    ``mean`` is below 1 or ``sigma`` is negative."""
    if not (1 <= mean < np.inf and 0 <= sigma < np.inf):
        raise InputError(f"lengths of mean {mean:g} and sigma {sigma:g}. Give a mean of 1 or more, sigma 0 or more.")

    def sample(generator: np.random.Generator, count: int) -> Ints:
        lengths = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.rint(np.clip(lengths, 1, most)).astype(np.int64)

    return sample


def parse_lengths(text: str) -> LengthSampler:
    """Parses ``500``, ``8Ki``, ``1..999``, ``lognormal:500`` or ``lognormal:500:0.8`` (sigma). Raises InputError."""
    kind, *number_texts = text.split(":")
    least_text, _, most_text = text.partition("..")
    try:
        if kind == "lognormal" and len(number_texts) in (1, 2):
            mean_len, sigma = float(number_texts[0]), float(number_texts[1]) if number_texts[1:] else LOGNORMAL_SIGMA
        else:
            len_bounds = [parse_count(bound_text) for bound_text in (least_text, most_text or least_text)]
    except ValueError:
        raise InputError(f"lengths {text!r} are not understood. Give 500, 1..999 or lognormal:500:0.8.") from None
    return lognormal(mean_len, sigma=sigma) if kind == "lognormal" else uniform(*len_bounds)


# -- observed requests --------------------------------------------------------------------------------------

COLUMNS = {"arrival_s": None, "prompt": None, "output": None, "prefix": -1, "prefix_len": 0}
"""Column of a trace -> its default; None if every row must have the column."""
MOST_TRACE_BYTES, MOST_TOKENS = 2**30, 2**40


def load_trace(path: Path) -> RequestTraffic:
    """Reads traffic from a JSONL file of objects, or a CSV file with a header.

    Columns: ``arrival_s``, ``prompt`` and ``output`` in tokens; ``prefix`` (a whole number) and ``prefix_len`` if
    prompts share prefixes. Raises InputError that names the file and the wrong line.
    """
    text = read_text(path, "Name a trace in JSONL or CSV.", most=MOST_TRACE_BYTES)
    values_by_name: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for line_number, row in _rows(path, text):
        for _, fault in unknown_fields(row, values_by_name, ()):
            raise InputError(f"{path}:{line_number}: {fault}")
        for name, column_values in values_by_name.items():
            raw_value = row.get(name, COLUMNS[name])
            try:
                float_value = float(raw_value)
                if name != "arrival_s" and not (float_value == int(float_value) and abs(float_value) <= MOST_TOKENS):
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                kind_words = "seconds" if name == "arrival_s" else f"a whole number of at most {MOST_TOKENS:,}"
                value_fault = f"is {raw_value!r}" if name in row else "is missing"
                raise InputError(f"{path}:{line_number}: {name} {value_fault}. Give {kind_words}.") from None
            column_values.append(float_value)
    try:
        return traffic_of(*values_by_name.values())
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields (line number, row); reads JSONL if the text starts with a bracket or brace, else CSV."""
    if text.lstrip().startswith(("{", "[")):
        yield from json_rows(path, text, "Give an object on every line.")
        return
    for row in (reader := csv.DictReader(text.splitlines(), skipinitialspace=True)):
        if None in row:
            raise InputError(f"{path}:{reader.line_num}: more fields than columns.")
        yield reader.line_num, row
