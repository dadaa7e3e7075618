"""Plans of services in words, tables and figures."""

import math
from collections.abc import Iterator

from meshwright.batching.record import ServingRecord
from meshwright.cli.output import three_digits
from meshwright.cli.verbs.plan_words import engine_lines, service_words
from meshwright.core.units import counted, format_bytes, format_seconds
from meshwright.plan.plan_file import EnginePool, ServicePlan
from meshwright.plan.serving.fleet import ENGINE_SYMBOLS
from meshwright.plan.serving.result import ServiceResult
from meshwright.plan.serving.service import TARGETS, Service
from meshwright.plan.why.why_not_service import ServiceWhyNot
from meshwright.report.answer import Condition, Fact, Heading, Piece, Symbols, Table, TableColumns
from meshwright.report.figure import Figure
from meshwright.report.plans.pareto import services_figure
from meshwright.report.plans.timeline import slots_figure

BUSY = 0.8
"""Share of what engines can serve from which a queue is worth a word."""


def slots_chart(result: ServiceResult, plan: ServicePlan, record: ServingRecord) -> Figure:
    pool_names = ("prefill", "generate") if plan.has_pools else ("engine",)
    return slots_figure(
        dict(zip(pool_names, record.spans, strict=True)),
        title=f"{result.setting.model.name} on {result.setting.cluster.short_name}: who holds which slot",
        subtitle=service_words(result.service),
    )


def service_text(result: ServiceResult, top: int) -> Iterator[Piece]:
    """Yields the plans, what the best consists of, and the conventions behind the numbers."""
    service, cluster = result.service, result.setting.cluster
    cached_text = f", {100 * service.prefix_share:.6g}% of them cached" * bool(service.prefix_share)
    yield (
        f"serving {result.setting.model.name} on {cluster.short_name} "
        f"({counted(cluster.num_chips, 'chip')}): {service_words(service, cached_text)}"
    )
    listed_plans = result.listed(top)
    has_load = service.requests_per_s is not None
    order_text = "best first" if not result.is_frontier else "fewest chips first" if has_load else "most tokens first"
    yield Table.of(listed_plans, service_columns(f"engines, {order_text}", service)).known()
    yield from _best_text(result, listed_plans[0])
    met_text = f", {result.num_meeting:,} of them meet the targets" * bool(service.targets)
    frontier_text = f"; on their frontier of TPOT and tok/s are {len(result.plans):,}" * result.is_frontier
    yield Fact("searched", f"{result.num_services:,} services that fit in memory{met_text}{frontier_text}")
    yield from map(Condition, result.notes)
    yield Symbols(ENGINE_SYMBOLS)


def service_columns(first: str, service: Service) -> TableColumns:
    """Returns the columns of plans; ``first`` is the title of the first."""
    speed_column = ("predicted.tokens_per_s_per_chip", three_digits, "tokens_per_s_per_chip")
    has_load = service.requests_per_s is not None
    return {
        first: lambda plan: "\n".join(engine_lines(plan)),
        "TTFT": ("predicted.ttft_s", format_seconds),
        "TPOT": ("predicted.tpot_s", format_seconds),
        "chips" if has_load else "tok/s/chip": ("predicted.num_chips", "{:,}".format) if has_load else speed_column,
        "$/M input": ("predicted.usd_per_m_input", _usd, "usd_per_m_input"),
        "$/M output": ("predicted.usd_per_m_output", _usd, "usd_per_m_output"),
        "bound by": "generate.bound_by",
    }


def _best_text(result: ServiceResult, best: ServicePlan) -> Iterator[Piece]:
    service, cluster, figures = result.service, result.setting.cluster, best.predicted
    chips = counted(figures.num_chips, "chip")
    idle = figures.num_chips - best.generate.num_chips - best.has_pools * best.prefill.num_chips
    rate_text = f"{three_digits(figures.requests_per_s)} requests/s on {chips}{f', {idle} of them idle' * bool(idle)}"
    if service.requests_per_s is not None:
        rate_text = f"{service.load_words} need {chips} of {cluster.num_chips:,}, which serve up to " + three_digits(
            figures.requests_per_s
        )
        busy_share = service.requests_per_s / figures.requests_per_s
        if busy_share > BUSY:
            rate_text += f"; {busy_share:.0%} busy, so that requests queue, which --simulate shows and TTFT leaves out"
    yield Fact("the first", rate_text)
    yield Fact("its decode step", _step_words(best.generate))
    if service.speculation:
        yield Fact(
            "its drafts",
            f"{best.num_drafts} a step, which makes {best.step_tokens:.3g} tokens of a sequence in the mean: "
            f"{format_seconds(best.generate.step_s / best.step_tokens)} a token",
        )
    if service.chunk_len or service.itl_s:
        yield Fact("between tokens", _gap_words(best))
    transfer_text = f"; sending its keys and values {format_seconds(figures.transfer_s)}" * best.has_pools
    prompts_text = counted(best.prefill.batch_seqs, "prompt")
    yield Fact("its prefill", f"of {prompts_text}: {_step_words(best.prefill)}{transfer_text}")
    memory_text = ", ".join(f"{_MEMORY[name]} {format_bytes(size)}" for name, size in best.generate.memory.items())
    yield Fact("memory of a chip", f"{memory_text}; {_free_words(best)}")
    if result.as_written and (best.weights, best.cache) != ("bf16", "bf16"):
        as_written, prediction = result.as_written, result.as_written.predicted
        text = f"makes {three_digits(prediction.tokens_per_s_per_chip)} tok/s"
        text = text if service.requests_per_s is None else f"needs {counted(prediction.num_chips, 'chip')}"
        yield Fact(
            "all in bf16",
            f"the best {text} at TPOT {format_seconds(prediction.tpot_s)}{_price_words(prediction.usd_per_m_output)}: "
            f"{', '.join(line.strip() for line in engine_lines(as_written))}",
        )


def _free_words(plan: ServicePlan) -> str:
    """Returns the free memory of a chip, of which a margin stays free; "" if a chip's memory is not known."""
    limit_bytes, margin = plan.setting.memory_limit, plan.setting.memory_margin
    if not math.isfinite(limit_bytes):
        return "the memory of a chip is not known"
    free_text = format_bytes(plan.predicted.free_bytes + margin * limit_bytes)
    return f"{free_text} of {format_bytes(limit_bytes)} free, {format_bytes(margin * limit_bytes)} of it on purpose"


def _gap_words(plan: ServicePlan) -> str:
    """Returns the longest time between two tokens, with and without chunks."""
    gap_text = format_seconds(plan.predicted.itl_s or 0.0)
    whole_gap = format_seconds(plan.generate.step_s + plan.prefill.step_s)
    if plan.has_pools:
        return f"at most {gap_text}, a step"
    if not plan.chunk_len:
        return f"at most {gap_text}, with whole prompts"
    return f"at most {gap_text} with chunks of {plan.chunk_len:,} tokens; {whole_gap} with whole prompts, TTFT " + (
        format_seconds(plan.prefill.step_s)
    )


_MEMORY = {"weights": "weights", "kv_cache": "KV", "activations": "activations"}


def _step_words(pool: EnginePool) -> str:
    """Returns the seconds of a step and of its parts before overlap, longest first, without parts below 3%."""
    pairs = sorted(pool.bounds_s.items(), key=lambda part: -part[1])
    words = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in pairs if seconds > 0.03 * pool.step_s)
    return f"{format_seconds(pool.step_s)}; before overlap {words}"


def frontier_figure(result: ServiceResult) -> Figure:
    curves, split_curves = (
        {name: [(1e3 * x, y_factor * y) for x, y in points] for name, points in points_by_name.items()}
        for points_by_name, y_factor in ((result.frontiers, 1.0), (result.split, 1e3))
    )
    cluster, first_plan = result.setting.cluster, result.plans[0]
    figures = first_plan.predicted
    return services_figure(
        curves,
        split_curves,
        (1e3 * figures.tpot_s, figures.tokens_per_s_per_chip, f"the first: {engine_lines(first_plan)[0]}"),
        title=f"{result.setting.model.name} on {cluster.short_name}: services that nothing beats",
        subtitle=service_words(result.service),
    )


def _price_words(dollars: float | None) -> str:
    return "" if dollars is None else f", ${_usd(dollars)} a million output tokens"


def _usd(dollars: float) -> str:
    return f"{dollars:.3g}" if dollars < 100 else f"{dollars:,.0f}"


def why_not_text(result: ServiceResult, told: ServiceWhyNot) -> Iterator[Piece]:
    """Yields why an engine is refused, or its best service beside the first and what takes the time of its chips."""
    yield ""
    yield f"Why not {', '.join(f'{name} {str(value).lower()}' for name, value in told.asked.items())}"
    if told.plan is None:
        yield Fact("  refused", told.refusal)
        return
    first_plan, best_plan = result.plans[0], told.plan
    yield Fact("  best with it", ", ".join(line.strip() for line in engine_lines(best_plan)))
    figures, targets = best_plan.predicted, result.service.targets
    for name, factor in told.misses.items():
        if name in targets:
            own_text = format_seconds(getattr(figures, TARGETS[name]) or 0.0)
            yield Fact(f"  misses {name}", f"{own_text}, {factor - 1:.1%} above {format_seconds(targets[name])}")
        else:
            chips_text = f"it needs {figures.num_chips:,} chips of {result.setting.cluster.num_chips:,}"
            yield Fact("  misses the load", chips_text)
    if best_plan == first_plan:
        yield Fact("", "that is the first plan itself")
        return
    extra_share = figures.tokens_per_s_per_chip / first_plan.predicted.tokens_per_s_per_chip - 1
    yield Fact(
        "  output",
        f"{three_digits(figures.tokens_per_s_per_chip)} tok/s per chip, {abs(extra_share):.1%} "
        f"{'more' if extra_share > 0 else 'fewer'} than the first",
    )
    for name, field in (("TPOT", "tpot_s"), ("TTFT", "ttft_s")):
        own_text, first_text = (format_seconds(getattr(plan.predicted, field)) for plan in (best_plan, first_plan))
        yield Fact(f"  {name}", f"{own_text}, the first's is {first_text}")
    rows = [(f"  {name}", *seconds) for name, seconds in told.chip_s.items()]
    columns = [Heading(name, format_seconds) for name in ("first", "here")]
    yield Table([Heading("  chip-time of a token", None, "part"), *columns], rows)
