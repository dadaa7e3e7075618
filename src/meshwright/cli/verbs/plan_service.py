"""The answer of `plan --serve`: the ways to serve a model on a cluster."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshwright.api.rates import rates_for
from meshwright.batching.record import WARM_UP, ServingRecord, ServingSummary
from meshwright.batching.trace import load_trace
from meshwright.cli.fields import field_value, parse_fields, parse_why_not, split_pairs, with_fields
from meshwright.cli.output import save_to, three_digits
from meshwright.cli.verbs.plan_words import engine_lines, target_words
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_bytes, format_seconds, parse_count
from meshwright.nn.hf.gguf import as_folder, open_files
from meshwright.nn.hf.published import why_refused
from meshwright.plan.serving.file import save_service, service_file
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.result import EnginePool, ServicePlan, ServiceResult
from meshwright.plan.serving.service import Service, Speculation, parse_load, parse_target
from meshwright.plan.serving.storing import STORED, stored_dtypes
from meshwright.plan.why.setup_changes import changed_setting, parse_what_if
from meshwright.plan.why.why_not_service import ServiceWhyNot, why_not_service
from meshwright.report.answer import Answer, Fact, Heading, Paragraph, Piece, Table, TableColumns
from meshwright.report.figure import Figure
from meshwright.report.plans.pareto import services_figure
from meshwright.report.plans.timeline import slots_figure
from meshwright.simulate.service import service_targets, service_traffic, simulate_service
from meshwright.spec.catalogue import load_model, weights_of
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.hf.published import folder_weights

OF_TRAINING = {
    "batch": "--batch",
    "seq_len": "--seq",
    "tokens": "--tokens",
    "collective_matmul": "--collective-matmul",
    "full": "--full",
    "breakdown": "--breakdown",
    "verify": "--verify",
    "recipe": "--recipe",
}
"""Options of `plan` that services do not take in this version."""

SERVED_SHARE = 0.9
"""Share of the requests that arrive below which it is said that fewer end."""

BUSY = 0.8
"""Share of what engines can serve from which a queue is worth a word."""


def service_answer(given: Any) -> Answer:
    """Returns the answer of `plan --serve`; ``given`` are the options of `plan`."""
    for name, flag in OF_TRAINING.items():
        if getattr(given, name):
            raise InputError(f"{flag} is for plans of training. Leave it out with --serve.")
    for name, flag in (("prompt", "--prompt"), ("output", "--output")):
        if getattr(given, name) is None:
            raise InputError(f"--serve needs {flag}, tokens in the mean. Write {flag} 512.")
    fields = parse_fields(given.pairs, sections=("model", "assumptions"))
    model = with_fields(load_model(given.model), "model", fields["model"])
    cluster = parse_cluster(given.on)
    if cluster.kind == "host":
        raise CannotRunError(f"services on {given.on} are not planned in this version. Name chips, such as h100:8x1.")
    if given.price is not None:
        cluster = msgspec.structs.replace(cluster, chip=cluster.chip.priced(given.price))
    service = Service(
        prompt_len=given.prompt,
        output_len=given.output,
        ttft_s=given.ttft,
        tpot_s=given.tpot,
        requests_per_s=given.rate,
        prefix_share=given.prefix_share,
        itl_s=given.itl,
        chunk_len=given.chunk,
        speculation=given.accept
        and Speculation(acceptance=given.accept, draft_cost=given.draft_cost, num_drafts=given.drafts),
    )
    weights, note = given.weights, ""
    if weights is None and (folder := weights_of(given.model)):
        with open_files(path := as_folder(Path(folder))) as tensors:
            found = folder_weights(model, path, tensors)
            refused = why_refused(model, tensors, found.quantisation)
        if found.dtype == "fp32":
            note = "the folder is in float32, which serve keeps; this plan is in bf16: convert it with --dtype bf16"
        if found.stored:
            model, weights = msgspec.structs.replace(model, stored=found.stored), STORED
            narrow = ", ".join(dict.fromkeys(dtype for _, dtype, _ in found.stored.matrices))
            note = f"weights as {given.model} stores them: {narrow} with products in bf16. --weights names others"
        note = "; ".join(filter(None, (note, *found.notes, refused and f"serve would refuse the folder: {refused}")))
    asked = (tuple(map(str.strip, text.split(","))) if text is not None else () for text in (weights, given.kv))
    stored = stored_dtypes(*asked, chip=cluster.chip)
    setting = service_setting(model, cluster, rates_for(cluster, given.calibration, fitted=True))
    assumed = with_fields(setting.assumptions, "assumptions", fields["assumptions"])
    setting = msgspec.structs.replace(setting, assumptions=assumed)
    result = plan_service(setting, service, stored=stored, axes=given.axes, pareto=given.pareto)
    if given.out:
        save_to(given.out, lambda path: save_service(service_file(result, result.plans[0]), path))
    facts, parts = result.to_json(), [*([Paragraph(note)] if note else []), *service_text(result, given.top)]
    figures = {given.png: lambda: _frontier_figure(result)}
    if given.is_simulated:
        plan, record = _simulated(result, given)
        # traces are summed up whole, random arrivals once they are steady
        under_load = record.summary(service_targets(service), warm_up=0.0 if given.trace else WARM_UP)
        facts["simulated"] = msgspec.to_builtins(under_load)
        parts += _load_text(under_load, plan, given)
        figures[given.slots] = lambda: _slots_figure(result, plan, record)
    if told := [why_not_service(result, parse_why_not(text)) for text in given.why_nots]:
        facts["why_not"] = told
        parts += [piece for one in told for piece in _why_not_text(result, one)]
    for changed in [_changed(result, text) for text in given.what_ifs]:
        facts.setdefault("what_if", []).append(changed.facts)
        parts += changed.pieces
    return Answer(facts, parts, figures, [[_row(plan) for plan in result.listed(given.top)]])


def _row(plan: ServicePlan) -> dict[str, Any]:
    """Returns a row of CSV: the engines in words, their batches, and the figures of the service."""
    words = {"engines": plan.generate.words, "prefill_engines": plan.prefill.words if plan.has_pools else ""}
    batches = {"batch": plan.generate.batch_seqs, "prompts_at_once": plan.prefill.batch_seqs}
    figures = {name: value for name, value in plan.to_json().items() if not isinstance(value, dict)}
    return {**words, **batches, "bound_by": plan.bound_by, **figures}


def _simulated(result: ServiceResult, given: Any) -> tuple[ServicePlan, ServingRecord]:
    """Returns the plan that is simulated, and what happened: the first, or the first without pools for a policy."""
    if given.chunk and given.policy not in (None, "chunked"):
        raise InputError(f"--policy {given.policy} prefills whole prompts. Leave out --chunk.")
    fitting = [plan for plan in result.plans if given.policy is None or not plan.has_pools]
    if not fitting:
        raise CannotRunError(f"--policy {given.policy} is for engines that do both phases, and every plan has pools.")
    if given.trace:
        if given.simulate or given.prompts or given.outputs:
            raise InputError("--trace has the requests. Leave out --simulate, --prompts and --outputs.")
        traffic = load_trace(given.trace)
    elif given.rate is None and given.concurrency is None:
        raise InputError("--simulate needs --rate 10/s, the requests that arrive, or --concurrency 64, a client's own.")
    else:
        traffic = service_traffic(
            result.service,
            duration_s=given.simulate,
            requests_per_s=given.rate or fitting[0].requests_per_s,
            lengths=(given.prompts, given.outputs),
            at_once=given.rate is None,
        )
    record = simulate_service(
        result,
        fitting[0],
        traffic,
        policy=given.policy or "chunked",
        concurrency=given.concurrency or math.inf,
        spans=bool(given.slots),
    )
    return fitting[0], record


def _slots_figure(result: ServiceResult, plan: ServicePlan, record: ServingRecord) -> Figure:
    names = ("prefill", "generate") if plan.has_pools else ("engine",)
    service = result.service
    return slots_figure(
        dict(zip(names, record.spans, strict=True)),
        title=f"{result.setting.model.name} on {result.setting.cluster.short_name}: who holds which slot",
        subtitle=f"{service.prompt_len:,} tokens of prompt, {service.output_len:,} of output{target_words(service)}",
    )


def _load_text(found: ServingSummary, plan: ServicePlan, given: Any) -> Iterator[Piece]:
    """Yields what requests meet that arrive at random, in percentiles."""
    rows = [
        {"of a request": name, **msgspec.structs.asdict(getattr(found, field))}
        for name, field in (
            ("queue", "queue"), ("TTFT", "ttft"), ("TPOT", "tpot"), ("between tokens", "itl"), ("whole", "latency")
        )
    ]  # fmt: skip
    columns: dict[str, Any] = {"the first under load": "of a request"}
    for name in ("mean", "p50", "p90", "p99"):  # answers of one token have no time between tokens
        columns[name] = name, lambda seconds: "-" if math.isnan(seconds) else format_seconds(seconds)
    yield ""
    yield Table.of(rows, columns)
    yield ""
    policy = f", policy {given.policy}, on {', '.join(map(str.strip, engine_lines(plan)))}" * bool(given.policy)
    source = f"{given.trace or f'{format_seconds(given.simulate or 0)} of Poisson arrivals'}"
    source += f" at {three_digits(given.rate or found.offered_per_s)} requests/s"
    if given.concurrency:
        most = f"at most {counted(given.concurrency, 'request')} on their way"
        source = f"a client with {most}" if given.rate is None and not given.trace else f"{source}, {most}"
    yield Fact("simulated", f"{source}{policy}")
    behind = found.requests_per_s < SERVED_SHARE * found.offered_per_s
    yield Fact(
        "served",
        f"{three_digits(found.requests_per_s)} requests/s, {found.output_tokens_per_s:,.0f} tokens/s; "
        + f"{found.met:.0%} of requests meet the targets; " * bool(given.ttft or given.tpot)
        + f"{found.num_preempted} preempted, {found.page_waste:.1%} of pages wasted"
        + "; fewer end than arrive: simulate for longer than a request takes, or lower the rate" * behind,
    )
    yield Fact(
        "engines",
        "; ".join(f"busy {pool.utilisation:.0%}, {pool.mean_running:.3g} sequences in each" for pool in found.pools),
    )


def service_text(result: ServiceResult, top: int) -> Iterator[Piece]:
    """Yields the plans, what the best consists of, and the conventions behind the numbers."""
    service, cluster = result.service, result.setting.cluster
    known = f", {100 * service.prefix_share:.6g}% of them cached" * bool(service.prefix_share)
    yield (
        f"serving {result.setting.model.name} on {cluster.short_name} "
        f"({counted(cluster.num_chips, 'chip')}): {service.prompt_len:,} tokens of prompt{known}, "
        f"{service.output_len:,} of output{target_words(service)}"
    )
    listed = result.listed(top)
    loaded = service.requests_per_s is not None
    first = "best first" if not result.is_frontier else "fewest chips first" if loaded else "most tokens first"
    yield Table.of(listed, _columns(f"engines, {first}", service)).known()
    if result.is_frontier:
        left = len(result.plans) - len(listed)
        more = f"; {left} more of them are in --json" * bool(left)
        yield f"none of these plans is beaten in both TPOT and tok/s{more}"
    yield from _best_text(result, listed[0])
    yield Fact(
        "counted",
        f"{result.num_services:,} ways to serve fit in memory, {result.num_meeting:,} of them meet the targets"
        if any(target is not None for target in (service.ttft_s, service.tpot_s, service.itl_s))
        else f"{result.num_services:,} ways to serve fit in memory",
    )
    yield from result.notes


def _columns(first: str, service: Service) -> TableColumns:
    """Returns the columns of plans; ``first`` is the title of the first."""
    made = ("tokens_per_s_per_chip", three_digits, "tokens_per_s_per_chip")
    loaded = service.requests_per_s is not None
    return {
        first: lambda plan: "\n".join(engine_lines(plan)),
        "TTFT": ("ttft_s", format_seconds),
        "TPOT": ("tpot_s", format_seconds),
        "chips" if loaded else "tok/s": ("num_chips", "{:,}".format) if loaded else made,
        "$/M in": ("usd_per_m_input", _usd, "usd_per_m_input"),
        "$/M out": ("usd_per_m_output", _usd, "usd_per_m_output"),
        "bound by": "bound_by",
    }


def _best_text(result: ServiceResult, best: ServicePlan) -> Iterator[Piece]:
    service, cluster = result.service, result.setting.cluster
    chips = counted(best.num_chips, "chip")
    idle = best.num_chips - best.generate.num_chips - best.has_pools * best.prefill.num_chips
    rate = f"{three_digits(best.requests_per_s)} requests/s on {chips}{f', {idle} of them idle' * bool(idle)}"
    if service.requests_per_s is not None:
        rate = f"{service.load_words} need {chips} of {cluster.num_chips:,}, which serve up to " + three_digits(
            best.requests_per_s
        )
        busy = service.requests_per_s / best.requests_per_s
        if busy > BUSY:
            rate += f"; {busy:.0%} busy, so that requests queue, which --simulate shows and TTFT leaves out"
    yield Fact("the first", rate)
    yield Fact("its decode step", _step_words(best.generate))
    if service.speculation:
        yield Fact(
            "its drafts",
            f"{best.num_drafts} a step, which makes {best.step_tokens:.3g} tokens of a sequence in the mean: "
            f"{format_seconds(best.generate.step_s / best.step_tokens)} a token",
        )
    if service.chunk_len or service.itl_s:
        yield Fact("between tokens", _gap_words(best))
    transfer = f"; sending its keys and values {format_seconds(best.transfer_s)}" * best.has_pools
    prompts = counted(best.prefill.batch_seqs, "prompt")
    yield Fact("its prefill", f"of {prompts}: {_step_words(best.prefill)}{transfer}")
    memory = ", ".join(f"{_MEMORY[name]} {format_bytes(size)}" for name, size in best.generate.memory.items())
    yield Fact("memory of a chip", f"{memory}; {format_bytes(best.free_bytes)} left")
    if result.as_written and (best.weights, best.cache) != ("bf16", "bf16"):
        other = result.as_written
        made = f"makes {three_digits(other.tokens_per_s_per_chip)} tok/s"
        made = made if service.requests_per_s is None else f"needs {counted(other.num_chips, 'chip')}"
        yield Fact(
            "all in bf16",
            f"the best {made} at TPOT {format_seconds(other.tpot_s)}: "
            f"{', '.join(line.strip() for line in engine_lines(other))}",
        )


def _gap_words(best: ServicePlan) -> str:
    """Returns the longest time between two tokens, with and without chunks."""
    gap, whole = format_seconds(best.itl_s or 0.0), format_seconds(best.generate.step_s + best.prefill.step_s)
    if best.has_pools:
        return f"at most {gap}, a step"
    if not best.chunk_len:
        return f"at most {gap}, with whole prompts"
    return f"at most {gap} with chunks of {best.chunk_len:,} tokens; {whole} with whole prompts, TTFT " + (
        format_seconds(best.prefill.step_s)
    )


_MEMORY = {"weights": "weights", "kv_cache": "KV", "activations": "activations"}


def _step_words(pool: EnginePool) -> str:
    """Returns the seconds of a step and of its parts by themselves, the longest first, without small ones."""
    parts = sorted(pool.bounds_s.items(), key=lambda one: -one[1])
    said = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds > 0.03 * pool.step_s)
    return f"{format_seconds(pool.step_s)} ({said}, each by itself)"


def _frontier_figure(result: ServiceResult) -> Figure:
    curves, split = (
        {name: [(1e3 * x, factor * y) for x, y in points] for name, points in found.items()}
        for found, factor in ((result.frontiers, 1.0), (result.split, 1e3))
    )
    service, cluster, first = result.service, result.setting.cluster, result.plans[0]
    return services_figure(
        curves,
        split,
        (1e3 * first.tpot_s, first.tokens_per_s_per_chip, f"the first: {engine_lines(first)[0]}"),
        title=f"{result.setting.model.name} on {cluster.short_name}: services that nothing beats",
        subtitle=f"{service.prompt_len:,} tokens of prompt, {service.output_len:,} of output{target_words(service)}",
    )


def _usd(dollars: float) -> str:
    return f"{dollars:.3g}" if dollars < 100 else f"{dollars:,.0f}"


# -- questions --------------------------------------------------------------------------------------------


def _why_not_text(result: ServiceResult, told: ServiceWhyNot) -> Iterator[Piece]:
    """Yields why an engine is refused, or its best service beside the first and what takes the time of its chips."""
    yield ""
    yield f"Why not {', '.join(f'{name} {str(value).lower()}' for name, value in told.asked.items())}"
    if told.plan is None:
        yield Fact("  refused", told.refusal)
        return
    first, best = result.plans[0], told.plan
    yield Fact("  best with it", ", ".join(line.strip() for line in engine_lines(best)))
    service = result.service
    figures = {
        "TTFT": (best.ttft_s, service.ttft_s), "TPOT": (best.tpot_s, service.tpot_s), "ITL": (best.itl_s, service.itl_s)
    }  # fmt: skip
    for name, times in told.misses.items():
        if name in figures:
            here, target = (format_seconds(seconds or 0.0) for seconds in figures[name])
            yield Fact(f"  misses {name}", f"{here}, {times - 1:.1%} above {target}")
        else:
            yield Fact(
                "  misses the load", f"it needs {best.num_chips:,} chips of {result.setting.cluster.num_chips:,}"
            )
    if best == first:
        yield Fact("", "that is the first plan itself")
        return
    ratio = best.tokens_per_s_per_chip / first.tokens_per_s_per_chip - 1
    yield Fact(
        "  output",
        f"{three_digits(best.tokens_per_s_per_chip)} tok/s per chip, {abs(ratio):.1%} "
        f"{'more' if ratio > 0 else 'fewer'} than the first",
    )
    for name, field in (("TPOT", "tpot_s"), ("TTFT", "ttft_s")):
        here, other = (format_seconds(getattr(one, field)) for one in (best, first))
        yield Fact(f"  {name}", f"{here}, the first's is {other}")
    rows = [(f"  {name}", *pair) for name, pair in told.chip_s.items()]
    shown = [Heading(name, format_seconds) for name in ("first", "here")]
    yield Table([Heading("  chip-time of a token", None, "part"), *shown], rows)


def _changed(result: ServiceResult, text: str) -> Answer:
    """Returns the first plan now and with what ``text`` changes, side by side: factors of the chip, links and cluster
    (chip.hbm=2x), fields of the model and of the service (service.prompt_len=32Ki)."""
    factors, fields = {}, {"model": {}, "service": {}}  # type: ignore[var-annotated]
    for name, value in split_pairs(text, "name=value. Write for example chip.hbm=2x", what="--what-if").items():
        section, _, field = name.partition(".")
        if section in fields:
            now = getattr(getattr(result.setting, section, result.service), field, None)
            fields[section][field] = _field_of(name, value, now)
        elif name in ("batch", "seq"):
            raise InputError(f"--what-if {name}: services have none. Change service.prompt_len or service.output_len.")
        else:
            factors |= parse_what_if(f"{name}={value}")
    setting, words = changed_setting(result.setting, factors)
    setting = msgspec.structs.replace(setting, model=with_fields(setting.model, "model", fields["model"]))
    service = with_fields(result.service, "service", fields["service"])
    for section, before in (("model", result.setting.model), ("service", result.service)):
        words += tuple(f"{section}.{name}: {getattr(before, name)} -> {new}" for name, new in fields[section].items())
    facts: dict[str, Any] = {
        "asked": text,
        "changed": words,
        "now": result.plans[0].to_json(),
        "then": None,
        "note": "",
    }
    said: list[Piece] = ["", *(Paragraph(f"{'    and' if n else 'What if'} {one}", 10) for n, one in enumerate(words))]
    try:
        then = plan_service(setting, service, stored=result.stored, axes=result.axes, pareto=result.is_frontier).plans[
            0
        ]
    except CannotRunError as error:
        return Answer({**facts, "note": str(error)}, [*said, Fact("  nothing serves", str(error))])
    both = [result.plans[0], then]
    table = Table.of(both, _columns("engines", service)).known()
    rows = [[f"  {name}", *row] for name, row in zip(("now", "then"), table.rows, strict=True)]
    made = then.tokens_per_s_per_chip / both[0].tokens_per_s_per_chip
    said += [
        Table([Heading("", None, "plan"), *table.columns], rows),
        Fact("  in all", f"{three_digits(made)} times the output tokens per second and chip"),
    ]
    return Answer({**facts, "then": then.to_json()}, said)


def _field_of(name: str, text: str, now: Any) -> Any:
    """Returns the new value of a field: a factor of the present number (2x), a time, a load, a count, or TOML."""
    what, field = f"--what-if {name}", name.rpartition(".")[2]
    if text.endswith("x") and isinstance(now, int | float):
        (factor,) = parse_what_if(f"chip.flops={text}").values()
        return round(now * factor) if isinstance(now, int) else now * factor
    if field in ("ttft_s", "tpot_s"):
        return parse_target(text, what=what)
    if field == "requests_per_s":
        return parse_load(text, what=what)
    return parse_count(text, what=what) if text[:1].isdigit() and text[-1:] in "ikMB" else field_value(text)
