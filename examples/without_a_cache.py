"""What a cache of keys and values saves: the time of one more token of a text, with it and without it, drawn.

Without a cache each token is a pass over the whole text, as by the simplest of samplers.
"""

import sys
import time
from pathlib import Path

import altair as alt
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import SchedulerLimits
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.report.figure import save, themed
from meshwright.report.marks import lines, log_axis, stroke_colors
from meshwright.serve.engine import Engine
from meshwright.serve.offline.generate import as_requests, generate, generate_uncached
from meshwright.spec.catalogue import load_model
from meshwright.spec.strategy import Strategy, make_mesh

MODEL = replace(load_model("tiny"), num_layers=4, d_model=256, d_ff=704, num_heads=8, num_kv_heads=8, head_dim=32)
LENGTHS = (32, 64, 128, 256, 512)
PAGE_LEN, NUM_PAGES = 32, 17
STORAGE = Storage(page_len=PAGE_LEN, num_pages=NUM_PAGES)

step = PackedStep(MODEL, Strategy(mesh=make_mesh({})), max_len=544, max_seqs=1, storage=STORAGE)
limits = SchedulerLimits(max_requests=1, token_budget=512, prefix_cache=False, page_len=PAGE_LEN, num_pages=NUM_PAGES)
engine = Engine(step, step.place(init_params(MODEL, seed=0)), limits)


def seconds(length: int) -> tuple[float, float]:
    """The time of a token behind a text of some length, with a cache and without one."""
    (request,) = as_requests([[number % 250 for number in range(length)]], max_tokens=9)
    found = generate(engine, [request])
    tokens = list(found.completions[0].tokens)
    cached = generate(engine, [request]).pace.tokens_per_s
    one = replace(request, max_tokens=1)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        if generate_uncached(engine, one) != tokens[:1]:
            raise SystemExit("the tokens are not those of the cache")
        best = min(best, time.perf_counter() - start)
    assert cached
    return 1 / cached, best


times = {length: seconds(length) for length in LENGTHS}
print("text     with a cache    without")
for length, (cached, uncached) in times.items():
    print(f"{length:>4} {cached * 1e3:13.2f} ms {uncached * 1e3:7.2f} ms")
curves = {
    name: [(length, 1e3 * each[place]) for length, each in times.items()]
    for place, name in enumerate(("with a cache", "without"))
}
x = log_axis(alt.X, "x", (LENGTHS[0], LENGTHS[-1]), "tokens of the text", values=LENGTHS)
every = [value for points in curves.values() for _, value in points]
y = log_axis(alt.Y, "y", (min(every) / 1.5, max(every) * 1.5), "time of one more token (ms)")
chart = alt.layer(*lines(curves, x, y, stroke_colors(curves)))
path = Path(sys.argv[1] if len(sys.argv) > 1 else "without_a_cache.png")
words = f"{MODEL.num_layers} layers of {MODEL.d_model}, measured"
save(themed(chart, "A cache makes a token's time flat", words), path)
print(f"drawn in {path}")
