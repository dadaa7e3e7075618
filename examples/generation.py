"""Generation over four devices: sequences over two, heads and the cache of keys and values over two."""

from beside_one_device import MODEL, print_steps

import meshwright as mw
from meshwright.algebra.generation.program import Storage
from meshwright.batching.limits import SchedulerLimits
from meshwright.nn.weights import init_params
from meshwright.serve.offline.generate import as_requests, generate

PROMPTS = [[5, 9, 60, 2, 7], [3], [11, 12, 13], [200, 100]]
STORAGE = Storage(cache_dtype="fp32", page_len=8, num_pages=16)


def tokens(step: mw.PackedStep) -> list[list[int]]:
    """What the likeliest tokens after each prompt are."""
    limits = SchedulerLimits(max_requests=step.max_seqs, token_budget=64, page_len=8, num_pages=16)
    engine = mw.Engine(step, step.place(init_params(MODEL, seed=0)), limits)
    return [list(one.tokens) for one in generate(engine, as_requests(PROMPTS, max_tokens=12)).completions]


def make_step(axes: dict[str, int]) -> mw.PackedStep:
    strategy = mw.Strategy(mesh=mw.make_mesh(axes), state="fp32")
    return mw.PackedStep(MODEL, strategy, max_len=32, max_seqs=len(PROMPTS), storage=STORAGE)


split = make_step({"data": 2, "tensor": 2})
for title, derived in (("steps with prompts", split.derived_prompts), ("each token", split.derived)):
    for block in derived.blocks:
        print_steps(f"{title}, {block.block.name}, {block.repeat} times", block.forward)
found, expected = tokens(split), tokens(make_step({}))
print("\nprompt -> tokens over four devices")
for prompt, tokens_of_prompt in zip(PROMPTS, found, strict=True):
    print(f"{prompt} -> {tokens_of_prompt}")
if found != expected:
    raise SystemExit(f"one device gives other tokens: {expected}")
print("one device gives the same tokens")
