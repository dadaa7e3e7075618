"""Explains a planned service: the listing of each phase's step, where its time goes, and its figures as formulas.

Everything is priced anew from the file's own rates, on the engine's part of the cluster.
"""

import re
from collections.abc import Callable, Iterator

import msgspec

from meshwright.algebra.generation import GenerationPhase, cache_table
from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.breakdown import Breakdown, Term
from meshwright.cost.formulas.serving import kv_transfer_s, waiting_s
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.plan.serving.engines import BOUNDS, bounds_s, loads
from meshwright.plan.serving.file import PHASES, ServiceFile
from meshwright.plan.serving.fleet import transfer_bytes_per_s
from meshwright.plan.serving.result import EnginePool
from meshwright.plan.why.explain import Algorithm, algorithm

AMOUNTS = ("FLOPs", "parameters", "KV", "network")
"""Parts of a step that are an amount: of FLOPs, or of bytes."""


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one of `BOUNDS` by itself, and the FLOPs or bytes of a chip behind them (None: neither)."""

    name: str
    amount: float | None
    alone_s: float


class PhaseExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a phase on one engine.

    ``num_positions`` is the length of a cache in decode, that of a prompt in prefill. ``blocks`` list one layer of each
    kind, the embedding and the head; ``repeats`` says how often each runs. ``terms`` add up to ``step_s``.
    """

    phase: str
    pool: EnginePool
    num_positions: int
    step_s: float
    blocks: tuple[Algorithm, ...]
    repeats: tuple[int, ...]
    parts: tuple[StepPart, ...]
    terms: tuple[Term, ...]
    memory: dict[str, float]


class Formula(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a service: its formula, the formula with its numbers, and the value, also as it is shown."""

    name: str
    text: str
    numbers: str
    value: float
    shown: str


class ServiceExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `explain` shows of a service: decode and prefill, and the formulas of its figures."""

    file: ServiceFile
    phases: tuple[PhaseExplanation, ...]
    formulas: tuple[Formula, ...]

    def value(self, name: str) -> float:
        """Returns the value of a formula."""
        return next(one.value for one in self.formulas if one.name == name)


def explain_service(file: ServiceFile) -> ServiceExplanation:
    """Returns the explanation of a service. Raises CannotRunError if a phase does not divide or does not fit."""
    file.require_legal()
    decode, prefill = (_phase(file, phase) for phase in PHASES)
    return ServiceExplanation(file=file, phases=(decode, prefill), formulas=_formulas(file, decode, prefill))


# -- a phase ----------------------------------------------------------------------------------------------


def _phase(file: ServiceFile, phase: GenerationPhase) -> PhaseExplanation:
    service = file.service
    length = service.mean_len if phase == "decode" else service.new_prompt_tokens
    priced, pool = price_strategy(*file.phase(phase, length)), file.pool(phase)
    blocks = [block for block in priced.costs.blocks if block.forward]
    layers = priced.derived.num_layers
    titles = {
        block.name: f"one layer, {block.steps.repeat} of {layers} ({block.name})" if block.is_layer else block.name
        for block in blocks
    }
    whole = dict(price_strategy(*file.phase(phase)).estimate.memory)
    if phase == "prefill":
        # the cache has the whole prompt, the pass its new tokens
        whole["kv_cache"] *= service.prompt_len / length
    return PhaseExplanation(
        phase=phase,
        pool=pool,
        num_positions=length,
        step_s=float(priced.estimate.step_s),
        blocks=tuple(algorithm(f"{phase}: {titles[block.name]}", block.forward) for block in blocks),
        repeats=tuple(block.steps.repeat for block in blocks),
        parts=tuple(_parts(priced)),
        terms=Breakdown(priced).terms,
        memory={name: float(size) for name, size in whole.items() if size},
    )


def _parts(priced: PricedStrategy) -> Iterator[StepPart]:
    """Yields the parts of a step by what they wait for."""
    alone = {name: float(seconds[0]) for name, seconds in bounds_s(priced, 1).items()}
    amounts = dict.fromkeys(AMOUNTS, 0.0)
    for cost in priced.costs.all:
        if cost.step.is_collective:
            amounts["network"] += float(cost.network_bytes * cost.here)
            continue
        amounts["FLOPs"] += float(cost.flops * cost.here)
        if (name := loads(cost)) in amounts:
            amounts[name] += float(cost.hbm_bytes * cost.here)
    yield from (
        StepPart(name=name, amount=amounts.get(name), alone_s=alone[name]) for name in BOUNDS if alone[name] > 0
    )


# -- the formulas -----------------------------------------------------------------------------------------


class _Sheet:
    """Formulas in order, each of numbers that are given or of formulas before it."""

    def __init__(self, **given: float | str) -> None:
        self.known = {name: value if isinstance(value, str) else f"{value:.10g}" for name, value in given.items()}
        self.rows: list[Formula] = []

    def add(
        self, name: str, text: str, value: float, show: Callable[[float], str], number: Callable[[float], str] = str
    ) -> float:
        """Adds a formula, whose value later ones write as ``number`` does; returns the value."""
        words = "|".join(map(re.escape, sorted(self.known, key=len, reverse=True)))
        numbers = re.sub(rf"(?<![\w$/])({words})(?![\w/])", lambda found: self.known[found[1]], text)
        self.rows.append(Formula(name=name, text=text, numbers=numbers, value=float(value), shown=show(value)))
        self.known[name] = number(value)
        return float(value)

    def seconds(self, name: str, text: str, value: float) -> float:
        """Adds a formula of seconds."""
        return self.add(name, text, value, format_seconds, _s)


def _formulas(file: ServiceFile, decode: PhaseExplanation, prefill: PhaseExplanation) -> tuple[Formula, ...]:
    """Returns the figures of a service: those of `plan.serving.search`, one by one."""
    service, generate, fill, pools = file.service, file.generate, file.prefill, file.has_pools
    batch, engines, output, step_s = generate.batch_seqs, generate.num_engines, service.output_len, decode.step_s
    sheet = _Sheet(
        t_step=_s(step_s), B=batch, G=engines, P=fill.num_engines, prompts=fill.batch_seqs, prompt=service.prompt_len,
        output=output, chips=file.predicted.num_chips, load=service.requests_per_s or 0.0,
        mixing=f"{file.calibration.efficiency.mixing:.4g}",
    )  # fmt: skip
    prefill_s = prefill.step_s
    if (new := service.new_prompt_tokens) < service.prompt_len:
        whole, known = (
            float(price_strategy(*file.phase("prefill", length)).estimate.step_s)
            for length in (service.prompt_len, service.prompt_len - new)
        )
        sheet.known |= {"t_new": _s(prefill_s), "t_whole": _s(whole), "t_cached": _s(known)}
        prefill_s = max(prefill_s, whole - known)
        sheet.seconds("t_prefill", "max(t_new, t_whole - t_cached)", prefill_s)
    sheet.known["t_prefill"] = _s(prefill_s)
    prompt_s = sheet.seconds("t_prompt", "t_prefill / prompts", prefill_s / fill.batch_seqs)
    if pools:
        tpot_s = sheet.seconds("TPOT", "t_step", step_s)
        rows = cache_table(file.model, batch_seqs=1, max_len=service.prompt_len, storage=file.stored.storage)
        sent, link = sum(row.num_bytes for row in rows), transfer_bytes_per_s(file.cluster)
        senders = min(generate.part.num_chips, fill.part.num_chips)
        sheet.known |= {"KV": _b(sent), "senders": f"{senders}", "link": f"{_b(link)}/s"}
        transfer_s = kv_transfer_s(sent, num_links=senders, link_bytes_per_s=link)
        sheet.seconds("t_transfer", "KV / (senders x link)", float(transfer_s))
        sheet.seconds("TTFT", "t_prefill + t_transfer", prefill_s + float(transfer_s))
        text, per_s = (
            "min(P / t_prompt, G x B / (output x t_step))",
            min(fill.num_engines / prompt_s, engines * batch / (output * step_s)),
        )
    else:
        wait = waiting_s(prompt_s, batch=batch, output_len=output, mixing=file.calibration.efficiency.mixing)
        tpot_s = sheet.seconds("TPOT", "t_step + mixing x (B - 1) / output x t_prompt", step_s + float(wait))
        sheet.seconds("TTFT", "t_prefill", prefill_s)
        text, per_s = "G x B / (output x TPOT + t_prompt)", engines * batch / (output * tpot_s + prompt_s)
    served = sheet.add("requests/s", text, per_s, *_DIGITS)
    if service.requests_per_s is not None:
        served = sheet.add("served/s", "min(requests/s, load)", min(per_s, service.requests_per_s), *_DIGITS)
    per_s_name = sheet.rows[-1].name
    sheet.add("tok/s/chip", f"{per_s_name} x output / chips", served * output / file.predicted.num_chips, *_DIGITS)
    if (price := file.cluster.chip.price_usd_per_hour) is not None:
        if pools:
            sheet.known |= {"chips of P": f"{fill.num_chips}", "chips of G": f"{generate.num_chips}"}
            text, share = (
                "chips of P / (chips of P + chips of G)",
                fill.num_chips / (fill.num_chips + generate.num_chips),
            )
        else:
            text = "t_prompt / (t_prompt + output x t_step / B)"
            share = prompt_s / (prompt_s + output * step_s / batch)
        sheet.add("share", text, share, "{:.1%}".format, "{:.4g}".format)
        sheet.known["price"] = f"{price:.10g}"
        usd = price / 3600 * file.predicted.num_chips / served
        sheet.add("$/request", f"price / 3600 x chips / {per_s_name}", usd, *_DIGITS)
        sheet.add("$/M in", "1e6 x $/request x share / prompt", 1e6 * usd * share / service.prompt_len, *_DIGITS)
        sheet.add("$/M out", "1e6 x $/request x (1 - share) / output", 1e6 * usd * (1 - share) / output, *_DIGITS)
    _add_room(sheet, file, decode, prefill)
    return tuple(sheet.rows)


def _add_room(sheet: _Sheet, file: ServiceFile, decode: PhaseExplanation, prefill: PhaseExplanation) -> None:
    """Adds the memory that is left of a chip's room, on the fuller chips; prefill works beside the caches of decode."""
    room = file.setting.memory_room
    need, other = (sum(one.memory.values()) for one in (decode, prefill))
    if file.has_pools:
        text, left = "room - max(generating, prefilling)", room - max(need, other)
    else:
        kept = ("weights", "kv_cache")
        decoding, other = (sum(v for k, v in one.memory.items() if k not in kept) for one in (decode, prefill))
        need -= decoding
        text, left = "room - weights and KV - max(decoding, prefilling)", room - need - max(decoding, other)
        sheet.known |= {"weights and KV": _b(need), "decoding": _b(decoding)}
    sheet.known |= {"room": _b(room), "generating": _b(need), "prefilling": _b(other)}
    sheet.add("memory left", text, left, format_bytes)


def _s(seconds: float) -> str:
    return f"{seconds:.4g} s"


def _b(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.4g} GB"


_DIGITS = ("{:.4g}".format, "{:.4g}".format)
