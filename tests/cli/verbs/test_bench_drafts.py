"""`meshwright bench drafts` from the command line: a draft that is the model itself is right each time."""

import pytest
from msgspec.structs import replace

from meshwright.bench.serving.drafts import DraftResult, predicted_speedups
from meshwright.nn.hf.weights import save_hf
from tests.parallel.generate_cases import LLAMA, float_params

MODEL = replace(LLAMA, name="tiny", vocab_size=64, d_model=16, d_ff=16)


@pytest.mark.slow
def test_a_sweep(call, tmp_path):
    save_hf(MODEL, float_params(MODEL), tmp_path / "tiny")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 2 3"}\n{"prompt": [4, 5]}\n')
    sizes = ("--max-len", "32", "--max-requests", "2", "--token-budget", "16", "--page-len", "8", "--axes", "tensor=1")
    asked = ("bench", "drafts", "tiny", "--draft", "tiny", "--prompts", "prompts.jsonl", *sizes)
    said = call(*asked, "--counts", "2", "--max-tokens", "12", "--png", "drafts.png", "--json")
    assert said.code == 0, said.err
    none, two = said.json["results"]
    assert (none["num_drafts"], none["step_tokens"], none["speedup"]) == (0, 1, 1)
    assert (two["num_drafts"], two["accepted"]) == (2, 1)
    assert 2 < two["step_tokens"] <= 3
    assert (tmp_path / "drafts.png").exists()
    table = said.printed("text").out
    assert [line for line in table.splitlines() if len(line) > 80] == []
    call(*asked, "--counts", "0,x").assert_refused(2, "--counts 0,x must be whole numbers of at least 1")
    call(*asked[:3], "--prompts", "prompts.jsonl").assert_refused(2, "nothing proposes tokens")
    save_hf(replace(MODEL, vocab_size=65), float_params(replace(MODEL, vocab_size=65)), tmp_path / "other")
    call(*asked[:3], "--draft", "other", *asked[5:]).assert_refused(2, "has V=65 tokens and tiny has V=64")


def test_speedups_follow_from_one_probability():
    def result(num_drafts, step_s, step_tokens):
        given = {"tokens_per_s": 1.0, "accepted": 0.5}
        return DraftResult(num_drafts=num_drafts, step_s=step_s, step_tokens=step_tokens, **given)

    found = predicted_speedups([result(0, 0.1, 1.0), result(1, 0.1, 1.5), result(2, 0.2, 1.6)])
    assert found == pytest.approx([1, 1.5, 1.75 / 2])
