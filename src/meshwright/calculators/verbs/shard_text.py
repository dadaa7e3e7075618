"""How `meshwright shard` prints: the steps, who holds how much, FLOPs, time, the ways and the run."""

from collections.abc import Iterator
from typing import Any

from meshwright.algebra.steps import BOOK_NAMES
from meshwright.cli.output import or_dash
from meshwright.core.units import format_bytes, format_flops, format_seconds
from meshwright.report.answer import Fact, Piece, Table

COLUMN = 17


def shard_text(title: str, result: dict[str, Any], on: str | None) -> Iterator[Piece]:
    """The result of `shard` as text."""
    where = f" on {on}" if on else ""
    yield from _steps_text(f"{title}{where}", result)
    yield from _arrays_text(result, "" if result["steps"] else f"{title}{where}")
    if result["flops_unsharded"]:
        yield from _flops_text(result)
    if result["steps"]:
        yield from _time_text(result)
    yield from _ways_text(result)
    if "run" in result:
        yield from _run_text(result["run"], result["flops_unsharded"] > 0)


def _steps_text(title: str, result: dict[str, Any]) -> Iterator[Piece]:
    rows = [
        [
            BOOK_NAMES.get(r["op"], "multiply"),
            r["axis"],
            r["result"],
            format_bytes(r["bytes"]),
            or_dash(r["time_s"], format_seconds),
        ]
        for r in result["steps"]
    ]
    if rows:
        yield Table(["step", "axis", "result", "bytes", "time"], rows, title)


def _arrays_text(result: dict[str, Any], title: str) -> Iterator[Piece]:
    rows = [
        [name, " x ".join(map(str, shape)) or "one number", format_bytes(result["bytes_per_device"][name]),
         format_bytes(result["bytes_total"][name]), _copies(result["copies"][name], result["addends"][name])]
        for name, shape in result["local_shapes"].items()
    ]  # fmt: skip
    yield Table(["array", "block of a device", "bytes", "in all", "copies"], rows, title)


def _copies(copies: int, addends: int) -> str:
    """How often the array is held, and of how many addends it is the sum."""
    return f"{copies:,}" if addends == 1 else f"{copies:,} of {addends:,} addends"


def _flops_text(result: dict[str, Any]) -> Iterator[Piece]:
    each, total, own = result["flops_per_device"], result["flops_total"], result["flops_unsharded"]
    yield Fact("FLOPs per device", format_flops(each, unit="FLOP"), column=COLUMN)
    more = f"{total / own:,.4g} times" if total != own else "as many as"
    yield Fact(
        "FLOPs in all",
        f"{format_flops(total, unit='FLOP')} on {result['devices']:,} devices, {more} the unsharded product's "
        f"{format_flops(own, unit='FLOP')}",
        column=COLUMN,
    )


def _time_text(result: dict[str, Any]) -> Iterator[Piece]:
    if result["time_s"] is not None:
        where = ", ".join(f"{axis} on {place}" for axis, place in result["placement"].items())
        told = f"{format_seconds(result['time_s'])}, one step after the other ({where})"
    else:
        told = "not known: name a cluster with --on"
    yield Fact("time", told, column=COLUMN)


def _run_text(run: dict[str, Any], product: bool) -> Iterator[Piece]:
    verdict = "equal to" if run["equal"] else "DIFFERENT from"
    ways = f"all {run['ways']} ways" if run["ways"] > 1 else "steps"
    told = (
        f"{ways} on {run['devices']} emulated devices {verdict} the unsharded {'product' if product else 'array'}: "
        f"largest error {run['largest_error']:.1e} of the largest entry"
    )
    yield Fact("run", told, column=COLUMN)


def _ways_text(result: dict[str, Any]) -> Iterator[Piece]:
    if "ways" not in result:
        return
    rows = [
        [
            w["way"],
            format_bytes(w["bytes"]),
            format_flops(w["flops_per_device"], unit="FLOP"),
            or_dash(w["time_s"], format_seconds),
        ]
        for w in result["ways"]
    ]
    yield ""
    yield Table(["way, cheapest first", "bytes moved", "FLOPs", "time"], rows)
    if result["slice_and_sum"]:
        at = result["slice_and_sum"]
        yield Fact(
            "slice and sum",
            f"over one ICI axis beats the whole product on each device from {at['dim']} = 2 alpha = "
            f"{at['min_size']:,.0f} (here {at['size']:,}); compute-bound below {at['dim']} / (2 alpha) = "
            f"{at['max_shards']:.3g} devices",
            column=COLUMN,
        )
