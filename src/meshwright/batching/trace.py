"""Traffic from a file of observed requests."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.batching.traffic import RequestTraffic, traffic_of
from meshwright.core.errors import InputError, nearest
from meshwright.core.files import read_text

REQUIRED = ("arrival_s", "prompt", "output")
OPTIONAL = ("prefix", "prefix_len")
MOST_TRACE_BYTES, MOST_TOKENS = 2**30, 2**40


def load_trace(path: Path) -> RequestTraffic:
    """Returns the requests of a JSONL file of objects, or of a CSV file with a header.

    Columns: ``arrival_s``, ``prompt`` and ``output`` in tokens; ``prefix`` (a whole number) and ``prefix_len`` if
    prompts share prefixes. Raises InputError that names the file, and the line where one is wrong.
    """
    text = read_text(path, "Name a trace in JSONL or CSV.", most=MOST_TRACE_BYTES)
    defaults = {"prefix": -1, "prefix_len": 0}
    columns: dict[str, list[float]] = {name: [] for name in (*REQUIRED, *OPTIONAL)}
    for line, row in _rows(path, text):
        for name in row.keys() - columns.keys():
            column_fault = (
                f"the column {name!r} is not known.{nearest(name, columns)}" if name else "more fields than columns."
            )
            raise InputError(f"{path}:{line}: {column_fault}")
        for name, column in columns.items():
            value = row.get(name, defaults.get(name))
            try:
                number = float(value)
                if name != "arrival_s" and not (number == int(number) and abs(number) <= MOST_TOKENS):
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                kind_words = "seconds" if name == "arrival_s" else f"a whole number of at most {MOST_TOKENS:,}"
                value_fault = f"is {value!r}" if name in row else "is missing"
                raise InputError(f"{path}:{line}: {name} {value_fault}. Give {kind_words}.") from None
            column.append(number)
    try:
        return traffic_of(*columns.values())
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields every row with its line, from JSONL if the first character is a brace."""
    if text.lstrip().startswith("["):
        raise InputError(f"{path} has one JSON array. Give an object on every line, without brackets around them.")
    if not text.lstrip().startswith("{"):
        for row in (reader := csv.DictReader(text.splitlines(), skipinitialspace=True)):
            yield reader.line_num, {name or "": value for name, value in row.items()}
        return
    for line, content in enumerate(text.splitlines(), start=1):
        if content.strip():
            try:
                row = json.loads(content)
            except ValueError as error:
                raise InputError(f"{path}:{line}: broken JSON ({error}). Give an object on every line.") from None
            if not isinstance(row, dict):
                raise InputError(f"{path}:{line}: {content[:40]!r} is not an object. Give one on every line.")
            yield line, row
