"""lm-eval's log-likelihoods through `/v1/completions` are those of our forward pass."""

import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from meshwright.nn.hf.weights import load_params
from meshwright.serve.model_folder import open_model
from tests.clients.folder import NAME, make_folder
from tests.clients.server import ROOT, Server
from tests.logits import logits_fn

TASK = """
task: words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
GENERATE = """doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: [".", "x"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""
LONGEST, NUM_QUESTIONS, NUM_CHOICES = 64, 40, 4
ABSOLUTE = 1e-3


@pytest.fixture(scope="module")
def often_ending(tmp_path_factory):
    """A server of a model that ends a text at a third of its tokens, so that many answers are followed by an end."""
    folder = make_folder(tmp_path_factory.mktemp("ends") / NAME)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *range(300, 560)]}))
    with Server(folder) as server:
        yield server, folder


@pytest.fixture
def questions(tmp_path):
    chance, words = random.Random(3), (ROOT / "docs" / "train.md").read_text().split()
    rows = []
    for _ in range(NUM_QUESTIONS):
        start = chance.randrange(len(words) - 20)
        choices = [" ".join(chance.choices(words, k=chance.randint(1, 3)))[:24] for _ in range(NUM_CHOICES)]
        answer = chance.randrange(NUM_CHOICES)
        rows.append({"question": " ".join(words[start : start + 8])[:50].strip(), "choices": choices, "answer": answer})
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def evaluate(client, server, folder, questions, kind, how):
    """Runs a task; returns its samples."""
    out, tasks = questions.parent / "out", questions.parent / "tasks"
    tasks.mkdir()
    rest = CHOICE if kind == "multiple_choice" else GENERATE
    (tasks / "words.yaml").write_text(TASK.format(file=questions, kind=kind) + rest)
    options = {"model": NAME, "base_url": f"{server.url}/v1/completions", "max_length": 1024, **how}
    if "tokenizer" in how:
        options["tokenizer"] = str(folder)
    batch = str(options.pop("batch_size", 1))
    given = ",".join(f"{name}={value}" for name, value in options.items())
    client(
        *("lm_eval", "run", "--model", "local-completions", "--model_args", given, "--tasks", "words"),
        *("--include_path", str(tasks), "--output_path", str(out), "--log_samples", "--batch_size", batch),
    )
    (samples,) = out.rglob("samples_words_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def log_likelihoods(folder, pairs):
    """Of each (text, what follows it): the sum over the tokens of what follows, by the forward pass."""
    model = open_model(folder).model
    params, logits = load_params(model, folder), logits_fn(model)
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows, starts, ends = np.zeros((len(pairs), LONGEST), np.int32), [], []
    for row, (text, after) in zip(rows, pairs, strict=True):
        tokens = encoder.encode(text + after).ids
        row[: len(tokens)] = tokens
        starts.append(len(encoder.encode(text).ids))
        ends.append(len(tokens))
    found = np.asarray(logits(params, jnp.asarray(rows)), np.float64)
    logprobs = found - np.log(np.exp(found).sum(-1, keepdims=True))
    each = np.take_along_axis(logprobs[:, :-1], rows[:, 1:, None], -1)[..., 0]
    likeliest = logprobs[:, :-1].argmax(-1) == rows[:, 1:]
    spans = [slice(start - 1, end - 1) for start, end in zip(starts, ends, strict=True)]
    sums = [row[span].sum() for row, span in zip(each, spans, strict=True)]
    return sums, [bool(row[span].all()) for row, span in zip(likeliest, spans, strict=True)]


LOCAL = {"tokenizer": "", "tokenizer_backend": "huggingface"}
HOW = {
    "tokens": LOCAL | {"num_concurrent": 8},
    "batches": LOCAL | {"batch_size": 5},
    "texts": LOCAL | {"num_concurrent": 4, "tokenized_requests": False},
    "its tokenizer": {"tokenizer_backend": "remote", "num_concurrent": 8},
}


@pytest.mark.parametrize("how", HOW)
def test_log_likelihoods_are_those_of_the_forward_pass(client, often_ending, questions, how):
    server, folder = often_ending
    samples = evaluate(client, server, folder, questions, "multiple_choice", HOW[how])
    pairs, found, greedy = [], [], []
    for sample in samples:
        for given, answer in zip(sample["arguments"].values(), sample["resps"], strict=True):
            pairs.append((given["arg_0"], given["arg_1"]))
            value, is_greedy = answer[0]
            found.append(float(value))
            greedy.append(str(is_greedy) == "True")
    assert len(pairs) == NUM_QUESTIONS * NUM_CHOICES
    sums, likeliest = log_likelihoods(folder, pairs)
    assert np.abs(np.array(found) - sums).max() < ABSOLUTE
    assert greedy == likeliest


def test_generation(client, often_ending, questions):
    server, folder = often_ending
    samples = evaluate(client, server, folder, questions, "generate_until", HOW["tokens"])
    assert len(samples) == NUM_QUESTIONS
    assert all("." not in sample["resps"][0][0] for sample in samples)
