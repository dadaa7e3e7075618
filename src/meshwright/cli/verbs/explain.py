"""`meshwright explain`: what matters in a plan's step, what binds it and its largest steps; with --all every step."""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import asdict

from meshwright.cli.asked import PlanOptions, read_fields, resolve, service_of
from meshwright.cli.fields import check_tokens
from meshwright.cli.output import four_digits, say
from meshwright.cli.verb import verb
from meshwright.cli.verbs.explain_service import TERMS, algorithm_text, largest_text, memory_words, service_explanation
from meshwright.cli.verbs.plan_words import (
    budget_text,
    collective_matmul_words,
    microbatch_words,
    placement_words,
    remat_words,
    rerun_words,
    schedule_words,
    sharding_words,
)
from meshwright.core.units import counted, format_bytes, format_count, format_flops, format_seconds
from meshwright.cost.breakdown import WORDS
from meshwright.cost.formulas.limit_table import Limit
from meshwright.cost.letters import Letters
from meshwright.cost.work.ops import mfu_words
from meshwright.plan.islands import exchange_notes, exchange_words
from meshwright.plan.planner import assumption_notes, imbalance_notes
from meshwright.plan.why.explain import Algorithm, Explanation, explain, limit_of_term
from meshwright.report.answer import (
    Answer,
    Condition,
    Detail,
    Fact,
    Facts,
    Paragraph,
    Piece,
    PlainPiece,
    Quantity,
    Table,
    TableColumns,
)
from meshwright.spec.efficiency import power_notes
from meshwright.spec.job import optimizer_words, require_training
from meshwright.spec.prediction import unmasked
from meshwright.spec.strategy import BATCH_AXES, mesh_words

MAX_TERMS = 3
MIN_SHARE = 0.03
"""Least share of the step with which a second or third term is said to matter."""
MAX_LIMITS = 2
"""Limits that are named beside what binds: the broken ones first, then those that are near."""


@verb(PlanOptions)
def command(given: PlanOptions) -> Answer:
    """Say what matters in the step of a plan, what binds it, what would help, and its ten largest steps; of a service,
    what binds decode and prefill.

    --all lists every step in the book's notation with its bytes and times, and the limits in closed form.
    """
    if service := service_of(given):
        return service_explanation(service, given.what)
    asked_plan = resolve(given, read_fields(given.pairs), verb="explain")
    require_training(check_tokens(asked_plan.setting.job), "explain")
    explanation = explain(asked_plan.plan())
    stored_estimate = asked_plan.predicted or explanation.estimate
    old_text, now_text = format_seconds(stored_estimate.step_s), format_seconds(explanation.estimate.step_s)
    if old_text != now_text:
        say(
            f"{given.what} predicts {old_text} a step and its own rates now give {now_text}: it was changed by hand, "
            f"or written by another version."
        )
    line_rows = [{"title": part.title, **asdict(line)} for part in _parts(explanation) for line in part.lines]
    facts = _facts(explanation)
    estimate = {name: value for name, value in asdict(explanation.estimate).items() if not isinstance(value, dict)}
    row = {**facts, "estimate": estimate, "memory_bytes": explanation.estimate.memory}
    return Answer(facts, _text(explanation), raw=[line_rows, explanation.terms, explanation.limits, [row]])


def _parts(told: Explanation) -> list[Algorithm]:
    """Returns every list of steps, in the order of a step."""
    parts = [part for block in told.blocks for part in (block.forward, block.backward)]
    parts += [told.between.sends] if told.between else []
    return [*parts, told.once, *([told.islands] if told.islands else [])]


def _facts(explanation: Explanation) -> Facts:
    facts = asdict(explanation)
    plan, changes = facts.pop("plan"), msgspec.to_builtins(explanation.changes)
    if changes["best"]:
        changes["best"]["strategy"] |= msgspec.to_builtins(plan.assumptions)
    return {
        "model": plan.model.name,
        "cluster": plan.cluster.short_name,
        "job": plan.job,
        "axes": plan.strategy.mesh,
        "fsdp_case": facts.pop("fsdp"),
        "between_stages": facts.pop("between"),
        "forward": explanation.forward,
        "backward": explanation.backward,
        **facts,
        "changes": changes,
    }


def _text(told: Explanation) -> Iterator[Piece]:
    plan, estimate = told.plan, told.estimate
    words_of_choice = (sharding_words, remat_words, schedule_words, collective_matmul_words, exchange_words)
    choice_texts = (mesh_words(plan.strategy.mesh), *(words_of(plan.strategy) for words_of in words_of_choice))
    yield (
        f"{plan.model.name} on {plan.cluster.short_name}: {', '.join(filter(None, choice_texts))}, "
        f"state {plan.strategy.state}{optimizer_words(plan.job)}; "
        f"{format_count(plan.job.tokens_per_step)} tokens a step = {counted(plan.job.batch_seqs, 'sequence')} of "
        f"{plan.job.seq_len:,} in {microbatch_words(plan.strategy)}"
    )
    lower_text, upper_text = format_seconds(estimate.step_s_lower), format_seconds(estimate.step_s_upper)
    step_text = f"{format_seconds(estimate.step_s)}; {lower_text} if all work overlaps, {upper_text} if none does"
    yield Fact("step", step_text)
    yield from _matters_text(told)
    memory_text = memory_words(estimate.memory, estimate.hbm_bytes_per_chip, plan.setting.memory_limit)
    yield Fact("memory of a chip", memory_text)
    unmasked_mfu = estimate.mfu_causal if plan.model.attention_mask else unmasked(estimate)
    unmasked_text = f", {unmasked_mfu:.1%} without masked scores" if unmasked_mfu else ""
    yield Fact(
        "MFU",
        f"{estimate.mfu:.1%} of the {plan.strategy.matmul_dtype} peak{unmasked_text}; HFU, with all recomputation, "
        f"{estimate.hfu:.1%}. MFU counts {mfu_words(plan.model)}",
    )
    yield ""
    yield from largest_text(told.largest, estimate.step_s, names_blocks=len(told.blocks) > 1)
    yield from map(Condition, _conditions(told))
    yield Detail(counted(sum(len(part.lines) for part in _parts(told)), "step"), [*_steps_text(told)])
    limits = limits_text(told.limits, told.symbols, "data x fsdp x context", told.sheet_bounds)
    yield Detail(counted(len(told.limits), "limit"), ["", *limits])
    if told.training is not None:
        yield Detail("the run", [*budget_text(told.training, plan.cluster.num_chips)])


def _matters_text(told: Explanation) -> Iterator[Piece]:
    """Yields the largest terms, what binds, the exposed communication and the best single change."""
    terms = [term for n, term in enumerate(told.terms[:MAX_TERMS]) if n == 0 or term.share >= MIN_SHARE]
    term_texts = (f"{term.words} {format_seconds(term.added_s)} ({term.share:.0%})" for term in terms)
    yield Fact("what matters", "; ".join(term_texts))
    limit_texts = [limit_words(limit, told.sheet_bounds.get(limit.name)) for limit in _binding_limits(told)]
    yield Fact("what binds", "; ".join([told.estimate.bound_by, *limit_texts]))
    overlap, links = told.overlap, [t for t in told.terms if t.name not in WORDS or t.name in ("pipeline", "islands")]
    if overlap.alone_s > 0:
        texts = [f"{format_seconds(t.added_s)} {t.words.removeprefix('collectives ')}" for t in links if t.added_s > 0]
        split_text = f" ({', '.join(texts[:3])})" * bool(texts)
        yield Fact(
            "exposed",
            f"{format_seconds(overlap.alone_s - overlap.hidden_s)} of {format_seconds(overlap.alone_s)} of "
            f"communication{split_text}; with all of it exposed a step takes "
            f"{format_seconds(overlap.exposed_step_s)} (MFU {overlap.exposed_mfu:.0%})",
        )
    yield Fact("what would help", _change_words(told))


def _binding_limits(told: Explanation) -> Sequence[Limit]:
    """Returns the worst limits that are broken, then near: those of the step's terms, and a broken one of memory."""
    limits = {limit.name: limit for term in told.terms if (limit := limit_of_term(term, told.limits)) is not None}
    limits |= {limit.name: limit for limit in told.limits if limit.unit == "bytes" and limit.holds is False}
    worst = sorted(limits.values(), key=lambda limit: limit.distance if limit.holds else -limit.distance)
    return [limit for limit in worst if limit.verdict in ("broken", "near")][:MAX_LIMITS]


def _conditions(told: Explanation) -> Iterator[str]:
    plan, texts = told.plan, [f"times rest on {told.plan.calibration.describe()}"]
    ratio, sheet_ratio = told.symbols.fsdp_alpha, told.sheet.fsdp_alpha
    limit = next((limit for limit in told.limits if limit.name == "tokens/chip, FSDP alone"), None)
    if limit is not None and limit.name in told.sheet_bounds and ratio and sheet_ratio:
        sheet_bound = told.sheet_bounds[limit.name]
        texts += [f"C/W {four_digits(ratio)} FLOPs/byte ({four_digits(sheet_ratio)} by the data sheet)"]
        texts += [f"FSDP alone needs {four_digits(limit.limit)} tokens a chip ({four_digits(sheet_bound)})"]
    yield "; ".join(texts)
    yield from power_notes(plan.cluster.chip, plan.calibration)
    yield from assumption_notes(plan.setting)
    yield from imbalance_notes(plan.setting, plan.strategy)
    yield from exchange_notes(plan) if told.islands else ()


def _steps_text(told: Explanation) -> Iterator[PlainPiece]:
    """Yields where the batch and the mesh go, every step of every part, and the terms of the step."""
    plan, batch = told.plan, told.batch
    replicas_text = mesh_words({axis: plan.strategy.mesh.get(axis, 1) for axis in BATCH_AXES}, alone="one replica")
    islands_text = f"{plan.strategy.num_islands} islands x " * (plan.strategy.num_islands > 1)
    yield Fact(
        "batch",
        f"{islands_text}{counted(batch.sequences, 'sequence')} = {batch.sequences_per_microbatch:,.0f} x "
        f"{batch.data_parallel:,} ({replicas_text}) x {microbatch_words(plan.strategy)}; "
        f"{counted(batch.positions_per_device, 'position')} of a sequence on a device",
    )
    yield Fact("placement", placement_words(plan.strategy.placement))
    if rerun_text := rerun_words(plan.strategy, plan.model.num_layers):
        yield Fact("recomputation", rerun_text)
    yield Fact("attention", f"by the kernel {told.attention_kernel}")
    if told.fsdp is not None:
        yield Fact("data parallelism", told.fsdp.words)
    for part in _parts(told):
        yield from algorithm_text(part)
        if (between := told.between) is not None and part is between.sends:
            chunks_text = f" of {counted(between.chunks, 'chunk')}" * (between.chunks > 1)
            yield Paragraph(
                f"     {between.schedule} on {counted(between.stages, 'stage')}{chunks_text}, "
                f"{counted(between.microbatches, 'microbatch')}: {counted(between.num_sends, 'send')} exposed, "
                f"{format_seconds(between.sends_s)}; idle for {format_seconds(between.bubble_s)}, "
                f"{between.bubble_s / told.estimate.step_s:.1%} of the step (the bubble)",
                indent=5,
            )
    yield ""
    yield Table.of(told.terms, TERMS)


_TITLES = {"speed": "Compute-bound, in closed form", "size": "What fits"}


def limits_text(
    limits: Sequence[Limit], letters: Letters, split: str, sheet_bounds: Mapping[str, float] | None = None
) -> Iterator[PlainPiece]:
    """Yields a table for each kind of limit, the letters of their formulas, and what is said of single limits."""
    bounds = sheet_bounds or {}
    columns: TableColumns = {
        "": "name",
        "formula": "formula",
        "bound": lambda limit: _amount(limit, limit.limit),
        "by data sheet": lambda limit: _amount(limit, bounds.get(limit.name)),
        "here": lambda limit: _amount(limit, limit.here),
        " ": "verdict",
    }
    for kind, title in _TITLES.items():
        if rows := [limit for limit in limits if limit.kind == kind]:
            yield Table.of(rows, columns, title).known()
    if any(limit.kind == "speed" for limit in limits):
        yield legend(letters, split)
    # that a size does not divide the chips matters most
    noted = sorted((limit for limit in limits if limit.note), key=lambda limit: limit.name != "tensor")
    yield from (Condition(f"{limit.name}: {limit.note}") for limit in noted)


def legend(at: Letters, split: str) -> str:
    """Returns what the letters of the formulas stand for; ``split`` is X in words."""
    slices_text, micro_text = " of each slice" * (at.num_slices > 1), " of a microbatch" * (at.num_microbatches > 1)
    entries = [f"in the formulas B = {format_count(at.batch_tokens)} tokens{slices_text}{micro_text}"]
    entries += [f"N = {counted(at.num_chips, 'chip')}{slices_text}, F = {at.d_ff:,}, C = {format_flops(at.peak_flops)}"]
    if at.alpha is not None:
        sheet_text = f", {at.sheet_alpha:,.4g} by the data sheet" if at.sheet_alpha not in (None, at.alpha) else ""
        entries.append(f"alpha = C / W of a torus axis = {at.alpha:,.4g} FLOPs/byte{sheet_text} with W {at.width}")
        entries.append(f"X = {split} on Mx = {at.fsdp_axes:g} and tensor on My = {at.tensor_axes:g} torus axes")
        entries.append("root = square root of the discriminant")
    elif at.link:
        entries.append("W one way: of a chip in its domain (nvlink), of a domain's cards (node), of one card (W alone)")
    return ", ".join(entries)


def _amount(limit: Limit, amount: float | None) -> Quantity | None:
    """Returns a bound or the plan's figure, which prints as a dash if its letters are not known."""
    show = {"bytes": format_bytes, "s": format_seconds, "": _number_words}[limit.unit]
    return None if amount is None else Quantity(amount, lambda value: "-" if math.isnan(value) else show(value))


def limit_words(limit: Limit, sheet_bound: float | None = None) -> str:
    """Returns ``"tensor: < 2.664 (3.333 by the data sheet), here 4, 1.5 times above: broken"``."""
    sign_text = f"{limit.formula[0]} " if limit.formula[0] in "<>" else ""
    sheet_text = "" if sheet_bound is None else f" ({_amount(limit, sheet_bound)} by the data sheet)"
    side_text = "above" if limit.here > limit.limit else "below"
    ratio_text = f", {limit.distance:.3g} times {side_text}" * math.isfinite(limit.distance)
    amounts_text = f"{sign_text}{_amount(limit, limit.limit)}{sheet_text}, here {_amount(limit, limit.here)}"
    return f"{limit.name}: {amounts_text}{ratio_text}: {limit.verdict}"


def _change_words(explanation: Explanation) -> str:
    """Returns the best single change and its gain, or says that none helps."""
    changes, step_s = explanation.changes, explanation.estimate.step_s
    refused_text = f" ({changes.num_tried - changes.num_legal} of them would not run)"
    tried_text = (
        f"{counted(changes.num_tried, 'single change')}{refused_text * (changes.num_tried > changes.num_legal)}"
    )
    if changes.best is None:
        return f"none of {tried_text} makes it faster"
    estimate = changes.best.estimate
    return (
        f"{changes.best.words}: {format_seconds(estimate.step_s)} a step, {changes.gain_s / step_s:.1%} less, "
        f"{format_bytes(estimate.hbm_bytes_per_chip)} per chip; the best of {tried_text}"
    )


def _number_words(value: float) -> str:
    """Returns four digits, or all before the point; from a million on three digits, unless it is a whole number."""
    magnitude = abs(value)
    return four_digits(value) if magnitude < 1e6 or (magnitude < 1e10 and value % 1 == 0) else f"{value:.3g}"
