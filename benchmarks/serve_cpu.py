"""Serving models of published shapes on CPU: the engine, and its server, beside transformers with the same weights.

python benchmarks/serve_cpu.py                         every shape and dtype in process: the engine beside `generate`
python benchmarks/serve_cpu.py gemma-270m --dtypes bf16 --http     also `meshwright serve` beside `transformers serve`
python benchmarks/serve_cpu.py --folder MODEL          a folder of your own, in the dtype of its weights
python benchmarks/serve_cpu.py --json                  the figures alone, as JSON

Every contestant is a process of its own with the same weights, prompts, threads and environment, greedy. They take
turns, and ratios are of the same round, because a shared machine is now faster, now slower; a turn begins with a short
run that is not timed, and the turns of a shape when the load is low. The tokens of all contestants must agree where the
model is sure of them; weights are random unless --folder has others, and in bf16 random weights are seldom sure.

Over HTTP an asyncio client sends completions at once, whole or as streams; it runs on the same cores as the servers.
`transformers serve --continuous-batching` wants fastapi, which `make test-clients` installs. llama.cpp is not among
them: its Python package is built from source, 19 minutes on two busy cores, and reads its own format alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from http_contestants import FORMS, SERVERS, ServerContestant, same_tokens

PROMPT_LEN, NUM_TOKENS, MOST_TOKENS = 32, 64, 1024
BATCHES = (1, 4, 8)
QUIET, MOST_WAIT_S = 0.5, 300
"""A shape begins at a load average below this, or after so many seconds."""

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
_GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "tie_word_embeddings": True}


def _sizes(
    vocab: int, width: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    return {
        **{"vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim},
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-27m": _LLAMA | _sizes(32_000, 384, 1024, 8, 6, 1, 64) | {"tie_word_embeddings": False},
    "llama-135m": _LLAMA | _sizes(32_000, 768, 2048, 14, 8, 8, 96),
    "gemma-270m": _GEMMA
    | _sizes(262_144, 640, 2048, 18, 4, 1, 256)
    | {"sliding_window": 512, "query_pre_attn_scalar": 256},
    "llama-1b": _LLAMA | _sizes(128_256, 2048, 8192, 16, 32, 8, 64),
}
"""Vocabularies of 32k, 128k and 262k, one and eight kv heads; the last are Gemma 3 270M and Llama 3.2 1B."""
DTYPES = ("bf16", "fp32")
Generation = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and a number of tokens -> so many greedy tokens after each."""


def prompts(count: int) -> list[list[int]]:
    """Random prompts, the same for everyone."""
    return np.random.default_rng(count).integers(10, 30_000, (count, PROMPT_LEN)).tolist()


def make_folder(folder: Path, shape: dict[str, Any], dtype: str) -> None:
    """Writes the model with random weights, as transformers does, and a tokenizer whose words are token numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, max_position_embeddings=MOST_TOKENS, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config).to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    model.save_pretrained(folder)
    words = {str(number): number for number in range(shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def wait_for_quiet() -> float:
    """Waits until the load average is low, and returns it."""
    until = time.monotonic() + MOST_WAIT_S
    while os.getloadavg()[0] >= QUIET and time.monotonic() < until:
        time.sleep(2)
    return os.getloadavg()[0]


# -- the contestants ---------------------------------------------------------------------------------------


def transformers_generation(folder: Path) -> Generation:
    """`generate`, all prompts in one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.generation_config.eos_token_id = None

    def run(given: list[list[int]], num_tokens: int) -> list[list[int]]:
        with torch.inference_mode():
            found = model.generate(
                torch.tensor(given),
                attention_mask=torch.ones(len(given), len(given[0]), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return found[:, len(given[0]) :].tolist()

    return run


def meshwright_generation(folder: Path) -> Generation:
    """The engine, with a step's slots for the largest batch."""
    from meshwright.serve.opening import open_engine
    from meshwright.serve.options import EngineOptions
    from meshwright.serve.request import TokenRequest

    options = EngineOptions(max_requests=max(BATCHES), max_len=MOST_TOKENS // 2, token_budget=PROMPT_LEN * max(BATCHES))
    engine = open_engine(folder, options).engine

    def run(given: list[list[int]], num_tokens: int) -> list[list[int]]:
        requests = [TokenRequest(prompt=tuple(prompt), max_tokens=num_tokens) for prompt in given]
        return [[one.token for one in outputs if one.token is not None] for outputs in engine.run(requests)]

    return run


IN_PROCESS: dict[str, Callable[[Path], Generation]] = {
    "generate": transformers_generation,
    "meshwright": meshwright_generation,
}


def contend(arguments: argparse.Namespace) -> None:
    """Answers each line "<prompts> <tokens>" with the tokens and seconds of a run, as JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    started = time.perf_counter()
    run = IN_PROCESS[arguments.contend](arguments.folder)
    run(prompts(1), 2)
    print(json.dumps({"start_s": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        count, num_tokens = map(int, line.split())
        given = prompts(count)
        run(given, 8)
        started = time.perf_counter()
        found = run(given, num_tokens)
        print(json.dumps({"tokens": found, "seconds": time.perf_counter() - started}), flush=True)


class Contestant:
    """A process that generates when asked."""

    def __init__(self, kind: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--contend", kind, "--folder", str(arguments.folder)]
        command += ["--threads", str(arguments.threads)]
        threads = {"OMP_NUM_THREADS": str(arguments.threads), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads}
        )
        self.start_s = self._answer()["start_s"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, count: int, num_tokens: int) -> dict[str, Any]:
        """Tokens and seconds of a batch."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count} {num_tokens}\n")
        self.process.stdin.flush()
        return self._answer()


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each contestant in each round, and the ratios of a round."""
    contestants = {kind: Contestant(kind, arguments) for kind in IN_PROCESS}
    found: dict[str, Any] = {"start_s": {kind: one.start_s for kind, one in contestants.items()}, "batches": {}}
    found["load"] = wait_for_quiet()
    for count in BATCHES:
        rates: dict[str, list[float]] = {kind: [] for kind in contestants}
        tokens = {}
        for _ in range(arguments.rounds):
            for kind, one in contestants.items():
                answer = one.run(count, NUM_TOKENS)
                rates[kind].append(count * NUM_TOKENS / answer["seconds"])
                tokens[kind] = np.array(answer["tokens"])
        # the share of tokens before texts part, which they do for good
        alike = np.logical_and.accumulate(tokens["generate"] == tokens["meshwright"], axis=1).mean()
        ratios = [own / other for own, other in zip(rates["meshwright"], rates["generate"], strict=True)]
        found["batches"][count] = {"tokens_per_s": rates, "ratio": statistics.median(ratios), "same_tokens": alike}
    for one in contestants.values():
        one.process.communicate()
    return found


def compare_servers(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same of servers, for whole answers and for streams, with the time to the first bytes of an answer."""
    contestants: dict[str, ServerContestant] = {}
    theirs, ours = SERVERS
    found: dict[str, Any] = {"batches": {}}
    try:
        for kind in SERVERS:
            contestants[kind] = ServerContestant(kind, arguments.folder, arguments.threads)
        found["start_s"] = {kind: one.start_s for kind, one in contestants.items()}
        found["load"] = wait_for_quiet()
        for count in BATCHES:
            for form in FORMS:
                rates: dict[str, list[float]] = {kind: [] for kind in SERVERS}
                firsts: dict[str, list[float]] = {kind: [] for kind in SERVERS}
                tokens = {}
                for _ in range(arguments.rounds):
                    for kind, one in contestants.items():
                        answer = one.run(prompts(count), NUM_TOKENS, form == "stream")
                        rates[kind].append(sum(map(len, answer["tokens"])) / answer["seconds"])
                        firsts[kind].append(answer["first_s"])
                        tokens[kind] = answer["tokens"]
                ratios = [own / other for own, other in zip(rates[ours], rates[theirs], strict=True)]
                found["batches"].setdefault(count, {})[form] = {
                    **{"tokens_per_s": rates, "first_s": firsts, "ratio": statistics.median(ratios)},
                    "same_tokens": same_tokens(tokens[ours], tokens[theirs], NUM_TOKENS),
                }
    finally:
        for one in contestants.values():
            one.close()
    return found


def show_servers(found: dict[str, Any]) -> None:
    """The figures of servers as text."""
    print(f"\n{'requests':>10}  {'form':>6}  {SERVERS[0]:>18}  {SERVERS[1]:>16}  tokens/s   ratio  same tokens  first")
    for count, forms in found["batches"].items():
        for form, each in forms.items():
            rates = [statistics.median(each["tokens_per_s"][kind]) for kind in SERVERS]
            firsts = " / ".join(f"{statistics.median(each['first_s'][kind]) * 1e3:.0f} ms" for kind in SERVERS)
            print(
                f"{count:>10}  {form:>6}  {rates[0]:18.0f}  {rates[1]:16.0f}  {'':8}  {each['ratio']:6.2f}  "
                f"{each['same_tokens']:11.1%}  {firsts}"
            )


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The figures as text."""
    print(
        f"{arguments.name}, {arguments.dtype}: prompts of {PROMPT_LEN} tokens, {NUM_TOKENS} after each, greedy, "
        f"{arguments.threads} threads; median of {arguments.rounds} rounds; load average {found['load']:.2f} before"
    )
    print(f"{'sequences':>10}  {'generate':>10}  {'meshwright':>10}  tokens/s   ratio  same tokens")
    for count, each in found["batches"].items():
        rates = [statistics.median(each["tokens_per_s"][kind]) for kind in IN_PROCESS]
        print(
            f"{count:>10}  {rates[0]:10.0f}  {rates[1]:10.0f}  {'':8}  {each['ratio']:6.2f}  {each['same_tokens']:.1%}"
        )


def main() -> None:
    """Runs a contestant or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--http", action="store_true", help="servers too")
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []], help="all by default")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contend", choices=IN_PROCESS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="a model to serve in place of the shapes")
    arguments = parser.parse_args()
    if arguments.contend:
        contend(arguments)
        return
    given = arguments.folder
    named = [(name, dtype) for name in arguments.shapes or SHAPES for dtype in arguments.dtypes]
    for name, dtype in [(given.name, "as stored")] if given else named:
        with tempfile.TemporaryDirectory() as made:
            arguments.name, arguments.dtype, arguments.folder = name, dtype, given or Path(made) / name
            if not given:
                make_folder(arguments.folder, SHAPES[name], dtype)
            found = {"shape": name, "dtype": dtype, **compare(arguments)}
            if arguments.http:
                found["http"] = compare_servers(arguments)
        if arguments.json:
            print(json.dumps(found), flush=True)
            continue
        show(found, arguments)
        if arguments.http:
            show_servers(found["http"])


if __name__ == "__main__":
    main()
