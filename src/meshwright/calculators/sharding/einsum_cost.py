"""Prices of the steps of one sharded product on a cluster: the calculator behind `shard`."""

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import CollectiveKind
from meshwright.cost.network.collectives import collective_bound_by, collective_time, group_rates
from meshwright.cost.network.placement import Placement, place_mesh
from meshwright.cost.work.ops import op_flops, op_hbm_bytes
from meshwright.spec.calibration import Calibration, datasheet_calibration, matmul_rate, memory_rate
from meshwright.spec.chip import compute_dtype
from meshwright.spec.cluster import Cluster


class StepPrice(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs on one device, bytes (of a collective's full array, else read and written), and seconds if known.

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
    """Returns the rates of a mesh as `place_mesh` lays it, the data sheet's without a calibration."""
    measured = calibration or datasheet_calibration(cluster.chip)
    return EinsumRates(cluster=cluster, calibration=measured, laid=place_mesh(cluster, mesh))


def price_einsum(
    steps: Sequence[Step], dims: Mapping[str, int], mesh: Mapping[str, int], rates: EinsumRates | None
) -> list[StepPrice]:
    """Returns the price of each step by itself; without rates only FLOPs and bytes."""
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
    """Returns seconds of the steps one after the other; None if one is unknown."""
    times = [price.time_s for price in prices if price.time_s is not None]
    return sum(times) if len(times) == len(prices) else None
