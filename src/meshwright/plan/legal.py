"""What a strategy must satisfy to run: each rule is a mask over many strategies and a sentence about one.

The rules on sizes are read off the derived steps: every dim that some array splits must divide by the axes that
split it. The search and the messages use the same rows.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.notation import product
from meshwright.algebra.rewrites.pipeline import NO_PIPELINE
from meshwright.algebra.sizes import Number
from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes
from meshwright.cost.memory import memory_parts, total_bytes
from meshwright.cost.pipeline import schedule_fits, schedule_refusal
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import strategy_placements
from meshwright.spec.strategy import REMAT_POLICIES, Strategy

NOUNS: dict[str, str] = {
    "B": "sequences",
    "T": "positions",
    "D": "model width",
    "F": "feed-forward width",
    "N": "query heads",
    "K": "kv heads",
    "V": "vocabulary",
}

MAX_LISTED = 16

MAX_IDLE_LAYERS = 0.1
"""Share of a pipeline's positions for layers that may stay empty if the layers do not divide by the stages."""


class StrategySizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that rules check; they may be arrays. ``dims`` has B for the whole batch, in sequences."""

    model: str
    cluster: str
    num_chips: int
    mesh: Mapping[str, Number]
    dims: Mapping[str, Number]
    num_microbatches: Number = 1
    schedule: str = "1f1b"
    chunks: Number = 1

    @property
    def stages(self) -> Number:
        """Stages of the pipeline."""
        return self.mesh.get("pipeline", 1)

    def devices(self, axes: Iterable[str]) -> Number:
        """Devices of some axes together."""
        return product(self.mesh[axis] for axis in axes)

    def named(self, axes: Iterable[str]) -> str:
        """``tensor=16``, or ``data=35 x fsdp=64 = 2240``; axes of size 1 are left out where others remain."""
        chosen = [axis for axis in axes if self.mesh[axis] > 1] or list(axes)
        text = " x ".join(f"{axis}={self.mesh[axis]}" for axis in chosen)
        return f"{text} = {self.devices(chosen)}" if len(chosen) > 1 else text


class LegalRule(msgspec.Struct, frozen=True):
    """A named condition. ``holds`` takes sizes or arrays of them; ``message`` explains one that does not hold."""

    name: str
    holds: Callable[[StrategySizes], Any]
    message: Callable[[StrategySizes], str]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a strategy cannot run, and what would."""

    rule: str
    message: str


DimSplit = tuple[str, tuple[str, ...]]
"""A dim and the mesh axes that split it somewhere in the program."""


def splits(derived: Derived) -> tuple[DimSplit, ...]:
    """Returns every dim with the axes that split it in some array; splits contained in a larger one are left out.

    Whole matrices of layers can be distributed over any number of devices, so updates of all layers add no split.
    """
    found: dict[DimSplit, None] = {}
    passes = (step for block in derived.blocks for step in (*block.forward, *block.backward))
    for step in (*passes, *(step for step in derived.update if not derived.is_stacked(step))):
        for array in (*step.inputs, step.result, *step.more):
            for dim, axes in zip(array.dims, array.axes, strict=True):
                if axes and dim != "C":  # tokens of an expert need not divide: their number is a mean
                    found[dim, axes] = None
    return tuple(
        (dim, axes) for dim, axes in found if not any(dim == other and set(axes) < set(wider) for other, wider in found)
    )


def size_rules(derived: Derived) -> tuple[LegalRule, ...]:
    """The rules that need nothing but sizes: every split is even, and all chips are used."""
    found = splits(derived)
    rules = [LegalRule("devices", lambda f: product(f.mesh.values()) == f.num_chips, _devices_message)]
    layers = derived.num_layers
    rules += [LegalRule("stages", lambda f: _places_used(f, layers), lambda f: _stages_message(f, layers))]
    if len(derived.program.stacks) > 1:
        rules.append(LegalRule("stacks", lambda f: np.asarray(f.stages) == 1, lambda f: NO_PIPELINE))
    rules += [LegalRule("experts", _experts_divide, lambda f: _experts_message(f, int(f.dims.get("E", 0))))]
    rules += [_split_rule(dim, axes, found) for dim, axes in found]
    if not any(dim == "B" for dim, _ in found):
        # microbatches must divide the sequences even where no axis does
        rules.append(_split_rule("B", (), found))
    return tuple(rules)


def _split_rule(dim: str, axes: tuple[str, ...], every: Sequence[DimSplit]) -> LegalRule:
    if dim == "B":
        return LegalRule(
            "sequences",
            lambda f: f.dims["B"] % (f.devices(axes) * f.num_microbatches) == 0,
            lambda f: _batch_message(f, axes),
        )
    return LegalRule(
        f"{'*'.join(axes)} | {dim}",
        lambda f: f.dims[dim] % f.devices(axes) == 0,
        lambda f: _split_message(f, dim, axes, every),
    )


SCHEDULE_RULE = LegalRule(
    "schedule",
    lambda f: schedule_fits(f.schedule, stages=f.stages, chunks=f.chunks, microbatches=f.num_microbatches),
    lambda f: schedule_refusal(
        f.schedule, stages=int(f.stages), chunks=int(f.chunks), microbatches=int(f.num_microbatches)
    ),
)
MEMORY_RULE = "memory"


def legal(setting: Setting, strategy: Strategy) -> tuple[Refusal, ...]:
    """Every reason why a strategy cannot be planned in a setting, in words; () when it can.

    Placement and memory are looked at only when the sizes divide. On this machine's own devices what is not
    executed in this version is refused too. Raises InputError for an assignment that cannot be derived at all.
    """
    try:
        setting.require_runnable(strategy)
    except CannotRunError as error:
        return (Refusal(rule="executed", message=str(error)),)
    derived, facts = setting.derived(strategy), strategy_sizes(setting, strategy)
    refused = check_rules((*size_rules(derived), SCHEDULE_RULE), facts)
    if refused:
        return refused
    try:
        strategy_placements(setting.cluster, strategy)
    except CannotRunError as error:
        return (Refusal(rule="placement", message=str(error)),)
    memory = setting.memory(strategy, derived)
    if total_bytes(memory) <= setting.memory_limit:
        return ()
    message = f"{_memory_message(facts, memory, setting.memory_limit)} {_remedy(setting, strategy)}"
    return (Refusal(rule=MEMORY_RULE, message=message),)


def fewest_microbatches(setting: Setting, strategy: Strategy) -> tuple[int, float] | None:
    """The fewest microbatches with which a strategy fits in memory, and its bytes per chip then; None without any.

    The schedule has to run with them, every data shard needs whole sequences, and all other sizes have to divide.
    """
    batch, derived = setting.job.batch_seqs, setting.derived(strategy)
    facts = strategy_sizes(setting, strategy)
    if check_rules(size_rules(derived), facts):
        return None
    shards = product(strategy.mesh.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    counts = np.array(divisors(max(1, batch // int(shards))))
    runs = SCHEDULE_RULE.holds(msgspec.structs.replace(facts, num_microbatches=counts))
    counts = counts[np.broadcast_to(runs, counts.shape)]
    if not len(counts):
        return None
    parts = memory_parts(derived, setting.sizes(strategy, microbatch_seqs=batch / counts))
    pipeline = msgspec.structs.replace(setting.pipeline(strategy), microbatches=counts)
    need = np.broadcast_to(total_bytes(parts.items(pipeline, strategy.offload)), counts.shape)
    fits = np.flatnonzero(need <= setting.memory_limit)
    return (int(counts[fits[0]]), float(need[fits[0]])) if len(fits) else None


def require_legal(setting: Setting, strategy: Strategy) -> None:
    """Raise CannotRunError with the first reason unless the strategy can run."""
    for refusal in legal(setting, strategy):
        raise CannotRunError(refusal.message)


def check_rules(rules: Iterable[LegalRule], facts: StrategySizes) -> tuple[Refusal, ...]:
    """The refusals of one strategy."""
    return tuple(Refusal(rule=rule.name, message=rule.message(facts)) for rule in rules if not rule.holds(facts))


def mask(rules: Iterable[LegalRule], facts: StrategySizes) -> Any:
    """Which of many strategies satisfy all rules."""
    result: Any = True
    for rule in rules:
        result = result & np.asarray(rule.holds(facts))
    return result


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def legal_axis_sizes(found: Sequence[DimSplit], axis: str, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes of one axis, the others 1, that divide every dim it splits; only 1 for an axis that splits nothing."""
    sizes = [dims[dim] for dim, axes in found if axis in axes]
    return divisors(math.gcd(*sizes)) if sizes else (1,)


# -- the sentences --------------------------------------------------------------------------------------


def strategy_sizes(setting: Setting, strategy: Strategy) -> StrategySizes:
    """Returns the sizes that the rules check."""
    model, cluster, job = setting.model, setting.cluster, setting.job
    return StrategySizes(
        model=model.name,
        cluster=cluster.short_name,
        num_chips=cluster.num_chips,
        mesh=strategy.mesh,
        dims=model.dims | {"B": job.batch_seqs, "T": job.seq_len},
        num_microbatches=strategy.num_microbatches,
        schedule=strategy.schedule,
        chunks=strategy.chunks,
    )


def _experts_divide(facts: StrategySizes) -> Any:
    """The axis `expert` splits experts; without any it has one device."""
    size = np.asarray(facts.mesh.get("expert", 1))
    experts = facts.dims.get("E", 0)
    return (experts % size == 0) & ((size == 1) | (experts > 0))


def _places_used(facts: StrategySizes, num_layers: int) -> Any:
    """True if every stage has a layer, and few positions for layers stay empty."""
    stages, chunks = np.asarray(facts.stages), np.asarray(facts.chunks)
    places = stages * chunks
    return (stages <= num_layers) & ((chunks == 1) | (places <= (1 + MAX_IDLE_LAYERS) * num_layers))


def _choices(values: Sequence[int], wanted: int) -> str:
    """``{1, 2, 4, 8}``, or the nearest of a long list."""
    if len(values) <= MAX_LISTED:
        return "{" + ", ".join(map(str, values)) + "}"
    below = max((v for v in values if v < wanted), default=values[0])
    above = min((v for v in values if v > wanted), default=values[-1])
    return f"{{..., {below}, {above}, ...}}" if below != above else f"{{..., {below}}}"


def _split_message(facts: StrategySizes, dim: str, axes: tuple[str, ...], every: Sequence[DimSplit]) -> str:
    size, count = facts.dims[dim], int(facts.devices(axes))
    chosen = [axis for axis in axes if facts.mesh[axis] > 1]
    values = legal_axis_sizes(every, chosen[0], facts.dims) if len(chosen) == 1 else divisors(size)
    padded = ""
    if dim == "V":
        unit = 128 * count
        padded = f" Or pad the vocabulary: --set model.vocab_size={-(-int(size) // unit) * unit}."
    return (
        f"{facts.named(axes)} does not divide {dim}={size} {NOUNS.get(dim, '')} of {facts.model}. "
        f"Use {'*'.join(chosen)} in {_choices(values, count)}.{padded}"
    )


def _batch_message(facts: StrategySizes, axes: tuple[str, ...]) -> str:
    size, count = facts.dims["B"], int(facts.devices(axes))
    if size % count == 0:
        local = size // count
        whose = f"the {local} sequences that each of {count} data shards has of {size}"
        return (
            f"num_microbatches={facts.num_microbatches} does not divide "
            f"{whose if count > 1 else f'the batch of {size} sequences'}. "
            f"Use num_microbatches in {_choices(divisors(local), facts.num_microbatches)}."
        )
    near = max(1, round(size / count)) * count
    return (
        f"{facts.named(axes)} does not divide the batch of {size} sequences. "
        f"Use {'*'.join(axes)} in {_choices(divisors(size), count)}, or a batch of {near} sequences."
    )


def _devices_message(facts: StrategySizes) -> str:
    have = int(product(facts.mesh.values()))
    return (
        f"mesh {facts.named(facts.mesh)} uses {have} devices and {facts.cluster} has {facts.num_chips}. "
        f"Make the product of the axes {facts.num_chips}, or name a cluster of {have}."
    )


def _stages_message(facts: StrategySizes, num_layers: int) -> str:
    stages, chunks = facts.stages, facts.chunks
    what = f"pipeline={stages}" if chunks == 1 else f"pipeline={stages} x chunks={chunks} = {stages * chunks}"
    return f"{what} stages are more than the {num_layers} layers of {facts.model}. Use at most {num_layers} in all."


def _experts_message(facts: StrategySizes, num_experts: int) -> str:
    size = facts.mesh.get("expert", 1)
    if not num_experts:
        return f"expert={size}: {facts.model} has no experts. Leave the axis out, or use fsdp={size}."
    choices = _choices(divisors(num_experts), int(size))
    return f"expert={size} does not divide the {num_experts} experts of {facts.model}. Use expert in {choices}."


def _memory_message(facts: StrategySizes, memory: dict[str, Number], limit: float) -> str:
    largest = sorted(memory.items(), key=lambda item: -item[1])[:3]
    items = ", ".join(f"{name} {format_bytes(float(size))}" for name, size in largest)
    return (
        f"{facts.model} on mesh {facts.named(facts.mesh)} needs {format_bytes(float(total_bytes(memory)))} per "
        f"chip and a chip of {facts.cluster} has {format_bytes(limit)} ({items})."
    )


def _remedy(setting: Setting, strategy: Strategy) -> str:
    """Names the smallest change of remat and microbatches that fits."""
    others = {remat: msgspec.structs.replace(strategy, remat=remat) for remat in REMAT_POLICIES}
    fits = {remat: fewest_microbatches(setting, other) for remat, other in others.items()}
    found = [(*fit, remat) for remat, fit in fits.items() if fit is not None]
    if not found:
        return "No remat policy or number of microbatches makes it fit: use more chips, or larger fsdp and tensor axes."
    count, need, remat = min(found, key=lambda one: one[0])
    return f"Use remat={remat} with num_microbatches={count} ({format_bytes(need)})."
