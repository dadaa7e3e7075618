"""Tokenizers built from the metadata of GGUF files, beside those that the metadata was made from."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meshwright.core.errors import InputError
from meshwright.nn.hf.gguf_tokenizer import gguf_tokenizer

TEXTS = [
    *("", " ", "a", " a", "a  b   c", "\n", "\n\n\n", "\t\tx", "naïve café", "日本語 テスト", "🙂👨‍👩‍👧", "e\u0301"),
    *("def f(x):\n    return x + 1\n", "don't WE'LL", "12345 67", "<s>hi</s>", "a<|im_end|>\nb", "\x00\x01", "x" * 200),
    *("".join(random.Random(seed).choices("ab cdé\n 1.,'<>本", k=40)) for seed in range(60)),
]
CORPUS = [*TEXTS, "the cat sat on the mat. the dog sat on the log.", "return x + y if x else y", "日本語 日本"] * 3
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
GPT2_RULE = "gpt-2"


def sentencepiece(*, prefixed):
    """A BPE as SentencePiece trains it: special tokens, all bytes, and pieces from the first merge on."""
    spaces = normalizers.Replace(" ", "▁")
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, limit_alphabet=40, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    pieces = json.loads(trained.to_str())["model"]
    vocab, merges = pieces["vocab"], [tuple(pair) for pair in pieces["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    if prefixed:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = spaces
    strip = [decoders.Strip(content=" ", left=1)] * prefixed
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokens = sorted(vocab, key=vocab.__getitem__)
    rank = {left + right: -float(number) for number, (left, right) in reversed([*enumerate(merges)])}
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [rank.get(token, -1e4) for token in tokens],
        "tokenizer.ggml.token_type": kinds + [NORMAL] * (len(tokens) - len(kinds)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": prefixed,
    }
    return tokenizer, values


def byte_level(pre=GPT2_RULE):
    """GPT-2's tokenizer of a small vocabulary, with a special token and one that is found before all others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("sat", normalized=False)])
    model = json.loads(tokenizer.to_str())["model"]
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {"<|im_end|>": CONTROL, "sat": USER_DEFINED}
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|im_end|>"],
    }
    return tokenizer, values


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_sentencepiece_tokenizer_gives_the_tokens_it_was_made_of(prefixed):
    expected, values = sentencepiece(prefixed=prefixed)
    found = gguf_tokenizer(values)
    assert found.config["bos_token"] == "<s>"
    for text in TEXTS:
        tokens = found.tokenizer.encode(text).ids
        assert tokens == [1, *expected.encode(text).ids], repr(text)
        assert found.tokenizer.decode(tokens) == expected.decode(tokens)


def test_a_byte_level_tokenizer_gives_the_tokens_it_was_made_of():
    expected, values = byte_level()
    found = gguf_tokenizer(values)
    for text in TEXTS:
        tokens = found.tokenizer.encode(text).ids
        assert tokens == expected.encode(text).ids, repr(text)
        assert found.tokenizer.decode(tokens) == expected.decode(tokens)
    sat = values["tokenizer.ggml.tokens"].index("sat")
    assert sat in found.tokenizer.encode("it sat").ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'LL buy 12345 ok", ["I", "'", "LL", " buy", " 12345", " ok"]),
        ("smollm", "I'LL buy 12345 ok", ["I", "'", "LL", " buy", " ", *"12345", " ok"]),
        ("llama-bpe", "I'LL buy 12345 ok", ["I", "'LL", " buy", " ", "123", "45", " ok"]),
        ("qwen2", "I'LL buy 12345 ok", ["I", "'LL", " buy", " ", *"12345", " ok"]),
        ("tekken", "helloWorld 12 ok", ["hello", "World", " ", "1", "2", " ok"]),
    ],
)
def test_texts_are_split_as_the_pre_tokenizer_says(pre, text, pieces):
    tokenizer = gguf_tokenizer(byte_level(pre)[1]).tokenizer
    found = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


def test_words_of_llama_3_are_tokens_whatever_the_merges_say():
    """And its texts begin with a token, unless the file says otherwise."""
    tokens = [*"abc", "abc", "<|begin_of_text|>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * 4 + [CONTROL],
        "tokenizer.ggml.bos_token_id": 4,
        "tokenizer.ggml.pre": "llama-bpe",
    }
    assert gguf_tokenizer(values).tokenizer.encode("abc").ids == [4, 3]
    assert gguf_tokenizer({**values, "tokenizer.ggml.add_bos_token": False}).tokenizer.encode("abc").ids == [3]
    assert gguf_tokenizer({**values, "tokenizer.ggml.pre": "gpt-2"}).tokenizer.encode("abc").ids == [0, 1, 2]


def test_tokens_of_spaces_are_found_in_texts():
    """Files of gemma have them as spaces, as tokens that are found before all others; their scores say nothing."""
    tokens = ["<unk>", "  ", "   ", "▁", "a", "▁a"]
    values = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * 3 + [-2.0, -1.0, 0.0],
        "tokenizer.ggml.token_type": [CONTROL, USER_DEFINED, USER_DEFINED, NORMAL, NORMAL, NORMAL],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = gguf_tokenizer(values).tokenizer
    assert tokenizer.encode("a  a").ids == [4, 1, 4]
    assert tokenizer.encode("   a a").ids == [2, 4, 5]
    assert tokenizer.decode([2, 4, 5]) == "   a a"


def test_templates_and_the_ends_of_texts_are_kept():
    values = byte_level()[1] | {"tokenizer.chat_template": "{{ x }}", "tokenizer.chat_template.tool_use": "{{ y }}"}
    found, end = gguf_tokenizer(values), values["tokenizer.ggml.bos_token_id"]
    templates = {one["name"]: one["template"] for one in found.config["chat_template"]}
    assert templates == {"default": "{{ x }}", "tool_use": "{{ y }}"}
    assert found.generation == {"bos_token_id": end}
    ids = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": end, "tokenizer.ggml.eom_token_id": 5}
    assert gguf_tokenizer(values | ids).generation["eos_token_id"] == [5, end]
    assert gguf_tokenizer({"general.architecture": "llama"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer.ggml.model": "t5"},
            r"the tokenizer 't5' of a GGUF file is not supported; llama and gpt2 are\.",
        ),
        ({"tokenizer.ggml.pre": "qwen3"}, r"the pre-tokenizer 'qwen3' of a GGUF file is not known\. Did you mean"),
    ],
)
def test_tokenizers_that_are_not_known_are_refused_by_name(change, message):
    with pytest.raises(InputError, match=message):
        gguf_tokenizer(byte_level()[1] | change)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("values", "architecture"),
    [
        (sentencepiece(prefixed=True)[1], "llama"),
        (sentencepiece(prefixed=False)[1], "gemma3"),
        (byte_level()[1], "gpt2"),
    ],
)
def test_tokens_are_those_of_transformers(values, architecture):
    pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    gguf = pytest.importorskip("transformers.integrations.gguf", reason="transformers is older than its reader of GGUF")
    names = gguf.GGUF_TOKENIZER_MAPPING["tokenizer"]
    given = {name: values[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in values}
    theirs, _ = gguf.convert_gguf_tokenizer(architecture, given)
    ours = gguf_tokenizer(values | {"general.architecture": architecture}).tokenizer
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
