"""The limits of single mesh axes beside a plan: when weights, rings and experts hide, and how long a bubble is.

Those of the weights and of the experts' AllToAll rest on the plan's own priced steps: compute grows with the tokens
that a chip has of a microbatch, the bytes of its weights do not. Sources of the closed forms: How to Scale Your Model,
sections 3.2, 4.4.1 and 5.1; what has no closed form there follows from its rules, as the docstrings say.
"""

from collections.abc import Iterable, Iterator, Sequence

from meshwright.algebra.notation import product
from meshwright.algebra.steps import num_moves
from meshwright.cost.formulas.roofline import critical_batch
from meshwright.cost.pass_times import link_seconds, seconds_by_group
from meshwright.cost.pipeline import strategy_pipeline
from meshwright.cost.step_costs import StepCost
from meshwright.cost.train_step import PricedStrategy
from meshwright.plan.why.torus_limits import Limit
from meshwright.spec.calibration import matmul_rate, memory_rate
from meshwright.spec.plan_file import Plan

MAX_BUBBLE = 0.1
"""Share of a step that may be idle before more microbatches are asked for."""


def axis_limits(plan: Plan, priced: PricedStrategy) -> tuple[Limit, ...]:
    """The limits of every axis that has several devices; all are of speed.

    None on this machine's emulated devices, which do not compute while they communicate.
    """
    if plan.cluster.kind == "host":
        return ()
    mesh = plan.strategy.mesh
    found = [*_weights_hide(plan, priced)]
    if mesh.get("pipeline", 1) > 1:
        found += _bubble(plan, priced)
    if mesh.get("context", 1) > 1:
        found += _ring(plan, priced)
    if plan.model.num_experts:
        found += _experts(plan, priced)
    return tuple(found)


def min_microbatches(bubble_s: float, each_s: float, max_share: float = MAX_BUBBLE) -> float:
    """Microbatches M from which a bubble is less than a share s of a step: bubble / (M each + bubble) < s.

    Of GPipe and 1F1B, whose bubble is (K - 1) x each: M > (K - 1) (1 - s) / s, nine times K - 1 for a tenth.
    """
    return bubble_s / each_s * (1 - max_share) / max_share


def ring_min_positions(
    peak_flops: float, link_bytes_per_s: float, *, num_heads: int, num_kv_heads: int, causal: bool = True
) -> float:
    """Query positions t of a device from which a hop of ring attention hides behind the attention of a hop.

    A hop is 4 t^2 N H FLOPs, half with causal masks, and sends t positions of K heads' keys and values, 2 x 2 t K H
    bytes in 16 bits, one way: t > C / W x K / N, twice that with causal masks. Follows from section 3.2's rules.
    """
    return (1 + causal) * peak_flops / link_bytes_per_s * num_kv_heads / num_heads


def max_expert_ring(alpha: float, d_ff: float, num_matrices: int = 3) -> float:
    """Devices of an expert axis on one two-way ring up to which its AllToAlls are shorter than the experts' products.

    Forward, 2 x matrices t k D F FLOPs against two AllToAlls of 2 t k D Z bytes gathered, each at 1 / (4 W):
    Z < 2 x matrices F / alpha. Follows from sections 3.2 and 4.4.1.
    """
    return 2 * num_matrices * d_ff / alpha


# -- weights ----------------------------------------------------------------------------------------------


def _weights_hide(plan: Plan, priced: PricedStrategy) -> Iterator[Limit]:
    """Tokens of a chip and microbatch from which the gathers and sums of a layer's weights hide behind its work.

    Gathers, and sums of every microbatch, behind each pass; sums that are made once a step behind the last one.
    """
    passes = [costs for block in priced.costs.layers for costs in (block.forward, block.backward)]
    tokens = plan.job.tokens_per_step / plan.strategy.num_microbatches / _ways(plan, "pipeline", invert=True)
    if any(c.hides and c.step.op == "all_gather" for costs in passes for c in costs):
        yield _hiding("weights", tokens, priced, passes, scopes=("layer", "microbatch"))
    if any(c.hides and c.step.scope == "step" for costs in passes for c in costs):
        yield _hiding("gradients", tokens, priced, passes, scopes=("step",))


def _hiding(
    what: str, tokens: float, priced: PricedStrategy, passes: Sequence[Sequence[StepCost]], *, scopes: tuple[str, ...]
) -> Limit:
    """The limit of the pass that needs the most tokens."""
    least = 0.0
    for costs in passes:
        moved = [c for c in costs if c.hides and c.step.scope in scopes and c.step.op != "permute"]
        least = max(least, tokens * _links_s(priced, moved) / _row_s(costs))
    return Limit(
        name=f"tokens/chip, {what} hide", formula=f"> tokens x T_{what} / T_layer", limit=least, here=tokens,
        holds=tokens > least, note="of one microbatch, from this plan's own times",
    )  # fmt: skip


def _links_s(priced: PricedStrategy, costs: Sequence[StepCost]) -> float:
    """Seconds that the busiest link needs for some collectives."""
    return float(max(link_seconds(seconds_by_group(costs, "network_s", 1), priced.rates), default=0.0))


def _row_s(costs: Iterable[StepCost]) -> float:
    """Seconds of a pass without what hides."""
    return float(sum(c.time_s for c in costs if not c.hides))


def _ways(plan: Plan, *axes: str, invert: bool = False) -> int:
    """Devices of some axes together, or of all the others."""
    mesh = plan.strategy.mesh
    return int(product(size for axis, size in mesh.items() if (axis in axes) != invert))


# -- pipelines --------------------------------------------------------------------------------------------


def _bubble(plan: Plan, priced: PricedStrategy) -> Iterator[Limit]:
    pipeline = strategy_pipeline(plan.strategy)
    times = priced.parts.times
    share = pipeline.share(times.num_layers)
    forward, backward, weight = (float(times.layers_s(part, share)) for part in ("forward", "backward", "weight"))
    bubble = float(pipeline.bubble_s(forward_s=forward, backward_s=backward, weight_s=weight))
    count = plan.strategy.num_microbatches
    least, idle = min_microbatches(bubble, forward + backward), bubble / (bubble + count * (forward + backward))
    yield Limit(
        name="microbatches, bubble < 10%", formula="> 9 T_bubble / T_microbatch", limit=least, here=count,
        holds=count > least, note=f"the {plan.strategy.schedule} bubble is {idle:.1%} of its passes",
    )  # fmt: skip


# -- context ----------------------------------------------------------------------------------------------


def _ring(plan: Plan, priced: PricedStrategy) -> Iterator[Limit]:
    """Only where keys and values go round: a hop's link rate is the group's own."""
    permutes = (c for c in priced.costs.all if c.step.op == "permute" and c.step.phase == "forward")
    moved = [c for c in permutes if "context" in c.step.axes]
    if not moved or plan.model.latent_attention:
        return
    moves = num_moves(moved[0].step, dims=priced.sizes.dims, mesh=priced.sizes.mesh)
    link = float(moved[0].network_bytes / (moved[0].network_s - moved[0].latency_s) * moves)
    rate = matmul_rate(plan.cluster.chip, plan.calibration, plan.strategy.matmul_dtype)
    tensor = plan.strategy.mesh.get("tensor", 1)
    least = ring_min_positions(
        rate,
        link,
        num_heads=plan.model.num_heads // tensor,
        num_kv_heads=max(1, plan.model.num_kv_heads // tensor),
        causal=priced.sizes.causal,
    )
    here = plan.job.seq_len / plan.strategy.mesh["context"]
    yield Limit(
        name="positions/device, ring hides", formula="> 2 C/W x K/N" if priced.sizes.causal else "> C/W x K/N",
        limit=least, here=here, holds=here > least, note="W one way between neighbours of the ring",
    )  # fmt: skip


# -- experts ----------------------------------------------------------------------------------------------


def _experts(plan: Plan, priced: PricedStrategy) -> Iterator[Limit]:
    model, chip, strategy = plan.model, plan.cluster.chip, plan.strategy
    rate = matmul_rate(chip, plan.calibration, strategy.matmul_dtype)
    dense = critical_batch(rate, memory_rate(chip, plan.calibration), weight_bytes=priced.sizes.width)
    tokens = plan.job.tokens_per_step / strategy.num_microbatches / _ways(plan, "data", "fsdp", "context")
    yield Limit(
        name="tokens/copy of the experts", formula="> E/k x C/W_hbm",
        limit=dense * model.num_experts / model.experts_per_token, here=tokens,
        holds=tokens > dense * model.num_experts / model.experts_per_token,
        note="fewer leave the experts' products waiting for their weights",
    )  # fmt: skip
    if strategy.mesh.get("expert", 1) > 1:
        yield from _exchange(plan, priced)


def _exchange(plan: Plan, priced: PricedStrategy) -> Iterator[Limit]:
    """The width of an expert that makes its products as long as the two AllToAlls; both grow with the tokens alike."""
    block = max((block.forward for block in priced.costs.layers), key=len)
    sent = [c for c in block if c.step.op == "all_to_all" and "expert" in c.step.axes]
    products = [c for c in block if c.step.op == "einsum" and "Fe" in _dims(c)]
    if not sent or not products:
        return
    comms, math = float(sum(c.network_s for c in sent)), float(sum(c.math_s for c in products))
    width = plan.model.d_ff_expert
    yield Limit(
        name="expert width, AllToAll shorter", formula="> Fe x T_AllToAll / T_experts", limit=width * comms / math,
        here=width, holds=comms < math, note="the AllToAlls are waited for",
    )  # fmt: skip


def _dims(cost: StepCost) -> set[str]:
    return {dim for array in cost.step.inputs for dim in array.dims}
