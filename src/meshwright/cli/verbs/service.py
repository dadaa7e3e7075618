"""`meshwright service`: the best ways to serve a model on a cluster."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from meshwright.api.rates import rates_for
from meshwright.batching.limits import Policy
from meshwright.batching.record import WARM_UP, ServingRecord, ServingSummary
from meshwright.batching.traffic import load_trace
from meshwright.cli.fields import field_value, parse_fields, parse_why_not, split_pairs, with_fields
from meshwright.cli.output import save_to, three_digits
from meshwright.cli.verb import Count, Load, TargetTime, argument, option, verb
from meshwright.cli.verbs.plan_words import PlannerOptions, engine_lines, what_if_option, why_not_option
from meshwright.cli.verbs.service_words import (
    frontier_figure,
    service_columns,
    service_text,
    slots_chart,
    why_not_text,
)
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.extras import require
from meshwright.core.units import counted, format_seconds, parse_count
from meshwright.plan.plan_file import ServicePlan, save_plan
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.result import ServiceResult
from meshwright.plan.serving.service import MAX_DRAFTS, Service, Speculation, parse_load, parse_target
from meshwright.plan.serving.storing import STORED, StoredDtypes, stored_dtypes
from meshwright.plan.why.setup_changes import CHANGES, JOB_CHANGES, changed_setting, parse_what_if
from meshwright.plan.why.why_not_service import ServiceWhyNot, why_not_service
from meshwright.report.answer import Answer, Fact, Facts, Heading, Paragraph, Piece, Table
from meshwright.simulate.service import service_targets, service_traffic, simulate_service
from meshwright.spec.catalogue import load_model, weights_of
from meshwright.spec.chip import Chip
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.hf.published import folder_weights
from meshwright.spec.model import Model

DRAFTED = {"accept": "--accept"}
SIMULATED = {"is_simulated": "--simulate or --trace"}

ASKED = "tensor=16,batch=64"
CHANGED = (*(name for name in CHANGES if name not in JOB_CHANGES), "service.FIELD", "model.FIELD")
"""An engine that may be asked about, and what may be changed."""

SERVED_SHARE = 0.9
"""Share of the requests that arrive below which it is said that fewer end."""


class Given(PlannerOptions):
    model: str = argument()
    on: str = option("The cluster: h100:8x8, v5e:4x4.")
    prompt: Count = option("Tokens of a prompt, in the mean.")
    output: Count = option("Tokens of an answer, in the mean.")
    ttft: TargetTime | None = option("Target of the time to the first token, such as 1s.", group="Targets and load")
    tpot: TargetTime | None = option("Target of the time per output token, such as 20ms.", group="Targets and load")
    itl: TargetTime | None = option(
        "Target of the longest time between two tokens, such as 50ms: cuts prompts into chunks.",
        group="Targets and load",
    )
    rate: Load | None = option("Load, such as 20/s or 600/min: gives the number of chips.", group="Targets and load")
    weights: str | None = option("Dtypes of weights to try, such as int8 or bf16,int8.", group="Engines")
    kv: str | None = option("Dtypes of cached keys and values to try.", group="Engines")
    prefix_share: float = option(
        "Share of a prompt that is cached already.", "--prefix-hits", default=0.0,
        type=click.FloatRange(0, 1, max_open=True), group="Engines", is_rare=True)  # fmt: skip
    chunk: Count | None = option("Tokens of a prompt's chunk, such as 512.", group="Engines", is_rare=True)
    accept: float | None = option(
        "Speculation: the probability that a drafted token is right.",
        type=click.FloatRange(0, 1, min_open=True),
        group="Speculation",
    )
    drafts: int | None = option(
        "Drafts of a step [default: as many as make tokens fastest].", type=click.IntRange(0, MAX_DRAFTS),
        needs=DRAFTED, group="Speculation", is_rare=True)  # fmt: skip
    draft_cost: float = option(
        "Time of a draft's step over one of the model.",
        type=click.FloatRange(0),
        default=0.05,
        needs=DRAFTED,
        group="Speculation",
        is_rare=True,
    )
    simulate: TargetTime | None = option(
        "Simulate the first plan at --rate for so long, such as 600s.", group="Simulation"
    )
    trace: Path | None = option(
        "Simulate the requests of this file: arrival_s, prompt, output.", group="Simulation", is_rare=True
    )
    prompts: str | None = option(
        "Lengths of simulated prompts: 1..999, lognormal:500:0.8.", needs=SIMULATED, group="Simulation", is_rare=True
    )
    outputs: str | None = option("Lengths of simulated outputs.", needs=SIMULATED, group="Simulation", is_rare=True)
    concurrency: Count | None = option(
        "Most requests of a client on their way at once.", needs=SIMULATED, group="Simulation", is_rare=True
    )
    policy: Policy | None = option(
        "Simulate the first plan without pools: how its engines take prompts up.",
        needs=SIMULATED,
        group="Simulation",
        is_rare=True,
    )
    slots: Path | None = option(
        "Draw who holds which slot of the simulated engines when.", needs=SIMULATED, group="Simulation", is_rare=True
    )

    why_nots = why_not_option(ASKED)
    what_ifs = what_if_option(", ".join(CHANGED))

    @property
    def is_simulated(self) -> bool:
        """True if requests are sent to the service."""
        return self.simulate is not None or self.trace is not None

    @property
    def service(self) -> Service:
        """The requests and targets."""
        speculation = None
        if self.accept:
            speculation = Speculation(acceptance=self.accept, draft_cost=self.draft_cost, num_drafts=self.drafts)
        return Service(
            prompt_len=self.prompt,
            output_len=self.output,
            ttft_s=self.ttft,
            tpot_s=self.tpot,
            requests_per_s=self.rate,
            prefix_share=self.prefix_share,
            itl_s=self.itl,
            chunk_len=self.chunk,
            speculation=speculation,
        )


@verb(Given)
def command(given: Given) -> Answer:
    """Find how to serve MODEL (a name, a config.json or a folder) on a cluster: engines, pools, times and cost."""
    fields = parse_fields(given.pairs, sections=("model", "assumptions"))
    model = with_fields(load_model(given.model), "model", fields["model"])
    cluster = parse_cluster(given.on)
    if cluster.kind == "host":
        raise CannotRunError(f"services on {given.on} are not planned in this version. Name chips, such as h100:8x1.")
    if given.price is not None:
        cluster = replace(cluster, chip=cluster.chip.priced(given.price))
    model, dtype_options, note = _stored(model, given, cluster.chip)
    setting = service_setting(model, cluster, rates_for(cluster, given.calibration, fitted=True))
    setting = replace(setting, assumptions=with_fields(setting.assumptions, "assumptions", fields["assumptions"]))
    result = plan_service(setting, given.service, stored=dtype_options, axes=given.axes, pareto=given.pareto)
    if given.out:
        save_to(given.out, lambda path: save_plan(result.plans[0], path))
    facts, pieces = result.to_json(), [*([Paragraph(note)] if note else []), *service_text(result, given.top)]
    pictures = {given.png: lambda: frontier_figure(result)}
    if given.is_simulated:
        plan, record = _simulated(result, given)
        # traces are summed up whole, random arrivals once they are steady
        load_summary = record.summary(service_targets(given.service), warm_up=0.0 if given.trace else WARM_UP)
        facts["simulated"] = msgspec.to_builtins(load_summary)
        pieces += _load_text(load_summary, plan, given)
        pictures[given.slots] = lambda: slots_chart(result, plan, record)
    if answers := [why_not_service(result, parse_why_not(text, ASKED)) for text in given.why_nots]:
        facts["why_not"] = [_why_not_facts(answer) for answer in answers]
        pieces += [piece for answer in answers for piece in why_not_text(result, answer)]
    for changed_answer in [_changed(result, text) for text in given.what_ifs]:
        facts.setdefault("what_if", []).append(changed_answer.facts)
        pieces += changed_answer.pieces
    return Answer(facts, pieces, pictures, [[_row(plan) for plan in result.listed(given.top)]])


def _stored(model: Model, given: Given, chip: Chip) -> tuple[Model, tuple[StoredDtypes, ...], str]:
    """Returns the model as its folder stores it, the dtypes to try, and what is to be said of the folder."""
    weights_text, note = given.weights, ""
    if weights_text is None and (folder := weights_of(given.model)):
        require("run", f"reading the weights of {folder} (--weights bf16 does not)")
        from meshwright.nn.hf.gguf import as_folder, open_files
        from meshwright.nn.hf.published import why_refused

        with open_files(path := as_folder(Path(folder))) as tensors:
            on_disk = folder_weights(model, path, tensors)
            refusal = why_refused(model, tensors, on_disk.quantisation)
        if on_disk.dtype == "fp32":
            note = "the folder is in float32, which serve keeps; this plan is in bf16: convert it with --dtype bf16"
        if on_disk.stored:
            model, weights_text = replace(model, stored=on_disk.stored), STORED
            dtypes_text = ", ".join(dict.fromkeys(dtype for _, dtype, _ in on_disk.stored.matrices))
            note = f"weights as {given.model} stores them: {dtypes_text} with products in bf16. --weights names others"
        note = "; ".join(filter(None, (note, *on_disk.notes, refusal and f"serve would refuse the folder: {refusal}")))
    dtypes = (tuple(map(str.strip, text.split(","))) if text is not None else () for text in (weights_text, given.kv))
    return model, stored_dtypes(*dtypes, chip=chip), note


def _row(plan: ServicePlan) -> Facts:
    """Returns a row of CSV: the engines in words, their batches, and the figures of the service."""
    engine_facts = {"engines": plan.generate.words, "prefill_engines": plan.prefill.words if plan.has_pools else ""}
    batch_facts = {"batch": plan.generate.batch_seqs, "prompts_at_once": plan.prefill.batch_seqs}
    figure_by_name = {name: value for name, value in plan.to_json().items() if not isinstance(value, dict)}
    return {**engine_facts, **batch_facts, "bound_by": plan.generate.bound_by, **figure_by_name}


def _why_not_facts(answer: ServiceWhyNot) -> Facts:
    """Returns the answer as plain data, with the engines of its plan whole."""
    plan = answer.plan
    plan_facts = plan and {**plan.to_json(), "generate": plan.generate, "prefill": plan.prefill}
    return {**msgspec.structs.asdict(answer), "plan": plan_facts}


def _simulated(result: ServiceResult, given: Given) -> tuple[ServicePlan, ServingRecord]:
    """Returns the plan that is simulated, and what happened: the first, or the first without pools for a policy."""
    if given.chunk and given.policy not in (None, "chunked"):
        raise InputError(f"--policy {given.policy} prefills whole prompts. Leave out --chunk.")
    plans = [plan for plan in result.plans if given.policy is None or not plan.has_pools]
    if not plans:
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
            duration_s=given.simulate or 0.0,
            requests_per_s=given.rate or plans[0].predicted.requests_per_s,
            lengths=(given.prompts, given.outputs),
            at_once=given.rate is None,
        )
    record = simulate_service(
        result,
        plans[0],
        traffic,
        policy=given.policy or "chunked",
        concurrency=given.concurrency or math.inf,
        spans=bool(given.slots),
    )
    return plans[0], record


def _load_text(summary: ServingSummary, plan: ServicePlan, given: Given) -> Iterator[Piece]:
    """Yields what requests meet that arrive at random, in percentiles."""
    rows = [
        {"of a request": name, **msgspec.structs.asdict(getattr(summary, field))}
        for name, field in (
            ("queue", "queue"), ("TTFT", "ttft"), ("TPOT", "tpot"), ("between tokens", "itl"), ("whole", "latency")
        )
    ]  # fmt: skip
    columns: Facts = {"the first under load": "of a request"}
    for name in ("mean", "p50", "p90", "p99"):  # answers of one token have no time between tokens
        columns[name] = name, lambda seconds: "-" if math.isnan(seconds) else format_seconds(seconds)
    yield ""
    yield Table.of(rows, columns)
    yield ""
    policy_text = f", policy {given.policy}, on {', '.join(map(str.strip, engine_lines(plan)))}" * bool(given.policy)
    source = f"{given.trace or f'{format_seconds(given.simulate or 0)} of Poisson arrivals'}"
    source += f" at {three_digits(given.rate or summary.offered_per_s)} requests/s"
    if given.concurrency:
        limit_text = f"at most {counted(given.concurrency, 'request')} on their way"
        source = f"a client with {limit_text}" if given.rate is None and not given.trace else f"{source}, {limit_text}"
    yield Fact("simulated", f"{source}{policy_text}")
    is_behind = summary.requests_per_s < SERVED_SHARE * summary.offered_per_s
    yield Fact(
        "served",
        f"{three_digits(summary.requests_per_s)} requests/s, {summary.output_tokens_per_s:,.0f} tokens/s; "
        + f"{summary.met:.0%} of requests meet the targets; " * bool(given.ttft or given.tpot)
        + f"{summary.num_preempted} preempted, {summary.page_waste:.1%} of pages wasted"
        + "; fewer end than arrive: simulate for longer than a request takes, or lower the rate" * is_behind,
    )
    yield Fact(
        "engines",
        "; ".join(f"busy {pool.utilisation:.0%}, {pool.mean_running:.3g} sequences in each" for pool in summary.pools),
    )


# -- what if ----------------------------------------------------------------------------------------------


def _changed(result: ServiceResult, text: str) -> Answer:
    """Returns the first plan now and with what ``text`` changes, side by side: factors of the chip, links and cluster
    (chip.hbm=2x), fields of the model and of the service (service.prompt_len=32Ki)."""
    factor_by_name, fields = {}, {"model": {}, "service": {}}  # type: ignore[var-annotated]
    for name, value in split_pairs(text, "name=value. Write for example chip.hbm=2x", what="--what-if").items():
        section, _, field = name.partition(".")
        if section in fields:
            old_value = getattr(getattr(result.setting, section, result.service), field, None)
            fields[section][field] = _field_of(name, value, old_value)
        elif name in JOB_CHANGES:
            raise InputError(f"--what-if {name}: services have none. Change service.prompt_len or service.output_len.")
        else:
            factor_by_name |= parse_what_if(f"{name}={value}", CHANGED)
    setting, edits = changed_setting(result.setting, factor_by_name)
    setting = replace(setting, model=with_fields(setting.model, "model", fields["model"]))
    service = with_fields(result.service, "service", fields["service"])
    for section, struct in (("model", result.setting.model), ("service", result.service)):
        edits += tuple(f"{section}.{name}: {getattr(struct, name)} -> {new}" for name, new in fields[section].items())
    facts: Facts = {
        "asked": text,
        "changed": edits,
        "now": result.plans[0].to_json(),
        "then": None,
        "note": "",
    }
    lines: list[Piece] = ["", *(Paragraph(f"{'    and' if n else 'What if'} {row}", 10) for n, row in enumerate(edits))]
    try:
        plan_options: Facts = {"stored": result.stored, "axes": result.axes, "pareto": result.is_frontier}
        new_plan = plan_service(setting, service, **plan_options).plans[0]
    except CannotRunError as error:
        return Answer({**facts, "note": str(error)}, [*lines, Fact("  nothing serves", str(error))])
    plans = [result.plans[0], new_plan]
    table = Table.of(plans, service_columns("engines", service)).known()
    rows = [[f"  {name}", *row] for name, row in zip(("now", "then"), table.rows, strict=True)]
    ratio = new_plan.predicted.tokens_per_s_per_chip / plans[0].predicted.tokens_per_s_per_chip
    lines += [
        Table([Heading("", None, "plan"), *table.columns], rows),
        Fact("  in all", f"{three_digits(ratio)} times the output tokens per second and chip"),
    ]
    return Answer({**facts, "then": new_plan.to_json()}, lines)


def _field_of(name: str, text: str, old_value: Any) -> Any:
    """Returns the new value of a field: a factor of the present number (2x), a time, a load, a count, or TOML."""
    option_text, field = f"--what-if {name}", name.rpartition(".")[2]
    if text.endswith("x") and isinstance(old_value, int | float):
        (factor,) = parse_what_if(f"chip.flops={text}").values()
        return round(old_value * factor) if isinstance(old_value, int) else old_value * factor
    if field in ("ttft_s", "tpot_s"):
        return parse_target(text, what=option_text)
    if field == "requests_per_s":
        return parse_load(text, what=option_text)
    return parse_count(text, what=option_text) if text[:1].isdigit() and text[-1:] in "ikMB" else field_value(text)
