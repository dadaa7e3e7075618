"""How long the planner takes: llama3-70b on 8192 and on 8960 chips, start-up of Python included.

    python benchmarks/plan.py [runs]

Prints one dated line per case: CPU and wall seconds, median of fresh processes.
"""

import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

CASES = {"v5p:16x16x32": "the book's split", "v5p:16x20x28": "a part of the torus and the nearest batch"}
PROGRAM = """
from meshwright.cost.setting import Setting
from meshwright.plan.planner import plan
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job

job = Job(batch_seqs=1024, seq_len=4096)
result = plan(Setting(catalogue.load_model("llama3-70b"), parse_cluster({cluster!r}), job))
best = result.nearest_batch or result.plans[0]
axes = " x ".join(f"{{axis}} {{size}}" for axis, size in best.strategy.mesh.items() if size > 1)
print(f"{{axes}}, {{best.job.batch_seqs}} sequences, step {{best.predicted.step_s:.4f}} s")
"""


def run_once(program: str) -> tuple[float, float, str]:
    """CPU seconds, wall seconds and output of one fresh process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, wall_s, done.stdout.strip()


def main(runs: int) -> None:
    where = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    for cluster, what in CASES.items():
        timed = [run_once(PROGRAM.format(cluster=cluster)) for _ in range(runs + 1)][1:]
        cpu_s, wall_s = (statistics.median(column) for column in list(zip(*timed, strict=True))[:2])
        print(
            f"{datetime.date.today()} plan llama3-70b on {cluster} ({what}): {cpu_s:.2f} s CPU, {wall_s:.2f} s wall, "
            f"median of {runs}; {timed[0][2]}; {where}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
