"""How the time of a server's step grows on a CPU: with sequences, with their context, and with the queue.

python benchmarks/serve_growth.py > benchmarks/results/serve_growth-DATE.txt
python benchmarks/serve_growth.py invariance     what batch invariance costs, alone

The llama of 26.7M parameters of `train_cpu.py`, fp32. A step's time is the median of many in which nothing but decoding
happens, in an engine that dispatches a step before it reads the last one.
"""

import os
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
from train_cpu import CONFIG

from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.host_memory import keep_freed_memory
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.serve.engine import Engine
from meshwright.serve.request import TokenRequest
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.strategy import Strategy, make_mesh

MAX_LEN, SLOTS, PAGE_LEN, STEPS = 2048, 32, 32, 30
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32), (64, 256, 512, 1024, 1536)
QUEUES = (10, 10_000)


def make_step(*, batch_invariant: bool = False) -> tuple[PackedStep, Any]:
    """A step with pages for every slot's longest request, and random weights on the device."""
    keep_freed_memory()
    config = {**CONFIG, "model_type": "llama", "max_position_embeddings": MAX_LEN}
    model = model_from_config(config, "llama")
    storage = Storage(cache_dtype="fp32", page_len=PAGE_LEN, num_pages=SLOTS * MAX_LEN // PAGE_LEN)
    strategy = Strategy(mesh=make_mesh({}), state="fp32")
    step = PackedStep(
        model, strategy, max_len=MAX_LEN, max_seqs=SLOTS, storage=storage, batch_invariant=batch_invariant
    )
    return step, step.place(init_params(model, 0))


def engine_on(step: PackedStep, params: Any, token_budget: int = 256) -> Engine:
    limits = SchedulerLimits(
        max_requests=SLOTS, token_budget=token_budget, page_len=PAGE_LEN, num_pages=SLOTS * MAX_LEN // PAGE_LEN
    )
    return Engine(step, params, limits)


def request(random: np.random.Generator, length: int, num_tokens: int) -> TokenRequest:
    prompt = random.integers(0, CONFIG["vocab_size"], length).tolist()
    return TokenRequest(prompt=tuple(prompt), max_tokens=num_tokens)


def step_ms(engine: Engine, count: int = STEPS) -> float:
    """The median time of a step, in ms."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def decoding_ms(step: PackedStep, params: Any, batch: int, context: int) -> float:
    """The time of a step of so many sequences of about this context."""
    engine, random = engine_on(step, params), np.random.default_rng(0)
    # the first ones decode while the prompts of the last ones are computed, and must not end before
    num_tokens = 2 * STEPS + 20 + batch * context // 200
    for _ in range(batch):
        engine.submit(request(random, context, num_tokens))
    while engine.state().waiting or any(live.computed < context for live in engine._live.values()):
        engine.step()
    for _ in range(3):
        engine.step()
    return step_ms(engine)


def straight_line(tokens: list[int], found: list[float]) -> str:
    seconds = np.array(found)
    slope, start = np.polyfit(tokens, seconds, 1)
    rest = seconds - np.polyval([slope, start], tokens)
    share = 1 - (rest**2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    return f"{start:.2f} ms + {1e6 * slope:.0f} ns a token, R^2 {share:.4f}"


def growth(step: PackedStep, params: Any) -> None:
    """Steps against sequences, contexts and requests that wait."""
    print("\nsequences  " + "".join(f"{f'at {context}':>10}" for context in CONTEXTS) + "   a line over the context")
    for batch in BATCHES:
        found = [decoding_ms(step, params, batch, context) for context in CONTEXTS]
        line = straight_line([batch * context for context in CONTEXTS], found)
        print(f"{batch:>9}  " + "".join(f"{each:>10.2f}" for each in found) + f"   {line}", flush=True)
    print("\nrequests that wait  ms a step of 32 sequences")
    for queue in QUEUES:
        engine, random = engine_on(step, params), np.random.default_rng(0)
        for _ in range(SLOTS):
            engine.submit(request(random, 64, 400))
        for _ in range(queue):
            engine.submit(request(random, 8, 8))
        for _ in range(20):
            engine.step()
        print(f"{queue:>18,}  {step_ms(engine):.2f}", flush=True)


def invariance(step: PackedStep, params: Any) -> None:
    """What batch invariance costs."""
    print("\nbatch-invariant: tokens/s of prompts of 32 tokens and 128 after each, beside the same without")
    invariant, _ = make_step(batch_invariant=True)
    checked = engine_on(invariant, params, 32)
    checked.warm_up()
    sizes = [shape.rows for shape in checked.shapes()]
    print(f"steps of {', '.join(map(str, sizes))} rows are alike")
    for batch in (1, 8, 32):
        rates: dict[str, list[float]] = {"plain": [], "batch-invariant": []}
        for _ in range(4):
            for name, one, budget in (("plain", step, 256), ("batch-invariant", invariant, 32)):
                random = np.random.default_rng(0)
                engine = checked if one is invariant else engine_on(one, params, budget)
                requests = [request(random, 32, 128) for _ in range(batch)]
                started = time.perf_counter()
                engine.run(requests)
                rates[name].append(batch * 128 / (time.perf_counter() - started))
        plain, alike = (statistics.median(rate[1:]) for rate in rates.values())
        print(f"{batch:>9} sequences  {plain:.0f}  {alike:.0f}  ratio {alike / plain:.3f}", flush=True)


def main() -> None:
    print(f"{os.cpu_count()} cores, jax {jax.__version__}; ms a step, the median of {STEPS}")
    step, params = make_step()
    if sys.argv[1:] != ["invariance"]:
        growth(step, params)
    invariance(step, params)


if __name__ == "__main__":
    main()
