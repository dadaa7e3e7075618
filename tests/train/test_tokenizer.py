import pytest

from meshwright.core.errors import InputError
from meshwright.train.text import read_documents
from meshwright.train.tokenizer import END_ID, END_OF_TEXT, load_tokenizer, save_tokenizer, train_tokenizer

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
