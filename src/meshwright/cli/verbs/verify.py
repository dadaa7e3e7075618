"""`meshwright verify`: the real step of a plan compiled for its hardware, which need not be there."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict

from meshwright.algebra.generation.program import CacheDtype, WeightStorage
from meshwright.api.proving import TIMEOUT_S, ProofOptions, prove_service, prove_strategy
from meshwright.cli.asked import CACHE_DTYPE, STEP, WEIGHTS, PlanOptions, read_fields, resolve, service_of, storage_of
from meshwright.cli.verb import option, verb
from meshwright.cli.verbs.plan_words import microbatch_words, remat_words, sharding_words
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_bytes, format_flops, format_seconds
from meshwright.plan.plan_file import PHASES, GenerationPhase, ServicePlan
from meshwright.report.answer import Answer, Condition, Detail, Fact, Heading, Piece, Table, TableColumns
from meshwright.spec.strategy import Form, mesh_words
from meshwright.verify.request import AskedStep, Depth
from meshwright.verify.targets import CompilerPlatform

if TYPE_CHECKING:
    from meshwright.verify.exchange import ExchangeProof
    from meshwright.verify.flops import Products
    from meshwright.verify.overlap import OverlapComparison
    from meshwright.verify.proof import MemoryComparison, Proof
    from meshwright.verify.traffic import Difference, TrafficComparison


class Given(PlanOptions):
    step: AskedStep | None = STEP
    depth: Depth = option("How far to compile.", default="partition")
    gspmd: bool = option("Compile the shardings as constraints: the compiler chooses the collectives.")
    platform: CompilerPlatform | None = option("The compiler; by default the cluster's own.", "--for")
    weights: WeightStorage = WEIGHTS
    cache_dtype: CacheDtype = CACHE_DTYPE
    timeout: float = option("Seconds that the compiler may take.", default=TIMEOUT_S)
    keep: Path | None = option("Keep the compiler's files in this folder.")


@verb(Given, needs="run")
def command(given: Given) -> Answer:
    """Compile the real step of a plan for its target and compare its memory and collectives with the prediction.

    The hardware need not be here. Depths: lower (does everything divide and agree), partition (memory and collectives,
    in seconds), full (the whole compiler). The exit code is 3 if the step does not partition, does not fit, or sends
    more than 2% of its bytes otherwise than derived without a name for it.
    """
    from meshwright.train.settings import settings_from_table
    from meshwright.verify.proof import proof_table

    if not given.timeout > 0:
        raise InputError(f"--timeout {given.timeout:g} leaves the compiler no time. Give seconds above 0.")
    fields = read_fields(given.pairs)
    settings_from_table(fields["train"])
    if service := service_of(given):
        return _service_answer(service, given)
    setting, strategy, _ = resolve(given, fields, verb="verify", step=given.step)
    if not setting.job.trains and fields["train"]:
        setting_name = next(iter(fields["train"]))
        raise InputError(f"--set train.{setting_name} is a setting of training. Leave it out, or take --step train.")
    options = _options(given, fields["train"])
    stored_setting = msgspec.structs.replace(setting, storage=storage_of(given, setting.job))
    proof = prove_strategy(stored_setting, strategy, options)
    facts = proof_table(proof)
    traffic_rows = proof.traffic.rows if proof.traffic else ()
    return Answer(facts, proof_text(proof), raw=[traffic_rows, [facts]], error=_error_of(proof))


def _options(given: Given, settings: Mapping[str, Any]) -> ProofOptions:
    return ProofOptions(
        depth=given.depth,
        form="gspmd" if given.gspmd else "shard_map",
        platform=given.platform,
        settings=settings,
        timeout_s=given.timeout,
        keep=given.keep,
        asked=given.step or "",
    )


def _service_answer(plan: ServicePlan, given: Given) -> Answer:
    from meshwright.verify.proof import proof_table

    if given.step == "train" or (given.weights, given.cache_dtype) != ("as they are", "bf16"):
        raise InputError(
            f"{given.what} says how a service is stored, and it has the steps decode and prefill. Take --step decode "
            f"or leave the options out."
        )
    phases_by_step: Mapping[str | None, Sequence[GenerationPhase]] = {None: PHASES, "prefill": ("prefill",)}
    proof_by_phase = prove_service(plan, phases_by_step.get(given.step, ("decode",)), _options(given, {}))
    pieces: list[Piece] = []
    traffic_rows = []
    for phase, proof in proof_by_phase.items():
        pieces += [*proof_text(proof, first=8 // len(proof_by_phase)), ""]
        traffic_rows += [{"step": phase, **asdict(row)} for row in (proof.traffic.rows if proof.traffic else ())]
    facts = {str(phase): proof_table(proof) for phase, proof in proof_by_phase.items()}
    error = next(filter(None, map(_error_of, proof_by_phase.values())), None)
    return Answer(facts, pieces, raw=[traffic_rows], error=error)


def _error_of(proof: "Proof") -> CannotRunError | None:
    """Returns why a step does not run, or that it does not send what is derived; None for a proof that holds."""
    from meshwright.verify.traffic import TOLERANCE

    if proof.exchange and proof.exchange.leaving:
        return CannotRunError(f"collectives leave an island: {', '.join(proof.exchange.leaving)}.")
    remainder = proof.traffic.remainder if proof.traffic and proof.request.form == "shard_map" else 0.0
    if proof.runs and remainder <= TOLERANCE:
        return None
    return CannotRunError(
        proof.refusal
        or f"the {proof.request.step} step of {proof.request.setting.model.name} does not send what is derived: "
        f"{remainder:.1%} of all bytes differ without a name, and {TOLERANCE:.0%} may. See its collectives: --keep "
        f"FOLDER, then meshwright hlo FOLDER/module.hlo."
    )


# -- what is printed ----------------------------------------------------------------------------------

_wide, _flops = partial(Fact, column=22), partial(format_flops, unit="FLOP")
HOW = {
    "lower": "lowered only: every array divides and every type agrees",
    "partition": "partitioned and its buffers assigned",
    "full": "compiled whole",
}


def proof_text(proof: "Proof", first: int = 8) -> Iterator[Piece]:
    """Yields how far the step was compiled and whether it fits, its collectives (the ``first`` rows) with their
    differences, and its products; then what the answer rests on."""
    request, outcome = proof.request, proof.outcome
    strategy, setting = request.strategy, request.setting
    headline = f"{setting.model.name} on {setting.cluster.short_name}, {request.step}: {mesh_words(strategy.mesh)}"
    if request.step == "train":
        choice_texts = (words_of(strategy) for words_of in (microbatch_words, remat_words, sharding_words))
        headline += f"; {', '.join(filter(None, choice_texts))}"
    yield f"{headline}; {counted(setting.job.batch_seqs, 'sequence')} of {setting.job.seq_len:,}"
    if outcome.lowered and proof.runs:
        chips_text = f"{setting.cluster.num_chips:,} x {setting.cluster.chip.full_name or setting.cluster.chip.name}"
        if request.target.platform == "cpu":
            chips_text = counted(request.target.num_devices, "emulated CPU device")
        yield Fact("compiled", f"{HOW[request.depth]}, for {chips_text}")
    if proof.memory is not None:
        yield from _memory_text(proof.memory)
    if proof.traffic is not None:
        yield from _traffic_text(proof.traffic, request.form, first)
    if proof.overlap is not None and proof.overlap.rows:
        yield from _overlap_text(proof.overlap)
    if proof.products is not None:
        yield from _products_text(proof.products)
    if proof.traffic_error:
        yield Fact("collectives", f"could not be read: {proof.traffic_error}")
    if proof.exchange is not None:
        yield from _exchange_text(proof.exchange)
    if request.target.note:
        yield Condition(request.target.note)
    if request.form == "gspmd":
        yield Condition("GSPMD: the derived shardings as constraints, collectives by the compiler")
    yield from map(Condition, outcome.compiler.notes)
    option_texts = [f"{name}={str(value).lower()}" for name, value in outcome.compiler.used.items()]
    if option_texts:
        yield Condition(f"options of the compiler: {', '.join(option_texts)}")
    yield Condition(
        f"took {format_seconds(outcome.cpu_s)} of CPU, {format_bytes(outcome.max_rss_bytes)} of memory, "
        f"{format_seconds(outcome.wall_s)} in all"
    )


def _memory_text(memory: "MemoryComparison") -> Iterator[Piece]:
    verdict = "fits" if memory.fits else "does not fit"
    peak_text = "" if memory.peak is None else f"; {format_bytes(memory.peak)} at once, by the compiler's count"
    yield Fact(
        "memory",
        f"{verdict}: {format_bytes(memory.needed)} of {format_bytes(memory.available)} a chip; predicted "
        f"{format_bytes(memory.predicted)} ({memory.error:+.1%}){peak_text}",
    )
    rows = [
        *((f"  {name.replace('_', ' ')}", value, None) for name, value in memory.items.items() if value > 0),
        ("arguments", memory.predicted_arguments, memory.arguments),
        ("all else", memory.predicted_temporaries, memory.temporaries),
    ]
    headings = [Heading("memory of a chip"), Heading("predicted", format_bytes), Heading("compiled", format_bytes)]
    yield Detail("memory by item", [Table(headings, rows)])


def _traffic_text(traffic: "TrafficComparison", form: Form, first: int) -> Iterator[Piece]:
    if not traffic.rows:
        yield Fact("collectives", "none")
        return
    columns: TableColumns = {
        "collectives of a step": lambda row: f"{row.kind} over {','.join(row.axes)}",
        "derived": "derived_arrays",
        "compiled": "compiled_arrays",
        "bytes sent, derived": ("derived_bytes", format_bytes),
        "bytes sent, compiled": ("compiled_bytes", format_bytes),
    }
    yield Table.of(traffic.rows, columns, first=first)
    for name in dict.fromkeys(row.name for row in traffic.differences):
        yield _wide(name, _difference_words([row for row in traffic.differences if row.name == name]))
    if form == "shard_map":
        yield _wide("without a name", f"{traffic.remainder:.2%} of all bytes that a device sends")


def _exchange_text(exchange: "ExchangeProof") -> Iterator[Piece]:
    """Yields that the program is one island's, and the sums between islands, which it does not have."""
    leaving_text = "" if exchange.leaving is None else ", and no collective leaves it"
    if exchange.leaving:
        leaving_text = f", and these leave it: {', '.join(exchange.leaving)}"
    devices_text = counted(exchange.num_devices, "device")
    yield Fact("islands", f"each of {exchange.num_islands} runs this program on its {devices_text}{leaving_text}")
    columns: TableColumns = {
        "summed between islands by hosts": "array",
        "when": "when",
        "bytes sent": ("sent_bytes", format_bytes),
    }
    yield Table.of(exchange.rows, columns, first=8)
    every_text = f"every {exchange.period} steps" if exchange.period > 1 else "every step"
    yield (
        f"outside of the compiled program: {format_bytes(exchange.sent_bytes)} leave each of R islands "
        f"{every_text}, by the formula 2 (R - 1) / R of its numbers"
    )


def _overlap_text(overlap: "OverlapComparison") -> Iterator[Piece]:
    """Yields what the schedule overlaps beside what the price hides, and the step with no more overlap than that."""
    columns: TableColumns = {
        "bytes sent": lambda row: f"{row.kind} over {','.join(row.axes)}",
        "overlapped": ("overlapped_bytes", format_bytes),
        "exposed": ("exposed_bytes", format_bytes),
        "alone": ("alone_s", format_seconds),
        "price hides": ("hidden_s", format_seconds),
        "how": lambda row: ", ".join(row.overlapped),
    }
    price = overlap.priced
    hidden_text, alone_text, step_text = map(format_seconds, (price.hidden_s, price.alone_s, price.exposed_step_s))
    share_text = f"{price.hidden_s / price.step_s:.0%} of its {format_seconds(price.step_s)}"
    yield _wide(
        "overlapped",
        f"{format_seconds(overlap.beside_s)} of {alone_text} of communication as compiled, {hidden_text} by the price "
        f"({share_text}). If the rest is exposed, the step takes {step_text} (MFU {price.exposed_mfu:.0%})",
    )
    yield Detail("overlap by collective", [Table.of(overlap.rows, columns)])


def _products_text(products: "Products") -> Iterator[Piece]:
    """Yields FLOPs of matrix products, and the steps in which they are not as derived."""
    excess_share = products.compiled / products.derived - 1 if products.derived else 0.0
    yield _wide(
        "matrix products",
        f"{_flops(products.compiled)} on a device, derived {_flops(products.derived)} ({excess_share:+.2%})",
    )
    for difference in products.differences[:SHOWN_PLACES]:
        yield _wide("", f"{difference.where}: {_flops(difference.compiled)}, derived {_flops(difference.derived)}")
    if products.by_data:
        yield _wide("", f"left out, since their number depends on the data: {', '.join(products.by_data)}")


SHOWN_PLACES = 3
"""Steps with one kind of difference that are named; `--json` has them all."""


def _difference_words(rows: list["Difference"]) -> str:
    """Returns the bytes of a kind of difference, what it is, and where most of it is."""
    from meshwright.verify.differences import CLASSES

    extra = sum(row.extra_bytes for row in rows)
    places = ", ".join(f"{row.where} {format_bytes(abs(row.extra_bytes))}" for row in rows[:SHOWN_PLACES])
    rest = f" and {len(rows) - SHOWN_PLACES} more" if len(rows) > SHOWN_PLACES else ""
    return f"{format_bytes(abs(extra))} {'more' if extra >= 0 else 'less'}, {CLASSES[rows[0].name]}: {places}{rest}"
