"""What adapters cost a server's step on a CPU: 8 sequences that decode, beside 0, 1, 4 and 8 adapters of rank 16.

taskset -c 0 python benchmarks/serve_adapters.py

The llama of 26.7M parameters of `train_cpu.py`, fp32, adapters on all linear layers; sequences take them in turn.
Times are CPU seconds of the process, so that other programs disturb them less; engines take turns.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import time
from typing import Any

import jax
import numpy as np
from msgspec.structs import replace
from serve_growth import request
from train_cpu import CONFIG

from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.host_memory import keep_freed_memory
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.serve.engine import Engine
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Lora
from meshwright.spec.strategy import Strategy, make_mesh

COUNTS, RANK, SEQUENCES, MAX_LEN, PAGE_LEN, TURNS, STEPS = (0, 1, 4, 8), 16, 8, 256, 32, 5, 24


def engine_with(count: int) -> Engine:
    """An engine in which all sequences decode."""
    model = model_from_config({**CONFIG, "model_type": "llama", "max_position_embeddings": MAX_LEN}, "llama")
    if count:
        model = replace(model, lora=Lora(rank=count * RANK, alpha=count * RANK))
    sizes: dict[str, Any] = {"page_len": PAGE_LEN, "num_pages": SEQUENCES * MAX_LEN // PAGE_LEN}
    storage = Storage(cache_dtype="fp32", adapters=count, **sizes)
    strategy = Strategy(mesh=make_mesh({}), state="fp32")
    step = PackedStep(model, strategy, max_len=MAX_LEN, max_seqs=SEQUENCES, storage=storage)
    limits = SchedulerLimits(max_requests=SEQUENCES, token_budget=32, **sizes)
    names = [str(number) for number in range(count)]
    engine, random = Engine(step, step.place(init_params(model, 0)), limits, adapters=names), np.random.default_rng(0)
    for number in range(SEQUENCES):
        one = request(random, 32, MAX_LEN - 32)
        engine.submit(replace(one, adapter=names[number % count] if count else ""))
    for _ in range(16):
        engine.step()
    return engine


def main() -> None:
    keep_freed_memory()
    engines = {count: engine_with(count) for count in COUNTS}
    found: dict[int, list[float]] = {count: [] for count in COUNTS}
    for count, engine in [*engines.items()] * TURNS:
        for number in range(STEPS):
            started = time.process_time()
            engine.step()
            found[count] += [1e3 * (time.process_time() - started)] * (number > 2)
    print(f"jax {jax.__version__}, {SEQUENCES} sequences, adapters of rank {RANK} on all linear layers")
    for count, times in found.items():
        low, middle = np.percentile(times, (25, 50))
        print(f"{count} adapters: {middle:.1f} ms of CPU time a step, a quarter of steps below {low:.1f}")


if __name__ == "__main__":
    main()
