"""`meshwright shard`: the steps of one sharded product, their cost, their proof on devices, their picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from meshwright.algebra.blocks import holders
from meshwright.algebra.einsum import einsum_steps
from meshwright.algebra.notation import (
    ShardedArray,
    bytes_per_device,
    bytes_total,
    check,
    local_shape,
    parse_einsum,
    parse_mesh,
)
from meshwright.algebra.steps import BOOK_NAMES, Step
from meshwright.algebra.ways import all_ways
from meshwright.cli.fields import dim_sizes
from meshwright.cli.machine import rates_for
from meshwright.cli.output import emit_json, json_option, or_dash, print_fact, print_table, say
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_flops, format_params, format_seconds
from meshwright.cost.einsum_cost import EinsumRates, StepPrice, einsum_rates, price_einsum
from meshwright.cost.limits import ici_intensity, reduce_after_max_shards, reduce_after_min_dim
from meshwright.spec.chip import compute_dtype, peak
from meshwright.spec.cluster import Cluster, parse_cluster

Trio = tuple[ShardedArray, ShardedArray, ShardedArray]
MAX_RUN_DEVICES = 64
MAX_RUN_ELEMENTS = 2**28
MAX_DRAWN_DEVICES = 4096
MAX_RELATIVE_ERROR = 1e-5
"""Of float32 products against float64 ones, relative to the largest entry."""
COLUMN = 17


@click.command()
@click.argument("product")
@click.option("--mesh", "mesh_text", required=True, help="Mesh axes, major to minor, such as X=4,Y=2.")
@click.option("--dims", "dims_text", required=True, help="Sizes, such as B=1024,D=4096,F=16384.")
@click.option("--on", "on", help="A cluster to price the steps on, such as v5e:4x4.")
@click.option("--calibration", type=click.Path(path_type=Path), help="Measured rates of that cluster (TOML).")
@click.option("--all", "every", is_flag=True, help="Every way of doing it, cheapest first.")
@click.option("--run", "execute", is_flag=True, help="Execute on emulated devices and check the numbers.")
@click.option("--png", type=click.Path(path_type=Path), help="Draw who holds which block (.png or .svg).")
@json_option
def command(
    product: str,
    mesh_text: str,
    dims_text: str,
    on: str | None,
    calibration: Path | None,
    every: bool,
    execute: bool,
    png: Path | None,
    as_json: bool,
) -> None:
    """Collectives, bytes and times of a PRODUCT such as "In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]"."""
    cluster = parse_cluster(on) if on else None
    arrays = _typed(parse_einsum(product), cluster)
    mesh, dims = parse_mesh(mesh_text), dim_sizes(dims_text)
    for array in arrays:
        check(array, dims, mesh)
    _refuse_too_large(arrays, dims, mesh, execute=execute, draw=png is not None)
    rates = _rates(cluster, mesh, calibration)
    steps = einsum_steps(*arrays)
    result = _result(arrays, steps, dims, mesh, rates)
    if every:
        result["ways"] = _ways(arrays, dims, mesh, rates)
        result["slice_and_sum"] = _slice_and_sum(arrays, dims, rates)
    if execute:
        chosen = [w.steps for w in all_ways(*arrays)] if every else [steps]
        result["run"] = _run(arrays, chosen, dims, mesh)
    if png:
        result["png"] = str(_draw(png, product, [*arrays[:2], steps[-1].result], dims, mesh))
    if as_json:
        emit_json(result)
    else:
        _print(product, result, on)


def _refuse_too_large(arrays: Trio, dims: dict[str, int], mesh: dict[str, int], *, execute: bool, draw: bool) -> None:
    """Raise InputError before a picture or a run that this machine could not hold."""
    devices = math.prod(mesh.values())
    for option, most in (
        ("--run", MAX_RUN_DEVICES if execute else None),
        ("--png", MAX_DRAWN_DEVICES if draw else None),
    ):
        if most is not None and devices > most:
            raise InputError(f"{option} takes at most {most} devices and the mesh has {devices}. Use smaller axes.")
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


def _typed(arrays: Trio, cluster: Cluster | None) -> Trio:
    """Arrays without a dtype are bf16, on the devices of this machine fp32."""
    default = "fp32" if cluster is not None and cluster.kind == "host" else "bf16"
    lhs, rhs, out = (a if a.dtype else a.replace(dtype=default) for a in arrays)
    return lhs, rhs, out


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
    arrays: Trio, steps: Sequence[Step], dims: dict[str, int], mesh: dict[str, int], rates: EinsumRates | None
) -> dict[str, Any]:
    prices = price_einsum(steps, dims, mesh, rates)
    return {
        "steps": [_step_row(s, p) for s, p in zip(steps, prices, strict=True)],
        "local_shapes": {a.name: list(local_shape(a, dims, mesh)) for a in arrays},
        "bytes_per_device": {
            a.name: bytes_per_device(a, dims, mesh, element_bytes=DTYPE_BYTES[a.dtype]) for a in arrays
        },
        "bytes_total": {a.name: bytes_total(a, dims, mesh, element_bytes=DTYPE_BYTES[a.dtype]) for a in arrays},
        "flops_per_device": sum(p.flops for p in prices),
        "time_s": _total(prices),
        "placement": rates.placement if rates else None,
    }


def _total(prices: Sequence[StepPrice]) -> float | None:
    times = [p.time_s for p in prices]
    return None if any(t is None for t in times) else sum(t for t in times if t is not None)


def _ways(arrays: Trio, dims: dict[str, int], mesh: dict[str, int], rates: EinsumRates | None) -> list[dict[str, Any]]:
    rows = []
    for way in all_ways(*arrays):
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


def _slice_and_sum(arrays: Trio, dims: dict[str, int], rates: EinsumRates | None) -> dict[str, Any] | None:
    """When slicing the contracted dim over one ICI axis and an AllReduce beat a whole product on every device.

    None where nothing is contracted, or on a cluster that is no torus. Source: exercise 3.4.
    """
    lhs, rhs, out = arrays
    dim = next((d for d in lhs.dims if d in rhs.dims and d not in out.dims), None)
    if dim is None or rates is None or rates.cluster.kind != "torus":
        return None
    chip = rates.cluster.chip
    alpha = ici_intensity(peak(chip, compute_dtype(chip, lhs.dtype, rhs.dtype)), chip.ici_axis_bytes_per_s)
    most = reduce_after_max_shards(dims[dim], alpha)
    return {"dim": dim, "size": dims[dim], "min_size": reduce_after_min_dim(alpha), "max_shards": most}


def _reference(arrays: Trio, dims: dict[str, int]) -> tuple[dict[ShardedArray, Any], Any]:
    """Random whole operands in float32, and their product in float64 by NumPy."""
    import numpy as np

    rng = np.random.default_rng(0)
    values = {a: rng.standard_normal([dims[d] for d in a.dims], np.float32) for a in arrays[:2]}
    letters = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys((*arrays[0].dims, *arrays[1].dims)))}
    left, right, out = ("".join(letters[d] for d in a.dims) for a in arrays)
    wide = [v.astype(np.float64) for v in values.values()]
    return values, np.einsum(f"{left},{right}->{out}", *wide, optimize=True)


def _run(arrays: Trio, ways: Sequence[Sequence[Step]], dims: dict[str, int], mesh: dict[str, int]) -> dict[str, Any]:
    """Run each way on emulated devices and on NumPy blocks, in float32, against the product of whole arrays."""
    import numpy as np

    from meshwright.algebra.blocks import execute, join, num_devices, split
    from meshwright.parallel.mesh import emulate_devices
    from meshwright.parallel.run_steps import run_steps

    emulate_devices(num_devices(mesh))
    values, expected = _reference(arrays, dims)
    scale = float(np.max(np.abs(expected)))
    blocks = {a: split(v, a, mesh) for a, v in values.items()}
    errors, in_numpy = [], []
    for steps in ways:
        held = execute(steps, blocks, mesh)[steps[-1].result]
        joined = join(held, steps[-1].result, mesh, rel_tol=1e-4)
        errors.append(float(np.max(np.abs(run_steps(steps, values, mesh) - expected))) / scale)
        in_numpy.append(float(np.max(np.abs(joined - expected))) / scale)
    return {
        "devices": num_devices(mesh),
        "ways": len(ways),
        "largest_error": max(errors),
        "largest_error_numpy": max(in_numpy),
        "equal": max(*errors, *in_numpy) < MAX_RELATIVE_ERROR,
    }


def _draw(path: Path, product: str, arrays: Sequence[ShardedArray], dims: dict[str, int], mesh: dict[str, int]) -> Path:
    from meshwright.report.figure import save
    from meshwright.report.sharding import sharding_figure

    panels = [panel(a, dims, mesh) for a in arrays]
    axes = ", ".join(f"{a}={n}" for a, n in mesh.items())
    written = save(
        sharding_figure(panels, title=product, subtitle=f"Mesh {axes}: each block carries its devices."), path
    )
    say(f"wrote {written}")
    return written


def panel(array: ShardedArray, dims: dict[str, int], mesh: dict[str, int]) -> Any:
    """The blocks of an array for the picture: its last dim to the right, all others flattened downwards."""
    from meshwright.report.sharding import ShardingPanel

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


def _print(product: str, result: dict[str, Any], on: str | None) -> None:
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
    print_table(["step", "axis", "result", "bytes", "time"], rows, f"{product}{f' on {on}' if on else ''}")
    shapes = [
        [name, " x ".join(map(str, shape)), format_bytes(result["bytes_per_device"][name]),
         format_bytes(result["bytes_total"][name])]
        for name, shape in result["local_shapes"].items()
    ]  # fmt: skip
    print_table(["array", "block of a device", "bytes", "in all"], shapes)
    print_fact("FLOPs per device", format_flops(result["flops_per_device"], unit="FLOP"), column=COLUMN)
    if result["time_s"] is not None:
        where = ", ".join(f"{axis} on {place}" for axis, place in result["placement"].items())
        told = f"{format_seconds(result['time_s'])}, one step after the other ({where})"
    else:
        told = "not known: name a cluster with --on"
    print_fact("time", told, column=COLUMN)
    _print_ways(result)
    if "run" in result:
        run = result["run"]
        verdict = "equal to" if run["equal"] else "DIFFERENT from"
        ways = f"all {run['ways']} ways" if run["ways"] > 1 else "steps"
        told = (
            f"{ways} on {run['devices']} emulated devices {verdict} the unsharded product: "
            f"largest error {run['largest_error']:.1e} of the largest entry"
        )
        print_fact("run", told, column=COLUMN)


def _print_ways(result: dict[str, Any]) -> None:
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
    click.echo()
    print_table(["way, cheapest first", "bytes moved", "FLOPs", "time"], rows)
    if result["slice_and_sum"]:
        at = result["slice_and_sum"]
        print_fact(
            "slice and sum",
            f"over one ICI axis beats the whole product on each device from {at['dim']} = 2 alpha = "
            f"{at['min_size']:,.0f} (here {at['size']:,}); compute-bound below {at['dim']} / (2 alpha) = "
            f"{at['max_shards']:.3g} devices",
            column=COLUMN,
        )
