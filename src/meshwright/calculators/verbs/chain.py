"""`meshwright chain`: the shardings of a chain of products that take the least time within a device's memory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from meshwright.algebra.blocks import local_shape
from meshwright.algebra.steps import BOOK_NAMES
from meshwright.api.rates import rates_for
from meshwright.calculators.sharding.chain import Chain, parse_chain
from meshwright.calculators.sharding.chain_search import Assignment, search_chain
from meshwright.calculators.sharding.einsum_cost import einsum_rates
from meshwright.cli.verb import CALIBRATION, DIMS, MESH, DimSizes, MeshSizes, Options, argument, option, verb
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_seconds, parse_bytes
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Table, TableColumns
from meshwright.spec.calibration import datasheet_calibration
from meshwright.spec.calibration import memory_bytes as usable_bytes
from meshwright.spec.cluster import parse_cluster

MAX_TOP = 20


class Given(Options):
    products: tuple[str, ...] = argument(required=True)
    mesh: MeshSizes = MESH
    dims: DimSizes = DIMS
    on: str = option("The cluster that runs it, such as v5e:4x4.")
    memory_text: str | None = option("Bytes of a device that may be used, such as 300MB; default: all.", "--memory")
    fixed: tuple[str, ...] = option('A sharding to keep, such as "B[J_X,K]"; more than one may be given.')
    dtype: str = option("Dtype of every array (bf16).", default="bf16", type=click.Choice(sorted(DTYPE_BYTES)))
    calibration: Path | None = CALIBRATION
    top: int = option("How many assignments to list (3).", default=3, type=click.IntRange(1, MAX_TOP))


@verb(Given)
def command(given: Given) -> Answer:
    """Find the least time for PRODUCTS such as "A[I,J] * B[J,K] -> C[I,K]", each of which takes the previous result.

    Every array may be sharded in any way, unless it is written with a mesh axis or named by --fixed.
    """
    cluster = parse_cluster(given.on)
    mesh, calibration = given.mesh, rates_for(cluster, given.calibration)
    chain = parse_chain(given.products, dims=given.dims, mesh=mesh, fixed=given.fixed, dtype=given.dtype)
    rates = einsum_rates(cluster, mesh, calibration=calibration)
    device_bytes = usable_bytes(cluster.chip, calibration or datasheet_calibration(cluster.chip))
    limit_bytes = parse_bytes(given.memory_text) if given.memory_text is not None else device_bytes
    if not 0 < limit_bytes <= device_bytes:
        usable_text = format_bytes(device_bytes)
        raise InputError(f"--memory {given.memory_text} must be more than 0 and at most the {usable_text} of a device.")
    assignments = search_chain(chain, rates, memory_bytes=limit_bytes, top=given.top)
    facts: Facts = {
        "cluster": cluster.short_name,
        "memory_limit_bytes": limit_bytes,
        "placement": rates.laid.describe(),
        "assignments": [_row(chain, assignment) for assignment in assignments],
    }
    ranked = list(enumerate(facts["assignments"], 1))
    array_rows = [{"assignment": n, "array": k, **a} for n, row in ranked for k, a in row["arrays"].items()]
    step_rows = [{"assignment": n, **step} for n, row in ranked for step in row["steps"]]
    totals = [{"assignment": n, **{k: v for k, v in row.items() if k not in ("arrays", "steps")}} for n, row in ranked]
    return Answer(facts, _text(facts), raw=[totals, array_rows, step_rows, [facts]])


def _row(chain: Chain, assignment: Assignment) -> Facts:
    figure_names = ("time_s", "communication_s", "memory_bytes", "input_bytes", "bound_by")
    return {
        **{name: getattr(assignment, name) for name in figure_names},
        "arrays": {
            name: {
                "sharding": str(array), "role": "input" if name in chain.inputs else "result",
                "fixed": name in chain.fixed, "block": list(local_shape(array, chain.dims, chain.mesh)),
            }
            for name, array in assignment.arrays.items()
        },
        "steps": [
            {
                "step": str(step), "op": step.op, "result": str(step.result), "axes": list(step.axes),
                "flops": price.flops, "bytes": price.num_bytes, "time_s": price.time_s,
                "bound_by": price.bound_by or None,
            }
            for step, price in zip(assignment.steps, assignment.prices, strict=True)
        ],
    }  # fmt: skip


ARRAYS: TableColumns = {
    "array": "array",
    "best sharding": "sharding",
    "role": lambda array: f"{array['role']}, fixed" if array["fixed"] else array["role"],
    "block of a device": ("block", lambda block: " x ".join(map(str, block))),
}
STEPS: TableColumns = {
    "": "number",
    "step": ("op", lambda op: BOOK_NAMES.get(op, "multiply")),
    "result": "result",
    "bytes": "bytes",
    "time": "time_s",
    "bound by": "bound_by",
}
NEXT: TableColumns = {
    # without spaces inside a name, a row breaks between arrays only
    "next best": lambda row: "  ".join(a["sharding"].replace(", ", ",") for a in row["arrays"].values()),
    "time": "time_s",
    "memory": "memory_bytes",
}


def _text(result: Mapping[str, Any]) -> Iterator[Piece]:
    best, limit_text = result["assignments"][0], format_bytes(result["memory_limit_bytes"])
    title = f"least time on {result['cluster']} within {limit_text} of a device"
    yield Table.of(({"array": name, **array} for name, array in best["arrays"].items()), ARRAYS, title)
    yield Table.of(({"number": step_number, **step} for step_number, step in enumerate(best["steps"], 1)), STEPS)
    products_text = format_seconds(best["time_s"] - best["communication_s"])
    shares_text = f"products {products_text}, communication {format_seconds(best['communication_s'])}"
    total_text = f"{format_seconds(best['time_s'])} without overlap: {shares_text}; {best['bound_by']} takes most of it"
    yield Fact("time", total_text)
    peak_text, inputs_text = format_bytes(best["memory_bytes"]), format_bytes(best["input_bytes"])
    yield Fact("memory", f"{peak_text} of a device at the peak, {inputs_text} of it inputs")
    if result["assignments"][1:]:
        yield Table.of(result["assignments"][1:], NEXT)
    yield Condition(f"mesh: {', '.join(f'{axis} on {place}' for axis, place in result['placement'].items())}")
    yield Condition("inputs stay in memory for the whole chain")
