"""Summarises a trace of a plan's step, each figure with its prediction."""

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec

from meshwright.algebra.generation.derive import job_strategy
from meshwright.algebra.generation.program import AS_WRITTEN, Storage
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_bytes
from meshwright.cost.breakdown import Breakdown
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.plan.plan_file import Plan
from meshwright.profile.advice import Advice, AdviceCase, advise
from meshwright.profile.compare import ProductRow, ProfileComparison, compare_times
from meshwright.profile.events import DeviceTrace, TracePlatform, load_trace
from meshwright.profile.hlo import TracedProgram, load_program
from meshwright.profile.memory import MAX_OWNERS, MemoryProfile, temporary_owners
from meshwright.profile.run import Recording
from meshwright.profile.times import StepTimes, measure_times

SAME_FLOPS = 0.02
"""Relative difference of FLOPs between program and derivation above which a note says so."""

OTHER_WEIGHTS = 2.5
"""A program is not the plan's if its weights on a device differ from the plan's by this factor or more."""
SLOWER = 1.2
"""Slowdown of steps under the profiler above which a note says so."""
ENOUGH_CORES = 0.75
"""Share of busy cores below which a note says that the machine was not quiet."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a profile, and what they were computed from.

    ``step_s`` is the step without the profiler if it was timed, else with it. ``flops`` are of the products in the
    compiled program on one device, ``predicted_flops`` of the derived steps. ``host_s`` is the CPU time of a step in
    the thread that dispatches it, None if it was not measured. ``notes`` qualify the figures;
    ``warnings`` are the notes on a slow profiler or a busy machine.
    """

    plan: Plan
    trace: DeviceTrace
    program: TracedProgram
    priced: PricedStrategy
    step_s: float
    profiled_s: float
    host_s: float | None
    predicted_step_s: float
    mfu: float
    hfu: float
    mfu_causal: float | None
    predicted_mfu: float
    predicted_hfu: float
    flops: float
    predicted_flops: float
    times: StepTimes
    comparison: ProfileComparison
    advice: tuple[Advice, ...]
    memory: MemoryProfile
    predicted_memory: dict[str, float]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def platform(self) -> TracePlatform:
        return self.trace.platform

    @property
    def missed(self) -> tuple[ProductRow, ...]:
        """Products of float32 operands that run below the full rate of the matrix units.

        A TPU rounds operands to bfloat16 unless more precision is requested, and then multiplies three or six times; a
        GPU takes TF32 by default, at half of the rate of bfloat16; a CPU has no such units.
        """
        if self.platform == "gpu":
            return self.comparison.float32
        precise_rows = (row for row in self.comparison.float32 if row.precision in ("high", "highest"))
        return tuple(precise_rows) if self.platform == "tpu" else ()


def analyse(
    plan: Plan, trace: Path, hlo: Path, recording: Recording | None = None, *, storage: Storage = AS_WRITTEN
) -> Profile:
    """Makes a profile from a trace and the traced program's text; memory and warm steps are from a recording.

    The traced step is of the plan's job; ``storage`` is for prefill and decode steps. Raises InputError for files that
    cannot be read, or are of different programs.
    """
    program = load_program(hlo)
    device_trace = load_trace(trace, program)
    job, calibration, num_chips = plan.job, plan.calibration, plan.cluster.num_chips
    strategy = job_strategy(job, plan.strategy)
    priced = price_strategy(msgspec.structs.replace(plan.setting, storage=storage), strategy)
    if recording is None:
        _require_same(hlo, program, priced, num_chips)
    chip = priced.rates.chip
    program = msgspec.structs.replace(program, ridge=float(chip.matmul_flops_per_s) / float(chip.hbm_bytes_per_s))
    times = measure_times(device_trace, program)
    breakdown = Breakdown(priced)
    comparison = compare_times(device_trace, program, times, breakdown)
    profiled_s = times.mean.total_s
    step_s = statistics.median(recording.step_s) if recording and recording.step_s else profiled_s
    estimate = priced.estimate
    program_flops = sum(row.flops for row in comparison.classes)
    derived_flops = float(estimate.flops) / num_chips
    measured_shares = estimate.measured(step_s)
    mfu = measured_shares["mfu_causal"] or measured_shares["mfu"]
    warnings = tuple(_warnings(profiled_s, step_s, device_trace, recording, mfu))
    case = AdviceCase(
        comparison=comparison,
        times=times,
        job=job,
        strategy=strategy,
        rates=priced.rates,
        expected=breakdown.steps,
        calibration=calibration,
    )
    return Profile(
        plan=plan,
        trace=device_trace,
        program=program,
        priced=priced,
        step_s=step_s,
        profiled_s=profiled_s,
        host_s=recording.host_s if recording else None,
        predicted_step_s=float(estimate.step_s),
        **measured_shares,
        predicted_mfu=float(estimate.mfu),
        predicted_hfu=float(estimate.hfu),
        flops=program_flops,
        predicted_flops=derived_flops,
        times=times,
        comparison=comparison,
        advice=advise(case),
        memory=recording.memory if recording else _temporaries(program),
        predicted_memory={name: float(num_bytes) for name, num_bytes in estimate.memory.items() if num_bytes},
        notes=(*_notes(device_trace, times, program_flops / derived_flops, num_devices=num_chips), *warnings),
        warnings=warnings,
    )


def _temporaries(program: TracedProgram) -> MemoryProfile:
    owners, live_bytes = temporary_owners(program)
    return MemoryProfile(counted="device", owners=tuple(owners[:MAX_OWNERS]), live_bytes=live_bytes)


def _require_same(hlo: Path, program: TracedProgram, priced: PricedStrategy, num_chips: int) -> None:
    """Raises InputError if a program's devices or its bytes of weights per device do not fit the plan."""
    module = program.module
    parameters = module.computations[module.entry].parameters.values()
    held_bytes = sum(shape.num_bytes for param in parameters if "params[" in param.op_name for shape in param.shapes)
    planned_bytes, fault = float(priced.estimate.memory["weights"]), ""
    if num_chips % module.num_devices:
        fault = f"is for {counted(module.num_devices, 'device')}, and the plan has {num_chips:,}"
    elif held_bytes and not 1 / OTHER_WEIGHTS < held_bytes / planned_bytes < OTHER_WEIGHTS:
        fault = f"has {format_bytes(held_bytes)} of weights on a device, and the plan {format_bytes(planned_bytes)}"
    if fault:
        raise InputError(f"{hlo} is not the program of this plan: it {fault}. Give the plan that was run.")


def _warnings(
    profiled_s: float, step_s: float, trace: DeviceTrace, recording: Recording | None, mfu: float | None = None
) -> Iterator[str]:
    """Yields notes on an MFU above 100%, on steps that the profiler slowed down, and on busy cores of the machine."""
    if mfu is not None and mfu > 1:
        yield (
            f"An MFU of {mfu:.0%} is impossible: the trace, the program and the plan do not belong together, or the "
            "chip's peak is higher than the plan's rates say."
        )
    if profiled_s > SLOWER * step_s:
        yield (
            f"The steps under the profiler took {profiled_s / step_s:.1f} times as long as those before them, and so "
            "do their parts: the profiler or other work slowed them down."
        )
    num_cores = os.cpu_count() or 1
    if trace.platform == "cpu" and recording is not None and recording.cores is not None:
        is_quiet = recording.cores >= ENOUGH_CORES * num_cores
        ending = "." if is_quiet else ": other programs ran, or threads waited; compare seconds on a quiet machine."
        yield f"The process kept {recording.cores:.1f} of {num_cores} cores busy in these steps{ending}"


def _notes(trace: DeviceTrace, times: StepTimes, flops_ratio: float, *, num_devices: int) -> Iterator[str]:
    """Yields limits of the trace's figures; ``flops_ratio`` is the program's FLOPs over those of the derived steps."""
    if trace.platform == "cpu":
        yield (
            "The devices are emulated and share the cores of one machine, so that a device computes while others "
            "wait and a stopped thread looks busy. Seconds of derived steps are therefore the machine's: each instant "
            "of wall time is divided among the instructions that run then; kinds of work sum to that step. They can be "
            "compared with rates that were measured with all devices busy. The time in which a collective moves data "
            "and that in which it waits cannot be separated well, nor does the trace show how compute and "
            "communication would overlap on separate devices."
        )
    if len(times.devices) < num_devices:
        yield f"The trace has {len(times.devices)} of {counted(num_devices, 'device')}: those of one process."
    if trace.by_thread:
        yield "The events name no device: each thread of the host counts as one."
    text_by_source = {
        "marks": "A step is the time between the ends of two steps, which includes the host's work between them.",
        "runs": "The trace has no marks of steps: a step is one run of the program, from its first to its last event.",
        "none": "The trace has no marks of steps: all of it counts as one.",
    }
    if trace.found_steps in text_by_source:
        yield text_by_source[trace.found_steps]
    ops_s = sum(event.seconds for event in trace.events)
    if trace.unnamed_s > 0.01 * ops_s:
        yield (
            f"{trace.unnamed_s / (trace.unnamed_s + ops_s):.0%} of the seconds on the devices are of kernels that name "
            "no instruction; they look idle here. CUDA graphs do that: XLA_FLAGS=--xla_gpu_enable_command_buffer= "
            "turns them off."
        )
    if len(trace.windows) > 1:
        yield f"Figures are means over {len(trace.windows)} steps and {counted(len(times.devices), 'device')}."
    yield (
        "A fusion's time counts for the derived step of its last operation; work that the compiler adds (slices of "
        "stacked weights, copies between loops) is outside the steps."
    )
    if flops_ratio and abs(flops_ratio - 1) > SAME_FLOPS:
        yield (
            f"The products of the program take {flops_ratio:.2f} times the FLOPs of the derived steps, so that seconds "
            "per FLOP differ by as much: calls of libraries count 0 if the program does not state their FLOPs, while "
            "padding, pipeline passes without a microbatch and empty slots of experts count in full."
        )
