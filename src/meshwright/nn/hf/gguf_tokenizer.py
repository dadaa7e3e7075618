"""Builds the tokenizer that a GGUF file describes. Source: llama.cpp (src/llama-vocab.cpp)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from meshwright.core.errors import InputError, nearest
from meshwright.spec.hf.gguf import gguf_names

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens: parts of texts; special tokens, not shown in texts; tokens that are matched before all others."""


class GgufTokenizer(NamedTuple):
    """A tokenizer, and the objects of its tokenizer_config.json and generation_config.json."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    generation: dict[str, Any]


def gguf_tokenizer(values: Mapping[str, Any]) -> GgufTokenizer | None:
    """Returns the tokenizer in a file's metadata ``values``, None if it has no tokens.

    Raises InputError for a tokenizer or a pre-tokenizer that is not known.
    """
    metadata = {name.removeprefix("tokenizer.ggml."): value for name, value in values.items()}
    kind, tokens, pre = metadata.get("model"), list(metadata.get("tokens", ())), str(metadata.get("pre", "default"))
    if not tokens:
        return None
    advice, split_of = "Put the model's tokenizer.json beside the file.", gguf_names()["pre_tokenizers"]
    if kind not in ("llama", "gpt2"):
        raise InputError(f"the tokenizer {kind!r} of a GGUF file is not supported; llama and gpt2 are. {advice}")
    if kind == "gpt2" and pre not in split_of:
        raise InputError(f"the pre-tokenizer {pre!r} of a GGUF file is not known.{nearest(pre, split_of)} {advice}")
    type_codes = metadata.get("token_type", [NORMAL] * len(tokens))
    if kind == "llama":
        # tokens of several spaces have plain spaces, all other tokens have the letter for a space
        tokens = ["▁" * len(text) if text and not text.strip(" ") else text for text in tokens]
        tokenizer = _sentencepiece(metadata, tokens, type_codes)
    else:
        tokenizer = _byte_level(metadata, tokens, split_of[pre])
    for token_type, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        texts = [text for text, code in zip(tokens, type_codes, strict=True) if code == token_type and text.strip("▁")]
        # tokens of spaces are left to merges, as in published files
        add([AddedToken(text, special=token_type == CONTROL, normalized=False) for text in texts])
    id_or_none = {name: metadata.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    id_of = {name: token_id for name, token_id in id_or_none.items() if token_id is not None and token_id < len(tokens)}
    default_adds = {"bos": kind == "llama" or split_of.get(pre) == "llama3", "eos": False}
    marks = [name for name in default_adds if name in id_of and metadata.get(f"add_{name}_token", default_adds[name])]
    if marks:
        mark_of = {name: (tokens[id_of[name]], id_of[name]) for name in marks}
        bos_mark, eos_mark = ([mark_of[name][0]] if name in marks else [] for name in default_adds)
        template = [*bos_mark, "$A", *eos_mark]
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=[*mark_of.values()])
    alias_by_key = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {name: tokens[id_of[alias]] for name, alias in alias_by_key.items() if alias in id_of}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    prefix = "tokenizer.chat_template"
    templates = {
        n[len(prefix) + 1 :] or "default": v for n, v in values.items() if n.startswith(prefix) and isinstance(v, str)
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    eos = [id_of[name] for name in ("eos", "eot", "eom") if name in id_of]
    generation = {f"{name[:3]}_token_id": id_of[name] for name in ("bos", "padding") if name in id_of}
    return GgufTokenizer(tokenizer, config, generation | ({"eos_token_id": [*dict.fromkeys(eos)]} if eos else {}))


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Returns a SentencePiece BPE with bytes for unknown characters.

    Files have scores in place of merges: a pair is merged first if the token that it forms has the highest score.
    """
    vocab, scores = {text: index for index, text in enumerate(tokens)}, metadata.get("scores", [0.0] * len(tokens))
    merges = []
    for text, type_code, score in zip(tokens, types, scores, strict=True):
        if type_code in (NORMAL, USER_DEFINED):
            rank = (type_code == NORMAL, -score, vocab[text])
            splits = ((text[:cut_at], text[cut_at:]) for cut_at in range(1, len(text)))
            merges += [(*rank, len(left), (left, right)) for left, right in splits if left in vocab and right in vocab]
    unknown_id = metadata.get("unknown_token_id")
    model = models.BPE(
        vocab,
        [pair for *_, pair in sorted(merges)],
        unk_token=None if unknown_id is None else tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=True,
    )
    architecture = str(metadata.get("general.architecture"))
    tokenizer, replace_spaces = Tokenizer(model), normalizers.Replace(" ", "▁")
    has_prefix_space = bool(metadata.get("add_space_prefix", not architecture.startswith("gemma")))
    if has_prefix_space and architecture != "phi3":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * has_prefix_space + [replace_spaces])
    strip_steps = [decoders.Strip(content=" ", left=1)] * has_prefix_space
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip_steps]
    )
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], splits: str) -> Tokenizer:
    """Returns a byte-level BPE with the file's merges, which splits texts by the rule named ``splits``."""
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("merges", ())]
    # a word that is a token is that token, whatever the merges say
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=splits in ("llama3", "tekken")))
    cut = [pre_tokenizers.Split(Regex(gguf_names()["splits"][splits]), behavior="isolated")] if splits != "gpt2" else []
    byte_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits in ("gpt2", "digits"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_step])
    if splits == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
