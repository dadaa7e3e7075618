"""A profile: everything that a trace says of a plan's step, each figure beside its prediction."""

from pathlib import Path
from typing import Any

import msgspec

from meshwright.cost.ops import model_flops
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.measure.profile_advice import Advice, Case, advise
from meshwright.measure.profile_classes import Facts
from meshwright.measure.profile_compare import Comparison, ProductRow, compare
from meshwright.measure.profile_events import Platform, Trace, load_trace
from meshwright.measure.profile_hlo import load_module
from meshwright.measure.profile_memory import MemoryProfile, temporary_owners
from meshwright.measure.profile_run import Recording
from meshwright.measure.profile_times import Times, measure_times
from meshwright.spec.calibration import reference_peak
from meshwright.spec.plan_file import Plan


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to show. ``step_s`` is the step without the profiler where it was timed, else the profiled one.

    ``flops`` are those of the products in the compiled program on one device, ``predicted_flops`` those of the derived
    steps; ``notes`` are what the reader has to know of the figures.
    """

    plan: Plan
    platform: Platform
    step_s: float
    profiled_s: float
    predicted_step_s: float
    mfu: float
    hfu: float
    predicted_mfu: float
    predicted_hfu: float
    flops: float
    predicted_flops: float
    times: Times
    comparison: Comparison
    advice: tuple[Advice, ...]
    memory: MemoryProfile
    predicted_memory: dict[str, float]
    notes: tuple[str, ...]

    @property
    def missed(self) -> tuple[ProductRow, ...]:
        """Products of float32 operands that the matrix units of the chip do not take at their full rate."""
        return tuple(row for row in self.comparison.float32 if misses_units(row, self.platform))


class Analysed(msgspec.Struct, frozen=True, kw_only=True):
    """A profile with what it was made from, for the timeline."""

    profile: Profile
    trace: Trace
    facts: Facts
    priced: PricedStrategy


def misses_units(row: ProductRow, platform: Platform) -> bool:
    """Whether a float32 product runs below the rate of the matrix units.

    A TPU rounds operands to bfloat16 unless more precision is asked for, and then multiplies three or six times; a GPU
    takes TF32 by default, at half of the rate of bfloat16; a CPU has no such units.
    """
    return platform == "gpu" or (platform == "tpu" and row.precision in ("high", "highest"))


def analyse(plan: Plan, trace: Path, hlo: Path, recording: Recording | None = None) -> Analysed:
    """A profile from a trace and the text of the program that was traced; memory and warm steps from a recording.

    Raises InputError for files that cannot be read, or are of different programs.
    """
    module = load_module(hlo)
    events = load_trace(trace, module)
    model, job, strategy, rates = plan.model, plan.job, plan.strategy, plan.calibration
    priced = price_strategy(model, plan.cluster, job, strategy, calibration=rates)
    chip = priced.rates.chip
    facts = Facts(module, ridge=float(chip.matmul_flops_per_s) / float(chip.hbm_bytes_per_s))
    times = measure_times(events, facts)
    comparison = compare(events, facts, times, priced)
    profiled_s = times.mean.total_s
    step_s = (recording.typical_s if recording else None) or profiled_s
    peak = reference_peak(plan.cluster.chip, rates, strategy.matmul_dtype) * plan.cluster.num_chips
    mfu = model_flops(model, job) / (step_s * peak)
    estimate = priced.estimate
    case = Case(comparison=comparison, times=times, job=job, strategy=strategy, rates=priced.rates, calibration=rates)
    profile = Profile(
        plan=plan,
        platform=events.platform,
        step_s=step_s,
        profiled_s=profiled_s,
        predicted_step_s=float(estimate.step_s),
        mfu=mfu,
        hfu=mfu * float(estimate.hfu) / float(estimate.mfu),
        predicted_mfu=float(estimate.mfu),
        predicted_hfu=float(estimate.hfu),
        flops=sum(row.flops for row in comparison.classes),
        predicted_flops=float(estimate.flops) / plan.cluster.num_chips,
        times=times,
        comparison=comparison,
        advice=advise(case),
        memory=recording.memory if recording else _memory_of(module),
        predicted_memory={name: float(b) for name, b in estimate.memory.items() if b},
        notes=_notes(events, times, comparison),
    )
    return Analysed(profile=profile, trace=events, facts=facts, priced=priced)


def _memory_of(module: Any) -> MemoryProfile:
    owners, live = temporary_owners(module)
    return MemoryProfile(counted="device", owners=tuple(owners[:12]), live_bytes=live)


def _notes(trace: Trace, times: Times, comparison: Comparison) -> tuple[str, ...]:
    """What the reader has to know before the figures."""
    found = []
    if comparison.shares_cores:
        found.append(
            "The devices are emulated and share the cores of one machine, so that a device computes while others "
            "wait and a stopped thread looks busy. Seconds of single steps are therefore the machine's: the wall time "
            "shared out over what works at each instant. They can be compared with rates that were measured with all "
            "devices busy. What a collective moves and what it waits cannot be told apart well, nor how compute and "
            "communication would overlap on devices of their own."
        )
    if trace.by_thread:
        found.append("The events name no device: each thread of the host counts as one.")
    words = {
        "marks": "A step lies between the ends of two, so that what the host does between steps is in it.",
        "runs": "The trace has no marks of steps: a step is one run of the program, from its first to its last event.",
        "none": "The trace has no marks of steps: all of it counts as one.",
    }
    if trace.found_steps in words:
        found.append(words[trace.found_steps])
    found.append(
        "A fusion's time stands with the derived step of its last operation; what the compiler adds (slices of stacked "
        "weights, copies between loops) is outside the steps."
    )
    if times.num_steps > 1:
        found.append(f"Figures are means over {times.num_steps} steps and {len(times.devices)} devices.")
    return tuple(found)
