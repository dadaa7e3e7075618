"""What fills a chip's memory as one thing changes: the tensor axis, the sequence length, or what is recomputed."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from meshwright.algebra.notation import product
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_count
from meshwright.cost.setting import Setting
from meshwright.plan.candidates import SPLIT_BATCH
from meshwright.plan.legal import MEMORY_RULE, divisors, legal, strategy_memory
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import AS_RUN, REMAT_POLICIES, Assumptions, Strategy, make_mesh

Axis = Literal["tensor", "seq", "remat"]
SWEPT: tuple[str, ...] = get_args(Axis)

MAX_SEQUENCE = 1 << 20


class MemoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One bar: bytes per chip of each item. ``reason`` says why a point cannot be had; then there are no items."""

    label: str
    strategy: Strategy
    job: Job
    items: dict[str, float]
    reason: str = ""

    @property
    def total_bytes(self) -> float:
        """What one chip holds."""
        return sum(self.items.values())


def memory_sweep(
    model: Model,
    cluster: Cluster,
    axis: Axis,
    *,
    seq_len: int,
    template: Strategy,
    axes: Mapping[str, int],
    microbatch_seqs: int = 1,
    values: Sequence[str] = (),
    assumptions: Assumptions = AS_RUN,
) -> tuple[MemoryPoint, ...]:
    """Memory per chip of a strategy with one thing changed at a time.

    ``axes`` are the given mesh axes; fsdp has the chips that are left. Every replica works on ``microbatch_seqs``
    sequences at a time, in as many microbatches as the template has. ``values`` replace the usual ones: powers of two
    of the tensor axis up to the heads, sequence lengths from 1 Ki to 128 Ki, every policy of remat.
    """
    if axis not in SWEPT:
        raise InputError(f"axis {axis!r} cannot be swept. Use {', '.join(SWEPT)}.")
    points = []
    for value in values or _usual(model, cluster, axis):
        given, strategy, length = dict(axes), template, seq_len
        if axis == "tensor":
            given["tensor"] = int(value)
        elif axis == "seq":
            length = int(value)
        else:
            strategy = msgspec.structs.replace(template, remat=value)
        label = {"tensor": f"tensor {value}", "seq": f"{format_count(length)} tokens", "remat": f"remat {value}"}[axis]
        strategy = _meshed(cluster, strategy, given)
        if length > MAX_SEQUENCE:
            raise InputError(f"sequences of {length:,} tokens are too long to count. Give at most {MAX_SEQUENCE:,}.")
        replicas = int(product(strategy.mesh[name] for name in SPLIT_BATCH))
        job = Job(batch_seqs=microbatch_seqs * replicas * strategy.num_microbatches, seq_len=length)
        points.append(_point(label, Setting(model, cluster, job, assumptions=assumptions), strategy))
    if not any(point.items for point in points):
        raise CannotRunError(f"no point of the sweep can be had on {cluster.short_name}: {points[0].reason}")
    return tuple(points)


def _usual(model: Model, cluster: Cluster, axis: Axis) -> list[str]:
    if axis == "remat":
        return list(REMAT_POLICIES)
    if axis == "tensor":
        most = min(model.num_heads, cluster.num_chips)
        return [str(size) for size in divisors(cluster.num_chips) if size <= most and model.num_kv_heads % size == 0]
    return [str(1024 << power) for power in range(8)]


def _meshed(cluster: Cluster, strategy: Strategy, axes: Mapping[str, int]) -> Strategy:
    """The strategy on all chips: fsdp has those that the given axes leave."""
    mesh = make_mesh(axes)
    taken = int(product(mesh.values()))
    if "fsdp" not in axes and cluster.num_chips % taken == 0:
        mesh["fsdp"] = cluster.num_chips // taken
    if int(product(mesh.values())) != cluster.num_chips:
        words = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        raise InputError(
            f"{words} do not make up the {cluster.num_chips} chips of {cluster.short_name}. Leave fsdp out to let it "
            f"take the rest."
        )
    return msgspec.structs.replace(strategy, mesh=mesh)


def _point(label: str, setting: Setting, strategy: Strategy) -> MemoryPoint:
    items: dict[str, float] = {}
    reason = next((one.message for one in legal(setting, strategy) if one.rule != MEMORY_RULE.name), "")
    if not reason:
        items = {name: float(size) for name, size in strategy_memory(setting, strategy).items()}
    return MemoryPoint(label=label, strategy=strategy, job=setting.job, items=items, reason=reason)
