"""Generation over four devices: sequences over two, heads and the cache of keys and values over two."""

from beside_one_device import MODEL, print_steps

from meshwright.nn.weights import init_params
from meshwright.parallel.generation.generate_step import GenerateStep
from meshwright.serve.offline.generate import generate
from meshwright.spec.strategy import Strategy, make_mesh

PROMPTS = [[5, 9, 60, 2, 7], [3], [11, 12, 13], [200, 100]]


def tokens(step: GenerateStep) -> list[list[int]]:
    """What the likeliest tokens after each prompt are."""
    found = generate(step, step.place(init_params(MODEL, seed=0)), PROMPTS, max_tokens=12)
    return [list(one.tokens) for one in found.completions]


def make_step(axes: dict[str, int]) -> GenerateStep:
    strategy = Strategy(mesh=make_mesh(axes), state="fp32")
    return GenerateStep(MODEL, strategy, max_len=32, batch_seqs=len(PROMPTS), cache_dtype="fp32")


split = make_step({"data": 2, "tensor": 2})
for title, derived in (("prefill", split.prefill_declared), ("each token", split.generate_declared)):
    for block in derived.blocks:
        print_steps(f"{title}, {block.block.name}, {block.repeat} times", block.forward)
found, expected = tokens(split), tokens(make_step({}))
print("\nprompt -> tokens over four devices")
for prompt, tokens_of_prompt in zip(PROMPTS, found, strict=True):
    print(f"{prompt} -> {tokens_of_prompt}")
if found != expected:
    raise SystemExit(f"one device gives other tokens: {expected}")
print("one device gives the same tokens")
