"""The numbers of a plan that the table of limits needs (`Letters`): sizes, links of the cluster, priced steps.

Limits on hiding weights scale the priced steps: compute grows with the tokens of a chip, the bytes of weights do not.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.algebra.notation import product
from meshwright.algebra.rewrites.rings import num_moves
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.accounting import state_bytes
from meshwright.cost.formulas.roofline import critical_batch
from meshwright.cost.formulas.training_budget import global_batch
from meshwright.cost.letters import Letters, feed_forward_width, sparsity
from meshwright.cost.network.links import TorusWidth, torus_width
from meshwright.cost.network.placement import Placement
from meshwright.cost.pass_times import link_seconds
from meshwright.cost.train_step import PricedStrategy
from meshwright.cost.work.kernels import StepCost
from meshwright.plan.run_budget import RunBudget
from meshwright.spec.calibration import Calibration, Efficiency, matmul_rate, memory_rate
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import BATCH_AXES
from meshwright.spec.weights import num_active_params, num_params


class BatchSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The factors of a step's sequences: the product of the first three fields is ``sequences``."""

    sequences_per_microbatch: float
    data_parallel: int
    num_microbatches: int
    sequences: float
    positions_per_device: float


def batch_of(priced: PricedStrategy) -> BatchSplit:
    """Returns the factors of the batch: a replica's microbatch x replicas x microbatches."""
    job, num_microbatches = priced.setting.job, priced.strategy.num_microbatches
    num_replicas = _devices(priced, *BATCH_AXES)
    microbatch_seqs = job.batch_seqs / (num_replicas * num_microbatches)
    return BatchSplit(
        sequences_per_microbatch=microbatch_seqs,
        data_parallel=num_replicas,
        num_microbatches=num_microbatches,
        sequences=global_batch(microbatch_seqs, data_parallel=num_replicas, num_microbatches=num_microbatches),
        positions_per_device=job.seq_len / _devices(priced, "context"),
    )


def model_letters(model: Model, num_stages: int = 1) -> dict[str, Any]:
    """Returns the fields of `Letters` that a model and its number of pipeline stages give."""
    return {
        "d_ff": feed_forward_width(model),
        "sparsity": sparsity(model),
        "num_params": num_params(model) / num_stages,
        "num_active_params": num_active_params(model) / num_stages,
    }


def shared_letters(cluster: Cluster, job: Job, num_slices: int) -> dict[str, Any]:
    """Returns the fields of `Letters` that a cluster and a job give without a plan; ``num_slices`` split the batch."""
    torus = torus_width(cluster)
    return {
        "num_axes": sum(torus.axes) if torus else 1,
        "width": torus.words if torus else "",
        "num_slices": num_slices,
        "slice_tokens": job.tokens_per_step / num_slices if num_slices > 1 else None,
        "dcn_bytes_per_s_per_host": cluster.chip.dcn_bytes_per_s_per_host or None,
        "chips_per_host": cluster.chip.chips_per_host or None,
        "pod_chips": cluster.chip.max_chips,
        "all_chips": cluster.num_chips,
        "step_tokens": job.tokens_per_step,
        "seq_len": job.seq_len,
    }


def letters_of(priced: PricedStrategy, budget: RunBudget | None = None) -> Letters:
    """Returns the `Letters` of a priced plan; ``peak_flops`` (C) is the rate of products behind the plan's times.

    `limits_at` returns every limit that applies to the plan: limits of single axes, of the mesh, and of size.
    """
    setting, strategy = priced.setting, priced.strategy
    cluster, job, chip, rates = setting.cluster, setting.job, setting.cluster.chip, setting.rates
    num_stages, num_microbatches = _devices(priced, "pipeline"), strategy.num_microbatches
    peak_flops = matmul_rate(chip, rates, strategy.matmul_dtype)
    torus, sheet_peak = torus_width(cluster), chip.peak_flops.get(strategy.matmul_dtype)
    tensor_axes, fsdp_axes = _axes_of_tensor(priced.placement, torus) if torus else (1, 1)
    num_slices = cluster.num_slices // math.gcd(num_stages, cluster.num_slices)
    num_chips, limit_bytes = cluster.num_chips // (num_slices * num_stages), setting.memory_limit
    activation_bytes = priced.estimate.memory["activations"] * cluster.num_chips
    return Letters(
        batch_tokens=job.tokens_per_step / num_slices / num_microbatches,
        num_microbatches=num_microbatches,
        num_chips=num_chips,
        num_stages=num_stages,
        data_ways=_devices(priced, *BATCH_AXES, "context") / num_slices,
        peak_flops=peak_flops,
        alpha=None if torus is None else limits.ici_intensity(peak_flops, torus.bytes_per_s * rates.efficiency.ici),
        sheet_alpha=limits.ici_intensity(sheet_peak, torus.bytes_per_s) if torus and sheet_peak else None,
        fsdp_axes=fsdp_axes,
        tensor_axes=tensor_axes,
        tensor=_devices(priced, "tensor"),
        context=_devices(priced, "context"),
        batch_seqs=job.batch_seqs,
        replicas=_devices(priced, *BATCH_AXES),
        memory_bytes=limit_bytes if math.isfinite(limit_bytes) else None,
        needed_bytes=float(priced.estimate.hbm_bytes_per_chip),
        shared_bytes=state_bytes(num_params(setting.model), state=strategy.state) + activation_bytes,
        train_tokens=budget.train_tokens if budget else None,
        run_days=budget.days if budget else None,
        **model_letters(setting.model, num_stages),
        **shared_letters(cluster, job, num_slices),
        **(switched_letters(cluster, peak_flops, rates.efficiency) if num_chips > 1 else {}),
        **_of_axes(priced, peak_flops),
    )


def _axes_of_tensor(placement: Placement, width: TorusWidth) -> tuple[float, float]:
    """Returns the numbers of torus axes of tensor parallelism and of all other axes, each at least one axis. An open
    line counts as half an axis if other axes are closed rings.

    The factors of ``tensor`` fill shares of axes (4 of an axis of 16 is a half); the sum of its shares, rounded, is the
    number of its axes, taken in the order of its shares."""
    links = [link for link in placement.links if link.level == "ici" and link.size > 1]
    share_by_link = {
        link.name: sum(math.log(factor, link.size) for axis, factor in link.parts if axis == "tensor") for link in links
    }
    num_tensor_axes = max(1, min(round(sum(share_by_link.values())), len(links) - 1))
    sorted_links = sorted(links, key=lambda link: (-share_by_link[link.name], -link.wraps))
    axis_widths = [(1 + link.wraps) / (1 + any(link.wraps for link in links)) for link in sorted_links]
    return sum(axis_widths[:num_tensor_axes]), sum(axis_widths[num_tensor_axes:]) or axis_widths[-1]


def _devices(priced: PricedStrategy, *axes: str) -> int:
    """Returns the product of the sizes of these axes."""
    return int(product(priced.strategy.mesh.get(axis, 1) for axis in axes))


def switched_letters(cluster: Cluster, peak: float, shares: Efficiency) -> dict[str, Any]:
    """Returns the fields of `Letters` for an NVLink domain and the network between domains; {} without NVLink."""
    chip = cluster.chip
    if cluster.kind != "switched" or not chip.nvlink_bytes_per_s:
        return {}
    nvlink_bytes_per_s = chip.nvlink_bytes_per_s * shares.nvlink
    link_bytes_per_s, flat_bytes_per_s, link_name = nvlink_bytes_per_s, nvlink_bytes_per_s, "nvlink"
    if cluster.nodes > 1 and chip.nic_bytes_per_s:
        flat_bytes_per_s = chip.nic_bytes_per_s * shares.network
        link_bytes_per_s, link_name = min(link_bytes_per_s, flat_bytes_per_s * cluster.domain), "node"
    return {
        "link": link_name,
        "link_alpha": limits.ici_intensity(peak, link_bytes_per_s),
        "domain": cluster.domain,
        "domain_alpha": limits.ici_intensity(peak, nvlink_bytes_per_s),
        "flat_bytes_per_s": flat_bytes_per_s,
    }


def sheet_letters(letters: Letters, cluster: Cluster, dtype: str, rates: Calibration) -> Letters:
    """Returns the letters with C and W of the data sheet; those of priced steps stay as they are."""
    chip, hbm_tokens = cluster.chip, letters.hbm_tokens
    peak_flops = chip.peak_flops.get(dtype, letters.peak_flops)
    if hbm_tokens and chip.hbm_bytes_per_s:
        hbm_tokens *= peak_flops / letters.peak_flops * memory_rate(chip, rates) / chip.hbm_bytes_per_s
    return msgspec.structs.replace(
        letters,
        alpha=letters.sheet_alpha or letters.alpha,
        hbm_tokens=hbm_tokens,
        **(switched_letters(cluster, peak_flops, Efficiency()) if letters.num_chips > 1 else {}),
    )


# -- single axes ------------------------------------------------------------------------------------------


def _of_axes(priced: PricedStrategy, peak_flops: float) -> dict[str, Any]:
    """Returns the fields of `Letters` for every mesh axis that has several devices.

    {} for this machine's emulated devices, which do not compute while they communicate.
    """
    setting, strategy = priced.setting, priced.strategy
    if setting.cluster.kind == "host":
        return {}
    costs_of_passes = [costs for block in priced.costs.layers for costs in (block.forward, block.backward)]
    stage_devices = int(product(size for axis, size in strategy.mesh.items() if axis != "pipeline"))
    letters: dict[str, Any] = {"chip_tokens": setting.job.tokens_per_step / strategy.num_microbatches / stage_devices}
    if any(c.gathers_weights for costs in costs_of_passes for c in costs):
        letters |= _hiding("weights", priced, costs_of_passes, scopes=("layer", "microbatch"))
    if any(c.hides and c.step.scope == "step" for costs in costs_of_passes for c in costs):
        letters |= _hiding("gradients", priced, costs_of_passes, scopes=("step",))
    if _devices(priced, "pipeline") > 1:
        forward_s, backward_s, bubble_s = priced.times.layer_passes(priced.pipeline)
        letters |= {
            "schedule": strategy.schedule,
            "bubble_s": float(bubble_s),
            "microbatch_s": float(forward_s + backward_s),
        }
    if _devices(priced, "context") > 1:
        letters |= _ring(priced)
    if setting.model.num_experts:
        letters |= _experts(priced, peak_flops)
    return letters


def _hiding(
    what: str, priced: PricedStrategy, passes: Sequence[Sequence[StepCost]], *, scopes: tuple[str, ...]
) -> dict[str, float]:
    """Returns the seconds of collectives of ``scopes`` and of steps that cannot hide, for the pass of worst ratio."""
    pass_times = []
    for costs in passes:
        moved_costs = [c for c in costs if c.hides and c.step.scope in scopes and c.step.op != "permute"]
        links_s = max(link_seconds(moved_costs, priced.rates, once=True), default=0.0)
        pass_times.append((float(links_s), float(sum(c.time_s for c in costs if not c.hides))))
    links_s, layer_s = max(pass_times, key=lambda times: times[0] / times[1])
    return {f"{what}_s": links_s, f"{what}_layer_s": layer_s}


def _ring(priced: PricedStrategy) -> dict[str, Any]:
    """Returns the fields of `Letters` for ring attention, the link rate from the priced permutes; {} without a ring."""
    model, tensor_size = priced.setting.model, _devices(priced, "tensor")
    permutes = (cost for cost in priced.costs.all if cost.step.op == "permute" and cost.step.phase == "forward")
    move_cost = next((cost for cost in permutes if "context" in cost.step.axes), None)
    if move_cost is None or model.latent_attention:
        return {}
    num_sends = num_moves(move_cost.step, priced.sizes)
    return {
        "ring_bytes_per_s": float(move_cost.network_bytes / (move_cost.network_s - move_cost.latency_s) * num_sends),
        "ring_positions": priced.setting.job.seq_len / _devices(priced, "context"),
        "num_heads": model.num_heads // tensor_size,
        "num_kv_heads": max(1, model.num_kv_heads // tensor_size),
        "causal": priced.sizes.causal,
    }


def _experts(priced: PricedStrategy, peak_flops: float) -> dict[str, Any]:
    """Returns the fields of `Letters` for experts, and for their AllToAlls if ``expert`` has several devices."""
    setting, model = priced.setting, priced.setting.model
    num_shards = _devices(priced, "data", "fsdp", "context")
    hbm_rate = memory_rate(setting.cluster.chip, setting.rates)
    letters = {
        "num_experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "hbm_tokens": critical_batch(peak_flops, hbm_rate, weight_bytes=priced.sizes.width),
        "copy_tokens": setting.job.tokens_per_step / priced.strategy.num_microbatches / num_shards,
    }
    forward_costs = max((block.forward for block in priced.costs.layers), key=len)
    exchange_costs = [c for c in forward_costs if c.step.op == "all_to_all" and "expert" in c.step.axes]
    product_costs = [c for c in forward_costs if c.flops and any("Fe" in array.dims for array in c.step.inputs)]
    if _devices(priced, "expert") > 1 and exchange_costs and product_costs:
        letters |= {
            "expert_width": model.d_ff_expert,
            "exchange_s": float(sum(c.network_s for c in exchange_costs)),
            "experts_s": float(sum(c.math_s for c in product_costs)),
        }
    return letters
