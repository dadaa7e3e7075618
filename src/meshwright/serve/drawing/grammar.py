"""Texts that an answer may be: JSON of a schema, matches of a regular expression, a choice; llguidance masks tokens."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par_with_draft_tokens
from tokenizers import Tokenizer

from meshwright.core.errors import InputError, first_line

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


class Grammar:
    """What an answer may be. `start` returns the state of one answer."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> LLMatcher:
        """Returns the state of an answer that has no token yet."""
        return self._matcher.deep_copy()


class GrammarReader:
    """Reads grammars for a tokenizer, whose model has logits of ``vocab_size`` tokens; an answer ends with one of
    ``end_tokens``, without these where no more may follow."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        ends = sorted(end_tokens) or None
        self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=ends)

    def read(self, kind: GrammarKind, given: Any) -> Grammar:
        """Returns a grammar, after some 0.1 to 100 ms. Raises InputError for one that is not valid."""
        try:
            readers: dict[str, Callable[[Any], str]] = {
                "json_schema": LLMatcher.grammar_from_json_schema,
                "regex": LLMatcher.grammar_from_regex,
                "choice": lambda texts: LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts))),
                "lark": LLMatcher.grammar_from_lark,
            }
            text = readers[kind](given)
        except ValueError as error:
            raise InputError(f"the {kind} is not valid: {first_line(error)}. Mend it.") from None
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise InputError(f"the {kind} is not valid: {matcher.get_error().splitlines()[0]}. Mend it.")
        return Grammar(matcher)


class MaskedRow(NamedTuple):
    """A row of logits by number, the state of its answer, and the tokens whose rows follow it."""

    row: int
    matcher: LLMatcher
    drafts: list[int]


class TokenMasks:
    """Makes masks of the tokens that may follow, on some of the host's threads."""

    def __init__(self, vocab_size: int) -> None:
        self._executor, self._vocab_size = LLExecutor(), vocab_size

    def of(self, size: int, rows: Sequence[MaskedRow]) -> np.ndarray:
        """Returns bits [size, V / 32]: 1 for a token that may be drawn, everywhere in rows without a grammar."""
        found = allocate_token_bitmask(size, self._vocab_size)
        given = [(one.matcher, one.row, one.drafts) for one in rows]
        fill_next_token_bitmask_par_with_draft_tokens(self._executor, given, found)
        return found
