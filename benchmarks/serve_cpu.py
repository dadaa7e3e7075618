"""Serving a llama of 26.7M parameters on CPU: the engine, and its server, beside transformers with the same weights.

python benchmarks/serve_cpu.py                   in process: the engine beside `generate`
python benchmarks/serve_cpu.py --http            also over HTTP: `meshwright serve` beside `transformers serve`
python benchmarks/serve_cpu.py --json            the figures alone, as JSON

Every contestant is a process of its own with the same weights, prompts, threads and environment, fp32, greedy. They
take turns, and ratios are of the same round, because a shared machine is now faster, now slower; a turn begins with a
short run that is not timed. The tokens of all contestants must agree where the model is sure of them.

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
from train_cpu import CONFIG

PROMPT_LEN, NUM_TOKENS = 32, 128
BATCHES = (1, 8, 32)
Generation = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and a number of tokens -> so many greedy tokens after each."""


def prompts(count: int) -> list[list[int]]:
    """Random prompts, the same for everyone."""
    return np.random.default_rng(count).integers(0, CONFIG["vocab_size"], (count, PROMPT_LEN)).tolist()


def make_folder(folder: Path) -> None:
    """Writes the model with random weights, as transformers does, and a tokenizer whose words are token numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(folder)
    words = {str(number): number for number in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


# -- the contestants ---------------------------------------------------------------------------------------


def transformers_generation(folder: Path) -> Generation:
    """`LlamaForCausalLM.generate`, all prompts in one batch."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = LlamaForCausalLM.from_pretrained(folder).eval()

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
    from meshwright.serve.opening import EngineOptions, open_engine
    from meshwright.serve.request import TokenRequest

    engine = open_engine(folder, EngineOptions(max_requests=max(BATCHES))).engine

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
    for count in BATCHES:
        rates: dict[str, list[float]] = {kind: [] for kind in contestants}
        tokens = {}
        for _ in range(arguments.rounds):
            for kind, one in contestants.items():
                answer = one.run(count, NUM_TOKENS)
                rates[kind].append(count * NUM_TOKENS / answer["seconds"])
                tokens[kind] = np.array(answer["tokens"])
        alike = (tokens["generate"] == tokens["meshwright"]).mean()
        ratios = [own / other for own, other in zip(rates["meshwright"], rates["generate"], strict=True)]
        found["batches"][count] = {"tokens_per_s": rates, "ratio": statistics.median(ratios), "same_tokens": alike}
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
        f"prompts of {PROMPT_LEN} tokens, {NUM_TOKENS} tokens after each, fp32, greedy, {arguments.threads} threads; "
        f"median of {arguments.rounds} rounds"
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contend", choices=IN_PROCESS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contend:
        contend(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder) / "llama"
        make_folder(arguments.folder)
        found = compare(arguments)
        if arguments.http:
            found["http"] = compare_servers(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    show(found, arguments)
    if arguments.http:
        show_servers(found["http"])


if __name__ == "__main__":
    main()
