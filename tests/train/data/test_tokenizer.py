import json

import pytest
from tokenizers import Tokenizer, models

from meshwright.core.errors import InputError
from meshwright.train.data.tokenizer import (
    END_ID,
    END_OF_TEXT,
    load_tokenizer,
    num_ids,
    open_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from tests.train.small import read_documents

DOCUMENTS = read_documents("pydoc")[:10]


@pytest.mark.parametrize(
    "text", [DOCUMENTS[0][:2000], "  tabs\tand  spaces \n\n", "naïve — 東京 🚀", "\x00\x7f", "", f"a{END_OF_TEXT}b"]
)
def test_any_text_comes_back_unchanged(text):
    tokenizer = train_tokenizer(DOCUMENTS, vocab_size=400)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_same_texts_give_the_same_tokenizer():
    assert train_tokenizer(DOCUMENTS, vocab_size=400).to_str() == train_tokenizer(DOCUMENTS, vocab_size=400).to_str()


def test_tokens_lie_within_the_vocabulary_and_shorten_the_text():
    tokenizer = train_tokenizer(DOCUMENTS, vocab_size=400)
    ids = tokenizer.encode(DOCUMENTS[3]).ids
    assert tokenizer.get_vocab_size() == 400
    assert max(ids) < 400
    assert len(ids) < 0.75 * len(DOCUMENTS[3].encode())
    assert tokenizer.encode(END_OF_TEXT).ids == [END_ID]


def test_a_saved_tokenizer_is_read_back(tmp_path):
    tokenizer = train_tokenizer(DOCUMENTS, vocab_size=300)
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").to_str() == tokenizer.to_str()
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]


def test_bad_sizes_and_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"vocab_size=64 is too small.*at least 257"):
        train_tokenizer(DOCUMENTS, vocab_size=64)
    with pytest.raises(InputError, match="is not there"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="is not a tokenizer file") as caught:
        load_tokenizer(tmp_path / "tokenizer.json")
    assert "\n" not in str(caught.value)


def given(folder, *words, config=None, truncated=False):
    """A folder with a tokenizer that knows these words, numbered from 0."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    if truncated:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=9)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "end"),
    [
        (None, "</s>"),
        ({"eos_token": "b"}, "b"),
        ({"eos_token": {"content": "a", "special": True}}, "a"),
        ({"eos_token": None}, "</s>"),
    ],
)
def test_a_given_tokenizer_says_its_end_of_text(tmp_path, config, end):
    words = ("<unk>", "a", "b", "</s>")
    found = open_tokenizer(given(tmp_path, *words, config=config), vocab_size=4)
    assert found.end_id == words.index(end)
    assert open_tokenizer(tmp_path / "tokenizer.json", vocab_size=4).end_id == found.end_id


def test_a_given_tokenizer_neither_cuts_nor_pads(tmp_path):
    tokenizer = open_tokenizer(given(tmp_path, "<eos>", "a", truncated=True), vocab_size=10).tokenizer
    assert tokenizer.truncation is None
    assert tokenizer.padding is None


@pytest.mark.parametrize(
    ("words", "config", "vocab_size", "message"),
    [
        (("</s>", "a", "b"), None, 2, r"has 3 tokens, but the model has vocab_size=2. Set model.vocab_size=3 or more"),
        (("a", "b"), None, 2, r"no end-of-text token: it lacks any of <|endoftext|>.*tokenizer_config.json"),
        (("a", "</s>"), {"eos_token": "<end>"}, 2, r"no end-of-text token: it lacks eos_token '<end>'"),
        (("a", "</s>"), "[", 2, r"tokenizer_config.json:1:2: broken JSON"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, words, config, vocab_size, message):
    with pytest.raises(InputError, match=message) as caught:
        open_tokenizer(given(tmp_path, *words, config=config), vocab_size=vocab_size)
    assert "\n" not in str(caught.value)


def test_gaps_in_the_numbers_count(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 70_000}, "a"))
    assert num_ids(tokenizer) == 70_001
    with pytest.raises(InputError, match=r"is not there. Give a tokenizer.json or the folder of one"):
        open_tokenizer(tmp_path / "nothing", vocab_size=10)
