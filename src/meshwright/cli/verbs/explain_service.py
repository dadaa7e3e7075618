"""The answer of `explain` about a planned service: both phases line by line, and its figures as formulas."""

from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.cli.output import say
from meshwright.cli.verbs.explain_text import TERMS, algorithm_text
from meshwright.cli.verbs.plan_words import engine_lines, placement_words, target_words
from meshwright.core.units import format_bytes, format_flops, format_rate, format_seconds
from meshwright.plan.serving.file import ServiceFile
from meshwright.plan.serving.fleet import engine_words
from meshwright.plan.serving.planner import service_notes
from meshwright.plan.why.explain_service import PhaseExplanation, ServiceExplanation, StepPart, explain_service
from meshwright.report.answer import Answer, Fact, Piece, Table, TableColumns


def service_explanation(file: ServiceFile, name: str) -> Answer:
    """Returns the explanation of a service; ``name`` is that of its file."""
    told = explain_service(file)
    changed = [
        f"{what} {format_seconds(old)}, now {format_seconds(new)}"
        for what, old, new in (
            ("TTFT", file.predicted.ttft_s, told.value("TTFT")),
            ("TPOT", file.predicted.tpot_s, told.value("TPOT")),
        )
        if format_seconds(old) != format_seconds(new)
    ]
    if changed:
        say(f"{name} predicts {', '.join(changed)}: it was changed by hand, or written by another version.")
    lines = [
        {"title": part.title, **msgspec.structs.asdict(line)}
        for phase in told.phases
        for part in phase.blocks
        for line in part.lines
    ]
    return Answer(_facts(told), _text(told), raw=[lines, told.formulas])


def _facts(told: ServiceExplanation) -> dict[str, Any]:
    file = told.file
    return {
        "model": file.model.name,
        "cluster": file.cluster.short_name,
        "service": file.service,
        "plan": file.plan.to_json(),
        **{one.phase: {**msgspec.structs.asdict(one), "pool": one.pool.to_json()} for one in told.phases},
        "formulas": told.formulas,
    }


def _text(told: ServiceExplanation) -> Iterator[Piece]:
    file, service = told.file, told.file.service
    engines = ", ".join(line.strip() for line in engine_lines(file.plan))
    yield (
        f"serving {file.model.name} on {file.cluster.short_name}: {engines}; {service.prompt_len:,} tokens of prompt, "
        f"{service.output_len:,} of output{target_words(service)}"
    )
    decode, prefill = told.phases
    yield Fact("TPOT", _tpot_words(told))
    for name, phase in (("decode", decode), ("prefill", prefill)):
        longest = max(phase.parts, key=lambda part: part.alone_s)
        yield Fact(
            name,
            f"{format_seconds(phase.step_s)} a step, most of it {longest.name}: {format_seconds(longest.alone_s)} by "
            f"{'itself' if longest.name != 'parameters' else 'themselves'}",
        )
    if file.num_drafts:
        yield Fact(
            "drafts",
            f"{file.num_drafts} a step, which takes {format_seconds(file.generate.step_s)} and makes "
            f"{file.step_tokens:.3g} tokens; listed is a step without any",
        )
    for phase in told.phases:
        yield from _phase_text(phase)
    yield ""
    prefilling = ", P engines that only prefill" if file.has_pools else ""
    yield f"The figures of the service, with G engines that generate, B sequences in each{prefilling}"
    for one in told.formulas:
        yield Fact(f"  {one.name}", one.text, 20)
        yield Fact("", f"= {one.numbers} = {one.shown}" if " " in one.numbers[:-2] else f"= {one.shown}", 20)
    yield from service_notes(file.setting, service, (file.stored,))


def _tpot_words(told: ServiceExplanation) -> str:
    """Returns what an output token takes: a step and, where engines prefill too, the wait for prompts of others."""
    file, tpot_s = told.file, told.value("TPOT")
    step_s = file.generate.step_s / file.step_tokens if file.num_drafts else told.phases[0].step_s
    waits = f", {format_seconds(tpot_s - step_s)} of it waiting for the prefills of others" * (not file.has_pools)
    return f"{format_seconds(tpot_s)}{waits}; TTFT {format_seconds(told.value('TTFT'))}"


def _phase_text(told: PhaseExplanation) -> Iterator[Piece]:
    pool = told.pool
    several, length = "s" * (pool.batch_seqs > 1), f"{told.num_positions:,}"
    what = f"{pool.batch_seqs:,} prompt{several} of {length} tokens"
    if told.phase == "decode":
        what = f"a token of {pool.batch_seqs:,} sequence{several}, {length} positions in each cache"
    yield ""
    yield f"{told.phase} on {pool.part.short_name} ({engine_words(pool.strategy)}): {what}"
    yield Fact("placement", placement_words(pool.strategy.placement))
    for part in told.blocks:
        yield from algorithm_text(part)
    yield ""
    yield Table.of(told.parts, PARTS)
    yield "parameters: products with weights, with the rows that they read and write; KV: attention, with its queries"
    yield Table.of(told.terms, TERMS)
    yield Fact("step", _sum_words(told))
    items = ", ".join(f"{name} {format_bytes(size)}" for name, size in told.memory.items())
    yield Fact("memory of a chip", f"{format_bytes(sum(told.memory.values()))}: {items}")


def _sum_words(told: PhaseExplanation) -> str:
    """Returns the step as the sum of its listings, and what it takes beside them or hides of them."""
    each = [(repeat, part.alone_s) for part, repeat in zip(told.blocks, told.repeats, strict=True)]
    runs = " + ".join(f"{repeat} x " * (repeat > 1) + format_seconds(seconds) for repeat, seconds in each)
    rest = told.step_s - sum(repeat * seconds for repeat, seconds in each)
    if rest < 0:
        return f"{format_seconds(told.step_s)} = {runs} - {format_seconds(-rest)}, which overlaps"
    beside = f" + {format_seconds(rest)} of the host" * (rest > 1e-6 * told.step_s)
    return f"{format_seconds(told.step_s)} = {runs}{beside}"


def _amount(part: StepPart) -> str | None:
    if part.amount is None:
        return None
    return format_flops(part.amount, unit="FLOPs") if part.name == "FLOPs" else format_bytes(part.amount)


def _rate(part: StepPart) -> str | None:
    if part.amount is None:
        return None
    rate = part.amount / part.alone_s
    return format_flops(rate) if part.name == "FLOPs" else format_rate(rate)


PARTS: TableColumns = {
    "of a chip, by itself": "name",
    "amount": _amount,
    "at": _rate,
    "takes": ("alone_s", format_seconds),
}
