"""Folders to generate from: their tokenizer, end tokens and dtype; text as it comes."""

import json

import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import save_hf
from meshwright.serve.model_folder import Text, TextStream, open_model
from tests.parallel.generate_cases import LLAMA, float_params


def byte_tokenizer(*special: str) -> Tokenizer:
    """A token for each byte, after the special ones."""
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_hf(LLAMA, float_params(LLAMA), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def test_a_folder_without_a_tokenizer_takes_numbers(folder):
    found = open_model(folder)
    assert found.model.num_layers == LLAMA.num_layers
    assert found.dtype == "fp32"
    assert found.text.encode("3, 4 5") == [3, 4, 5]
    assert found.text.decode([3, 4]) == "3 4"
    with pytest.raises(InputError, match=r"no tokenizer.json, so a prompt must be token numbers.*not 'hello'"):
        found.text.encode("hello")


def test_the_tokenizer_and_its_end(folder):
    byte_tokenizer("<pad>", "</s>").save(str(folder / "tokenizer.json"))
    found = open_model(folder)
    assert found.text.decode(found.text.encode("né")) == "né"
    assert found.end_tokens == {1}


@pytest.mark.parametrize(
    ("file", "table", "ends"),
    [
        ("generation_config.json", {"eos_token_id": [7, 9]}, {7, 9}),
        ("generation_config.json", {"eos_token_id": 7}, {7}),
        ("generation_config.json", {}, {1}),
        ("tokenizer_config.json", {"eos_token": "<pad>"}, {0}),
        ("tokenizer_config.json", {"eos_token": {"content": "<pad>"}}, {0}),
        ("tokenizer_config.json", {"eos_token": "<none>"}, set()),
    ],
)
def test_files_beside_say_where_a_text_ends(folder, file, table, ends):
    byte_tokenizer("<pad>", "</s>").save(str(folder / "tokenizer.json"))
    (folder / file).write_text(json.dumps(table))
    assert open_model(folder).end_tokens == ends


def test_narrow_weights_are_bf16(tmp_path):
    save_hf(LLAMA, {n: p.astype(jnp.bfloat16) for n, p in float_params(LLAMA).items()}, tmp_path)
    assert open_model(tmp_path).dtype == "bf16"


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no config.json. Give the folder of a finished run"):
        open_model(tmp_path)


def test_files_that_cannot_be_read_are_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json is not a tokenizer file"):
        open_model(folder)
    model = {"type": "BPE", "vocab": {"a": 0, "bb": 1, "ab": 2}, "merges": [["a", "bb"]]}
    tokenizer = {"version": "1.0", "model": {**model, "continuing_subword_prefix": "x" * 9}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match=r"tokenizer.json is not a tokenizer file"):
        open_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id is \['x'\]"):
        open_model(folder)
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"generation_config.json holds no JSON object"):
        open_model(folder)


def test_text_comes_in_whole_characters():
    text = Text(byte_tokenizer())
    stream, tokens = TextStream(text, text.encode("a")), text.encode("né 猫!")
    pieces = [stream.push(token) for token in tokens]
    assert "".join([*pieces, stream.finish()]) == "né 猫!"
    assert pieces == ["n", "", "é", " ", "", "", "猫", "!"]


def test_what_is_left_in_the_middle_of_a_character_comes_in_the_end():
    text = Text(byte_tokenizer())
    stream = TextStream(text, text.encode("a"))
    assert [stream.push(token) for token in text.encode("猫")[:2]] == ["", ""]
    assert "�" in stream.finish()
    assert stream.finish() == ""


def test_numbers_come_with_their_spaces():
    stream = TextStream(Text(), [5, 6])
    assert [stream.push(7), stream.push(81)] == [" 7", " 81"]


@pytest.mark.parametrize("token", [0, byte_tokenizer("<pad>").encode("é").ids[0]])
def test_tokens_without_text_do_not_pile_up(token):
    """Special tokens, and bytes that never become a character, which come as replacements in the end."""
    text = Text(byte_tokenizer("<pad>"))
    stream = TextStream(text, text.encode("a"))
    pieces = [stream.push(token) for _ in range(100)]
    assert max(map(len, pieces)) < 10
    assert len(stream.tokens) - stream.start < 30
    assert "".join(pieces) + stream.finish() == text.decode([token] * 100)
    assert stream.push(text.encode("b")[0]) == "b"
