"""The answer of `explain` about a planned service: both phases line by line, and its figures as formulas."""

from collections.abc import Iterator

import msgspec

from meshwright.cli.output import format_flop_count, say
from meshwright.cli.verbs.plan_words import engine_lines, placement_words, service_words
from meshwright.core.dims import COLLECTIVES
from meshwright.core.units import format_bytes, format_flops, format_rate, format_seconds
from meshwright.cost.breakdown import term_words
from meshwright.plan.plan_file import ServicePlan
from meshwright.plan.serving.fleet import engine_words
from meshwright.plan.serving.planner import service_notes
from meshwright.plan.why.explain import Algorithm, ListedStep
from meshwright.plan.why.explain_service import STARTS, PhaseExplanation, ServiceExplanation, StepPart, explain_service
from meshwright.report.answer import Answer, Fact, Facts, Paragraph, Piece, Table, TableColumns


def service_explanation(plan: ServicePlan, name: str) -> Answer:
    """Returns the explanation of a service; ``name`` is that of its plan."""
    explanation = explain_service(plan)
    change_texts = [
        f"{figure} {format_seconds(old_s)}, now {format_seconds(new_s)}"
        for figure, old_s, new_s in (
            ("TTFT", plan.predicted.ttft_s, explanation.value("TTFT")),
            ("TPOT", plan.predicted.tpot_s, explanation.value("TPOT")),
        )
        if format_seconds(old_s) != format_seconds(new_s)
    ]
    if change_texts:
        say(f"{name} predicts {', '.join(change_texts)}: it was changed by hand, or written by another version.")
    line_rows = [
        {"title": part.title, **msgspec.structs.asdict(line)}
        for phase in explanation.phases
        for part in phase.blocks
        for line in part.lines
    ]
    facts: Facts = {
        "model": plan.model.name,
        "cluster": plan.cluster.short_name,
        "service": plan.service,
        "plan": plan.to_json(),
        **{each.phase: {**msgspec.structs.asdict(each), "pool": each.pool.to_json()} for each in explanation.phases},
        "formulas": explanation.formulas,
    }
    return Answer(facts, _text(explanation), raw=[line_rows, explanation.formulas])


def _text(explanation: ServiceExplanation) -> Iterator[Piece]:
    plan, service = explanation.plan, explanation.plan.service
    engines_text = ", ".join(line.strip() for line in engine_lines(plan))
    yield f"serving {plan.model.name} on {plan.cluster.short_name}: {engines_text}; {service_words(service)}"
    decode, prefill = explanation.phases
    tpot_s = explanation.value("TPOT")
    step_s = plan.generate.step_s / plan.step_tokens if plan.num_drafts else decode.step_s
    # where engines prefill too, a token also waits for prompts of others
    wait_text = f", {format_seconds(tpot_s - step_s)} of it waiting for the prefills of others" * (not plan.has_pools)
    yield Fact("TPOT", f"{format_seconds(tpot_s)}{wait_text}; TTFT {format_seconds(explanation.value('TTFT'))}")
    for name, phase in (("decode", decode), ("prefill", prefill)):
        top_part = max(phase.parts, key=lambda part: part.alone_s)
        yield Fact(
            name,
            f"{format_seconds(phase.step_s)} a step, most of it {top_part.name}: {format_seconds(top_part.alone_s)} by "
            f"{'themselves' if top_part.name in ('parameters', STARTS) else 'itself'}",
        )
    if plan.num_drafts:
        yield Fact(
            "drafts",
            f"{plan.num_drafts} a step, which takes {format_seconds(plan.generate.step_s)} and makes "
            f"{plan.step_tokens:.3g} tokens; listed is a step without any",
        )
    for phase in explanation.phases:
        yield from _phase_text(phase)
    yield ""
    prefill_text = ", P engines that only prefill" if plan.has_pools else ""
    yield f"The figures of the service, with G engines that generate, B sequences in each{prefill_text}"
    for row in explanation.formulas:
        yield Fact(f"  {row.name}", row.text, 20)
        yield Fact("", f"= {row.numbers} = {row.shown}" if " " in row.numbers[:-2] else f"= {row.shown}", 20)
    yield from service_notes(plan.setting, service, (plan.stored,))


def _phase_text(phase: PhaseExplanation) -> Iterator[Piece]:
    pool = phase.pool
    plural_end, length_text = "s" * (pool.batch_seqs > 1), f"{phase.num_positions:,}"
    work_text = f"{pool.batch_seqs:,} prompt{plural_end} of {length_text} tokens"
    if phase.phase == "decode":
        work_text = f"a token of {pool.batch_seqs:,} sequence{plural_end}, {length_text} positions in each cache"
    yield ""
    yield f"{phase.phase} on {pool.part.short_name} ({engine_words(pool.strategy)}): {work_text}"
    yield Fact("placement", placement_words(pool.strategy.placement))
    for part in phase.blocks:
        yield from algorithm_text(part)
    yield ""
    yield Table.of(phase.parts, PARTS)
    yield "parameters: products with weights, with the rows that they read and write; KV: attention, with its queries"
    yield Table.of(phase.terms, TERMS)
    if any(part.name == STARTS for part in phase.parts):
        yield f"{STARTS} that do not hide count with the work that has them, or else with the host"
    yield Fact("step", _sum_words(phase))
    items_text = ", ".join(f"{name} {format_bytes(size)}" for name, size in phase.memory.items())
    yield Fact("memory of a chip", f"{format_bytes(sum(phase.memory.values()))}: {items_text}")


def _sum_words(phase: PhaseExplanation) -> str:
    """Returns the step as the sum of its listings, and what it takes beside them or hides of them."""
    listings = [(repeat, part.alone_s) for part, repeat in zip(phase.blocks, phase.repeats, strict=True)]
    runs_text = " + ".join(f"{repeat} x " * (repeat > 1) + format_seconds(seconds) for repeat, seconds in listings)
    rest_s = phase.step_s - sum(repeat * seconds for repeat, seconds in listings)
    if rest_s < 0:
        return f"{format_seconds(phase.step_s)} = {runs_text} - {format_seconds(-rest_s)}, which overlaps"
    host_s = sum(part.alone_s for part in phase.parts if part.name == "host")
    rests = ((host_s, "of the host"), (rest_s - host_s, f"of {STARTS} that do not hide"))
    rest_text = "".join(f" + {format_seconds(s)} {words}" for s, words in rests if s > 1e-6 * phase.step_s)
    return f"{format_seconds(phase.step_s)} = {runs_text}{rest_text}"


def _amount(part: StepPart, seconds: float = 0.0) -> str | None:
    """Returns the FLOPs or bytes of a part, or their rate over some seconds."""
    if part.amount is None:
        return None
    if part.name == "FLOPs":
        return format_flops(part.amount / seconds) if seconds else format_flops(part.amount, unit="FLOPs")
    return format_rate(part.amount / seconds) if seconds else format_bytes(part.amount)


TERMS: TableColumns = {
    "work of one step": ("name", term_words),
    "alone": ("alone_s", format_seconds),
    "adds": ("added_s", lambda added: format_seconds(max(0.0, added))),
    "share": ("share", "{:.0%}".format),
}
PARTS: TableColumns = {
    "of a chip, by itself": "name",
    "amount": _amount,
    "at": lambda part: _amount(part, part.alone_s),
    "takes": ("alone_s", format_seconds),
}


# -- what is printed alike for training --------------------------------------------------------------------


def algorithm_text(part: Algorithm) -> Iterator[Piece]:
    yield Paragraph(f"\n{part.title[0].upper()}{part.title[1:]}", None)
    for line in part.lines:
        yield Paragraph(f"{line.number:>3}. {line.text}", indent=7)
        yield Paragraph(f"       {_measures(line)}", None)
    if part.num_left_out:
        yield Paragraph(f"     ({part.num_left_out} small local steps are not listed)", None)
    yield Paragraph(
        f"     compute {format_seconds(part.compute_s)}; communication that can hide {format_seconds(part.hidden_s)}, "
        f"on the critical path {format_seconds(part.critical_s)}",
        indent=5,
    )


def _measures(line: ListedStep) -> str:
    """Returns FLOPs if there are any, bytes, seconds, and whether the step can overlap."""
    amount_texts = [format_flop_count(line.flops)] if line.flops else []
    array_text = "array of " * (line.op in COLLECTIVES)  # what else is listed is of a chip
    times_text = {0.0: "not on the busiest device", 1.0: ""}.get(line.times, f"{line.times:,.4g} times")
    texts = (
        *amount_texts,
        array_text + format_bytes(line.num_bytes),
        format_seconds(line.time_s),
        times_text,
        line.overlaps,
    )
    return ", ".join(word for word in texts if word)
