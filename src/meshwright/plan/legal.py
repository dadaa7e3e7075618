"""The conditions for a strategy to run: each rule is a mask over many strategies and a sentence about one.

The rules on sizes are read off the derived steps: every dim that is split in some array must be a multiple of the
devices that split it. Search and messages use the same rules.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation.derive import job_strategy
from meshwright.algebra.notation import product
from meshwright.algebra.rewrites.pipeline import no_stages
from meshwright.algebra.sizes import Number
from meshwright.core.dims import ISLANDS
from meshwright.core.errors import CannotRunError
from meshwright.core.units import counted, format_bytes
from meshwright.cost.memory.chip import total_bytes
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.pipeline import schedule_fits, schedule_refusal
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import strategy_placements
from meshwright.plan.rules import NOUNS, LegalRule, Refusal, StrategySizes, check_rules, mask
from meshwright.spec.model import Model
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, REPEATED_HEADS, RERUN_POLICIES, USUAL_POLICIES, Strategy

MAX_LISTED = 16
"""Number of sizes up to which a message lists all; of more it names the nearest two."""

MAX_IDLE_SHARE = 0.1
"""Largest number of empty layer slots in a pipeline, as a share of the number of layers."""


DimSplit = tuple[str, tuple[str, ...]]
"""A dim and the mesh axes that split it somewhere in the program."""


def splits(derived: Derived) -> tuple[DimSplit, ...]:
    """Returns each dim with each set of axes that splits it in some array, except sets that a larger one contains.

    Leaves out dims that need not divide: expert slots, the vocabulary over ``tensor``, repeated heads, and all splits
    in updates of stacked layers, which send whole matrices to any number of devices."""
    pairs: dict[DimSplit, None] = {}
    pass_steps = (step for block in derived.blocks for step in (*block.forward, *block.backward))
    for step in (*pass_steps, *(step for step in derived.update if not derived.is_stacked(step))):
        for array in (*step.inputs, step.result, *step.more):
            for dim, axes in zip(array.dims, array.axes, strict=True):
                # slots C need not divide: their number is a mean; V is padded, and kv heads are repeated
                if axes and dim not in ("C", *REPEATED_HEADS) and (dim, axes) != ("V", ("tensor",)):
                    pairs[dim, axes] = None
    return tuple(
        (dim, axes) for dim, axes in pairs if not any(dim == d and set(axes) < set(wide_axes) for d, wide_axes in pairs)
    )


def size_rules(derived: Derived) -> tuple[LegalRule, ...]:
    """Returns the rules on the sizes of derived steps: axes divide the dims that they split, every stage has a layer,
    and ``expert`` divides the experts."""
    dim_splits, num_layers = splits(derived), derived.num_layers
    rules = [LegalRule("stages", lambda f: _places_used(f, num_layers), lambda f: _stages_message(f, num_layers))]
    if reason := no_stages(derived.program):
        rules.append(LegalRule(STACKS_RULE, lambda f: np.asarray(f.stages) == 1, lambda f: reason))
    rules += [LegalRule("experts", _experts_divide, lambda f: _experts_message(f, int(f.dims.get("E", 0))))]
    rules += [_split_rule(dim, axes, dim_splits) for dim, axes in dim_splits]
    if not any(dim == "B" for dim, _ in dim_splits):
        # microbatches must divide the sequences even where no axis splits them
        rules.append(_split_rule("B", (), dim_splits))
    return tuple(rules)


def _split_rule(dim: str, split_axes: tuple[str, ...], all_splits: Sequence[DimSplit]) -> LegalRule:
    """Returns the rule that the product of the axes divides a dim, named such as ``tensor | K``; for B, the rule
    ``sequences`` that the product times the microbatches divides the batch."""
    if dim == "B":
        return LegalRule(
            "sequences",
            lambda facts: facts.dims["B"] % (facts.devices(split_axes) * facts.num_microbatches) == 0,
            lambda facts: _batch_message(facts, split_axes),
        )
    return LegalRule(
        f"{'*'.join(split_axes)} | {dim}",
        lambda facts: facts.dims[dim] % facts.devices(split_axes) == 0,
        lambda facts: _split_message(facts, dim, split_axes, all_splits),
    )


SCHEDULE_RULE = LegalRule(
    "schedule",
    lambda f: schedule_fits(f.schedule, stages=f.stages, chunks=f.chunks, microbatches=f.num_microbatches),
    lambda f: schedule_refusal(
        f.schedule, stages=int(f.stages), chunks=int(f.chunks), microbatches=int(f.num_microbatches)
    ),
)
DEVICES_RULE = LegalRule("devices", lambda f: product(f.mesh.values()) == f.num_chips, lambda f: _devices_message(f))
ZERO_AXES = ("fsdp", "expert", "context")
"""Mesh axes that ZeRO shards over in the standard assignment."""


def zero_rules(strategy: Strategy, *, given: bool = False) -> tuple[LegalRule, ...]:
    """Returns the rule that with ZeRO ``data`` is 1 unless one of `ZERO_AXES` has several devices: ZeRO shards nothing
    over ``data``. Returns () without ZeRO, and for stage 3, the default assignment, unless it is ``given``."""
    zero_stage = strategy.zero or 0
    if not zero_stage or (zero_stage == 3 and not (given and strategy.assignment == DEFAULT_ASSIGNMENT)):
        return ()

    def message(facts: StrategySizes) -> str:
        mesh = {"fsdp" if axis == "data" else axis: size for axis, size in facts.mesh.items() if axis != "fsdp"}
        axes_text = ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
        return (
            f"zero={zero_stage} shards over fsdp, and the replicas of data={facts.mesh['data']} hold everything whole. "
            f"Use --axes {axes_text} --set strategy.zero={zero_stage}."
        )

    return (LegalRule("zero", lambda f: (np.asarray(f.mesh["data"]) == 1) | (f.devices(ZERO_AXES) > 1), message),)


STACKS_RULE = "stacks"
"""Name of the rule that pipeline stages need a training job and a model with one stack of layers."""
MEMORY_RULE = "memory"
"""Name of the refusal for too little memory. Only a strategy that is refused for it can still be priced."""


def legal(setting: Setting, strategy: Strategy) -> tuple[Refusal, ...]:
    """Returns the reasons why a strategy cannot be planned in a setting; () if it can.

    Refuses first what this version does not run on this machine's own devices; checks placement and memory only if all
    rules on sizes hold; checks one of several islands. Raises InputError for an assignment that cannot be derived.
    """
    try:
        setting, strategy = setting.of_island(strategy), strategy.inner()
    except CannotRunError as error:
        return (Refusal(rule=ISLANDS, message=str(error)),)
    try:
        setting.require_runnable(strategy)
    except CannotRunError as error:
        return (Refusal(rule="executed", message=str(error)),)
    try:
        strategy = job_strategy(setting.job, strategy)
        derived = setting.derived(strategy)
    except CannotRunError as error:
        return (Refusal(rule=STACKS_RULE, message=str(error)),)
    facts = strategy_sizes(setting, strategy)
    refusals = check_rules((DEVICES_RULE, *zero_rules(strategy), *size_rules(derived), SCHEDULE_RULE), facts)
    if refusals:
        return refusals
    try:
        strategy_placements(setting.cluster, strategy)
    except CannotRunError as error:
        return (Refusal(rule="placement", message=str(error)),)
    bytes_by_item = setting.memory(strategy, derived)
    if total_bytes(bytes_by_item) <= setting.memory_limit:
        return ()
    message = f"{_memory_message(facts, bytes_by_item, setting.memory_limit)} {_remedy(setting, strategy)}"
    return (Refusal(rule=MEMORY_RULE, message=message),)


def microbatches_that_fit(setting: Setting, strategy: Strategy) -> dict[int, float]:
    """Maps each number of microbatches with which a strategy is legal and leaves the memory margin free, ascending, to
    the bytes per chip. Ignores the strategy's own number of microbatches. {} if it breaks another rule."""
    try:
        derived = setting.derived(strategy)
    except CannotRunError:
        return {}
    batch_seqs, facts = setting.job.batch_seqs, strategy_sizes(setting, strategy)
    microbatch_counts = np.array(divisors(batch_seqs))
    rules = (DEVICES_RULE, *size_rules(derived), SCHEDULE_RULE)
    is_legal = mask(rules, msgspec.structs.replace(facts, num_microbatches=microbatch_counts))
    microbatch_counts = microbatch_counts[np.broadcast_to(is_legal, microbatch_counts.shape)]
    if not len(microbatch_counts):
        return {}
    memory = memory_parts(derived, setting.sizes(strategy, microbatch_seqs=batch_seqs / microbatch_counts))
    pipeline = msgspec.structs.replace(setting.pipeline(strategy), microbatches=microbatch_counts)
    needed_bytes = np.broadcast_to(total_bytes(memory.items(pipeline, strategy.offload)), microbatch_counts.shape)
    has_room = needed_bytes <= setting.memory_room
    return dict(zip(microbatch_counts[has_room].tolist(), needed_bytes[has_room].tolist(), strict=True))


def require_legal(setting: Setting, strategy: Strategy) -> None:
    """Raises CannotRunError with the first reason if the strategy cannot run."""
    for refusal in legal(setting, strategy):
        raise CannotRunError(refusal.message)


def require_even_splits(derived: Derived, model: Model, mesh: Mapping[str, int]) -> None:
    """Raises CannotRunError if a mesh does not divide the model's dims. Does not check the batch or sequence length."""
    facts = StrategySizes(model=model.name, cluster="", num_chips=product(mesh.values()), mesh=mesh, dims=model.dims)
    pairs = splits(derived)
    for refusal in check_rules((_split_rule(*split, pairs) for split in pairs if split[0] in model.dims), facts):
        raise CannotRunError(refusal.message)


def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors of a positive number, ascending."""
    small_divisors = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small_divisors, *(number // d for d in small_divisors)}))


def legal_axis_sizes(found: Sequence[DimSplit], axis: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the sizes of one axis that divide, with all other axes 1, each of ``dims`` that the axis splits; (1,) if
    it splits none."""
    dim_sizes = [dims[dim] for dim, axes in found if axis in axes and dim in dims]
    return divisors(math.gcd(*dim_sizes)) if dim_sizes else (1,)


# -- the sentences --------------------------------------------------------------------------------------


def strategy_sizes(setting: Setting, strategy: Strategy) -> StrategySizes:
    """Returns the sizes of a strategy, its model, cluster and job that the rules check."""
    model, cluster, job = setting.model, setting.cluster, setting.job
    return StrategySizes(
        model=model.name,
        cluster=cluster.short_name,
        num_chips=cluster.num_chips,
        mesh=strategy.mesh,
        dims=model.dims | ({"B": job.batch_seqs, "T": job.seq_len} if job.trains else setting.row_dims),
        num_microbatches=strategy.num_microbatches,
        schedule=strategy.schedule,
        chunks=strategy.chunks,
    )


def _experts_divide(facts: StrategySizes) -> Any:
    """True if ``expert`` divides the experts; a model without experts needs size 1."""
    axis_size = np.asarray(facts.mesh.get("expert", 1))
    num_experts = facts.dims.get("E", 0)
    return (num_experts % axis_size == 0) & ((axis_size == 1) | (num_experts > 0))


def layer_places(num_layers: int, runs: Number) -> Number:
    """Returns the layer slots of ``runs`` equally long stages or chunks: the layers rounded up to a multiple."""
    return -(-num_layers // runs) * runs


def few_idle_places(num_layers: int, runs: Number) -> Any:
    """True if the empty layer slots of ``runs`` stages or chunks are at most `MAX_IDLE_SHARE` of the layers."""
    return layer_places(num_layers, runs) <= (1 + MAX_IDLE_SHARE) * num_layers


def _places_used(facts: StrategySizes, num_layers: int) -> Any:
    """True if stages are at most as many as layers and, with several chunks, few layer slots stay empty."""
    num_stages, num_chunks = np.asarray(facts.stages), np.asarray(facts.chunks)
    return (num_stages <= num_layers) & ((num_chunks == 1) | few_idle_places(num_layers, num_stages * num_chunks))


def _choices(values: Sequence[int], asked_value: int) -> str:
    """Returns ``{1, 2, 4, 8}``; of more than `MAX_LISTED` values only the nearest below and above ``asked_value``."""
    if len(values) <= MAX_LISTED:
        return "{" + ", ".join(map(str, values)) + "}"
    lower_value = max((v for v in values if v < asked_value), default=values[0])
    upper_value = min((v for v in values if v > asked_value), default=values[-1])
    return f"{{..., {lower_value}, {upper_value}, ...}}" if lower_value != upper_value else f"{{..., {lower_value}}}"


def _split_message(facts: StrategySizes, dim: str, axes: tuple[str, ...], all_splits: Sequence[DimSplit]) -> str:
    size, num_devices = facts.dims[dim], int(facts.devices(axes))
    split_axes = [axis for axis in axes if facts.mesh[axis] > 1]
    allowed_sizes = legal_axis_sizes(all_splits, split_axes[0], facts.dims) if len(split_axes) == 1 else divisors(size)
    return (
        f"{facts.named(axes)} does not divide {dim}={size} {NOUNS[dim]} of {facts.model}. "
        f"Use {'*'.join(split_axes)} in {_choices(allowed_sizes, num_devices)}."
    )


def _batch_message(facts: StrategySizes, axes: tuple[str, ...]) -> str:
    num_seqs, num_shards = facts.dims["B"], int(facts.devices(axes))
    if num_seqs % num_shards == 0:
        local_seqs = num_seqs // num_shards
        share_text = f"the {local_seqs} of {num_seqs} sequences that each of {num_shards} data shards has"
        return (
            f"num_microbatches={facts.num_microbatches} does not divide "
            f"{share_text if num_shards > 1 else f'the batch of {num_seqs} sequences'}. "
            f"Use num_microbatches in {_choices(divisors(local_seqs), facts.num_microbatches)}."
        )
    nearest_batch = max(1, round(num_seqs / num_shards)) * num_shards
    return (
        f"{facts.named(axes)} does not divide the batch of {num_seqs} sequences. "
        f"Use {'*'.join(axes)} in {_choices(divisors(num_seqs), num_shards)}, or a batch of {nearest_batch} sequences."
    )


def _devices_message(facts: StrategySizes) -> str:
    num_devices = int(product(facts.mesh.values()))
    return (
        f"{facts.mesh_text} needs {counted(num_devices, 'device')}, but {facts.cluster} has "
        f"{facts.num_chips:,}. Make the product of the axes {facts.num_chips:,}, or name a cluster of {num_devices:,}."
    )


def _stages_message(facts: StrategySizes, num_layers: int) -> str:
    num_stages, chunks = int(facts.stages), int(facts.chunks)
    if num_stages > num_layers:
        reason = f"pipeline={num_stages} is more stages than the {num_layers} layers of {facts.model}."
        return f"{reason} Use at most {num_layers}."
    limit = int((1 + MAX_IDLE_SHARE) * num_layers)
    candidates = (msgspec.structs.replace(facts, chunks=num_chunks) for num_chunks in range(1, limit // num_stages + 1))
    values = [int(candidate.chunks) for candidate in candidates if _places_used(candidate, num_layers)]
    suffix = ", or fewer stages" if num_stages > 1 else ""
    return (
        f"pipeline={num_stages} x chunks={chunks} has {layer_places(num_layers, num_stages * chunks)} places for the "
        f"{num_layers} layers of {facts.model}, more than {limit}. Use chunks in {_choices(values, chunks)}{suffix}."
    )


def _experts_message(facts: StrategySizes, num_experts: int) -> str:
    size = facts.mesh.get("expert", 1)
    if not num_experts:
        return f"expert={size}: {facts.model} has no experts. Leave the axis out, or use fsdp={size}."
    choices_text = _choices(divisors(num_experts), int(size))
    return f"expert={size} does not divide the {num_experts} experts of {facts.model}. Use expert in {choices_text}."


def _memory_message(facts: StrategySizes, bytes_by_item: dict[str, Number], limit_bytes: float) -> str:
    largest_items = sorted(bytes_by_item.items(), key=lambda item: -item[1])[:3]
    items_text = ", ".join(f"{name} {format_bytes(float(num_bytes))}" for name, num_bytes in largest_items)
    return (
        f"{facts.model} on {facts.mesh_text} needs {format_bytes(float(total_bytes(bytes_by_item)))} per chip "
        f"(most: {items_text}), but a chip of {facts.cluster} has {format_bytes(limit_bytes)}."
    )


def _remedy(setting: Setting, strategy: Strategy) -> str:
    """Names the smallest change with which a strategy fits in memory: the remat policy or the microbatches, or both if
    one is not enough; of several such changes, the one with the fewest microbatches."""
    old_count = strategy.num_microbatches
    fixes: list[tuple[int, int, float, str | tuple[str, ...]]] = []
    for policies in ((strategy.remat, *USUAL_POLICIES), RERUN_POLICIES) if setting.job.trains else ():
        # policies that run layers several times only if no usual policy fits
        for remat in dict.fromkeys(policies) if not fixes else ():
            bytes_by_count = microbatches_that_fit(setting, msgspec.structs.replace(strategy, remat=remat))
            fixes += [
                ((remat != strategy.remat) + (count != old_count), count, num_bytes, remat)
                for count, num_bytes in bytes_by_count.items()
            ]
    if not fixes:
        advice = "None of the remat policies tried, with any number of microbatches, makes it fit: use "
        return f"{advice if setting.job.trains else 'Use '}more chips, or larger fsdp and tensor axes."
    _, count, num_bytes, remat = min(fixes, key=lambda fix: fix[:2])
    changes = [f"remat={remat}"] * (remat != strategy.remat) + [f"num_microbatches={count}"] * (count != old_count)
    return f"Use {' with '.join(changes)} ({format_bytes(num_bytes)})."
