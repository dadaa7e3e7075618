"""Limits answers to a JSON schema, regular expression, choices or Lark grammar by token masks (llguidance)."""

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from meshwright.core.errors import InputError, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_KEPT = 64
"""Compiled grammars that a `GrammarReader` caches."""

MOST_ITEMS = 5_000
"""Parser items per token: an answer that needs more stops there. With this limit masks of 100,000 tokens took at most
35 ms in seven hostile grammars; 770 ms with llguidance's default."""

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


class GrammarReader:
    """Compiles grammars for a tokenizer and a model of ``vocab_size`` tokens. An answer ends with an end token;
    without ``end_tokens``, where the grammar allows no further token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]) -> None:
        from llguidance import LLTokenizer

        end_token_ids = sorted(end_tokens) or None
        self._tokenizer = LLTokenizer(_plain(tokenizer), n_vocab=vocab_size, eos_token=end_token_ids)
        self.read = lru_cache(MOST_KEPT)(self._read)
        """Returns the matcher of an empty answer, to be copied for each request, for a kind and text of grammar: a JSON
        schema, a JSON list of choices, a regular expression (Rust syntax), a Lark grammar. Raises InputError if the
        grammar is not valid or no text matches it."""

    def _read(self, kind: GrammarKind, text: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        try:
            if kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text)
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                terms = [json.dumps(item, ensure_ascii=False) for item in json.loads(text)] if kind == "choice" else []
                grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(terms) if terms else text)
        except ValueError as error:
            raise _invalid(kind, str(error)) from None
        limits = LLParserLimits(verbose_errors=False, step_max_items=MOST_ITEMS)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        # the first mask takes longest, so it is made before any step, and shows grammars that match no text
        can_begin = not matcher.is_error() and any(matcher.compute_bitmask())
        if not can_begin or matcher.is_error():
            reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
            raise _invalid(kind, reason if reason and not reason.startswith("NoExtension") else "no text matches")
        return matcher


def _invalid(kind: GrammarKind, reason: str) -> InputError:
    kind_words = {"json_schema": "json schema", "lark": "grammar"}.get(kind, kind)
    return InputError(f"the {kind_words} is not valid: {one_line(reason)[:400]}. Correct it, or leave it out.")


def _plain(tokenizer: Tokenizer) -> str:
    """Returns a tokenizer as JSON with its special tokens renamed to strings that no text contains, so that the text
    of a grammar such as "<eos>" is encoded as plain tokens."""
    document = json.loads(tokenizer.to_str())
    aliases = {token["content"]: f"\ufdd0{token['id']}\ufdd1" for token in document["added_tokens"] if token["special"]}
    for token in document["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    model_table = document["model"]
    if isinstance(model_table.get("vocab"), dict):
        model_table["vocab"] = {aliases.get(name, name): token_id for name, token_id in model_table["vocab"].items()}
    elif "vocab" in model_table:
        model_table["vocab"] = [[aliases.get(name, name), score] for name, score in model_table["vocab"]]
    if "unk_token" in model_table:
        model_table["unk_token"] = aliases.get(model_table["unk_token"], model_table["unk_token"])
    return json.dumps(document | {"post_processor": None})


class MaskedRow(NamedTuple):
    """The index of a row of logits, the matcher of its answer, and the drafts, whose rows follow this row."""

    row: int
    matcher: "LLMatcher"
    drafts: list[int]


class TokenMasks:
    """Computes masks of the tokens that grammars allow next, on several threads of the host."""

    def __init__(self, vocab_size: int) -> None:
        self._executor: Any = None  # made at the first mask: only requests with a grammar need llguidance
        self._vocab_size = vocab_size

    def of(self, size: int, rows: Sequence[MaskedRow]) -> np.ndarray:
        """Returns bits [size, V / 32]: 1 for a token that may be drawn; all ones in rows that are not in ``rows``."""
        import llguidance.numpy as bits

        self._executor = self._executor or bits.LLExecutor()
        masks = bits.allocate_token_bitmask(size, self._vocab_size)
        if undrafted_rows := [(row.matcher, row.row) for row in rows if not row.drafts]:
            bits.fill_next_token_bitmask_par(self._executor, undrafted_rows, masks)
        if drafted_rows := [(row.matcher, row.row, row.drafts) for row in rows if row.drafts]:
            bits.fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted_rows, masks)
        return masks
