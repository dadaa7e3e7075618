"""Whether a real model answers as in transformers: greedy texts of 100 prompts, and log-probabilities of their tokens.

    python -m benchmarks.same_text MODEL.gguf [--tokens 32] [--dtypes fp32 bf16] [--both]

The model is converted to safetensors in each dtype. Weights that are loaded from the GGUF file and from the safetensors
must be equal bit by bit; the engine of the server generates from the file, with --both from the safetensors too.
transformers reads the safetensors; a text is its greedy one if each token is its likeliest after the tokens before,
which one forward pass says (`generate` itself goes on from ten of the prompts). Texts are the same up to the first
token at which its two best logits differ by no more than TOLERANCE: there rounding decides. Every other difference
counts, and makes the exit code 1, as does a log-probability in fp32 that differs by more than LOGPROB. One prompt in
ten is longer than the window of a Gemma 3 (512 positions).
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.nn.hf.gguf import as_folder
from meshwright.nn.hf.weights import convert_hf, load_params
from meshwright.serve.model_folder import ModelFolder, open_model
from meshwright.serve.opening import open_engine
from meshwright.serve.options import EngineOptions
from meshwright.serve.request import TokenRequest
from meshwright.spec.model import Model

TOLERANCE = {"fp32": 1e-4, "bf16": 0.25}
"""Difference of two logits that rounding may turn round; 0.25 is two steps of a bf16 number from 16 to 32."""
LOGPROB = 2e-5
LONGEST, BY_GENERATE = 1024, 10

ENGLISH = """The capital of France is|Once upon a time there was|Water boils at|The three primary colours are
|My favourite food is pizza because|The best way to learn a language is|In 1969, the first human|Dear Sir or Madam,
|The meaning of life|Roses are red,|To be, or not to be:|The weather in London in November|She opened the door and saw
|The theory of relativity says that|A list of fruits: apple, banana,|He said, "I will never|The largest planet is
|How do I bake bread?|Question: What is 2 + 2?\nAnswer:|The opposite of hot is|Breaking news: scientists have
|My name is Alice and|The president of the United States|It was a dark and stormy night|If you want to be happy,
|The quick brown fox|Photosynthesis is the process|An apple a day|The stock market fell today after|I think, therefore
|Translate to French: good morning =|Shakespeare was born in|The human heart has|In the beginning|Step 1:
|The recipe needs two eggs, 100 g of sugar and|Monday, Tuesday, Wednesday,|1, 1, 2, 3, 5, 8,|Q: Who wrote Hamlet? A:
|The moon is about 384,400 km from"""
CODE = r"""def fibonacci(n):\n    |import numpy as np\n\n|for (int i = 0; i < n; i++) {\n|SELECT name FROM users WHERE
|class Stack:\n    def __init__(self):\n|#include <stdio.h>\n\nint main(|<html>\n<head>\n<title>|{"name": "Bob", "age":
|git commit -m "|fn main() {\n    println!|try:\n    x = int(input())\nexcept|const add = (a, b) =>|SELECT COUNT(*)
|if __name__ == "__main__":\n|public static void main(|\begin{document}\n|x = [i ** 2 for i in|docker run -it
|async function fetchData(url) {\n|#!/bin/bash\nset -e\n|assert sorted([3, 1, 2]) ==|while True:\n    |return None\n\n
|def quicksort(xs):\n    if len(xs) <= 1:\n|lambda x:"""
OTHERS = """Die Hauptstadt von Deutschland ist|Il était une fois|El cielo es azul porque|La capitale d'Italia è
|東京は日本の|今天天气很好,|Москва — столица|مرحبا، كيف|Η Αθήνα είναι|서울은 대한민국의|नमस्ते, आप|Warszawa jest stolicą
|O Brasil é um país|Ik hou van|Stockholm är huvudstaden i|İstanbul'un nüfusu|שלום, מה|Xin chào, tôi là|ประเทศไทยมี
|Helsinki on Suomen|Praha je hlavní|Jakarta adalah|Mimi ninaitwa|Kyiv — 🇺🇦 |😀 😃 😄"""


def prompts() -> list[str]:
    """Returns 100 prompts: 40 in English, 25 of code, 25 in other languages, 10 long ones that join them."""
    lines = [text.replace("\n|", "|").split("|") for text in (ENGLISH, CODE, OTHERS)]
    short = [one.replace("\\n", "\n") for group in lines for one in group]
    turned = [short[start:] + short[:start] for start in range(0, 90, 9)]
    return [*short, *("\n".join(one) for one in turned)]


class Generated(NamedTuple):
    """Tokens after each prompt, and their log-probabilities."""

    tokens: np.ndarray
    logprobs: np.ndarray


class Judged(NamedTuple):
    """What transformers says of tokens after prompts: its likeliest tokens at their places, how far its two best logits
    are apart there, and the log-probabilities of the given tokens."""

    tokens: np.ndarray
    margins: np.ndarray
    logprobs: np.ndarray


def ours(source: ModelFolder, given: list[list[int]], count: int) -> Generated:
    """Generates with the engine of the server. Returns log-probabilities."""
    options = EngineOptions(max_len=LONGEST, max_requests=8, token_budget=64, page_len=32)
    engine: Any = open_engine(source, options, in_background=False).engine
    requests = [TokenRequest(prompt=tuple(one), max_tokens=count, logprobs=0) for one in given]
    outputs = [[one for one in row if one.token is not None] for row in engine.run(requests)]
    tokens, found = ([[pick(one) for one in row] for row in outputs] for pick in (_token, _logprob))
    return Generated(np.asarray(tokens), np.asarray(found))


def _token(one: Any) -> int:
    return int(one.token)


def _logprob(one: Any) -> float:
    return float(one.logprob.logprob)


def judged(model: Any, given: list[list[int]], tokens: np.ndarray) -> Judged:
    """Returns what transformers says of tokens after prompts, one prompt at a time."""
    import torch

    found = []
    for prompt, after in zip(given, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + after.tolist()]), logits_to_keep=len(after) + 1).logits[0, :-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        best = wide.topk(2)
        logprobs = wide.log_softmax(-1).gather(1, torch.tensor(after)[:, None].long())
        found.append((best.indices[:, 0], best.values[:, 0] - best.values[:, 1], logprobs[:, 0]))
    return Judged(*(torch.stack(part).numpy() for part in zip(*found, strict=True)))


def generated(model: Any, given: list[list[int]], count: int) -> np.ndarray:
    """Returns the tokens that `generate` of transformers gives after prompts, which go together."""
    import torch

    model.generation_config.eos_token_id = None
    longest = max(map(len, given))
    rows = torch.tensor([[0] * (longest - len(one)) + one for one in given])
    shown = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in given])
    with torch.no_grad():
        found = model.generate(rows, attention_mask=shown, do_sample=False, max_new_tokens=count)
    return np.asarray(found[:, longest:])


def compared(what: str, ours: np.ndarray, theirs: Judged, tolerance: float) -> bool:
    """Prints one line, and one for each text that is another. Returns True if none is."""
    num_equal, close, wrong = 0, list[float](), list[tuple[int, int, float]]()
    for row in range(len(ours)):
        differ = np.flatnonzero(ours[row] != theirs.tokens[row])
        margin = float(theirs.margins[row, differ[0]]) if differ.size else 0.0
        num_equal += not differ.size
        if differ.size and margin <= tolerance:
            close.append(margin)
        elif differ.size:
            wrong.append((row, int(differ[0]), margin))
    more = f", {len(close)} differ where two logits are within {max(close):.2g}" if close else ""
    print(f"{what}: {num_equal} of {len(ours)} texts of {ours.shape[1]} tokens are the same{more}", flush=True)
    for row, first, margin in wrong:
        print(f"  prompt {row}: token {first} is another, where the two best logits are {margin:.3g} apart", flush=True)
    return not wrong


def apart(one: np.ndarray, other: np.ndarray) -> str:
    """Says how far log-probabilities are apart: at most, and what 99 of 100 are within."""
    found = np.abs(one - other)
    return f"{found.max():.1e} at most, {np.quantile(found, 0.99):.1e} for 99 of 100"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=100, help="of the list, evenly")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--both", action="store_true", help="generate from the safetensors too")
    parser.add_argument("--float64", action="store_true", help="compare with transformers in float64 too")
    given = parser.parse_args()
    opened, texts = open_model(given.model), prompts()
    tokens = [opened.text.encode(text) for text in texts[:: len(texts) // given.prompts]]
    print(f"{opened.model.name}, jax {jax.__version__}, {os.cpu_count()} cores of {platform.machine()}")
    print(f"{len(tokens)} prompts of {min(map(len, tokens))} to {max(map(len, tokens))} tokens", flush=True)
    right = True
    for dtype in given.dtypes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / opened.model.name
            convert_hf(opened.model, as_folder(given.model), folder, dtype=dtype)
            right &= same_weights(opened.model, (given.model, folder), dtype)
            places = {"GGUF": given.model, **({"safetensors": folder} if given.both else {})}
            found = {}
            for what, place in places.items():
                begun = time.perf_counter()
                found[what] = ours(open_model(place)._replace(dtype=dtype), tokens, given.tokens)
                print(f"{dtype} {what}: the engine took {time.perf_counter() - begun:.0f} s", flush=True)
            right &= against(folder, dtype, tokens, found, exactly=given.float64 and dtype == "fp32")
    print(f"load {os.getloadavg()[0]:.0f}")
    sys.exit(not right)


def same_weights(model: Model, places: tuple[Path, Path], dtype: str) -> bool:
    """Prints whether the weights that are loaded from two places are equal bit by bit, and returns it."""
    of_jax = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[dtype]
    one, other = (load_params(model, place, None, of_jax) for place in places)
    num_equal = sum(np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes() for name in one)
    print(f"{dtype}: {num_equal} of {len(one)} arrays from GGUF and from safetensors are equal bit by bit", flush=True)
    return num_equal == len(one)


def against(folder: Path, dtype: str, tokens: list[list[int]], found: dict[str, Generated], *, exactly: bool) -> bool:
    """Prints how texts and log-probabilities compare with those of transformers. Returns True if they agree."""
    import torch
    from transformers import AutoModelForCausalLM

    of_torch = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=of_torch).eval()
    one, right, tolerance = found["GGUF"], True, TOLERANCE[dtype]
    theirs = judged(model, tokens, one.tokens)
    for what, each in found.items():
        same = np.array_equal(each.tokens, one.tokens)
        of_each = theirs if same else judged(model, tokens, each.tokens)
        right &= compared(f"{dtype} {what}", each.tokens, of_each, tolerance)
    short = sorted(range(len(tokens)), key=lambda number: len(tokens[number]))[:BY_GENERATE]
    texts = generated(model, [tokens[number] for number in short], one.tokens.shape[1])
    own = Judged(texts, *(part[short] for part in theirs[1:]))
    right &= compared(f"{dtype} beside generate", one.tokens[short], own, tolerance)
    print(f"{dtype} log-probabilities: the engine and transformers {apart(one.logprobs, theirs.logprobs)}", flush=True)
    if exactly:
        exact = judged(model.double(), tokens, one.tokens).logprobs
        print(f"{dtype} log-probabilities: the engine and transformers in float64 {apart(one.logprobs, exact)}")
        print(
            f"{dtype} log-probabilities: transformers and itself in float64 {apart(theirs.logprobs, exact)}", flush=True
        )
    return right and (dtype != "fp32" or float(np.abs(one.logprobs - theirs.logprobs).max()) <= LOGPROB)


if __name__ == "__main__":
    main()
