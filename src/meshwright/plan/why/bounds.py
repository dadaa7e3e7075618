"""The letters of a plan for the table of limits: from its sizes, its cluster's links and its own priced steps.

Those of the weights and of the experts' AllToAll rest on the priced steps: compute grows with the tokens that a chip
has of a microbatch, the bytes of its weights do not.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.algebra.notation import product
from meshwright.algebra.rewrites.rings import num_moves
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.accounting import state_bytes
from meshwright.cost.formulas.limit_table import Letters, Limit, feed_forward_width, limits_at, sparsity
from meshwright.cost.formulas.roofline import critical_batch
from meshwright.cost.formulas.training_budget import global_batch, tokens_per_device
from meshwright.cost.memory import memory_limit
from meshwright.cost.network.placement import Placement
from meshwright.cost.pass_times import link_seconds
from meshwright.cost.train_step import PricedStrategy
from meshwright.cost.work.kernels import StepCost
from meshwright.plan.run_budget import RunBudget
from meshwright.spec.calibration import matmul_rate, memory_rate
from meshwright.spec.plan_file import Plan
from meshwright.spec.weights import num_active_params, num_params


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """How the sequences of a step are shared out: their product is ``sequences``."""

    sequences_per_microbatch: float
    data_parallel: int
    num_microbatches: int
    sequences: float
    positions_per_device: float


def batch_of(plan: Plan) -> Batch:
    """The bookkeeping of the plan's batch: a replica's microbatch x replicas x microbatches."""
    mesh, count = plan.strategy.mesh, plan.strategy.num_microbatches
    replicas = product(mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    each = plan.job.batch_seqs / (replicas * count)
    return Batch(
        sequences_per_microbatch=each,
        data_parallel=replicas,
        num_microbatches=count,
        sequences=global_batch(each, data_parallel=replicas, num_microbatches=count),
        positions_per_device=tokens_per_device(plan.job.seq_len, context=mesh.get("context", 1)),
    )


def limits_of(plan: Plan, priced: PricedStrategy, budget: RunBudget | None = None) -> tuple[Limit, ...]:
    """Every limit that has a meaning for a plan: those of single axes, of the whole mesh, and of size."""
    return limits_at(letters_of(plan, priced, budget))


def letters_of(plan: Plan, priced: PricedStrategy, budget: RunBudget | None = None) -> Letters:
    """The letters with this plan's numbers; C is the rate of products that its times rest on."""
    cluster, strategy, job, model = plan.cluster, plan.strategy, plan.job, plan.model
    mesh, stages = strategy.mesh, strategy.mesh.get("pipeline", 1)
    peak = matmul_rate(cluster.chip, plan.calibration, strategy.matmul_dtype)
    width = cluster.chip.ici_axis_bytes_per_s if cluster.kind == "torus" else None
    width = None if width is None else width * plan.calibration.efficiency.ici
    total = sum(size > 1 for size in cluster.shape)
    tensor = max(1, min(round(_axes_taken(priced.placement, "tensor")), total - 1))
    slices = cluster.num_slices // math.gcd(stages, cluster.num_slices)
    chips = cluster.num_chips // (slices * stages)
    return Letters(
        batch_tokens=job.tokens_per_step / slices / strategy.num_microbatches,
        num_microbatches=strategy.num_microbatches,
        num_chips=chips,
        num_stages=stages,
        num_slices=slices,
        d_ff=feed_forward_width(model),
        data_ways=_devices(plan, "data", "fsdp", "expert", "context") / slices,
        peak_flops=peak,
        alpha=None if width is None else limits.ici_intensity(peak, width),
        num_axes=total,
        fsdp_axes=max(1, total - tensor),
        tensor_axes=tensor,
        tensor=mesh.get("tensor", 1),
        sparsity=sparsity(model),
        slice_tokens=job.tokens_per_step / slices if slices > 1 else None,
        dcn_bytes_per_s_per_host=cluster.chip.dcn_bytes_per_s_per_host or None,
        chips_per_host=cluster.chip.chips_per_host or None,
        **(_switched(plan, peak) if chips > 1 else {}),
        **_of_axes(plan, priced, peak),
        **_sizes(plan, priced, budget),
    )


def _axes_taken(placement: Placement, name: str) -> float:
    """Torus axes' worth of one mesh axis: 1 where it fills one, a half for 4 of an axis of 16."""
    shares = (
        math.log(factor) / math.log(link.size)
        for link in placement.links
        for axis, factor in link.parts
        if axis == name and factor > 1
    )
    return sum(shares)


def _devices(plan: Plan, *axes: str) -> int:
    """Devices of some axes together."""
    return int(product(plan.strategy.mesh.get(axis, 1) for axis in axes))


def _switched(plan: Plan, peak: float) -> dict[str, Any]:
    """Letters of a switched domain and the network between domains; none elsewhere."""
    chip, cluster, shares = plan.cluster.chip, plan.cluster, plan.calibration.efficiency
    if cluster.kind != "switched" or not chip.nvlink_bytes_per_s:
        return {}
    nvlink = chip.nvlink_bytes_per_s * shares.nvlink
    rate, flat, link = nvlink, nvlink, "nvlink"
    if cluster.nodes > 1 and chip.nic_bytes_per_s:
        flat = chip.nic_bytes_per_s * shares.network
        rate, link = min(rate, flat * cluster.domain), "node"
    stages = plan.strategy.mesh.get("pipeline", 1)
    return {
        "link": link,
        "link_alpha": limits.ici_intensity(peak, rate),
        "domain_alpha": limits.ici_intensity(peak, nvlink),
        "flat_bytes_per_s": flat,
        "num_params": num_params(plan.model) / stages,
        "num_active_params": num_active_params(plan.model) / stages,
    }


def _sizes(plan: Plan, priced: PricedStrategy, budget: RunBudget | None) -> dict[str, Any]:
    job, chips = plan.job, plan.cluster.num_chips
    room = memory_limit(plan.cluster, plan.calibration)
    activations = priced.estimate.memory["activations"] * chips
    return {
        "all_chips": chips,
        "step_tokens": job.tokens_per_step,
        "seq_len": job.seq_len,
        "context": plan.strategy.mesh.get("context", 1),
        "batch_seqs": job.batch_seqs,
        "replicas": batch_of(plan).data_parallel,
        "memory_bytes": room if math.isfinite(room) else None,
        "needed_bytes": float(priced.estimate.hbm_bytes_per_chip),
        "shared_bytes": state_bytes(num_params(plan.model), state=plan.strategy.state) + activations,
        "train_tokens": budget.train_tokens if budget else None,
        "run_days": budget.days if budget else None,
    }


# -- single axes ------------------------------------------------------------------------------------------


def _of_axes(plan: Plan, priced: PricedStrategy, peak: float) -> dict[str, Any]:
    """Letters of every axis that has several devices.

    None on this machine's emulated devices, which do not compute while they communicate.
    """
    if plan.cluster.kind == "host":
        return {}
    mesh, count = plan.strategy.mesh, plan.strategy.num_microbatches
    passes = [costs for block in priced.costs.layers for costs in (block.forward, block.backward)]
    others = int(product(size for axis, size in mesh.items() if axis != "pipeline"))
    found: dict[str, Any] = {"chip_tokens": plan.job.tokens_per_step / count / others}
    if any(c.hides and c.step.op == "all_gather" for costs in passes for c in costs):
        found |= _hiding("weights", priced, passes, scopes=("layer", "microbatch"))
    if any(c.hides and c.step.scope == "step" for costs in passes for c in costs):
        found |= _hiding("gradients", priced, passes, scopes=("step",))
    if mesh.get("pipeline", 1) > 1:
        found |= _bubble(plan, priced)
    if mesh.get("context", 1) > 1:
        found |= _ring(plan, priced)
    if plan.model.num_experts:
        found |= _experts(plan, priced, peak)
    return found


def _hiding(
    what: str, priced: PricedStrategy, passes: Sequence[Sequence[StepCost]], *, scopes: tuple[str, ...]
) -> dict[str, float]:
    """Seconds of the collectives on weights, and of the rest of the pass that hides the smallest part of them.

    Gathers, and sums of every microbatch, pass behind each pass; sums that are made once a step behind the last one.
    """
    pairs = []
    for costs in passes:
        moved = [c for c in costs if c.hides and c.step.scope in scopes and c.step.op != "permute"]
        links_s = max(link_seconds(moved, priced.rates, once=True), default=0.0)
        pairs.append((float(links_s), float(sum(c.time_s for c in costs if not c.hides))))
    links_s, layer_s = max(pairs, key=lambda pair: pair[0] / pair[1])
    return {f"{what}_s": links_s, f"{what}_layer_s": layer_s}


def _bubble(plan: Plan, priced: PricedStrategy) -> dict[str, Any]:
    forward, backward, bubble = priced.times.layer_passes(priced.pipeline)
    return {
        "schedule": plan.strategy.schedule,
        "bubble_s": float(bubble),
        "microbatch_s": float(forward + backward),
    }


def _ring(plan: Plan, priced: PricedStrategy) -> dict[str, Any]:
    """Letters of ring attention, where keys and values go round: a hop's link rate is the group's own."""
    permutes = (c for c in priced.costs.all if c.step.op == "permute" and c.step.phase == "forward")
    moved = next((c for c in permutes if "context" in c.step.axes), None)
    if moved is None or plan.model.latent_attention:
        return {}
    moves = num_moves(moved.step, dims=priced.sizes.dims, mesh=priced.sizes.mesh)
    tensor = plan.strategy.mesh.get("tensor", 1)
    return {
        "ring_bytes_per_s": float(moved.network_bytes / (moved.network_s - moved.latency_s) * moves),
        "ring_positions": plan.job.seq_len / plan.strategy.mesh["context"],
        "num_heads": plan.model.num_heads // tensor,
        "num_kv_heads": max(1, plan.model.num_kv_heads // tensor),
        "causal": priced.sizes.causal,
    }


def _experts(plan: Plan, priced: PricedStrategy, peak: float) -> dict[str, Any]:
    """Letters of the experts, and of their AllToAlls where an axis of several devices holds them."""
    model, bandwidth = plan.model, memory_rate(plan.cluster.chip, plan.calibration)
    found = {
        "num_experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "hbm_tokens": critical_batch(peak, bandwidth, weight_bytes=priced.sizes.width),
        "copy_tokens": plan.job.tokens_per_step
        / plan.strategy.num_microbatches
        / _devices(plan, "data", "fsdp", "context"),
    }
    block = max((block.forward for block in priced.costs.layers), key=len)
    sent = [c for c in block if c.step.op == "all_to_all" and "expert" in c.step.axes]
    products = [c for c in block if c.flops and any("Fe" in array.dims for array in c.step.inputs)]
    if plan.strategy.mesh.get("expert", 1) > 1 and sent and products:
        found |= {
            "expert_width": model.d_ff_expert,
            "exchange_s": float(sum(c.network_s for c in sent)),
            "experts_s": float(sum(c.math_s for c in products)),
        }
    return found
