"""Builds the tokenizer that a GGUF file describes. Source: llama.cpp (src/llama-vocab.cpp)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from meshwright.core.errors import InputError, nearest
from meshwright.spec.hf.gguf import gguf_names

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens: those of texts; special ones, which texts do not show; those that are found before all others."""


class GgufTokenizer(NamedTuple):
    """A tokenizer, and the objects of its tokenizer_config.json and generation_config.json."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    generation: dict[str, Any]


def gguf_tokenizer(values: Mapping[str, Any]) -> GgufTokenizer | None:
    """Returns the tokenizer of a file's metadata, None without one.

    Raises InputError for a tokenizer or a pre-tokenizer that is not known.
    """
    metadata = {name.removeprefix("tokenizer.ggml."): value for name, value in values.items()}
    kind, tokens, pre = metadata.get("model"), list(metadata.get("tokens", ())), str(metadata.get("pre", "default"))
    if not tokens:
        return None
    put, known = "Put the model's tokenizer.json beside the file.", gguf_names()["pre_tokenizers"]
    if kind not in ("llama", "gpt2"):
        raise InputError(f"the tokenizer {kind!r} of a GGUF file is not read; llama and gpt2 are. {put}")
    if kind == "gpt2" and pre not in known:
        raise InputError(f"the pre-tokenizer {pre!r} of a GGUF file is not known.{nearest(pre, known)} {put}")
    types = metadata.get("token_type", [NORMAL] * len(tokens))
    if kind == "llama":
        # tokens of several spaces are stored as such, where all others have the letter for a space
        tokens = ["▁" * len(text) if text and not text.strip(" ") else text for text in tokens]
        tokenizer = _sentencepiece(metadata, tokens, types)
    else:
        tokenizer = _byte_level(metadata, tokens, known[pre])
    for wanted, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        texts = [text for text, code in zip(tokens, types, strict=True) if code == wanted and text.strip("▁")]
        # tokens of spaces are left to merges, as in published files
        add([AddedToken(text, special=wanted == CONTROL, normalized=False) for text in texts])
    named = {name: metadata.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    ids = {name: number for name, number in named.items() if number is not None and number < len(tokens)}
    usual = {"bos": kind == "llama" or known.get(pre) == "llama3", "eos": False}
    adds = [name for name in usual if name in ids and metadata.get(f"add_{name}_token", usual[name])]
    if adds:
        marks = {name: (tokens[ids[name]], ids[name]) for name in adds}
        first, last = ([marks[name][0]] if name in adds else [] for name in usual)
        form = [*first, "$A", *last]
        tokenizer.post_processor = processors.TemplateProcessing(form, special_tokens=[*marks.values()])
    shorts = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {name: tokens[ids[short]] for name, short in shorts.items() if short in ids}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    mark = "tokenizer.chat_template"
    templates = {
        n[len(mark) + 1 :] or "default": v for n, v in values.items() if n.startswith(mark) and isinstance(v, str)
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    generation = {f"{name[:3]}_token_id": ids[name] for name in ("bos", "padding") if name in ids}
    return GgufTokenizer(tokenizer, config, generation | ({"eos_token_id": [*dict.fromkeys(ends)]} if ends else {}))


def _sentencepiece(given: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Returns a SentencePiece BPE with bytes for unknown letters.

    Files have scores in place of merges: two tokens merge to one, the one with the highest score first.
    """
    vocab, scores = {text: number for number, text in enumerate(tokens)}, given.get("scores", [0.0] * len(tokens))
    merges = []
    for text, code, score in zip(tokens, types, scores, strict=True):
        if code in (NORMAL, USER_DEFINED):
            rank = (code == NORMAL, -score, vocab[text])
            cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            merges += [(*rank, len(left), (left, right)) for left, right in cuts if left in vocab and right in vocab]
    unknown = given.get("unknown_token_id")
    model = models.BPE(
        vocab,
        [pair for *_, pair in sorted(merges)],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    architecture = str(given.get("general.architecture"))
    tokenizer, spaces = Tokenizer(model), normalizers.Replace(" ", "▁")
    prefixed = bool(given.get("add_space_prefix", not architecture.startswith("gemma")))
    if prefixed and architecture != "phi3":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefixed + [spaces])
    strip = [decoders.Strip(content=" ", left=1)] * prefixed
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _byte_level(given: Mapping[str, Any], tokens: Sequence[str], splits: str) -> Tokenizer:
    """Returns a BPE of bytes with the merges of the file, which splits texts as models of that kind do."""
    vocab = {text: number for number, text in enumerate(tokens)}
    merges = [tuple(pair.split(" ", 1)) for pair in given.get("merges", ())]
    # a word that is a token is that token, whatever the merges say
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splits in ("llama3", "tekken")))
    cut = [pre_tokenizers.Split(Regex(gguf_names()["splits"][splits]), behavior="isolated")] if splits != "gpt2" else []
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits in ("gpt2", "digits"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, of_bytes])
    if splits == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
