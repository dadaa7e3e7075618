"""Explains a planned service: the listing of each phase's step, where its time goes, and its figures as formulas.

Everything is priced anew from the plan's own rates, on the engine's part of the cluster.
"""

import math
import re
from collections.abc import Iterator

import msgspec

from meshwright.algebra.generation.cache import sequence_bytes
from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.breakdown import Breakdown, Term
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.plan.plan_file import PHASES, EnginePool, GenerationPhase, ServicePlan
from meshwright.plan.serving.engines import BOUNDS, bounds_s, loads
from meshwright.plan.serving.fleet import transfer_bytes_per_s
from meshwright.plan.why.explain import Algorithm, LargestStep, algorithm, largest_steps
from meshwright.spec.strategy import sequence_shards

AMOUNTS = ("FLOPs", "parameters", "KV", "network")
"""Parts of a step that have an amount: "FLOPs" in FLOPs, all other parts in bytes."""
STARTS = "kernel starts"
"""Name of the part in which the host starts kernels one by one; work of the kernels hides some of it."""


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """One of `BOUNDS` or `STARTS`: its seconds without overlap, and its FLOPs or bytes per chip (None: neither). The
    part "host" excludes `STARTS`."""

    name: str
    amount: float | None
    alone_s: float


class PhaseExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a phase on one engine.

    ``num_positions`` is the length of a cache in decode, of a prompt's new tokens in prefill. ``blocks`` list one layer
    of each kind, the embedding and the head; ``repeats`` says how often each runs. ``terms`` add up to ``step_s``, of
    which the ``largest`` steps add most.
    """

    phase: str
    pool: EnginePool
    num_positions: int
    step_s: float
    blocks: tuple[Algorithm, ...]
    repeats: tuple[int, ...]
    parts: tuple[StepPart, ...]
    terms: tuple[Term, ...]
    largest: tuple[LargestStep, ...]
    memory: dict[str, float]


class Formula(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a service: its formula, the formula with numbers, its value, and the value as text with a unit."""

    name: str
    text: str
    numbers: str
    value: float
    shown: str


class ServiceExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `explain` shows of a service: decode and prefill, and the formulas of its figures."""

    plan: ServicePlan
    phases: tuple[PhaseExplanation, ...]
    formulas: tuple[Formula, ...]

    def value(self, name: str) -> float:
        """Returns the value of the formula called ``name``."""
        return next(formula.value for formula in self.formulas if formula.name == name)


def explain_service(plan: ServicePlan) -> ServiceExplanation:
    """Returns the explanation of a service. Raises CannotRunError if a phase does not divide or fit, or has chunks."""
    plan.require_whole_prompts()
    plan.require_legal()
    decode, prefill = (_phase(plan, phase) for phase in PHASES)
    explanation = ServiceExplanation(plan=plan, phases=(decode, prefill), formulas=_formulas(plan, decode, prefill))
    if (left_bytes := explanation.value("memory left")) < 0:
        raise CannotRunError(
            f"[generate]: decode and prefill need {format_bytes(-left_bytes)} more per chip than a chip has. Lower "
            f"generate.batch_seqs, or plan the service again."
        )
    return explanation


# -- a phase ----------------------------------------------------------------------------------------------


def _phase(plan: ServicePlan, phase: GenerationPhase) -> PhaseExplanation:
    service = plan.service
    num_positions = service.mean_len if phase == "decode" else service.new_prompt_tokens
    priced, pool = price_strategy(*plan.phase(phase, num_positions)), plan.pool(phase)
    blocks = [block for block in priced.costs.blocks if block.forward]
    num_layers = priced.derived.num_layers
    title_by_block = {
        block.name: f"one layer, {block.steps.repeat} of {num_layers} ({block.name})" if block.is_layer else block.name
        for block in blocks
    }
    breakdown = Breakdown(priced)
    full_memory = dict(price_strategy(*plan.phase(phase)).estimate.memory)
    return PhaseExplanation(
        phase=phase,
        pool=pool,
        num_positions=num_positions,
        step_s=float(priced.estimate.step_s),
        blocks=tuple(algorithm(f"{phase}: {title_by_block[block.name]}", block.forward) for block in blocks),
        repeats=tuple(block.steps.repeat for block in blocks),
        parts=tuple(_parts(priced, breakdown)),
        terms=breakdown.terms,
        largest=largest_steps(breakdown),
        memory={name: float(num_bytes) for name, num_bytes in full_memory.items() if num_bytes},
    )


def _parts(priced: PricedStrategy, breakdown: Breakdown) -> Iterator[StepPart]:
    """Yields the parts of a step that take any time, in the order of `BOUNDS`, then `STARTS`."""
    alone_s = {name: float(seconds[0]) for name, seconds in bounds_s(priced, 1).items()}
    alone_s[STARTS] = float(priced.times.starts_s)
    alone_s["host"] -= alone_s[STARTS]
    amount_of = dict.fromkeys(AMOUNTS, 0.0)
    amount_of["network"] = sum(traffic.num_bytes for traffic in breakdown.traffic)
    for cost in priced.costs.all:
        if cost.step.is_collective:
            continue
        amount_of["FLOPs"] += float(cost.flops * cost.here)
        if (name := loads(cost)) in amount_of:
            amount_of[name] += float(cost.hbm_bytes * cost.here)
    for name in (*BOUNDS, STARTS):
        if alone_s[name] > 0:
            yield StepPart(name=name, amount=amount_of.get(name), alone_s=alone_s[name])


# -- the formulas -----------------------------------------------------------------------------------------

_TITLES = {
    "per_s": "requests/s", "served": "served/s", "made": "tok/s/chip", "usd": "$/request", "usd_in": "$/M in",
    "usd_out": "$/M out", "left": "memory left",
}  # fmt: skip
"""Name in a formula -> its printed name, where that is another."""
_AGGREGATED = {
    "TPOT": "t_step + (B - 1) / output x t_prompt",
    "TTFT": "t_prefill",
    "per_s": "G x B / (output x TPOT + t_prompt)",
}
_POOLED = {
    "TPOT": "t_step",
    "t_transfer": "prompts x KV / (senders x link)",
    "TTFT": "t_prefill + t_transfer",
    "per_s": "min(P / t_prompt, G x B / (output x t_step))",
}
_SHARES = {False: "t_prompt / (t_prompt + output x t_step / B)", True: "P_chips / (P_chips + G_chips)"}
_ROOM = {
    False: "room - weights_and_KV - max(decoding, prefilling)",
    True: "room - max(weights_and_KV + decoding, prefilling)",
}
"""True for a plan with a pool of prefill engines, else False -> formula: prefill's share of dollars, free memory."""


def _formulas(plan: ServicePlan, decode: PhaseExplanation, prefill: PhaseExplanation) -> tuple[Formula, ...]:
    """Returns the figures of a service by the formulas of `plan.serving.search`, each as it is printed.

    With pools prefill has its own chips; without, it runs next to the caches of decode, with the same weights. With
    drafts ``t_checked`` is the plan's step, which checks them, and ``t_step`` is its seconds per token.
    """
    service, generate, pool, has_pools = plan.service, plan.generate, plan.prefill, plan.has_pools
    usd_per_hour = plan.cluster.chip.price_usd_per_hour
    items = [generate.memory if plan.num_drafts else decode.memory, prefill.memory]
    stored = [sum(memory.get(name, 0.0) for name in ("weights", "kv_cache")) for memory in items]
    count_by_name: dict[str, float] = {
        "B": generate.batch_seqs, "G": generate.num_engines, "P": pool.num_engines, "prompts": pool.batch_seqs,
        "prompt": service.prompt_len, "output": service.output_len, "chips": plan.predicted.num_chips,
        "load": service.requests_per_s or 0.0, "price": usd_per_hour or 0.0, "P_chips": pool.num_chips,
        "G_chips": generate.num_chips, "senders": min(generate.part.num_chips, pool.part.num_chips),
    }  # fmt: skip
    bytes_by_name = {
        "KV": sequence_bytes(plan.model, service.prompt_len, plan.stored.storage),
        "link": transfer_bytes_per_s(plan.cluster),
        "room": plan.setting.memory_room, "weights_and_KV": stored[0], "decoding": sum(items[0].values()) - stored[0],
        "prefilling": sum(prefill.memory.values()) - (0 if has_pools else stored[1]),
    }  # fmt: skip
    seconds_by_name = {"t_step": decode.step_s, "t_prefill": prefill.step_s}
    formulas: dict[str, str] = {}
    if plan.num_drafts:
        seconds_by_name["t_checked"], count_by_name["tokens"] = generate.step_s, plan.step_tokens
        formulas["t_step"] = "t_checked / tokens"
    is_shared = generate.batch_seqs > 1 and sequence_shards(generate.strategy) > 1 and not has_pools
    if is_shared:
        count_by_name["devices"] = sequence_shards(generate.strategy)
        formulas |= {"ending": "(B - 1) / output"}
    formula = "max((1 - exp(-ending)) / ending, 1 / devices) x t_prefill x devices / prompts"
    formulas |= {"t_prompt": formula if is_shared else "t_prefill / prompts", **(_POOLED if has_pools else _AGGREGATED)}
    rate_name = "per_s"
    if service.requests_per_s is not None:
        rate_name, formulas["served"] = "served", "min(per_s, load)"
    formulas["made"] = f"{rate_name} x output / chips"
    if usd_per_hour is not None:
        formulas |= {
            "share": _SHARES[has_pools],
            "usd": f"price / 3600 x chips / {rate_name}",
            "usd_in": "1e6 x usd x share / prompt",
            "usd_out": "1e6 x usd x (1 - share) / output",
        }
    formulas["left"] = _ROOM[has_pools]
    known = {**count_by_name, **bytes_by_name, **seconds_by_name}
    text_of = {name: f"{value:.10g}" for name, value in count_by_name.items()}
    text_of |= {name: f"{value / 1e9:.4g} GB{'/s' * (name == 'link')}" for name, value in bytes_by_name.items()}
    text_of |= {name: f"{value:.4g} s" for name, value in seconds_by_name.items()}
    rows = []
    for name, text in formulas.items():
        # the texts are the constants above
        known[name] = value = float(eval(text.replace(" x ", " * "), {"min": min, "max": max, "exp": math.exp}, known))
        is_time = name[:2] in ("t_", "TP", "TT")
        numbers = re.sub(r"\b[A-Za-z]\w*", lambda match: text_of.get(match[0], match[0]), text)
        text_of[name] = f"{value:.4g}{' s' * is_time}"
        value_text = format_seconds(value) if is_time else format_bytes(value) if name == "left" else text_of[name]
        text = re.sub(r"\w+", lambda match: _TITLES.get(match[0], match[0]), text)
        rows.append(Formula(name=_TITLES.get(name, name), text=text, numbers=numbers, value=value, shown=value_text))
    return tuple(rows)
