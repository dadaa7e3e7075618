"""A trace of a training step and of a served step through `profile`, on one GPU: the last part of `on_gpu.sh`.

Unaccounted is the time of a step in instructions that no derived step explains, and in which nothing runs for longer
than a launch.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
from gpu_part import Part, model_of, this_chip
from train_gpu import CASES, STATE, TINY, job_of

from meshwright.algebra.generation.program import AS_WRITTEN
from meshwright.api.compiling import step_of
from meshwright.api.planning import plan_of
from meshwright.api.rates import rates_for
from meshwright.api.served_step import ServedDecode
from meshwright.cost.setting import Setting
from meshwright.profile.run import record_steps, warmup_steps
from meshwright.profile.subjects import Subject, Training
from meshwright.profile.summary import analyse
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

STEPS, SEQUENCES = 3, 8
MOST = 0.1
SHOWN = 6


def main() -> None:
    """Traces both."""
    part = Part("trace", f"at most {MOST:.0%} unaccounted", __doc__)
    cluster = parse_cluster(f"{this_chip().name}:1")
    rates = rates_for(cluster, None, fitted=True)
    case, shares = (TINY if part.tiny else CASES)[0], list[float]()
    length, warmup = 64 if part.tiny else 1024, warmup_steps()
    jobs = {"train": job_of(case), "decode": Job(kind="decode", batch_seqs=SEQUENCES, seq_len=length)}

    def run(name: str) -> None:
        strategy = Strategy(mesh=make_mesh({}), remat=case.remat, state=STATE)
        setting = Setting(model_of(case.model, layers=case.layers, tiny=part.tiny), cluster, jobs[name], rates)
        plan = plan_of(setting, strategy)
        if name == "train":
            subject: Subject = Training(step_of(setting, strategy, {}), setting.job)
        else:
            subject = ServedDecode(setting, strategy, warmup + STEPS)
        with tempfile.TemporaryDirectory() as folder:
            recording = record_steps(subject, folder=Path(folder), steps=STEPS, warmup=warmup)
            found = analyse(plan, recording.trace, recording.hlo, recording, storage=AS_WRITTEN)
        rows, mean = found.comparison.steps, found.times.mean
        unknown = sum(row.measured_s or 0.0 for row in rows if row.kind == "not derived")
        share = (unknown + mean.idle_s) / mean.total_s
        shares.append(share)
        kinds: list[dict[str, Any]] = [
            {"name": row.name, "measured_s": row.measured_s, "predicted_s": row.predicted_s}
            for row in found.comparison.terms
        ]
        part.keep(
            f"{name}: {found.step_s * 1e3:.2f} ms, predicted {found.predicted_step_s * 1e3:.2f}, under the profiler "
            f"{found.profiled_s * 1e3:.2f}; host {(found.host_s or 0) * 1e3:.2f} ms; unaccounted {share:.1%}, of it "
            f"idle beyond launches {mean.idle_s / mean.total_s:.1%}",
            case=name, step_s=found.step_s, predicted_s=found.predicted_step_s, profiled_s=found.profiled_s,
            host_s=found.host_s, unaccounted=share, parts=mean.parts, kinds=kinds,
            not_derived={row.name: row.measured_s for row in rows if row.kind == "not derived"},
        )  # fmt: skip
        for row in kinds[:SHOWN]:
            both = (f"{(row[key] or 0) * 1e3:.2f}" for key in ("measured_s", "predicted_s"))
            print("  {}: {} ms, predicted {}".format(row["name"], *both), flush=True)
        jax.clear_caches()

    part.each(jobs, run)
    part.close(f"at most {max(shares):.1%}" if shares else "nothing measured", max(shares, default=1.0) <= MOST)


if __name__ == "__main__":
    main()
