"""Proves a plan: compiles its step for its target, and compares memory, collectives and FLOPs with the derivation."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwright.cost.breakdown import Breakdown
from meshwright.cost.train_step import price_strategy
from meshwright.hlo.collectives import collectives
from meshwright.spec.chip import catalogued, compiled_as
from meshwright.verify.differences import compare_traffic
from meshwright.verify.exchange import ExchangeProof
from meshwright.verify.expected import StepDerivation
from meshwright.verify.flops import Products, compare_products
from meshwright.verify.overlap import OverlapComparison, compare_overlap
from meshwright.verify.request import Request
from meshwright.verify.running import CompileOutcome, available_bytes, run_request
from meshwright.verify.traffic import TrafficComparison

ARGUMENTS = ("weights", "optimizer", "kv_cache")
"""Items of memory that are arguments of a step; all other items are temporaries."""


class MemoryComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device: predicted by item, compiled (outputs are among temporaries), and available to a program."""

    items: dict[str, float]
    arguments: float
    temporaries: float
    needed: float
    peak: float | None
    available: float

    @property
    def predicted(self) -> float:
        """The sum of the items."""
        return sum(self.items.values())

    @property
    def predicted_arguments(self) -> float:
        return sum(value for name, value in self.items.items() if name in ARGUMENTS)

    @property
    def predicted_temporaries(self) -> float:
        return self.predicted - self.predicted_arguments

    @property
    def error(self) -> float:
        """Relative error of the prediction: predicted over compiled, less one."""
        return self.predicted / self.needed - 1

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Result of compiling a step.

    ``refusal`` says in one line why the step does not compile or fit; empty if it does. ``memory`` (not on CPUs),
    ``traffic`` and ``products`` are None unless buffers were assigned; ``traffic_error`` says why the collectives could
    not be read. ``overlap`` is None on CPUs, which overlap nothing, and for form "gspmd"; so is ``products`` for
    "gspmd". With islands, ``request`` compiles one island and ``exchange`` has the sums between islands.
    """

    request: Request
    outcome: CompileOutcome
    refusal: str = ""
    memory: MemoryComparison | None = None
    traffic: TrafficComparison | None = None
    traffic_error: str = ""
    overlap: OverlapComparison | None = None
    products: Products | None = None
    exchange: ExchangeProof | None = None

    @property
    def runs(self) -> bool:
        """True if the step compiles and fits in memory, as far as the request's depth shows."""
        return not self.refusal


def prove(request: Request, *, program: Sequence[str], timeout_s: float, keep: Path | None = None) -> Proof:
    """Compiles the step of a request in a child process and compares it with the derivation."""
    outcome = run_request(request, program=program, timeout_s=timeout_s, keep=keep)
    refusal = _refusal(request, outcome)
    if outcome.memory is None:
        return Proof(request=request, outcome=outcome, refusal=refusal)
    derivation = StepDerivation(request)
    # constraints leave the products of the whole mesh in the text before partitioning
    counts_products = bool(outcome.program) and request.form == "shard_map"
    memory, offered_bytes = None, available_bytes(outcome.out_of_memory)
    if request.target.platform != "cpu":
        measured_memory = outcome.memory
        memory = MemoryComparison(
            items=derivation.memory(),
            arguments=measured_memory.arguments,
            temporaries=measured_memory.temporaries + measured_memory.outputs,
            needed=measured_memory.needed,
            peak=measured_memory.peak,
            available=min((offered_bytes or 0) * _devices(request) or math.inf, request.setting.memory_limit),
        )
        refusal = refusal or _does_not_fit(request, memory)
    traffic, traffic_error, overlap = None, "", None
    mesh = request.strategy.mesh
    try:
        expected_rows, compiled_rows = derivation.expected(), collectives(outcome.hlo, mesh)
        traffic = compare_traffic(expected_rows, compiled_rows, mesh, remarks=outcome.remarks)
        if request.target.platform != "cpu" and request.form == "shard_map":
            priced_step = price_strategy(request.setting, request.strategy)
            overlap = compare_overlap(compiled_rows, Breakdown(priced_step), mesh)
    except ValueError as error:
        traffic_error = str(error)
    return Proof(
        request=request,
        outcome=outcome,
        refusal=refusal,
        memory=memory,
        traffic=traffic,
        traffic_error=traffic_error,
        overlap=overlap,
        products=compare_products(outcome.program, derivation.products()) if counts_products else None,
    )


def _devices(request: Request) -> int:
    """Returns the compiler's devices per chip; 0 if the chip's memory is not that of the chip it is compiled as."""
    chip = request.setting.cluster.chip
    base_chip = compiled_as(chip)
    target = catalogued(base_chip, "libtpu")
    return 0 if base_chip.memory_bytes != chip.memory_bytes else target.devices if target else 1


def _refusal(request: Request, outcome: CompileOutcome) -> str:
    """Returns one line that says why compilation failed; empty if it succeeded."""
    if outcome.ended in ("done", "stopped"):
        return ""
    stage = "compiled" if outcome.lowered else "lowered"
    cause = {"crash": "the compiler crashed", "timeout": "time limit reached"}.get(outcome.ended)
    message = f"{cause}: {outcome.message}" if cause else outcome.message
    if "Mosaic kernels cannot be automatically partitioned" in message:
        message = "XLA cannot partition TPU kernels by itself. Omit --gspmd, or use it with --for cpu or on GPUs"
    hint = " Give more time with --timeout." if outcome.ended == "timeout" else ""
    return f"the {request.step} step of {request.setting.model.name} could not be {stage}: {message.rstrip('.')}.{hint}"


def _does_not_fit(request: Request, memory: MemoryComparison) -> str:
    if memory.fits:
        return ""
    gb, max_gb = memory.needed / 1e9, memory.available / 1e9
    return (
        f"the {request.step} step of {request.setting.model.name} needs {gb:.1f} GB on each chip of "
        f"{request.setting.cluster.short_name}, {gb / max_gb:.2g} times the {max_gb:.1f} GB that a chip has for it. "
        f"Use more chips, {'more remat' if request.setting.job.trains else 'int8'}, or fewer sequences at a time."
    )


def proof_table(proof: Proof) -> dict[str, object]:
    """Returns the proof as plain data, with the keys of `verify --json`."""
    request, outcome = proof.request, proof.outcome
    table: dict[str, object] = {
        "model": request.setting.model.name,
        "cluster": request.setting.cluster.short_name,
        "step": request.step,
        "axes": dict(request.strategy.mesh),
        "depth": request.depth,
        "form": request.form,
        "target": request.target.platform,
        "note": request.target.note,
        "runs": proof.runs,
        "refusal": proof.refusal,
        "wall_s": outcome.wall_s,
        "cpu_s": outcome.cpu_s,
        "max_rss_bytes": outcome.max_rss_bytes,
        "products": msgspec.to_builtins(proof.products),
        "compiler": msgspec.to_builtins(outcome.compiler),
        "overlap": msgspec.to_builtins(proof.overlap),
    }
    if proof.exchange is not None:
        table["exchange"] = {**msgspec.to_builtins(proof.exchange), "sent_bytes": proof.exchange.sent_bytes}
    if proof.memory is not None:
        memory = proof.memory
        table["memory"] = {
            **msgspec.structs.asdict(memory),
            "predicted": memory.predicted,
            "error": memory.error,
            "fits": memory.fits,
        }
    if proof.traffic is not None:
        table["collectives"] = {
            **msgspec.to_builtins(proof.traffic),
            "derived_bytes": proof.traffic.derived_bytes,
            "compiled_bytes": proof.traffic.compiled_bytes,
            "remainder": proof.traffic.remainder,
        }
    return table
