"""`meshwright profile`: a few steps of a plan under the profiler, each figure beside its prediction."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshwright.algebra.generation.program import CacheDtype, Storage, WeightStorage
from meshwright.api.running import require_devices
from meshwright.cli.asked import CACHE_DTYPE, STEP, WEIGHTS, PlanOptions, read_fields, resolve, storage_of
from meshwright.cli.output import busy_words, or_dash, say
from meshwright.cli.verb import Count, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_bytes, format_seconds
from meshwright.plan.plan_file import Plan
from meshwright.report.answer import Answer, Condition, Detail, Facts, Piece, Table
from meshwright.spec.model import require_runnable
from meshwright.verify.request import AskedStep

if TYPE_CHECKING:
    from meshwright.profile.summary import Profile


class Given(PlanOptions):
    steps: Count = option("Steps under the profiler.", default="3")
    warmup: Count | None = option("Steps before them: 3, on CPU 5.")
    out: Path | None = option("Folder of the report; runs/NAME-profile by default.", "-o", "--out")
    step: AskedStep | None = STEP
    weights: WeightStorage = WEIGHTS
    cache_dtype: CacheDtype = CACHE_DTYPE
    trace: Path | None = option("Read this trace (*.xplane.pb) and run nothing.")
    hlo: Path | None = option("The text of the program of --trace.")


@verb(Given, needs="run draw")
def command(given: Given) -> Answer | None:
    """Run a few steps of a plan file, or of a MODEL planned on the way, and say where their time goes.

    --step prefill runs prompts of the plan's length, --step decode a server's engine while all its sequences decode.
    Writes a page, pictures and a timeline that opens in Perfetto. --trace and --hlo read a trace that was taken
    elsewhere, of the program that the plan compiles to.
    """
    if (given.trace is None) != (given.hlo is None):
        raise InputError("--trace and --hlo go together: the trace names instructions of the HLO's text. Give both.")
    plan = resolve(given, read_fields(given.pairs), verb="profile", step=given.step).plan()
    storage = storage_of(given, plan.job)
    folder = given.out or Path("runs") / f"{plan.model.name}-profile"
    if given.trace is not None and given.hlo is not None:
        from meshwright.profile.summary import analyse

        profile = analyse(plan, given.trace, given.hlo, storage=storage)
    else:
        profile = _run(plan, storage, folder, steps=given.steps, warmup=given.warmup)
    from meshwright.parallel.processes import is_first

    return profile_answer(profile, folder) if is_first() else None


def _run(plan: Plan, storage: Storage, folder: Path, *, steps: int, warmup: int | None) -> "Profile":
    require_runnable(plan.model)
    require_devices(plan)
    folder.mkdir(parents=True, exist_ok=True)
    import jax

    from meshwright.api.compiling import step_of
    from meshwright.api.served_step import ServedDecode
    from meshwright.parallel.processes import is_first
    from meshwright.profile.run import record_steps, warmup_steps
    from meshwright.profile.subjects import Prefill, Subject, Training
    from meshwright.profile.summary import analyse

    num_warmup = warmup or warmup_steps()
    setting = replace(plan.setting, storage=storage)
    if setting.reads_sources:
        raise CannotRunError(
            f"the sources of {plan.model.name} are read by a program of its own, which is priced and proved, not "
            "profiled, in this version. Take the step decode."
        )
    if plan.job.kind == "decode":
        subject: Subject = ServedDecode(setting, plan.strategy, num_warmup + steps)
    else:
        subject_type = Training if plan.job.trains else Prefill
        subject = subject_type(step_of(setting, plan.strategy, {}), plan.job)
    if is_first():
        suffix = "" if plan.job.trains else f", {plan.job.kind}"
        say(
            f"{plan.model.name} on {plan.cluster.short_name}{suffix}: {num_warmup} steps to warm up, then {steps} "
            "under the profiler"
        )
    # one folder each: processes on one machine would write files of the same name
    trace_name = "trace" if is_first() else f"trace-{jax.process_index()}"
    recording = record_steps(subject, folder=folder / trace_name, steps=steps, warmup=num_warmup)
    return analyse(plan, recording.trace, recording.hlo, recording, storage=storage)


# -- what is answered -----------------------------------------------------------------------------------

SHOWN_ROWS = 4
SHOWN_ADVICE = 1


def profile_answer(profile: "Profile", folder: Path) -> Answer:
    """Writes the report into the folder. Returns a summary; its data has everything but the raw memory samples."""
    from meshwright.report.machine.profile_report import write_report

    paths = write_report(profile, folder)
    facts = _facts(profile) | {"files": paths}
    raw = [profile.comparison.terms, profile.comparison.steps, [facts]]
    return Answer(facts, _text(profile, folder), raw=raw)


def _text(profile: "Profile", folder: Path) -> Iterator[Piece]:
    """Yields one screen: the step, where its time goes, the worst terms and steps, advice, memory, the folder."""
    from meshwright.plan.why.explain import attention_kernel
    from meshwright.report.machine.profile_report import REPORT, difference_words, headline_rows, times_table

    times, comparison = profile.times, profile.comparison
    predicted_parts = comparison.predicted.parts
    part_rows = [(name, predicted_parts[name], seconds, format_seconds) for name, seconds in times.mean.parts.items()]
    yield Table.compared([*headline_rows(profile), *part_rows])
    yield from busy_words()
    waits_text = f" ({format_seconds(times.waited_s)} of it for other devices)" if times.waited_s else ""
    overlap_text = or_dash(times.overlap, "{:.0%}".format)
    yield (
        f"the five parts are of a mean device under the profiler and sum to its step; communication takes "
        f"{format_seconds(times.communication_s)}{waits_text}, {overlap_text} of it overlapped"
    )
    yield ""
    yield times_table(comparison.terms, "kind of work, worst first", SHOWN_ROWS)
    yield times_table(comparison.steps, "derived step, worst first", SHOWN_ROWS)
    advice = [f"{row.term}, {difference_words(row.difference_s)}: {row.text}" for row in profile.advice]
    yield from advice[:SHOWN_ADVICE]
    if left := advice[SHOWN_ADVICE:]:
        yield Detail(f"advice on {counted(len(left), 'kind')} of work", left)
    peak = profile.memory.peak
    if peak:
        largest_owner = profile.memory.owners[0]
        owner_text = "of the first device" if profile.memory.counted == "device" else "of the process"
        yield (
            f"memory: peak {format_bytes(peak.num_bytes)} {owner_text}; largest on a device: {largest_owner.name} "
            f"({largest_owner.kind}), {format_bytes(largest_owner.num_bytes)}"
        )
    yield f"wrote {folder / REPORT}, its pictures and a timeline"
    yield from (Condition(text[:1].lower() + text[1:].removesuffix(".")) for text in profile.warnings)
    yield Condition(f"MFU is a share of the {profile.plan.strategy.matmul_dtype} peak")
    if profile.host_s is not None:
        yield Condition(f"host: {format_seconds(profile.host_s)} of CPU time a step in the thread that dispatches it")
    if profile.plan.job.trains:
        yield Condition(f"attention by the kernel {attention_kernel(profile.plan)}")
    if comparison.shares_cores:
        yield Condition(
            "emulated devices share the cores: each instant of the machine's time is divided among the instructions "
            "that run then and do not wait; kinds of work sum to the step under the profiler"
        )


OF_PROFILE = ("platform", "step_s", "host_s", "mfu", "hfu", "flops", "advice", "notes")
OF_TIMES = ("devices", "communication_s", "hidden_s", "overlap", "ops")
OF_COMPARISON = ("shares_cores", "terms", "parts", "steps", "classes")
OF_MEMORY = ("counted", "arguments_bytes", "temporaries_bytes", "live_bytes", "owners")


def _facts(profile: "Profile") -> Facts:
    times, comparison, memory = profile.times, profile.comparison, profile.memory
    sources = ((profile, OF_PROFILE), (times, OF_TIMES), (comparison, OF_COMPARISON))
    return {
        **{name: getattr(source, name) for source, names in sources for name in names},
        "step_s_profiled": profile.profiled_s,
        "step_s_predicted": profile.predicted_step_s,
        "mfu_predicted": profile.predicted_mfu,
        "hfu_predicted": profile.predicted_hfu,
        "flops_predicted": profile.predicted_flops,
        "partition": times.mean,
        "partition_predicted": comparison.predicted,
        "float32_products": comparison.float32,
        "memory": {
            **{name: getattr(memory, name) for name in OF_MEMORY},
            "peak_bytes": memory.peak.num_bytes if memory.peak else None,
            "predicted": profile.predicted_memory,
        },
    }
