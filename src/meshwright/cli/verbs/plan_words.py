"""Strategies and their costs in words and as columns, for the verbs that print plans."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.cli.asked import AXES, SET
from meshwright.cli.output import format_energy, format_power, three_digits
from meshwright.cli.verb import CALIBRATION, Count, MeshSizes, Options, option
from meshwright.core.errors import CannotRunError
from meshwright.core.units import counted, format_bytes, format_count, format_params, format_seconds
from meshwright.cost.breakdown import PricedOverlap
from meshwright.cost.formulas.training_budget import DAY_S
from meshwright.cost.setting import Setting
from meshwright.plan.islands import exchange_words
from meshwright.plan.legal import ZERO_AXES
from meshwright.plan.plan_file import ServicePlan
from meshwright.plan.run_budget import RunBudget
from meshwright.plan.serving.service import Service
from meshwright.plan.why.setup_changes import CHANGES
from meshwright.report.answer import Fact, TableColumns
from meshwright.spec.assumptions import require_runnable_strategy
from meshwright.spec.model import require_runnable
from meshwright.spec.prediction import unmasked
from meshwright.spec.strategy import Strategy, mesh_words
from meshwright.verify.targets import target_of

MIN_HIDDEN = 0.1
"""Least share of a step that overlap hides for it to be said."""


def why_not_option(example: str) -> Any:
    """Returns the option of questions like ``example``."""
    return option(f"Why not {example}?", "--why-not", metavar="NAME=VALUE,...", group="Questions")


def what_if_option(names_text: str) -> Any:
    """Returns the option of changes of what ``names_text`` lists."""
    return option(
        f"What if chip.flops=8x,chips=2x? Of {names_text}; network is nic and dcn, the links that leave the "
        f"domain or slice.",
        "--what-if",
        metavar="WHAT=Nx,...",
        group="Questions",
    )


class PlannerOptions(Options):
    """What every verb that plans takes, beside its work."""

    price: float | None = option("Dollars of a chip and hour, in place of the catalogue's.", is_rare=True)
    axes: MeshSizes | None = AXES
    top: Count = option("How many plans to list.", default=5)
    pairs: tuple[str, ...] = SET
    calibration: Path | None = CALIBRATION
    out: Path | None = option("Write the first plan to this file.", "-o", "--out", group="Results")
    pareto: bool = option(
        "List the plans that nothing beats: time against memory, cost or tokens per chip.", group="Questions"
    )
    png: Path | None = option("Draw the plans that nothing beats.", group="Results")
    why_nots: tuple[str, ...] = why_not_option("tensor=16,remat=block")
    what_ifs: tuple[str, ...] = what_if_option(", ".join(CHANGES))


STEP: TableColumns = {"step": ("predicted.step_s", format_seconds)}


def mfu_columns(found: Iterable[Any]) -> TableColumns:
    """Returns the column of MFU; if one is above 100%, or a model has a mask of its own, beside it a column of MFU
    without masked scores."""
    has_unmasked = any(unmasked(plan.predicted) or plan.setting.model.attention_mask for plan in found)
    field_by_heading = {"MFU": "mfu"} | ({"unmasked": "mfu_causal"} if has_unmasked else {})
    return {heading: (f"predicted.{name}", "{:.0%}".format) for heading, name in field_by_heading.items()}


MEMORY: TableColumns = {"memory": ("predicted.hbm_bytes_per_chip", format_bytes)}
"""Columns of tables of planned strategies."""


def cost_columns(found: Iterable[Any]) -> TableColumns:
    """Returns the columns of MFU, memory and what bounds the step."""
    return {**mfu_columns(found), **MEMORY, "bound by": "predicted.bound_by"}


def microbatch_words(strategy: Strategy) -> str:
    """Returns ``"1 microbatch"``, ``"8 microbatches"``."""
    return counted(strategy.num_microbatches, "microbatch")


def remat_words(strategy: Strategy) -> str:
    """Returns ``"remat block"``, or the kept results joined by plus signs."""
    remat = strategy.remat
    return f"remat {remat if isinstance(remat, str) else '+'.join(remat) or 'keeping nothing'}"


def rerun_words(strategy: Strategy, num_layers: int) -> str:
    """Returns what is kept and runs again where each layer's backward pass runs those before it; "" for other remat."""
    if not strategy.recomputes_each or not isinstance(strategy.segment, int):
        return ""
    num_held = -(-num_layers // (strategy.mesh.get("pipeline", 1) * strategy.chunks))
    length = min(strategy.segment, num_held)
    num_segments, num_layers_left = divmod(num_held, length)
    num_reruns = num_segments * length * (length - 1) // 2 + num_layers_left * (num_layers_left - 1) // 2
    return (
        f"of {num_held} layers in sequence the input of one in {length} is kept; each layer's backward pass runs the "
        f"layers from there to it again: {num_reruns:,} forward passes of a layer, C (C - 1) / 2 for every C = {length}"
    )


def schedule_words(strategy: Strategy) -> str:
    """Returns ``"interleaved in 4 chunks"``; "" without a pipeline."""
    if strategy.mesh.get("pipeline", 1) == 1:
        return ""
    return strategy.schedule if strategy.chunks == 1 else f"{strategy.schedule} in {strategy.chunks} chunks"


def sharding_words(strategy: Strategy) -> str:
    """Returns the ZeRO stage, with its axes unless ``fsdp`` is one, and the attention over ``context``; "" without."""
    texts = []
    zero_axes = [axis for axis in ZERO_AXES if strategy.mesh.get(axis, 1) > 1]
    if zero_axes and strategy.zero is not None:
        texts.append(f"ZeRO-{strategy.zero}" + (f" over {' and '.join(zero_axes)}" if "fsdp" not in zero_axes else ""))
    if strategy.mesh.get("context", 1) > 1:
        texts.append({"gather": "gathered keys"}.get(strategy.context_attention, strategy.context_attention))
    return ", ".join(texts)


def collective_matmul_words(strategy: Strategy) -> str:
    """Returns ``"two-way collective matmuls"``; "" without them, or without an axis that they run over."""
    kind = strategy.collective_matmul
    return "" if kind == "none" or strategy.mesh.get("tensor", 1) == 1 else f"{kind} collective matmuls"


CHOICES: tuple[Callable[[Strategy], str], ...] = (
    microbatch_words,
    remat_words,
    schedule_words,
    sharding_words,
    lambda strategy: f"{' and '.join(strategy.offload)} offloaded" if strategy.offload else "",
    exchange_words,
    collective_matmul_words,
)


def full_words(strategy: Strategy) -> str:
    """Returns the mesh and every choice, in one line."""
    return ", ".join(filter(None, (mesh_words(strategy.mesh), *(words_of(strategy) for words_of in CHOICES))))


def budget_text(budget: RunBudget, num_chips: int) -> Iterator[Fact]:
    """Yields the steps, time, cost, FLOPs and power of the whole run."""
    cost_text = "no price known (--price)" if budget.cost_usd is None else f"${budget.cost_usd:,.0f}"
    yield Fact(
        "the run",
        f"{format_count(budget.train_tokens)} tokens in {budget.steps:,.0f} steps: "
        f"{format_seconds(budget.days * DAY_S)}, {cost_text}, {format_params(budget.chip_hours)} chip-hours",
    )
    petaflop_days_text, years_text = (three_digits(value) for value in (budget.petaflop_days, budget.one_chip_years))
    yield Fact(
        "",
        f"6 x parameters x tokens = {budget.flops:.3g} FLOPs = {petaflop_days_text} petaflop-days, "
        f"{budget.mfu_6nd:.1%} of the chip-hours' peak; {years_text} years on one chip at peak",
    )
    if (failures := budget.failures) is not None:
        whose_text = "" if failures.of_chip else ", as none of this chip are published"
        days_text = "no end" if budget.days_with_failures is None else format_seconds(budget.days_with_failures * DAY_S)
        yield Fact(
            "with failures",
            f"{days_text}, {failures.goodput:.1%} of the time kept: one in {format_seconds(failures.mtbf_s)} by the "
            f"rates of {failures.rates}{whose_text}, {format_seconds(failures.restart_s)} to restart, a checkpoint "
            f"every {counted(failures.checkpoint_steps, 'step')}",
        )
    power_text = "not known for this chip (power_w)"
    if budget.power_w is not None and budget.energy_kwh is not None:
        power_text = (
            f"{format_power(budget.power_w)} for {counted(num_chips, 'chip')} alone, "
            f"{format_energy(budget.energy_kwh)} in all"
        )
    yield Fact("power", power_text)


def placement_words(placement: Mapping[str, str]) -> str:
    """Returns ``"fsdp on x (16) x y (16); tensor on z (4)"``; axes of one chip are left out."""
    return "; ".join(f"{axis} on {place}" for axis, place in placement.items() if place != "1 chip") or "one chip"


def engine_lines(plan: ServicePlan) -> list[str]:
    """Returns the engines, their batch and dtypes, and the pool for prefill if there is one."""
    lines = [f"{plan.generate.words}, batch {plan.generate.batch_seqs:,}", f"  {plan.stored.words}"]
    return lines + [f"  prefill on {plan.prefill.words}"] * plan.has_pools


def service_words(service: Service, cached: str = "") -> str:
    """Returns the lengths of requests, how much of a prompt is ``cached``, the targets and the load."""
    target_texts = [f"{name} at most {format_seconds(target)}" for name, target in service.targets.items()]
    limits_text = ", ".join(filter(None, [*target_texts, service.load_words]))
    lengths_text = f"{service.prompt_len:,} tokens of prompt{cached}, {service.output_len:,} of output"
    return f"{lengths_text}; {limits_text}" if limits_text else lengths_text


def overlap_words(priced: PricedOverlap, setting: Setting, strategy: Strategy) -> str:
    """Returns what overlap hides, and the verb that shows more if it can compile this; "" below `MIN_HIDDEN`."""
    if priced.hidden_s < MIN_HIDDEN * priced.step_s:
        return ""
    hidden_text, alone_text, step_text = map(format_seconds, (priced.hidden_s, priced.alone_s, priced.exposed_step_s))
    step_text += f" (MFU {priced.exposed_mfu:.0%})"
    try:
        require_runnable(setting.model)
        require_runnable_strategy(strategy)
        can_compile = target_of(setting.cluster).platform != "cpu" and not setting.assumptions.of_other_software
    except CannotRunError:
        can_compile = False
    hint_text = " (`meshwright verify` shows what the compiler overlaps)" * can_compile
    return f"hides {hidden_text} of {alone_text} of communication{hint_text}; without it a step takes {step_text}"
