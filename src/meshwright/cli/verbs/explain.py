"""`meshwright explain`: a plan in the book's notation, line by line, and the limits it stands near."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from meshwright.cli.asked import PlanOptions, read_fields, resolve, service_of
from meshwright.cli.fields import check_tokens
from meshwright.cli.output import four_digits, say
from meshwright.cli.verb import verb
from meshwright.cli.verbs.explain_service import TERMS, algorithm_text, service_explanation
from meshwright.cli.verbs.plan_words import (
    budget_text,
    collective_matmul_words,
    microbatch_words,
    overlap_words,
    placement_words,
    remat_words,
    rerun_words,
    sharding_words,
)
from meshwright.core.units import counted, format_bytes, format_count, format_flops, format_seconds
from meshwright.cost.breakdown import Term
from meshwright.cost.formulas.limit_table import Letters, Limit
from meshwright.cost.work.ops import mfu_words
from meshwright.plan.islands import exchange_notes, exchange_words
from meshwright.plan.planner import assumption_notes, imbalance_notes
from meshwright.plan.why.explain import Explanation, explain, limit_of_term
from meshwright.report.answer import Answer, Fact, Facts, Paragraph, Piece, Quantity, Table
from meshwright.spec.efficiency import power_notes
from meshwright.spec.job import optimizer_words, require_training
from meshwright.spec.prediction import unmasked
from meshwright.spec.strategy import BATCH_AXES, mesh_words

MAX_TERMS = 3
MIN_SHARE = 0.03
"""Least share of the step with which a second or third term is said to matter."""
NEAR = 2.0
"""A plan within this factor of a limit, on either side, is near it."""


@verb(PlanOptions)
def command(given: PlanOptions) -> Answer:
    """The algorithm of one layer under a plan, with bytes and times, and the limits in closed form; of a service the
    steps of both phases, and its figures as formulas."""
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
    parts = [part for block in explanation.blocks for part in (block.forward, block.backward)]
    parts += [explanation.between.sends, explanation.once] if explanation.between else [explanation.once]
    parts += [explanation.islands] if explanation.islands else []
    line_rows = [{"title": part.title, **asdict(line)} for part in parts for line in part.lines]
    facts = _facts(explanation)
    estimate = {name: value for name, value in asdict(explanation.estimate).items() if not isinstance(value, dict)}
    row = {**facts, "estimate": estimate, "memory_bytes": explanation.estimate.memory}
    return Answer(facts, _text(explanation), raw=[line_rows, explanation.terms, explanation.limits, [row]])


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


def _text(explanation: Explanation) -> Iterator[Piece]:
    plan = explanation.plan
    state_text = f"state {plan.strategy.state}{optimizer_words(plan.job)}"
    choice_texts = (
        words_of(plan.strategy) for words_of in (sharding_words, remat_words, collective_matmul_words, exchange_words)
    )
    summary_text = ", ".join(filter(None, (mesh_words(plan.strategy.mesh), *choice_texts, state_text)))
    yield f"{plan.model.name} on {plan.cluster.short_name}: {summary_text}"
    batch, job = explanation.batch, plan.job
    replicas_text = mesh_words({axis: plan.strategy.mesh.get(axis, 1) for axis in BATCH_AXES}, alone="one replica")
    islands_text = f"{plan.strategy.num_islands} islands x " * (plan.strategy.num_islands > 1)
    yield Fact(
        "batch",
        f"{format_count(job.tokens_per_step)} tokens a step = {islands_text}{batch.sequences:,.0f} sequences of "
        f"{job.seq_len:,} = {batch.sequences_per_microbatch:,.0f} x {batch.data_parallel:,} ({replicas_text}) x "
        f"{microbatch_words(plan.strategy)}; {batch.positions_per_device:,.0f} positions of a sequence on a device",
    )
    yield Fact("placement", placement_words(plan.strategy.placement))
    if rerun_text := rerun_words(plan.strategy, plan.model.num_layers):
        yield Fact("recomputation", rerun_text)
    yield Fact("attention", f"by the kernel {explanation.attention_kernel}")
    yield Fact("times rest on", plan.calibration.describe())
    yield from (Fact("power", note) for note in power_notes(plan.cluster.chip, plan.calibration))
    yield from (Fact("note", note) for note in assumption_notes(plan.setting))
    yield from (Fact("load of experts", note) for note in imbalance_notes(plan.setting, plan.strategy))
    yield ""
    yield from _lead_text(explanation)
    for block in explanation.blocks:
        yield from algorithm_text(block.forward)
        yield from algorithm_text(block.backward)
    if (between := explanation.between) is not None:
        yield from algorithm_text(between.sends)
        chunks_text = f" of {between.chunks} chunks" if between.chunks > 1 else ""
        yield Paragraph(
            f"     {between.schedule} on {counted(between.stages, 'stage')}{chunks_text}, "
            f"{counted(between.microbatches, 'microbatch')}: a step waits for {between.num_sends:,.0f} sends, "
            f"{format_seconds(between.sends_s)}, and stands idle for {format_seconds(between.bubble_s)}, "
            f"{between.bubble_s / explanation.estimate.step_s:.1%} of it (the bubble)",
            indent=5,
        )
    yield from algorithm_text(explanation.once)
    if explanation.islands is not None:
        yield from algorithm_text(explanation.islands)
        yield from exchange_notes(plan)
    yield from _step_text(explanation)
    yield from _limits_text(explanation)


def _step_text(told: Explanation) -> Iterator[Piece]:
    estimate = told.estimate
    yield ""
    yield Table.of(told.terms, TERMS)
    lower_text, upper_text = format_seconds(estimate.step_s_lower), format_seconds(estimate.step_s_upper)
    yield Fact(
        "step",
        f"{format_seconds(estimate.step_s)}, between {lower_text} (perfect overlap) and {upper_text} (none: compute, "
        f"memory and network one after the other); bound by "
        f"{estimate.bound_by}",
    )
    unmasked_mfu = estimate.mfu_causal if told.plan.model.attention_mask else unmasked(estimate)
    tail = f", {unmasked_mfu:.1%} without masked scores" if unmasked_mfu else ""
    if overlap_text := overlap_words(told.overlap, told.plan.setting, told.plan.strategy):
        yield Fact("overlap", overlap_text)
    yield Fact(
        "utilisation",
        f"MFU {estimate.mfu:.1%} of {mfu_words(told.plan.model)}{tail}; HFU {estimate.hfu:.1%}, recomputation counted",
    )
    items_text = ", ".join(f"{name} {format_bytes(size)}" for name, size in estimate.memory.items() if size)
    yield Fact("memory of a chip", f"{format_bytes(estimate.hbm_bytes_per_chip)} at the fullest moment: {items_text}")
    if told.training is not None:
        yield from budget_text(told.training, told.plan.cluster.num_chips)


_VERDICTS = {True: "met", False: "not met", None: "hint"}
_TITLES = {"speed": "When communication hides behind compute, in closed form", "size": "What fits"}


def limit_tables(limits: Sequence[Limit]) -> dict[str, Table]:
    """Returns kind of limit -> its table, for the kinds that ``limits`` has."""
    rows: dict[str, list[list[Any]]] = {kind: [] for kind in _TITLES}
    for limit in limits:
        rows[limit.kind].append([limit.name, limit.formula, *limit_amounts(limit), _VERDICTS[limit.holds]])
    return {kind: Table(["", "formula", "bound", "here", ""], rows[kind], _TITLES[kind]) for kind in rows if rows[kind]}


def _limits_text(explanation: Explanation) -> Iterator[Piece]:
    for kind, table in limit_tables(explanation.limits).items():
        yield ""
        yield table
        if kind == "speed":
            yield legend(explanation.symbols)
        yield from (f"{limit.name}: {limit.note}" for limit in explanation.limits if limit.kind == kind and limit.note)


def legend(at: Letters, split: str = "data x fsdp x context") -> str:
    """Returns what the letters of the formulas stand for; ``split`` is X in words."""
    slices_text, micro_text = " of each slice" * (at.num_slices > 1), " of a microbatch" * (at.num_microbatches > 1)
    entries = [
        f"B = {format_count(at.batch_tokens)} tokens{slices_text}{micro_text}",
        f"N = {counted(at.num_chips, 'chip')}{slices_text}",
    ]
    entries += [f"F = {at.d_ff:,}", f"C = {format_flops(at.peak_flops)}"]
    if at.alpha is not None:
        sheet_text = f", {at.sheet_alpha:,.4g} by the data sheet" if at.sheet_alpha not in (None, at.alpha) else ""
        entries.append(f"alpha = C / W of a torus axis = {at.alpha:,.4g} FLOPs/byte{sheet_text} with W {at.width}")
        entries.append(f"X = {split} on Mx = {at.fsdp_axes:g} and tensor on My = {at.tensor_axes:g} torus axes")
        entries.append("root = square root of the discriminant")
    elif at.link:
        entries.append("W one way: of a chip in its domain (nvlink), of a domain's cards (node), of one card (W alone)")
    return ", ".join(entries)


# -- what is said first ---------------------------------------------------------------------------------


def _lead_text(explanation: Explanation) -> Iterator[Piece]:
    """Yields two to six facts before the algorithm."""
    terms = [term for n, term in enumerate(explanation.terms[:MAX_TERMS]) if n == 0 or term.share >= MIN_SHARE]
    for term_index, term in enumerate(terms):
        yield Fact("what matters" if term_index == 0 else "", _term_words(term, explanation))
    near_limit = _nearest_limit(explanation, [limit_of_term(term, explanation.limits) for term in terms])
    if near_limit is not None:
        yield Fact("beyond a limit" if near_limit.holds is False else "near a limit", limit_words(near_limit))
    yield Fact("what would help", _change_words(explanation))
    if explanation.fsdp is not None:
        yield Fact("data parallelism", explanation.fsdp.words)


def _nearest_limit(explanation: Explanation, said: Sequence[Limit | None]) -> Limit | None:
    """Returns the limit of a term that the plan is nearest to, on either side, and not in ``said``; None if far."""
    term_limits = [limit_of_term(term, explanation.limits) for term in explanation.terms]
    open_limits = [limit for limit in term_limits if limit is not None and limit not in said]
    limits = [limit for limit in open_limits if min(limit.limit, limit.here) > 0 and _distance(limit) <= math.log(NEAR)]
    return min(limits, key=_distance, default=None)


def _distance(limit: Limit) -> float:
    return abs(math.log(limit.here / limit.limit))


def _term_words(term: Term, explanation: Explanation) -> str:
    text = f"{term.words}: {format_seconds(term.added_s)}, {term.share:.0%} of the step"
    if term.alone_s > 1.1 * term.added_s:
        text += f" ({format_seconds(term.alone_s)} by themselves, the rest hides)"
    limit = limit_of_term(term, explanation.limits)
    if limit is not None:
        return f"{text}; {limit_words(limit)}"
    if term.name in ("elementwise", "optimizer"):
        return f"{text}; at the memory rate of {explanation.plan.cluster.chip.name}"
    if term.name in ("matmul", "attention", "loss_head"):
        rerun_text = f", {explanation.recomputed:.0%} of all FLOPs recomputed" if explanation.recomputed > 0.005 else ""
        return f"{text}; at the rates of {explanation.plan.cluster.chip.name}{rerun_text}"
    return text


def limit_amounts(limit: Limit) -> tuple[Quantity, Quantity]:
    """Returns the bound and the plan's figure, which prints as a dash if its letters are not known."""
    show = {"bytes": format_bytes, "s": format_seconds, "": _number_words}[limit.unit]
    show_bound = (lambda amount: "below one device") if _below_one(limit) else show
    return Quantity(limit.limit, show_bound), Quantity(limit.here, lambda here: "-" if math.isnan(here) else show(here))


def _below_one(limit: Limit) -> bool:
    """True for an upper bound below one device: the limit never holds."""
    return limit.formula[0] == "<" and not limit.unit and limit.limit < 1


def limit_words(limit: Limit) -> str:
    """Returns ``"tokens/chip, weights hide: > 850, here 1,024: 1.2 times above"``."""
    bound_amount, plan_amount = limit_amounts(limit)
    sign_text = f"{limit.formula[0]} " if limit.formula[0] in "<>" and not _below_one(limit) else ""
    text = f"{limit.name}: {sign_text}{bound_amount}, here {plan_amount}"
    if min(limit.limit, limit.here) <= 0:
        return text
    side = "above" if limit.here > limit.limit else "below"
    ratio = math.exp(_distance(limit))
    return f"{text}: {ratio:.3g} times {side}{'' if limit.holds is not False else ', not met'}"


def _change_words(explanation: Explanation) -> str:
    """Returns the best single change and its gain, or says that none helps."""
    changes = explanation.changes
    tried_text = f"{changes.num_tried} changes tried ({changes.num_legal} of them run)"
    if changes.best is None:
        return f"none of the {tried_text} makes it faster"
    gain_share = changes.gain_s / explanation.estimate.step_s
    new_estimate = changes.best.estimate
    return (
        f"{changes.best.words}: {format_seconds(new_estimate.step_s)} a step, {gain_share:.1%} less, "
        f"{format_bytes(new_estimate.hbm_bytes_per_chip)} per chip; the best of the {tried_text}"
    )


def _number_words(value: float) -> str:
    """Returns four digits, or all before the point; from a million on three digits, unless it is a whole number."""
    magnitude = abs(value)
    return four_digits(value) if magnitude < 1e6 or (magnitude < 1e10 and value % 1 == 0) else f"{value:.3g}"
