"""`meshwright shard`: the steps of one sharded product, their cost, their proof on devices, their picture.

An array alone, or an array and the sharding it is wanted in, are shown in the same way.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.algebra.notation import ShardedArray, check
from meshwright.algebra.steps import Step
from meshwright.api.rates import rates_for
from meshwright.calculators.sharding.blocks import holders
from meshwright.calculators.sharding.einsum_cost import (
    EinsumRates,
    StepPrice,
    einsum_rates,
    num_copies,
    price_einsum,
    whole_flops,
)
from meshwright.calculators.sharding.parsing import bytes_per_device, bytes_total, local_shape
from meshwright.calculators.sharding.ways import ProductSteps, all_ways
from meshwright.calculators.verbs.roofline_sweep import drawn
from meshwright.calculators.verbs.shard_asked import ShardQuestion, parse_asked
from meshwright.calculators.verbs.shard_run import run_ways
from meshwright.calculators.verbs.shard_text import shard_text
from meshwright.cli.fields import dim_sizes, parse_mesh
from meshwright.cli.shared import DIMS
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.core.units import format_params
from meshwright.cost.formulas.limits import ici_intensity, reduce_after_max_shards, reduce_after_min_dim
from meshwright.report.answer import Answer
from meshwright.spec.chip import compute_dtype, peak
from meshwright.spec.cluster import Cluster, parse_cluster

MAX_RUN_DEVICES = 64
MAX_RUN_ELEMENTS = 2**28
MAX_DRAWN_DEVICES = 4096


class Given(Options):
    product: str = argument()
    mesh_text: str = option("Mesh axes, major to minor, such as X=4,Y=2.", "--mesh")
    dims_text: str = DIMS
    on: str | None = option("A cluster to price the steps on, such as v5e:4x4.")
    calibration: Path | None = option("Measured rates of that cluster (TOML).")
    every: bool = option("Every way of doing the product, cheapest first.", "--all")
    execute: bool = option("Execute on emulated devices and check the numbers.", "--run")
    png: Path | None = option("Draw who holds which block (.png or .svg).")


@verb(Given)
def command(given: Given) -> Answer:
    """Collectives, bytes and times of a PRODUCT such as "In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]".

    Or of one array, "A[I_XY,J]", or of an array moved into another sharding, "A[B_X,D]{U_Z} -> A[B_XZ,D]".
    """
    cluster = parse_cluster(given.on) if given.on else None
    asked = parse_asked(given.product, dtype="fp32" if cluster is not None and cluster.kind == "host" else "bf16")
    mesh, dims = parse_mesh(given.mesh_text), dim_sizes(given.dims_text)
    for array in asked.arrays:
        check(array, dims, mesh)
    _refuse_idle(asked, every=given.every, execute=given.execute)
    _refuse_too_large(asked.arrays, dims, mesh, execute=given.execute, draw=given.png is not None)
    rates = _rates(cluster, mesh, given.calibration)
    result = _result(asked, dims, mesh, rates)
    if given.every:
        result["ways"] = _ways(asked, dims, mesh, rates)
        result["slice_and_sum"] = _slice_and_sum(asked, dims, rates)
    if given.execute:
        chosen = [way.steps for way in _all_ways(asked)] if given.every else [asked.steps]
        result["run"] = run_ways(asked, chosen, dims, mesh)
    result |= drawn(given.png)
    text = shard_text(asked.title, result, given.on)
    return Answer(result, text, {given.png: lambda: _figure(asked, dims, mesh)})


def _refuse_idle(asked: ShardQuestion, *, every: bool, execute: bool) -> None:
    """Raise InputError for an option that an array alone, or a resharding, has no use for."""
    if every and not asked.factors:
        raise InputError(f"--all lists the ways of a product, and {asked.title} is none. Leave it out.")
    if execute and not asked.steps:
        raise InputError(f"--run has no step to execute for {asked.title}. Write where it should go: A[I_X] -> A[I].")


def _refuse_too_large(
    arrays: Sequence[ShardedArray], dims: dict[str, int], mesh: dict[str, int], *, execute: bool, draw: bool
) -> None:
    """Raise InputError before a picture or a run that this machine could not hold."""
    devices = math.prod(mesh.values())
    for name, most in (
        ("--run", MAX_RUN_DEVICES if execute else None),
        ("--png", MAX_DRAWN_DEVICES if draw else None),
    ):
        if most is not None and devices > most:
            raise InputError(f"{name} takes at most {most} devices and the mesh has {devices}. Use smaller axes.")
    elements = max(math.prod(dims[d] for d in a.dims) for a in arrays)
    if execute and max(elements, math.prod(dims.values()) / 1000) > MAX_RUN_ELEMENTS:
        raise InputError(
            f"--run holds whole arrays on this machine: at most {format_params(MAX_RUN_ELEMENTS)} elements each and "
            f"a thousand times as many products. Use smaller dims; the steps stay the same."
        )


def _rates(cluster: Cluster | None, mesh: dict[str, int], calibration: Path | None) -> EinsumRates | None:
    if cluster is not None:
        return einsum_rates(cluster, mesh, calibration=rates_for(cluster, calibration))
    if calibration is not None:
        raise InputError(f"--calibration {calibration} needs the cluster it is for: give --on.")
    return None


def _step_row(step: Step, price: StepPrice) -> dict[str, Any]:
    return {
        "op": step.op,
        "array": str(step.inputs[0]) if len(step.inputs) == 1 else " * ".join(map(str, step.inputs)),
        "result": str(step.result),
        "axis": "".join(step.axes) if all(len(a) == 1 for a in step.axes) else ",".join(step.axes),
        "bytes": price.num_bytes,
        "time_s": price.time_s,
        "critical": step.is_collective,
    }


def _result(
    asked: ShardQuestion, dims: dict[str, int], mesh: dict[str, int], rates: EinsumRates | None
) -> dict[str, Any]:
    prices = price_einsum(asked.steps, dims, mesh, rates)
    devices = math.prod(mesh.values())
    flops = sum(p.flops for p in prices)
    named = {asked.key(a): a for a in asked.arrays}
    return {
        "steps": [_step_row(s, p) for s, p in zip(asked.steps, prices, strict=True)],
        "local_shapes": {name: list(local_shape(a, dims, mesh)) for name, a in named.items()},
        "bytes_per_device": {
            name: bytes_per_device(a, dims, mesh, element_bytes=DTYPE_BYTES[a.dtype]) for name, a in named.items()
        },
        "bytes_total": {
            name: bytes_total(a, dims, mesh, element_bytes=DTYPE_BYTES[a.dtype]) for name, a in named.items()
        },
        "copies": {name: num_copies(a, mesh) for name, a in named.items()},
        "addends": {name: math.prod(mesh[axis] for axis in a.unreduced) for name, a in named.items()},
        "devices": devices,
        "flops_per_device": flops,
        "flops_total": flops * devices,
        "flops_unsharded": whole_flops(asked.factors, asked.result, dims) if asked.factors else 0.0,
        "time_s": _total(prices),
        "placement": rates.placement if rates else None,
    }


def _total(prices: Sequence[StepPrice]) -> float | None:
    times = [p.time_s for p in prices]
    return None if any(t is None for t in times) else sum(t for t in times if t is not None)


def _all_ways(asked: ShardQuestion) -> tuple[ProductSteps, ...]:
    lhs, rhs = asked.factors
    return all_ways(lhs, rhs, asked.result)


def _ways(
    asked: ShardQuestion, dims: dict[str, int], mesh: dict[str, int], rates: EinsumRates | None
) -> list[dict[str, Any]]:
    rows = []
    for way in _all_ways(asked):
        prices = price_einsum(way.steps, dims, mesh, rates)
        moved = sum(p.num_bytes for s, p in zip(way.steps, prices, strict=True) if s.is_collective)
        rows.append(
            {
                "way": way.name,
                "steps": [str(s) for s in way.steps],
                "bytes": moved,
                "flops_per_device": sum(p.flops for p in prices),
                "time_s": _total(prices),
            }
        )
    return sorted(rows, key=lambda r: (r["time_s"] if r["time_s"] is not None else 0, r["bytes"]))


def _slice_and_sum(asked: ShardQuestion, dims: dict[str, int], rates: EinsumRates | None) -> dict[str, Any] | None:
    """When slicing the contracted dim over one ICI axis and an AllReduce beat a whole product on every device.

    None where nothing is contracted, or on a cluster that is no torus. Source: exercise 3.4.
    """
    (lhs, rhs), out = asked.factors, asked.result
    dim = next((d for d in lhs.dims if d in rhs.dims and d not in out.dims), None)
    if dim is None or rates is None or rates.cluster.kind != "torus":
        return None
    chip = rates.cluster.chip
    alpha = ici_intensity(peak(chip, compute_dtype(chip, lhs.dtype, rhs.dtype)), chip.ici_axis_bytes_per_s)
    most = reduce_after_max_shards(dims[dim], alpha)
    return {"dim": dim, "size": dims[dim], "min_size": reduce_after_min_dim(alpha), "max_shards": most}


def _figure(asked: ShardQuestion, dims: dict[str, int], mesh: dict[str, int]) -> Any:
    from meshwright.report.arrays.sharding import sharding_figure

    panels = [panel(a, dims, mesh) for a in asked.drawn]
    axes = ", ".join(f"{a}={n}" for a, n in mesh.items())
    return sharding_figure(panels, title=asked.title, subtitle=f"Mesh {axes}: each block carries its devices.")


def panel(array: ShardedArray, dims: dict[str, int], mesh: dict[str, int]) -> Any:
    """The blocks of an array for the picture: its last dim to the right, all others flattened downwards."""
    from meshwright.report.arrays.sharding import ShardingPanel

    held = holders(array, mesh)
    rows = sorted({index[:-1] for index in held})
    cols = sorted({index[-1:] for index in held})
    shape = local_shape(array, dims, mesh)
    # Dims that are whole have one block: naming it in every row says nothing.
    split = [i for i, axes in enumerate(array.axes[:-1]) if axes]
    return ShardingPanel(
        title=str(array),
        cells=tuple(tuple(tuple(held[r + c]) for c in cols) for r in rows),
        row_labels=tuple(",".join(str(r[i]) for i in split) for r in rows),
        col_labels=tuple(str(c[0]) if c else "" for c in cols),
        row_title=", ".join(array.dims[i] for i in split),
        col_title=array.dims[-1] if array.dims else "",
        note=f"{' x '.join(map(str, shape))} on each device",
    )
