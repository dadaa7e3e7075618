"""The whole space of GPT-3 175B on 4096 A100, priced and ranked: strategies, seconds of CPU, memory; and scaling.

python benchmarks/search.py            GPT-3 175B on 4096 A100, every choice, nothing screened out
python benchmarks/search.py --scaling  plans of the verb `plan` on 1,000 to 100,000 chips

Run with OMP_NUM_THREADS=1 for one core. For comparison: Calculon (github.com/calculon-ai/calculon) evaluates some 300
strategies a second and core.
"""

import argparse
import resource
import time

from meshwright.core.units import format_bytes, format_seconds
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.plan.search import search
from meshwright.plan.space import FULL, open_space
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

BATCH_SEQS = 3072
"""Sequences of a step of the largest run in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (2021), table 1."""

CLUSTERS = ("h100:8x125", "h100:8x1250", "h100:8x12500", "v5p:8x8x16", "v5p:16x16x32", "12*v5p:16x16x32")


def full_space() -> None:
    """Every legal strategy of the benchmark job, once."""
    started = time.process_time()
    cluster = parse_cluster("a100:8x512")
    template = Strategy(mesh=make_mesh({}), state="bf16-master-fp32-grads")
    job = Job(batch_seqs=BATCH_SEQS, seq_len=2048)
    setting = Setting(load_model("gpt3-175b"), cluster, job, fitted_calibration(cluster.chip))
    space = open_space(setting, template, choices=FULL)
    outcome = search(space, cluster, BATCH_SEQS, exhaustive=True, frontier=True)
    seconds = time.process_time() - started
    print(f"{outcome.num_legal:,} legal strategies on {outcome.num_meshes:,} meshes, {len(space.patterns)} patterns")
    print(f"{outcome.num_candidates:,} fit in memory and were ranked; {len(outcome.frontier)} on the frontier")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{seconds:.2f} s of CPU, {outcome.num_legal / seconds:,.0f} strategies a second, {format_bytes(peak)} at most"
    )
    for found in outcome.found:
        at, one = found.predicted, found.strategy
        mesh = ", ".join(f"{axis} {size}" for axis, size in one.mesh.items() if size > 1)
        how = f"{one.schedule} x {one.chunks}, {one.num_microbatches} microbatches, remat {one.remat}, ZeRO-{one.zero}"
        print(f"  {format_seconds(at.step_s)}  {at.mfu:.0%}  {format_bytes(at.hbm_bytes_per_chip)}  {mesh}; {how}")


def scaling() -> None:
    """Seconds of CPU of one plan on clusters of very different sizes, after a first one that warms the caches up."""
    chosen = load_model("llama3-70b")
    rank_plans(Setting(chosen, parse_cluster("h100:8x2"), Job(batch_seqs=64, seq_len=4096)))
    for text in CLUSTERS:
        cluster = parse_cluster(text)
        # as many sequences as chips, so that the work divides on every cluster alike
        batch = cluster.num_chips
        started = time.process_time()
        rank_plans(Setting(chosen, cluster, Job(batch_seqs=batch, seq_len=4096), fitted_calibration(cluster.chip)))
        print(f"{text:>20} {cluster.num_chips:>9,} chips  {time.process_time() - started:6.2f} s of CPU")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", action="store_true", help="plans on 1,000 to 100,000 chips")
    (scaling if parser.parse_args().scaling else full_space)()
