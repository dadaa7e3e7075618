"""Plans of services in words, tables and figures."""

from collections.abc import Iterator

from meshwright.batching.record import ServingRecord
from meshwright.cli.output import three_digits
from meshwright.cli.verbs.plan_words import engine_lines, target_words
from meshwright.core.units import counted, format_bytes, format_seconds
from meshwright.plan.serving.result import EnginePool, ServicePlan, ServiceResult
from meshwright.plan.serving.service import Service
from meshwright.plan.why.why_not_service import ServiceWhyNot
from meshwright.report.answer import Fact, Heading, Piece, Table, TableColumns
from meshwright.report.figure import Figure
from meshwright.report.plans.pareto import services_figure
from meshwright.report.plans.timeline import slots_figure

BUSY = 0.8
"""Share of what engines can serve from which a queue is worth a word."""


def slots_chart(result: ServiceResult, plan: ServicePlan, record: ServingRecord) -> Figure:
    pool_names = ("prefill", "generate") if plan.has_pools else ("engine",)
    service = result.service
    return slots_figure(
        dict(zip(pool_names, record.spans, strict=True)),
        title=f"{result.setting.model.name} on {result.setting.cluster.short_name}: who holds which slot",
        subtitle=f"{service.prompt_len:,} tokens of prompt, {service.output_len:,} of output{target_words(service)}",
    )


def service_text(result: ServiceResult, top: int) -> Iterator[Piece]:
    """Yields the plans, what the best consists of, and the conventions behind the numbers."""
    service, cluster = result.service, result.setting.cluster
    cached_text = f", {100 * service.prefix_share:.6g}% of them cached" * bool(service.prefix_share)
    yield (
        f"serving {result.setting.model.name} on {cluster.short_name} "
        f"({counted(cluster.num_chips, 'chip')}): {service.prompt_len:,} tokens of prompt{cached_text}, "
        f"{service.output_len:,} of output{target_words(service)}"
    )
    listed_plans = result.listed(top)
    has_load = service.requests_per_s is not None
    order_text = "best first" if not result.is_frontier else "fewest chips first" if has_load else "most tokens first"
    yield Table.of(listed_plans, service_columns(f"engines, {order_text}", service)).known()
    if result.is_frontier:
        num_left = len(result.plans) - len(listed_plans)
        rest_text = f"; {num_left} more of them are in --json" * bool(num_left)
        yield f"none of these plans is beaten in both TPOT and tok/s{rest_text}"
    yield from _best_text(result, listed_plans[0])
    yield Fact(
        "counted",
        f"{result.num_services:,} ways to serve fit in memory, {result.num_meeting:,} of them meet the targets"
        if any(target is not None for target in (service.ttft_s, service.tpot_s, service.itl_s))
        else f"{result.num_services:,} ways to serve fit in memory",
    )
    yield from result.notes


def service_columns(first: str, service: Service) -> TableColumns:
    """Returns the columns of plans; ``first`` is the title of the first."""
    speed_column = ("tokens_per_s_per_chip", three_digits, "tokens_per_s_per_chip")
    has_load = service.requests_per_s is not None
    return {
        first: lambda plan: "\n".join(engine_lines(plan)),
        "TTFT": ("ttft_s", format_seconds),
        "TPOT": ("tpot_s", format_seconds),
        "chips" if has_load else "tok/s": ("num_chips", "{:,}".format) if has_load else speed_column,
        "$/M in": ("usd_per_m_input", _usd, "usd_per_m_input"),
        "$/M out": ("usd_per_m_output", _usd, "usd_per_m_output"),
        "bound by": "bound_by",
    }


def _best_text(result: ServiceResult, best: ServicePlan) -> Iterator[Piece]:
    service, cluster = result.service, result.setting.cluster
    chips = counted(best.num_chips, "chip")
    idle = best.num_chips - best.generate.num_chips - best.has_pools * best.prefill.num_chips
    rate_text = f"{three_digits(best.requests_per_s)} requests/s on {chips}{f', {idle} of them idle' * bool(idle)}"
    if service.requests_per_s is not None:
        rate_text = f"{service.load_words} need {chips} of {cluster.num_chips:,}, which serve up to " + three_digits(
            best.requests_per_s
        )
        busy_share = service.requests_per_s / best.requests_per_s
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
    transfer_text = f"; sending its keys and values {format_seconds(best.transfer_s)}" * best.has_pools
    prompts_text = counted(best.prefill.batch_seqs, "prompt")
    yield Fact("its prefill", f"of {prompts_text}: {_step_words(best.prefill)}{transfer_text}")
    memory_text = ", ".join(f"{_MEMORY[name]} {format_bytes(size)}" for name, size in best.generate.memory.items())
    yield Fact("memory of a chip", f"{memory_text}; {format_bytes(best.free_bytes)} left")
    if result.as_written and (best.weights, best.cache) != ("bf16", "bf16"):
        as_written = result.as_written
        words = f"makes {three_digits(as_written.tokens_per_s_per_chip)} tok/s"
        words = words if service.requests_per_s is None else f"needs {counted(as_written.num_chips, 'chip')}"
        yield Fact(
            "all in bf16",
            f"the best {words} at TPOT {format_seconds(as_written.tpot_s)}: "
            f"{', '.join(line.strip() for line in engine_lines(as_written))}",
        )


def _gap_words(best: ServicePlan) -> str:
    """Returns the longest time between two tokens, with and without chunks."""
    gap_text, unchunked = format_seconds(best.itl_s or 0.0), format_seconds(best.generate.step_s + best.prefill.step_s)
    if best.has_pools:
        return f"at most {gap_text}, a step"
    if not best.chunk_len:
        return f"at most {gap_text}, with whole prompts"
    return f"at most {gap_text} with chunks of {best.chunk_len:,} tokens; {unchunked} with whole prompts, TTFT " + (
        format_seconds(best.prefill.step_s)
    )


_MEMORY = {"weights": "weights", "kv_cache": "KV", "activations": "activations"}


def _step_words(pool: EnginePool) -> str:
    """Returns the seconds of a step and of its parts by themselves, the longest first, without small ones."""
    parts = sorted(pool.bounds_s.items(), key=lambda part: -part[1])
    words = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds > 0.03 * pool.step_s)
    return f"{format_seconds(pool.step_s)} ({words}, each by itself)"


def frontier_figure(result: ServiceResult) -> Figure:
    curves, split_curves = (
        {name: [(1e3 * x, factor * y) for x, y in points] for name, points in lines.items()}
        for lines, factor in ((result.frontiers, 1.0), (result.split, 1e3))
    )
    service, cluster, first_plan = result.service, result.setting.cluster, result.plans[0]
    return services_figure(
        curves,
        split_curves,
        (1e3 * first_plan.tpot_s, first_plan.tokens_per_s_per_chip, f"the first: {engine_lines(first_plan)[0]}"),
        title=f"{result.setting.model.name} on {cluster.short_name}: services that nothing beats",
        subtitle=f"{service.prompt_len:,} tokens of prompt, {service.output_len:,} of output{target_words(service)}",
    )


def _usd(dollars: float) -> str:
    return f"{dollars:.3g}" if dollars < 100 else f"{dollars:,.0f}"


def why_not_text(result: ServiceResult, told: ServiceWhyNot) -> Iterator[Piece]:
    """Yields why an engine is refused, or its best service beside the first and what takes the time of its chips."""
    yield ""
    yield f"Why not {', '.join(f'{name} {str(value).lower()}' for name, value in told.asked.items())}"
    if told.plan is None:
        yield Fact("  refused", told.refusal)
        return
    first_plan, best = result.plans[0], told.plan
    yield Fact("  best with it", ", ".join(line.strip() for line in engine_lines(best)))
    service = result.service
    figures = {
        "TTFT": (best.ttft_s, service.ttft_s), "TPOT": (best.tpot_s, service.tpot_s), "ITL": (best.itl_s, service.itl_s)
    }  # fmt: skip
    for name, factor in told.misses.items():
        if name in figures:
            own_text, target_text = (format_seconds(seconds or 0.0) for seconds in figures[name])
            yield Fact(f"  misses {name}", f"{own_text}, {factor - 1:.1%} above {target_text}")
        else:
            yield Fact(
                "  misses the load", f"it needs {best.num_chips:,} chips of {result.setting.cluster.num_chips:,}"
            )
    if best == first_plan:
        yield Fact("", "that is the first plan itself")
        return
    ratio = best.tokens_per_s_per_chip / first_plan.tokens_per_s_per_chip - 1
    yield Fact(
        "  output",
        f"{three_digits(best.tokens_per_s_per_chip)} tok/s per chip, {abs(ratio):.1%} "
        f"{'more' if ratio > 0 else 'fewer'} than the first",
    )
    for name, field in (("TPOT", "tpot_s"), ("TTFT", "ttft_s")):
        own_text, first_text = (format_seconds(getattr(plan, field)) for plan in (best, first_plan))
        yield Fact(f"  {name}", f"{own_text}, the first's is {first_text}")
    rows = [(f"  {name}", *pair) for name, pair in told.chip_s.items()]
    columns = [Heading(name, format_seconds) for name in ("first", "here")]
    yield Table([Heading("  chip-time of a token", None, "part"), *columns], rows)
