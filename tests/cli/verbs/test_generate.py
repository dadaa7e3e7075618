"""`meshwright generate` on a tiny model's folder: text out, figures beside it, refusals in one line."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from meshwright.api.running import GeneratedText
from meshwright.cli.engine import prepare_devices
from meshwright.cli.verbs.generate import answer
from meshwright.core.errors import CannotRunError
from meshwright.nn.hf.weights import save_hf
from meshwright.report.answer import as_text
from meshwright.serve.drawing.sampling import LIKELIEST, Sampling
from meshwright.serve.offline.generate import Completion, Generated, GenerationPace
from meshwright.spec.cluster import parse_cluster
from tests.parallel.generate_cases import LLAMA, float_params, likeliest
from tests.serve.test_model_folder import byte_tokenizer

MODEL = replace(LLAMA, name="bytes", vocab_size=263, d_model=16, d_ff=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("bytes")
    save_hf(MODEL, float_params(MODEL), found)
    byte_tokenizer("<pad>", "</s>").save(str(found / "tokenizer.json"))
    return str(found)


def expected(text: str, num_tokens: int) -> str:
    tokenizer = byte_tokenizer("<pad>", "</s>")
    prompt = tokenizer.encode(text).ids
    found = likeliest(MODEL, float_params(MODEL), prompt, num_tokens)
    found = found[: found.index(1)] if 1 in found else found
    return tokenizer.decode(prompt + found)


def test_one_prompt_is_written_out_with_what_follows(call, folder):
    said = call("generate", folder, "--prompt", "Once", "--max-tokens", "6", "--on", "cpu:2", "--axes", "tensor=2")
    assert said.code == 0
    assert said.out == expected("Once", 6) + "\n"
    assert all(len(line) <= 80 for line in said.err.splitlines())
    first, cache, slots, last = said.err.replace("\n  ", " ").splitlines()
    assert "tensor 2" in first
    assert "of weights on each device" in first
    # 2 layers, keys and values, of half of the heads
    assert cache.startswith("cache: 8 pages of 32 positions, 65.5 kB of fp32 keys and values on each device")
    assert slots.startswith("up to 1 request at once of 256 positions at most")
    assert last.startswith("loaded and compiled in")
    assert "tokens/s; 6 tokens" in last


def test_several_prompts_as_one_object(call, folder, tmp_path):
    (tmp_path / "more.txt").write_text("so\n\nand then\n")
    said = call(
        *("generate", folder, "--prompt", "Once", "--prompts", "more.txt", "--on", "cpu:2", "--axes", "data=2"),
        *(
            "--max-tokens",
            "4",
            "--weights",
            "int8",
            "--cache-dtype",
            "int8",
            "--temperature",
            "0.8",
            "--top-k",
            "50",
            "--top-p",
            "0.9",
        ),
        *("--seed", "3", "--json"),
    )
    assert said.code == 0, said.err
    assert said.json["mesh"] == {"data": 2}
    assert [one["prompt"] for one in said.json["completions"]] == ["Once", "so", "and then"]
    asked = Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=3)
    assert said.json["sampling"] == json.loads(msgspec.json.encode(asked))
    for one in said.json["completions"]:
        assert one["finish"] == "stop" or len(one["tokens"]) == 4
    assert said.json["pace"]["num_tokens"] == sum(len(one["tokens"]) for one in said.json["completions"])


def test_several_texts_are_numbered(capsys):
    generated = Generated(
        completions=tuple(Completion(tokens=(1,), finish="stop") for _ in range(2)),
        pace=GenerationPace(first_token_s=0.5, tokens_per_s=None, num_tokens=7),
    )
    found = GeneratedText(model="tiny", mesh={"data": 1}, texts=(" it is", "!"), generated=generated, opened_s=1.0)
    told = answer(found, ["so", "Once"], LIKELIEST, live=False)
    assert list(as_text(told.pieces, 80)) == ["[1] so it is", "[2] Once!"]
    assert answer(found, ["so", "Once"], LIKELIEST, live=True).pieces == []
    assert capsys.readouterr().err == "loaded and compiled in 1 s; first token after 500 ms; 7 tokens\n" * 2


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "generate needs a prompt. Write: generate runs/NAME-001 --prompt"),
        (["--prompts", "none.txt"], 2, "none.txt cannot be read"),
        (["--prompt", "a", "--on", "cpu:4", "--axes", "tensor=2"], 2, "tensor=2 is 2 devices and --on cpu:4 is 4"),
        (["--prompt", "a", "--on", "cpu:3", "--axes", "tensor=3"], 2, "does not divide by tensor=3"),
        (["--prompt", "a", "--axes", "pipeline=2"], 3, "pipeline=2 trains but does not generate"),
        (["--prompt", "a", "--top-p", "0"], 2, "--top-p 0.0 must be more than 0"),
        (["--prompt", "a", "--on", "h200:1"], 3, "h200:1x1 is not this machine"),
        (["--prompt", "", "--on", "cpu:1"], 2, "prompt 1 is empty"),
        (["--prompt", "a", "--on", "cpu:1", "--max-tokens", "5000"], 2, "need 5,001 positions, but "),
        (
            ["--prompts", "lines.jsonl"],
            2,
            "lines.jsonl has JSON lines, whose answers go to a file. Give -o answers.jsonl",
        ),
        (
            ["--prompt", "abc", "--max-len", "4", "--max-tokens", "3", "--on", "cpu:1"],
            2,
            "need 6 positions; this engine has 4. Shorten the prompt, ask for fewer tokens, or give a larger --max-len",
        ),
        (
            ["--prompt", "a", "--max-tokens", "3", "--page-len", "1000000000", "--on", "cpu:1"],
            2,
            "Give a smaller --page-len, more --cache-bytes, or both",
        ),
        (["--prompt", "a\udc80"], 2, "prompt 1 is not UTF-8"),
        (["--prompt", "a", "--axes", "tensor=64"], 3, "emulate them: --on cpu:64"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(call, folder, options, code, message):
    call("generate", folder, *options).assert_refused(code, message)


def test_too_few_accelerators_are_refused_by_the_option_that_was_given(monkeypatch):
    monkeypatch.setattr("jax.devices", lambda: [SimpleNamespace(platform="gpu")])
    with pytest.raises(CannotRunError, match=r"^--on h100:8x1 is 8 devices and this machine has 1"):
        prepare_devices(parse_cluster("h100:8x1"), None)


def test_a_folder_without_a_model_is_refused(call, tmp_path):
    said = call("generate", str(tmp_path), "--prompt", "a")
    said.assert_refused(2, "has no config.json. Give the folder of a finished run")
