"""`meshwright shard`: the steps of one sharded product, their cost, their check on devices, their picture.

The product may also be a single array, or an array and its new sharding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.algebra.blocks import bytes_per_device, bytes_total, execute, join, local_shape, num_devices, split
from meshwright.algebra.notation import ShardedArray, check, product
from meshwright.algebra.steps import BOOK_NAMES, Step
from meshwright.api.rates import rates_for
from meshwright.calculators.sharding.einsum_cost import (
    EinsumRates,
    all_ways,
    axes_text,
    einsum_rates,
    price_einsum,
    total_time,
)
from meshwright.calculators.sharding.parsing import ShardQuestion, parse_asked, refuse_unknown_dims
from meshwright.cli.output import format_flop_count, four_digits
from meshwright.cli.verb import CALIBRATION, DIMS, MESH, DimSizes, MeshSizes, Options, argument, option, verb
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_bytes, format_params, format_seconds
from meshwright.cost.formulas.limits import ici_intensity, reduce_after_max_shards, reduce_after_min_dim
from meshwright.cost.network.legs import group_legs, turns_text
from meshwright.cost.network.links import torus_width
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Symbols, Table
from meshwright.spec.chip import compute_dtype, peak
from meshwright.spec.cluster import parse_cluster

MAX_RUN_DEVICES = 64
MAX_RUN_ELEMENTS = 2**28
MAX_DRAWN_DEVICES = 4096
OF_ARRAYS = ("local_shapes", "bytes_per_device", "bytes_total", "copies", "addends")
"""Keys of the JSON object that have a value for every array."""

STEPS: Facts = {
    "step": ("op", lambda op: BOOK_NAMES.get(op, "multiply")),
    "axis": "axis",
    "result": "result",
    "bytes": "bytes",
    "time": "time_s",
}
WAYS: Facts = {
    "way, cheapest first": "way",
    "bytes of arrays": "bytes",
    "FLOPs": ("flops_per_device", format_flop_count),
    "time": "time_s",
    "times least": ("times_cheapest", "{:.2f}".format),
}


class Given(Options):
    product: str = argument()
    mesh: MeshSizes = MESH
    dims: DimSizes = DIMS
    on: str | None = option("A cluster to price the steps on, such as v5e:4x4.")
    calibration: Path | None = CALIBRATION
    every: bool = option("Every way of doing the product, cheapest first.", "--all")
    execute: bool = option("Execute on emulated devices and check the numbers.", "--run", extra="run")
    png: Path | None = option("Draw who holds which block (.png or .svg).")


@verb(Given)
def command(given: Given) -> Answer:
    """Show collectives, bytes and times of a PRODUCT such as "In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]".

    PRODUCT may be one array, "A[I_XY,J]", or an array that moves to another sharding, "A[B_X,D]{U_Z} -> A[B_XZ,D]".
    """
    cluster = parse_cluster(given.on) if given.on else None
    question = parse_asked(given.product, dtype="fp32" if cluster is not None and cluster.kind == "host" else "bf16")
    mesh, dims = given.mesh, given.dims
    refuse_unknown_dims(dims, question.arrays)
    for array in question.arrays:
        check(array, dims, mesh)
    _refuse(question, given, dims, mesh)
    if cluster is None and given.calibration is not None:
        raise InputError(f"--calibration {given.calibration} needs the cluster it is for: give --on.")
    rates = einsum_rates(cluster, mesh, calibration=rates_for(cluster, given.calibration)) if cluster else None
    result = _result(question, dims, mesh, rates)
    steps_by_name = {"": question.steps}
    # measured rates may lack those of ways that nobody asked for
    if given.every or (question.factors and cluster is not None and cluster.kind != "host"):
        lhs, rhs = question.factors
        steps_by_way = all_ways(lhs, rhs, question.result)
        way_rows = _ways(steps_by_way, dims, mesh, rates)
        result["cheapest"] = {key: way_rows[0][key] for key in result["cheapest"]}
    if given.every:
        steps_by_name, result["ways"] = steps_by_way, way_rows
        result["slice_and_sum"] = _slice_and_sum(question, dims, rates)
    if given.execute:
        result["run"] = run_ways(question, list(steps_by_name.values()), dims, mesh)
    title = f"{question.title} on {given.on}" if given.on else question.title
    array_rows = [{"array": name, **{key: result[key][name] for key in OF_ARRAYS}} for name in result["local_shapes"]]
    raw = [result["steps"], array_rows, result.get("ways"), [result]]
    return Answer(result, _text(title, result), {given.png: lambda: _figure(question, dims, mesh)}, raw)


def _refuse(asked: ShardQuestion, given: Given, dims: dict[str, int], mesh: dict[str, int]) -> None:
    """Raises InputError for an option that does not apply, and for arrays too large for this machine."""
    if given.every and not asked.factors:
        raise InputError(f"--all lists the ways of a product, and {asked.title} is none. Leave it out.")
    if given.execute and not asked.steps:
        raise InputError(f"--run has no step to execute for {asked.title}. Write where it should go: A[I_X] -> A[I].")
    mesh_size = math.prod(mesh.values())
    for name, is_wanted, max_size in (
        ("--run", given.execute, MAX_RUN_DEVICES),
        ("--png", given.png is not None, MAX_DRAWN_DEVICES),
    ):
        if is_wanted and mesh_size > max_size:
            raise InputError(f"{name} takes at most {max_size} devices and the mesh has {mesh_size}. Use smaller axes.")
    max_elements = max(math.prod(dims[d] for d in a.dims) for a in asked.arrays)
    if given.execute and max(max_elements, math.prod(dims.values()) / 1000) > MAX_RUN_ELEMENTS:
        raise InputError(
            f"--run holds whole arrays on this machine: at most {format_params(MAX_RUN_ELEMENTS)} elements each and "
            f"a thousand times as many products. Use smaller dims; the steps stay the same."
        )


def _result(question: ShardQuestion, dims: dict[str, int], mesh: dict[str, int], rates: EinsumRates | None) -> Facts:
    prices = price_einsum(question.steps, dims, mesh, rates)
    scatter_steps = [step for step in question.steps if step.op == "reduce_scatter"]
    mesh_size, device_flops = math.prod(mesh.values()), sum(p.flops for p in prices)
    array_names, all_dims = [a.name for a in question.arrays], {dim for a in question.factors for dim in a.dims}
    array_of = {a.name if array_names.count(a.name) == 1 else str(a): a for a in question.arrays}
    facts_of = {
        name: {
            "local_shapes": list(local_shape(a, dims, mesh)),
            "bytes_per_device": bytes_per_device(a, dims, mesh, element_bytes=DTYPE_BYTES[a.dtype]),
            "bytes_total": bytes_total(a, dims, mesh, element_bytes=DTYPE_BYTES[a.dtype]),
            # of each block, over the axes that neither split the array nor hold addends (section 3.1)
            "copies": math.prod(size for axis, size in mesh.items() if axis not in (*a.spread, *a.unreduced)),
            "addends": math.prod(mesh[axis] for axis in a.unreduced),
        }
        for name, a in array_of.items()
    }
    return {
        "steps": [
            {
                "op": step.op, "array": " * ".join(map(str, step.inputs)), "result": str(step.result),
                "axis": axes_text(step.axes), "bytes": price.num_bytes, "time_s": price.time_s,
                "critical": step.is_collective,
            }
            for step, price in zip(question.steps, prices, strict=True)
        ],
        **{key: {name: array_facts[key] for name, array_facts in facts_of.items()} for key in OF_ARRAYS},
        "devices": mesh_size,
        "flops_per_device": device_flops,
        "flops_total": device_flops * mesh_size,
        # on one device that holds everything: 2 for every combination of all dims
        "flops_unsharded": 2.0 * math.prod(map(dims.__getitem__, all_dims)) if all_dims else 0.0,
        "time_s": total_time(prices),
        "placement": rates.laid.describe() if rates else None,
        "cheapest": {"way": "", "time_s": None},
        "turns": sorted({turns_text(rates.laid, s.axes) for s in scatter_steps} - {""}) if rates else [],
    }  # fmt: skip


def _ways(
    steps_by_way: Mapping[str, Sequence[Step]], dims: dict[str, int], mesh: dict[str, int], rates: EinsumRates | None
) -> list[Facts]:
    """Returns a row for each sequence of steps, sorted by time, without rates by bytes."""
    rows: list[Facts] = []
    for name, steps in steps_by_way.items():
        prices = price_einsum(steps, dims, mesh, rates)
        sent_bytes = sum(p.num_bytes for s, p in zip(steps, prices, strict=True) if s.is_collective)
        row = {"way": name, "steps": list(map(str, steps)), "bytes": sent_bytes}
        rows.append(row | {"flops_per_device": sum(p.flops for p in prices), "time_s": total_time(prices)})
    rows.sort(key=lambda r: (r["time_s"] or 0, r["bytes"]))
    cost_field = "time_s" if rows[0]["time_s"] else "bytes"
    least_cost = rows[0][cost_field]
    return [{**row, "times_cheapest": row[cost_field] / least_cost if least_cost else None} for row in rows]


def _slice_and_sum(question: ShardQuestion, dims: dict[str, int], rates: EinsumRates | None) -> Facts | None:
    """Returns the sizes at which slicing the contracted dim over its ICI axis, with an AllReduce of the sums, beats a
    whole product on every device; None if no dim is contracted or the cluster is no torus.

    W is the rate of the axes that split the dim. Source: How to Scale Your Model, exercise 3.4.
    """
    (lhs, rhs), out = question.factors, question.result
    dim = next((d for d in lhs.dims if d in rhs.dims and d not in out.dims), None)
    torus = None if rates is None else torus_width(rates.cluster)
    if dim is None or rates is None or torus is None:
        return None
    split_axes = next((a.axes[a.dims.index(dim)] for a in (lhs, rhs) if a.axes[a.dims.index(dim)]), ())
    legs = group_legs(rates.laid, split_axes)
    link_rate, words = torus.bytes_per_s, torus.words
    if legs:
        link_rate = sum((1 + leg.wraps) * leg.bytes_per_s / leg.sharing for leg in legs)
        words = "both ways" if any(leg.wraps for leg in legs) else "one way, no ring"
    chip = rates.cluster.chip
    alpha = ici_intensity(peak(chip, compute_dtype(chip, lhs.dtype, rhs.dtype)), link_rate)
    limit = reduce_after_max_shards(dims[dim], alpha)
    return {"dim": dim, "size": dims[dim], "min_size": reduce_after_min_dim(alpha), "max_shards": limit, "width": words}


MAX_RELATIVE_ERROR = 1e-5
"""Largest error of float32 products against float64 ones, relative to the largest entry."""


def run_ways(asked: ShardQuestion, ways: Sequence[Sequence[Step]], dims: dict[str, int], mesh: dict[str, int]) -> Facts:
    """Runs each sequence of steps in float32, on emulated devices and on NumPy blocks; returns its errors against
    float64."""
    from meshwright.parallel.mesh import emulate_devices

    emulate_devices(num_devices(mesh))
    steps_before, input_arrays, size_by_dim = _inputs(asked, dims, mesh)
    rng = np.random.default_rng(0)
    value_of = {a: rng.standard_normal([size_by_dim[d] for d in a.dims], np.float32) for a in input_arrays}
    blocks_of = {a: split(v, a, mesh) for a, v in value_of.items()}
    whole_step = Step(op="einsum", inputs=input_arrays, result=asked.result)
    full_result = execute([whole_step], {a: [v.astype(np.float64)] for a, v in value_of.items()}, {})[asked.result][0]
    errors, numpy_errors = [], []
    for way_steps in ways:
        steps = (*steps_before, *way_steps)
        result = steps[-1].result
        joined_result = join(execute(steps, blocks_of, mesh)[result], result, mesh, rel_tol=1e-4)
        errors.append(_error(run_steps(steps, value_of, mesh), full_result))
        numpy_errors.append(_error(joined_result, full_result))
    return {
        "devices": num_devices(mesh),
        "ways": len(ways),
        "largest_error": max(errors),
        "largest_error_numpy": max(numpy_errors),
        "equal": max(*errors, *numpy_errors) < MAX_RELATIVE_ERROR,
    }


def _error(computed: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(computed - expected))) / float(np.max(np.abs(expected)))


def _inputs(
    question: ShardQuestion, dims: dict[str, int], mesh: dict[str, int]
) -> tuple[tuple[Step, ...], tuple[ShardedArray, ...], dict[str, int]]:
    """Returns steps that make the question's arrays, the input arrays of these steps, and the sizes of all dims.

    An unreduced array is made by a product, so that its addends differ: each device of {U_Z} multiplies its part of a
    dim over Z. A missing sum then shows.
    """
    if question.factors:
        return (), question.factors, dims
    array = question.arrays[0]
    if not array.unreduced:
        return (), (array,), dims
    terms_dim = "terms"
    split_terms = array.replace(
        name=f"{array.name}_terms", dims=(*array.dims, terms_dim), axes=(*array.axes, array.unreduced), unreduced=()
    )
    factors_array = ShardedArray(f"{array.name}_factors", (terms_dim,), (array.unreduced,), (), array.dtype)
    step = Step(op="einsum", inputs=(split_terms, factors_array), result=array)
    return (step,), step.inputs, dims | {terms_dim: product(mesh[axis] for axis in array.unreduced)}


def run_steps(
    steps: Sequence[Step], values: Mapping[ShardedArray, np.ndarray], mesh_axes: Mapping[str, int]
) -> np.ndarray:
    """Returns the global result of the last step, from global input values, on the first devices of this machine."""
    import jax

    from meshwright.nn.interpreter import run_update
    from meshwright.parallel.mesh import device_mesh, named_sharding, partition_spec

    mesh, result = device_mesh(mesh_axes), steps[-1].result
    mapped_steps = jax.shard_map(
        lambda *blocks: run_update(None, steps, dict(zip(values, blocks, strict=True)), lambda a: a)[result],
        mesh=mesh,
        in_specs=tuple(map(partition_spec, values)),
        out_specs=partition_spec(result),
        check_vma=False,
    )
    device_arrays = [jax.device_put(value, named_sharding(mesh, array)) for array, value in values.items()]
    return np.asarray(jax.jit(mapped_steps)(*device_arrays))


# -- text and picture ------------------------------------------------------------------------------------


def _text(title: str, result: Facts) -> Iterator[Piece]:
    if result["steps"]:
        yield Table.of(result["steps"], STEPS, title)
        if result["time_s"] is None or not result["placement"]:
            yield Fact("time", "not known: name a cluster with --on")
        else:
            yield Fact("time", f"{format_seconds(result['time_s'])} without overlap of steps")
            yield Condition(f"mesh: {', '.join(f'{axis} on {place}' for axis, place in result['placement'].items())}")
        yield Condition("bytes of a collective: its whole array, gathered or not yet scattered, on one device; of "
                        "multiply: what a device reads and writes in memory")  # fmt: skip
    best_way, least_s = result["cheapest"]["way"], result["cheapest"]["time_s"]
    if least_s and f"{result['time_s'] / least_s:.2f}" != "1.00":
        saving = f"{format_seconds(least_s)}, {result['time_s'] / least_s:.2f} times faster"
        yield Fact("cheapest", f"{saving}: {best_way} (--all lists every way; above: as programs run it)")
    if result["flops_unsharded"]:
        local, total, full = (format_flop_count(result[f"flops_{key}"]) for key in ("per_device", "total", "unsharded"))
        flops_ratio, devices_text = (
            result["flops_total"] / result["flops_unsharded"],
            counted(result["devices"], "device"),
        )
        ratio_text = "as many as" if flops_ratio == 1 else f"{four_digits(flops_ratio)} times the {full} of"
        yield Fact("FLOPs", f"{local} per device, {total} on {devices_text}: {ratio_text} the unsharded product")
    addends_text = {name: "" if n == 1 else f" of {n:,} addends" for name, n in result["addends"].items()}
    rows = [
        [name, " x ".join(map(str, shape)) or "one number", format_bytes(result["bytes_per_device"][name]),
         format_bytes(result["bytes_total"][name]), f"{result['copies'][name]:,}{addends_text[name]}"]
        for name, shape in result["local_shapes"].items()
    ]  # fmt: skip
    columns = ["array", "block of a device", "bytes", "bytes in all", "copies"]
    yield Table(columns, rows, "" if result["steps"] else title)
    yield from map(Condition, result["turns"])
    if "ways" in result:
        yield Table.of(result["ways"], WAYS)
        if slice_sum := result["slice_and_sum"]:
            dim, limit = (
                slice_sum["dim"],
                f"below {slice_sum['dim']} / (2 alpha) = {slice_sum['max_shards']:.3g} devices",
            )
            yield Fact(
                "slice and sum",
                f"slicing {dim} over one ICI axis and an AllReduce beat the whole product on each device from {dim} = "
                f"2 alpha = {slice_sum['min_size']:,.0f} (here {slice_sum['size']:,}); "
                f"{'never compute-bound' if slice_sum['max_shards'] < 1 else f'compute-bound {limit}'}",
            )
            yield Symbols({"alpha": f"FLOP/s of a chip / bytes/s of the axis, {slice_sum['width']}"})
    if "run" in result:
        run_facts, noun = result["run"], "product" if result["flops_unsharded"] else "array"
        ways_text = f"all {run_facts['ways']} ways" if run_facts["ways"] > 1 else "steps"
        equal_text = "equal to" if run_facts["equal"] else "DIFFERENT from"
        text = f"{ways_text} on {run_facts['devices']} emulated devices {equal_text} the unsharded {noun}"
        yield Fact("run", f"{text}: largest error {run_facts['largest_error']:.1e} of the largest entry")


def _figure(question: ShardQuestion, dims: dict[str, int], mesh: dict[str, int]) -> Any:
    from meshwright.report.arrays.sharding import array_panel, sharding_figure

    # what was given, then the array that each step leaves
    arrays = question.arrays[:-1] if question.steps else question.arrays
    panels = [array_panel(array, dims, mesh) for array in arrays]
    panels += [array_panel(step.result, dims, mesh, by=_step_words(step)) for step in question.steps]
    mesh_text = ", ".join(f"{a}={n}" for a, n in mesh.items())
    when_text = " Arrays as given and after each step;" if question.steps else ""
    subtitle = f"Mesh {mesh_text}.{when_text} {'n' if when_text else 'N'}umbers in blocks are devices."
    return sharding_figure(panels, title=question.title, subtitle=subtitle)


def _step_words(step: Step) -> str:
    """Returns ``"after AllGather over Y: "``."""
    axes_suffix = f" over {','.join(step.axes)}" if step.axes else ""
    return f"after {BOOK_NAMES.get(step.op, 'the product')}{axes_suffix}: "
