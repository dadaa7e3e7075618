"""What a folder has beside its weights goes along with a run and a conversion, and ends its answers."""

import json

import pytest

from meshwright.nn.hf.beside import FILES, copy_beside, files_beside, keep_beside
from meshwright.nn.hf.tokenizer import end_tokens, read_tokenizer
from tests.train.data.chats import SPECIAL, TEMPLATES, write_tokenizer

NUMBERS = {name: number for number, name in enumerate(SPECIAL)}


@pytest.fixture
def source(tmp_path):
    """A published folder that ends texts at </s>, and answers of chats at <|im_end|>."""
    folder = write_tokenizer(tmp_path / "source", TEMPLATES["qwen"])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    return folder


def test_all_files_are_copied(source, tmp_path):
    for name in FILES:
        if not (source / name).is_file():
            (source / name).write_text("{}")
    (source / "README.md").write_text("not copied")
    copies = copy_beside(source, tmp_path / "out")
    names = {*FILES, "additional_chat_templates/tool_use.jinja"}
    assert {str(file.relative_to(tmp_path / "out")) for file in copies} == names
    assert all(file.read_bytes() == (source / file.relative_to(tmp_path / "out")).read_bytes() for file in copies)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (None, None, ["</s>", "<|im_end|>"]),
        ({"eos_token_id": 2}, None, ["</s>", "<|im_end|>"]),
        ({"eos_token_id": [7, 5]}, None, ["<|im_end|>", "<|eot|>", "</s>"]),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 5], "top_k": 3}, ["</s>", "<|eot|>", "<|im_end|>"]),
    ],
)
def test_a_run_keeps_every_token_that_ends_a_text_and_the_one_that_ends_an_answer(
    config, generation, ends, source, tmp_path
):
    for name, table in (("config.json", config), ("generation_config.json", generation)):
        if table is not None:
            (source / name).write_text(json.dumps(table))
    run = tmp_path / "run"
    tokenizer = read_tokenizer(source / "tokenizer.json")
    keep_beside(source, run, tokenizer)
    kept = json.loads((run / "generation_config.json").read_text())
    assert kept == (generation or {}) | {"eos_token_id": [NUMBERS[name] for name in ends]}
    assert end_tokens(run, tokenizer) == kept["eos_token_id"]
    assert not (run / "config.json").exists()
    assert len(files_beside(run)) == len(files_beside(source)) + (generation is None)
    keep_beside(run, run, tokenizer)  # a run that goes on with its own tokenizer
    assert json.loads((run / "generation_config.json").read_text()) == kept
