"""Every sequence of steps for one sharded product, and its price on a cluster: the calculator behind `shard`.

Sequences differ in the dims that mesh axes split while blocks are multiplied. `einsum_steps` makes only one of them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from meshwright.algebra.einsum import einsum_steps, local_product, reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import CollectiveKind
from meshwright.cost.network.collectives import collective_bound_by, collective_time, group_rates
from meshwright.cost.network.placement import Placement, place_mesh
from meshwright.cost.work.ops import op_flops, op_hbm_bytes
from meshwright.spec.calibration import Calibration, datasheet_calibration, matmul_rate, memory_rate
from meshwright.spec.chip import compute_dtype
from meshwright.spec.cluster import Cluster

Layout = dict[str, tuple[str, ...]]
"""Dim -> the mesh axes that split it during the local product, in both operands alike."""


def all_ways(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> dict[str, tuple[Step, ...]]:
    """Returns every sequence of steps for ``lhs * rhs -> out``, by a name that says what it gathers, moves, sums and
    slices.

    The steps of `einsum_steps` are first, the rest is ordered by number of collectives. Blocks can be multiplied
    without communication when every mesh axis splits at most one dim, in both operands alike. Each dim is tried with
    every major part of the axes that it has in lhs, rhs or out: gather either operand or move its axis, slice and
    reduce, gather or slice an input or the output, gather everything. A sum is scattered, or else completed and then
    sliced.
    """
    rule_steps = einsum_steps(lhs, rhs, out)
    sequences = {steps for layout in _layouts(lhs, rhs, out) for steps in _steps(layout, lhs, rhs, out)} - {rule_steps}
    steps_by_name = {_name(steps): steps for steps in sequences}
    ways = sorted(steps_by_name.items(), key=lambda way: (sum(s.is_collective for s in way[1]), len(way[1]), way[0]))
    return {_name(rule_steps): rule_steps, **dict(ways)}


def _layouts(lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> Iterator[Layout]:
    dims = tuple(dict.fromkeys((*lhs.dims, *rhs.dims)))
    axes_choices = []
    for dim in dims:
        axes_of_arrays = [array.axes_of(dim) for array in (lhs, rhs, out)]
        axes_choices.append(list(dict.fromkeys(axes[:n] for axes in axes_of_arrays for n in range(len(axes) + 1))))
    for axes_by_dim in itertools.product(*axes_choices):
        used_axes = [axis for axes in axes_by_dim for axis in axes]
        if len(set(used_axes)) == len(used_axes):
            yield dict(zip(dims, axes_by_dim, strict=True))


def _steps(layout: Layout, lhs: ShardedArray, rhs: ShardedArray, out: ShardedArray) -> Iterator[tuple[Step, ...]]:
    lhs_in, rhs_in = (array.resharded(layout, unreduced=()) for array in (lhs, rhs))
    result = local_product(lhs_in, rhs_in, out)
    if not set(out.unreduced) <= set(result.unreduced):
        return
    steps = (*reshard(lhs, lhs_in), *reshard(rhs, rhs_in), Step(op="einsum", inputs=(lhs_in, rhs_in), result=result))
    yield (*steps, *reshard(result, out))
    reduced_array = result.replace(unreduced=out.unreduced)
    yield (*steps, *reshard(result, reduced_array), *reshard(reduced_array, out))


def _name(steps: tuple[Step, ...]) -> str:
    return "; ".join(_words(step) for step in steps if step.only_moves) or "no communication"


def axes_text(axes: Sequence[str]) -> str:
    """Returns the axes of a step: ``XY``, or names with commas between."""
    return ("" if all(len(axis) == 1 for axis in axes) else ",").join(axes)


def _words(step: Step) -> str:
    name, axes = step.result.name, axes_text(step.axes)
    return {
        "all_gather": f"gather {step.dim} of {name} over {axes}",
        "slice": f"slice {step.dim} of {name} over {axes}",
        "all_to_all": f"move {axes} of {name} from {step.dim} to {step.to_dim}",
        "reduce_scatter": f"sum {name} over {axes}, scattered into {step.dim}",
        "all_reduce": f"sum {name} over {axes}",
    }[step.op]


class StepPrice(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs on one device, bytes (of a collective's full array, else read and written), and seconds if known.

    ``bound_by`` is "compute", "hbm", "latency" or a level of links; empty for a slice, and without rates.
    """

    flops: float
    num_bytes: float
    time_s: float | None
    bound_by: str = ""


class EinsumRates(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh with any axis names placed on a cluster, and its rates."""

    cluster: Cluster
    calibration: Calibration
    laid: Placement


def einsum_rates(cluster: Cluster, mesh: Mapping[str, int], *, calibration: Calibration | None = None) -> EinsumRates:
    """Returns the rates of a mesh placed by `place_mesh`; of the data sheet without a calibration."""
    used_calibration = calibration or datasheet_calibration(cluster.chip)
    return EinsumRates(cluster=cluster, calibration=used_calibration, laid=place_mesh(cluster, mesh))


def price_einsum(
    steps: Sequence[Step], dims: Mapping[str, int], mesh: Mapping[str, int], rates: EinsumRates | None
) -> list[StepPrice]:
    """Returns the price of each step by itself; without rates only FLOPs and bytes."""
    sizes = OpSizes(dims=dims, mesh=mesh, state="bf16-adam")
    return [_price(step, sizes, rates) for step in steps]


def _price(step: Step, sizes: OpSizes, rates: EinsumRates | None) -> StepPrice:
    if step.is_collective:
        kind: CollectiveKind = step.op  # type: ignore[assignment]
        num_bytes = sizes.bytes(step.full)
        if rates is None:
            return StepPrice(flops=0.0, num_bytes=num_bytes, time_s=None)
        group = group_rates(rates.laid, step.axes, rates.calibration)
        time_s, bound_by = float(collective_time(kind, num_bytes, group)), collective_bound_by(kind, num_bytes, group)
        return StepPrice(flops=0.0, num_bytes=num_bytes, time_s=time_s, bound_by=bound_by)
    flops, num_bytes = float(op_flops(step, sizes)), float(op_hbm_bytes(step, sizes))
    if rates is None:
        return StepPrice(flops=flops, num_bytes=num_bytes, time_s=None)
    chip = rates.cluster.chip
    streamed_s = num_bytes / memory_rate(chip, rates.calibration)
    if not flops:
        return StepPrice(flops=flops, num_bytes=num_bytes, time_s=streamed_s)
    computed_s = flops / matmul_rate(chip, rates.calibration, compute_dtype(chip, *(a.dtype for a in step.inputs)))
    bound_by = "compute" if computed_s > streamed_s else "hbm"
    return StepPrice(flops=flops, num_bytes=num_bytes, time_s=max(streamed_s, computed_s), bound_by=bound_by)


def total_time(prices: Sequence[StepPrice]) -> float | None:
    """Returns the seconds of all steps without overlap; None if one is unknown."""
    times_s = [price.time_s for price in prices if price.time_s is not None]
    return sum(times_s) if len(times_s) == len(prices) else None
