"""What the steps of one sharded product cost on a cluster: the calculator behind `shard`."""

from collections.abc import Mapping, Sequence
from itertools import permutations

import msgspec

from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import CollectiveKind
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.network.collectives import collective_bound_by, collective_time, group_rates
from meshwright.cost.network.placement import Placement, place_axes, whole_axis_placement
from meshwright.cost.work.ops import op_flops, op_hbm_bytes
from meshwright.spec.calibration import Calibration, datasheet_calibration, matmul_rate, memory_rate
from meshwright.spec.chip import compute_dtype
from meshwright.spec.cluster import Cluster


class StepPrice(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs on one device, bytes (of the full array for a collective, through memory else), and seconds if known.

    ``bound_by`` is "compute", "hbm", "latency" or a level of links; empty for a slice, and without rates.
    """

    flops: float
    num_bytes: float
    time_s: float | None
    bound_by: str = ""


class EinsumRates(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh of any axis names laid on a cluster."""

    cluster: Cluster
    calibration: Calibration
    laid: Placement


def einsum_rates(cluster: Cluster, mesh: Mapping[str, int], *, calibration: Calibration | None = None) -> EinsumRates:
    """The mesh on the cluster, whole physical axes first; on a part of the cluster when the mesh is smaller.

    Raises CannotRunError when the mesh has more devices than the cluster or no part of it has its shape.
    """
    part = _part(cluster, mesh)
    laid = whole_axis_placement(part, mesh) or place_axes(part, mesh)[0]
    measured = calibration or datasheet_calibration(cluster.chip)
    return EinsumRates(cluster=part, calibration=measured, laid=laid)


def _part(cluster: Cluster, mesh: Mapping[str, int]) -> Cluster:
    """The cluster, or the part of it on which each mesh axis has physical axes of its own."""
    needed = int(product(mesh.values()))
    if needed == cluster.num_chips:
        return cluster
    if needed > cluster.num_chips:
        raise CannotRunError(
            f"the mesh has {needed} devices and {cluster.short_name} {cluster.num_chips} chips; "
            f"name a larger cluster or a smaller mesh."
        )
    shape = _sub_shape(cluster, tuple(mesh.values()), needed)
    if shape is None:
        raise InputError(
            f"no part of {cluster.short_name} has the shape of mesh {'x'.join(map(str, mesh.values()))}; "
            f"name a cluster of {needed} chips."
        )
    return cluster.part(shape)


def _sub_shape(cluster: Cluster, sizes: tuple[int, ...], needed: int) -> tuple[int, ...] | None:
    """The shape inside the cluster that holds the mesh, each mesh axis on one physical axis where that is possible."""
    if cluster.kind == "host":
        return (needed,)
    if cluster.kind == "switched":
        shape = []
        for size in cluster.shape:
            shape.append(min(needed, size))
            if needed % shape[-1]:
                return None
            needed //= shape[-1]
        return tuple(shape) if needed == 1 else None
    if len(sizes) > len(cluster.shape):
        return None
    padded = (*sizes, *(1,) * (len(cluster.shape) - len(sizes)))
    fitting = (p for p in permutations(padded) if all(n <= size for n, size in zip(p, cluster.shape, strict=True)))
    return next(fitting, None)


def price_einsum(
    steps: Sequence[Step], dims: Mapping[str, int], mesh: Mapping[str, int], rates: EinsumRates | None
) -> list[StepPrice]:
    """The price of each step by itself; without rates only FLOPs and bytes."""
    sizes = OpSizes(dims=dims, mesh=mesh, state="bf16-adam")
    return [_price(step, sizes, rates) for step in steps]


def _price(step: Step, sizes: OpSizes, rates: EinsumRates | None) -> StepPrice:
    if step.is_collective:
        kind: CollectiveKind = step.op  # type: ignore[assignment]
        moved = sizes.bytes(step.full)
        if rates is None:
            return StepPrice(flops=0.0, num_bytes=moved, time_s=None)
        group = group_rates(rates.laid, step.axes, rates.calibration)
        seconds, bound = float(collective_time(kind, moved, group)), collective_bound_by(kind, moved, group)
        return StepPrice(flops=0.0, num_bytes=moved, time_s=seconds, bound_by=bound)
    flops, moved = float(op_flops(step, sizes)), float(op_hbm_bytes(step, sizes))
    if rates is None:
        return StepPrice(flops=flops, num_bytes=moved, time_s=None)
    chip = rates.cluster.chip
    streamed_s = moved / memory_rate(chip, rates.calibration)
    if not flops:
        return StepPrice(flops=flops, num_bytes=moved, time_s=streamed_s)
    computed_s = flops / matmul_rate(chip, rates.calibration, compute_dtype(chip, *(a.dtype for a in step.inputs)))
    bound = "compute" if computed_s > streamed_s else "hbm"
    return StepPrice(flops=flops, num_bytes=moved, time_s=max(streamed_s, computed_s), bound_by=bound)


def total_time(prices: Sequence[StepPrice]) -> float | None:
    """Seconds of steps one after the other; None where one is not known."""
    times = [price.time_s for price in prices if price.time_s is not None]
    return sum(times) if len(times) == len(prices) else None


def num_copies(array: ShardedArray, mesh: Mapping[str, int]) -> int:
    """How often the mesh holds each block: the product of the axes that neither split the array nor hold addends.

    Source: How to Scale Your Model, section 3.1.
    """
    used = (*array.spread, *array.unreduced)
    return int(product(size for axis, size in mesh.items() if axis not in used))


def whole_flops(factors: Sequence[ShardedArray], result: ShardedArray, dims: Mapping[str, int]) -> float:
    """FLOPs of the product on one device that holds everything: 2 for every combination of all dims."""
    arrays = [array.replace(axes=((),) * len(array.dims), unreduced=()) for array in (*factors, result)]
    step = Step(op="einsum", inputs=tuple(arrays[:-1]), result=arrays[-1])
    return price_einsum([step], dims, {}, None)[0].flops
