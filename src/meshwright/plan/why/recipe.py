"""The lecture's recipe as a baseline: a strategy chosen by rules of thumb, step by step, without a search.

Data parallelism up to about 128 chips and a billion parameters; then FSDP; activation checkpointing when activations do
not fit; hybrid sharding from 256 chips on; context, tensor and pipeline parallelism beyond about 1,000 chips, 50
billion parameters or sequences of 10,000 tokens. The batch of a chip is always as large as memory allows. Source:
Stanford CS231n (2025), lecture 11, which leaves the sizes of the last three axes to tuning. Here they follow its
example, Llama 3: about 8,192 positions per device, tensor over one machine, and the fewest stages that fit.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.core.units import counted, format_params
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import Estimate, estimate_step
from meshwright.plan.legal import MEMORY_RULE, divisors, legal, microbatches_that_fit
from meshwright.plan.rules import Refusal
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, Strategy, make_mesh
from meshwright.spec.weights import num_params

DATA_CHIPS, DATA_PARAMS = 128, 1e9
"""Chips and parameters up to which plain data parallelism is the recipe's choice."""
HYBRID_CHIPS = 256
"""Chips from which FSDP over all chips is too expensive: no weight is split over more than this many."""
FAR_CHIPS, FAR_PARAMS, FAR_TOKENS = 1000, 50e9, 10_000
"""Chips, parameters and tokens of a sequence beyond any of which the recipe uses context, tensor and pipeline."""
LOCAL_POSITIONS = 8192
"""Positions of a sequence per device, as in Llama 3's training with and without context parallelism."""
MACHINE_CHIPS = 8
"""Chips of a machine if the catalogue has no number for the chip."""

REMATS = ("none", "block", "sqrt")
"""Remat policies in the order they are tried: no checkpoints, one per layer, one per sqrt(L) layers."""


class RecipeStep(msgspec.Struct, frozen=True):
    """One step of the recipe: whether it applies, and the reason with the sizes that it sets."""

    name: str
    applies: bool
    reason: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The recipe's strategy and the steps that lead to it. ``refusal`` says why it does not run; None if it does.
    ``estimate`` is None if ``refusal`` has another reason than memory."""

    steps: tuple[RecipeStep, ...]
    strategy: Strategy
    estimate: Estimate | None
    refusal: Refusal | None = None


def recipe(setting: Setting, *, template: Strategy) -> Recipe:
    """Returns the recipe for a job on all chips of a cluster; ``template`` has the state and precision."""
    builder = _Builder(setting, template)
    inner = {axis: (size, reason) for axis, size, reason in _far(builder)}
    strategy = _chosen(
        builder, {"context": 1, "tensor": 1, "pipeline": 1} | {axis: size for axis, (size, _) in inner.items()}
    )
    refusals = legal(setting, strategy)
    is_runnable = all(refusal.rule == MEMORY_RULE for refusal in refusals)
    return Recipe(
        steps=tuple(_said(builder, strategy, inner)),
        strategy=strategy,
        estimate=estimate_step(setting, strategy) if is_runnable else None,
        refusal=refusals[0] if refusals else None,
    )


class _Builder:
    """Builds strategies of a job on a cluster from a template, and tests which fit."""

    def __init__(self, setting: Setting, template: Strategy) -> None:
        model, cluster, job = setting.model, setting.cluster, setting.job
        self.setting, self.model, self.cluster, self.job, self.template = setting, model, cluster, job, template
        self.chips, self.params = cluster.num_chips, num_params(model)
        self.machine = min(cluster.chip.chips_per_host or MACHINE_CHIPS, self.chips)

    def strategy(self, mesh: Mapping[str, int], remat: str) -> Strategy:
        """Returns the template with a mesh and a remat policy, in one microbatch, with ring attention on chips."""
        attention_mode = "gather" if self.cluster.kind == "host" else "ring"
        fields: dict[str, Any] = {"schedule": "1f1b", "chunks": 1, "offload": (), "placement": {}, "slice_axes": ()}
        fields |= {"mesh": make_mesh(mesh), "remat": remat, "num_microbatches": 1, "context_attention": attention_mode}
        fields["assignment"] = DEFAULT_ASSIGNMENT
        return msgspec.structs.replace(self.template, **fields)

    def first_that_fits(self, meshes: Iterator[Mapping[str, int]]) -> Strategy | None:
        """Returns the strategy of the first mesh that fits, with as little remat as it needs; None if none fits."""
        for mesh in meshes:
            for remat in REMATS:
                if remat == "sqrt" and self.cluster.kind == "host":
                    continue
                strategy = self.strategy(mesh, remat)
                if bytes_by_microbatches := microbatches_that_fit(self.setting, strategy):
                    return msgspec.structs.replace(strategy, num_microbatches=min(bytes_by_microbatches))
        return None


# -- the steps --------------------------------------------------------------------------------------------


def _far(builder: _Builder) -> Iterator[tuple[str, int, str]]:
    """Yields (axis, size, reason) for tensor and context parallelism, where the recipe uses them."""
    if builder.cluster.kind == "host":
        return
    tensor = math.gcd(builder.machine, builder.model.common_kv_heads)
    has_few_seqs = builder.chips > FAR_CHIPS and builder.chips > builder.job.batch_seqs
    if tensor > 1 and builder.params > FAR_PARAMS:
        yield "tensor", tensor, f"more than {format_params(FAR_PARAMS)} parameters, over the chips of a machine"
    elif tensor > 1 and has_few_seqs:
        yield "tensor", tensor, f"more than {FAR_CHIPS:,} chips and fewer sequences, over the chips of a machine"
    else:
        tensor = 1
    is_long, context = builder.job.seq_len > FAR_TOKENS, 1
    while builder.chips % (2 * tensor * context) == 0 and (
        (is_long and builder.job.seq_len / context > LOCAL_POSITIONS)
        or builder.chips // (tensor * context) > builder.job.batch_seqs
    ):
        context *= 2
    if context > 1:
        reason = f"sequences longer than {FAR_TOKENS:,} tokens" if is_long else "fewer sequences than replicas"
        yield "context", context, reason


def _chosen(builder: _Builder, inner: Mapping[str, int]) -> Strategy:
    """Returns the first strategy that fits, with the fewest stages (a power of two); if none fits, FSDP unpipelined."""
    num_powers = 1 if builder.cluster.kind == "host" else int(math.log2(builder.model.num_layers)) + 1
    inner_chips = inner["context"] * inner["tensor"]
    for num_stages in (2**power for power in range(num_powers)):
        if builder.chips % (inner_chips * num_stages):
            continue
        mesh_splits = _splits(builder, builder.chips // (inner_chips * num_stages), inner["tensor"])
        strategy = builder.first_that_fits({**inner, "pipeline": num_stages, **split} for split in mesh_splits)
        if strategy is not None:
            return strategy
    return builder.strategy({**inner, "fsdp": builder.chips // inner_chips}, "block")


def _splits(builder: _Builder, num_ways: int, tensor_size: int) -> Iterator[dict[str, int]]:
    """Yields sizes of data and fsdp: data alone for small jobs, then fsdp alone; from 256 chips on fsdp in groups of
    machines, the smallest groups first, with data between groups."""
    if builder.chips <= DATA_CHIPS and builder.params <= DATA_PARAMS:
        yield {"data": num_ways}
    if builder.chips < HYBRID_CHIPS:
        yield {"fsdp": num_ways}
    else:
        for group_size in divisors(num_ways):
            if min(builder.machine, num_ways) <= group_size <= HYBRID_CHIPS // tensor_size:
                yield {"fsdp": group_size, "data": num_ways // group_size}


def _said(builder: _Builder, strategy: Strategy, inner_axes: Mapping[str, tuple[int, str]]) -> Iterator[RecipeStep]:
    mesh, num_microbatches = strategy.mesh, strategy.num_microbatches
    data, fsdp, num_stages = mesh["data"], mesh["fsdp"], mesh["pipeline"]
    params_text, job_text = (
        format_params(DATA_PARAMS),
        f"{format_params(builder.params)} parameters on {builder.chips:,} chips",
    )
    yield RecipeStep(
        "data parallelism",
        builder.chips <= DATA_CHIPS and builder.params <= DATA_PARAMS and data > 1,
        f"up to {DATA_CHIPS} chips and {params_text} parameters; here {job_text}",
    )
    yield RecipeStep("FSDP", fsdp > 1, f"beyond that: fsdp {fsdp:,}" if fsdp > 1 else "not needed")
    is_hybrid = fsdp > 1 and data > 1
    reason = f"from {HYBRID_CHIPS} chips on, in the smallest groups of machines that fit"
    yield RecipeStep("hybrid sharding", is_hybrid, f"{reason}: data {data:,} x fsdp {fsdp:,}" if is_hybrid else reason)
    has_remat = strategy.remat != "none"
    reason = f"activations do not fit otherwise: remat {strategy.remat}" if has_remat else "activations fit as they are"
    yield RecipeStep("checkpointing", has_remat, reason)
    reason_by_axis = {
        "context": f"for sequences longer than {FAR_TOKENS:,}; here {builder.job.seq_len:,}",
        "tensor": f"for more than {format_params(FAR_PARAMS)} parameters, or {FAR_CHIPS:,} chips and fewer sequences",
    }
    for axis, unused_reason in reason_by_axis.items():
        size, reason = inner_axes.get(axis, (1, unused_reason))
        yield RecipeStep(f"{axis} parallelism", size > 1, f"{reason}: {axis} {size}" if size > 1 else reason)
    reason = f"the fewest stages with which it fits: {num_stages}" if num_stages > 1 else "fits without"
    yield RecipeStep("pipeline", num_stages > 1, reason)
    local_seqs = builder.job.batch_seqs / (data * fsdp * num_microbatches)
    batch_text = f"{num_microbatches} x {counted(local_seqs, 'sequence')}"
    yield RecipeStep("batch of a chip", True, f"as large as memory allows: {batch_text}")
