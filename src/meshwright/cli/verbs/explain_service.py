"""The answer of `explain` about a planned service: both phases line by line, and its figures as formulas."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from meshwright.cli.output import format_flop_count, say, three_digits, width
from meshwright.cli.verbs.plan_words import engine_lines, placement_words, service_words
from meshwright.core.dims import COLLECTIVES, LETTERS
from meshwright.core.units import counted, format_bytes, format_flops, format_rate, format_seconds
from meshwright.cost.breakdown import term_words
from meshwright.plan.plan_file import ServicePlan
from meshwright.plan.serving.fleet import engine_words
from meshwright.plan.serving.planner import service_notes
from meshwright.plan.why.explain import Algorithm, LargestStep, ListedStep
from meshwright.plan.why.explain_service import PhaseExplanation, ServiceExplanation, StepPart, explain_service
from meshwright.report.answer import (
    Answer,
    Condition,
    Detail,
    Fact,
    Facts,
    Paragraph,
    Piece,
    PlainPiece,
    Symbols,
    Table,
    TableColumns,
)


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
    decode = explanation.phases[0]
    engines_text = ", ".join(line.strip() for line in engine_lines(plan))
    yield f"serving {plan.model.name} on {plan.cluster.short_name}: {engines_text}; {service_words(service)}"
    tpot_s, ttft_s = explanation.value("TPOT"), explanation.value("TTFT")
    step_s = plan.generate.step_s / plan.step_tokens if plan.num_drafts else decode.step_s
    # where engines prefill too, a token also waits for prompts of others
    wait_text = f", {format_seconds(tpot_s - step_s)} of it prefills of other requests" * (not plan.has_pools)
    yield Fact("TPOT", f"{format_seconds(tpot_s)}{wait_text}; TTFT {format_seconds(ttft_s)}")
    usd_text, value = "", explanation.value
    if plan.predicted.usd_per_m_output is not None:
        usd_text = f"; ${value('$/M in'):.3g} a million tokens in, ${value('$/M out'):.3g} out"
    rate_text = f"{three_digits(value('requests/s'))} requests/s, {three_digits(value('tok/s/chip'))} tokens/s a chip"
    yield Fact("throughput", f"{rate_text}{usd_text}")
    for phase in explanation.phases:
        parts = sorted(phase.parts, key=lambda part: -part.alone_s)
        parts_text = ", ".join(f"{part.name} {format_seconds(part.alone_s)}" for part in parts[:3])
        yield Fact(
            phase.phase,
            f"{format_seconds(phase.step_s)} a step, bound by {parts[0].name} ({parts_text}, each without overlap); "
            f"{_work_words(phase)}",
        )
    if plan.num_drafts:
        yield Fact(
            "drafts",
            f"{plan.num_drafts} a step, which takes {format_seconds(plan.generate.step_s)} and makes "
            f"{plan.step_tokens:.3g} tokens; listed is a step without any",
        )
    for phase in explanation.phases[: 1 + plan.has_pools]:
        memory_text = memory_words(phase.memory, sum(phase.memory.values()), plan.setting.memory_limit)
        yield Fact(f"memory, {phase.phase}", memory_text)
    yield ""
    yield from largest_text(decode.largest, decode.step_s, " of decode", names_blocks=False)
    yield from map(Condition, service_notes(plan.setting, service, (plan.stored,)))
    num_lines = sum(len(part.lines) for phase in explanation.phases for part in phase.blocks)
    yield Detail(f"{num_lines} steps", [piece for phase in explanation.phases for piece in _phase_text(phase)])
    yield Detail(f"{len(explanation.formulas)} formulas", [*_formulas_text(explanation)])


def _formulas_text(explanation: ServiceExplanation) -> Iterator[PlainPiece]:
    yield ""
    prefill_text = ", P engines that only prefill" if explanation.plan.has_pools else ""
    yield f"The figures of the service, with G engines that generate, B sequences in each{prefill_text}"
    for row in explanation.formulas:
        yield Fact(f"  {row.name}", row.text, 20)
        yield Fact("", f"= {row.numbers} = {row.shown}" if " " in row.numbers[:-2] else f"= {row.shown}", 20)


def _work_words(phase: PhaseExplanation) -> str:
    """Returns what one step of a phase works on, and where."""
    pool = phase.pool
    work_text = f"{counted(pool.batch_seqs, 'prompt')} of {phase.num_positions:,} tokens"
    if phase.phase == "decode":
        work_text = f"a token of {counted(pool.batch_seqs, 'sequence')} with {phase.num_positions:,} positions cached"
    return f"{work_text}, on {pool.part.short_name} ({engine_words(pool.strategy)})"


def _phase_text(phase: PhaseExplanation) -> Iterator[PlainPiece]:
    yield ""
    yield f"{phase.phase}: {_work_words(phase)}"
    yield Fact("placement", placement_words(phase.pool.strategy.placement))
    for part in phase.blocks:
        yield from algorithm_text(part)
    yield ""
    yield Table.of(phase.parts, PARTS)
    yield "parameters: products with weights, with the rows that they read and write; KV: attention, with its queries"
    yield Table.of(phase.terms, TERMS)


def _amount(part: StepPart, seconds: float = 0.0) -> str | None:
    """Returns the FLOPs or bytes of a part, or their rate over some seconds."""
    if part.amount is None:
        return None
    if part.name == "FLOPs":
        return format_flops(part.amount / seconds) if seconds else format_flops(part.amount, unit="FLOP")
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

STEP_AT = 16
"""Column of the steps in the table of the largest."""


def memory_words(items: Mapping[str, float], needed_bytes: float, limit_bytes: float) -> str:
    """Returns ``"38.8 GB of 95 GB, 56.2 GB free: weights 17.6 GB, ..."``, or how much is missing."""
    free_text, free_bytes = "", limit_bytes - needed_bytes
    if math.isfinite(limit_bytes):
        verdict = "free" if free_bytes >= 0 else "too much"
        free_text = f" of {format_bytes(limit_bytes)}, {format_bytes(abs(free_bytes))} {verdict}"
    item_texts = (f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in items.items() if size)
    return f"{format_bytes(needed_bytes)}{free_text}: {', '.join(item_texts)}"


def largest_text(steps: Sequence[LargestStep], step_s: float, of: str = "", *, names_blocks: bool) -> Iterator[Piece]:
    """Yields a table of the largest steps, and the letters of their dims."""

    def line_of(step: LargestStep) -> str:
        """Returns a step in one line: if it is too long, with the names of its operands, and cut."""
        room, is_repeated = width() - STEP_AT, step.phase == "backward" and not step.text.startswith("d")
        prefix = f"{step.block.removeprefix('layer_')}: " * (names_blocks and step.block.startswith("layer"))
        prefix += "again: " * (step.phase == "recompute" or is_repeated)
        result, _, operands = step.text.partition(" = ")
        names = re.sub(r"\[[^]]*\](\{U_(\w+|\{[^}]*\})\})?", "", operands)
        names = re.sub(r", in blocks of .*", ", in a ring", names)
        text = f"{prefix}{result} = {operands if len(prefix + step.text) <= room else names}"
        return text if len(text) <= room else f"{text[: room - 3]}..."

    columns: TableColumns = {
        "adds": ("added_s", format_seconds),
        "share": (lambda step: step.added_s / step_s, "{:.0%}".format),
        f"the {counted(len(steps), 'largest step')}{of}": line_of,
    }
    yield Table.of(steps, columns)
    dims_texts = (dims for step in steps for dims in re.findall(r"\[([^]]*)\]", line_of(step)))
    letters = {name for dims in dims_texts for name in re.findall(r"(?<![_{,\w])[A-Z]\w*?(?=_|\W|$)", dims)}
    yield Symbols({name: meaning for name, meaning in LETTERS.items() if name in letters})


def algorithm_text(part: Algorithm) -> Iterator[PlainPiece]:
    yield Paragraph(f"\n{part.title[0].upper()}{part.title[1:]}", None)
    for line in part.lines:
        yield Paragraph(f"{line.number:>3}. {line.text}", indent=7)
        yield Paragraph(f"       {_measures(line)}", None)
    if part.num_left_out:
        yield Paragraph(f"     ({counted(part.num_left_out, 'small local step')} not listed)", None)
    yield Paragraph(
        f"     compute {format_seconds(part.compute_s)}; communication {format_seconds(part.critical_s)} on the "
        f"critical path, {format_seconds(part.hidden_s)} that can overlap",
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
