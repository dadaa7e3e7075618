"""What a model's mask reads of records: of records of tokens by its fields, of prompts with completions the prompt."""

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from meshwright.core.errors import InputError
from meshwright.masks.mods import tree_walk
from meshwright.masks.names import Rule
from meshwright.train.data.text import SKIP, FileCorpus
from meshwright.train.data.token_store import TokenStore

FIELDS = {"prefix": "prefix", "enter": "parents", "leave": "parents", "spans": "spans", "is_global": "is_global"}
"""What a mask reads -> the field of a record of tokens that has it."""


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, and of these: the length of the prefix, the earlier position of each one's parent (-1 for a root), the
    images as pairs [first, end), and 1 for each global token, else 0."""

    tokens: list[int]
    prefix: int | None = None
    parents: list[int] | None = None
    spans: list[tuple[int, int]] | None = None
    is_global: list[Literal[0, 1]] | None = None


class _Tokens(NamedTuple):
    """Tokens of a record, complements where they are not predicted, and what a mask reads of each."""

    tokens: np.ndarray
    columns: dict[str, np.ndarray]


def open_records(corpus: FileCorpus, rule: Rule | None, *, vocab_size: int) -> TokenStore:
    """Reads records of tokens into memory, with what the mask ``rule`` reads.

    A token is predicted by the token before it if it sees that one and is not seen by it: not in a prefix or in an
    image, and not where another branch of a tree begins. Raises InputError for a record that is malformed or has too
    large a token, unless the corpus leaves bad records out.
    """
    found = list[_Tokens]()
    for record, where in corpus.records():
        try:
            found.append(_read(record, where, rule, vocab_size))
        except InputError as error:
            if corpus.bad is None:
                raise InputError(f"{str(error).removesuffix('.')}; {SKIP}.") from None
            corpus.bad.add(where)
    if not found:
        raise InputError(f"data {corpus.data!r} has no record of tokens that can be read.")
    edges = np.cumsum([0, *(len(one.tokens) for one in found)], dtype=np.uint64)
    columns = {name: np.concatenate([one.columns[name] for one in found]) for name in found[0].columns}
    return TokenStore(np.concatenate([one.tokens for one in found]), edges, columns=columns)


def _read(fields: dict[str, Any], where: str, rule: Rule | None, vocab_size: int) -> _Tokens:
    try:
        record = msgspec.convert(fields, TokenRecord)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {str(error)[0].lower()}{str(error)[1:]}. Mend it.") from None
    length, wrong = len(record.tokens), [token for token in record.tokens if not 0 <= token < vocab_size]
    if wrong or not length:
        what = f"has the token {wrong[0]}" if wrong else "has no tokens"
        raise InputError(f"{where} {what}. Give tokens from 0 to {vocab_size - 1}, the vocabulary of the model.")
    columns = {name: _column(record, name, where) for name in (rule.data if rule else ()) if name in FIELDS}
    tokens, counted = np.array(record.tokens, np.int32), np.ones(length, bool)
    if rule is not None:
        others = {"lengths": np.array([length]), "documents": np.zeros((1, length), np.int32)}
        arrays = others | {name: column[:1] if name == "prefix" else column[None] for name, column in columns.items()}
        mask, before, after = (
            rule.make(*(arrays[name] for name in rule.data)),
            np.arange(length - 1),
            np.arange(1, length),
        )
        counted[1:] = mask(0, 0, after, before) & ~mask(0, 0, before, after)
    return _Tokens(np.where(counted, tokens, ~tokens), columns)


def _column(record: TokenRecord, name: str, where: str) -> np.ndarray:
    """Returns what a mask reads of each token of a record, int32."""
    length, field = len(record.tokens), FIELDS[name]
    given: Any = getattr(record, field)
    if given is None:
        raise InputError(f"{where} has no {field}, which the mask of the model reads. Add it.")
    if name == "prefix":
        if not 0 <= given <= length:
            raise InputError(f"{where}: prefix is {given}, of {length} tokens. Use 0 to {length}.")
        return np.full(length, given, np.int32)
    found = np.zeros(length, np.int32)
    if name == "spans":
        for number, (first, end) in enumerate(given, start=1):
            if not 0 <= first < end <= length or found[first:end].any():
                raise InputError(
                    f"{where}: span [{first}, {end}) is empty, overlaps another or exceeds the {length} tokens. Give "
                    "the first token of each image and the one after its last."
                )
            found[first:end] = number
        return found
    if len(given) != length:
        raise InputError(f"{where} has {length} tokens and {len(given)} of {field}. Give one for each token.")
    if name == "is_global":
        return np.array(given, np.int32)
    wrong = [at for at, parent in enumerate(given) if not -1 <= parent < at]
    if wrong:
        raise InputError(
            f"{where}: token {wrong[0]} has the parent {given[wrong[0]]}. Give an earlier token, or -1 for a root."
        )
    enter, leave = tree_walk(np.array([given], np.int32))
    return (enter if name == "enter" else leave)[0]


def with_mask_data(store: TokenStore, rule: Rule | None, data: str) -> TokenStore:
    """Returns a store with what the mask ``rule`` reads of its records: a prefix is what comes before the first token
    that counts in the loss. Raises InputError where ``data`` does not have it."""
    missing = [name for name in (rule.data if rule else ()) if name in FIELDS and name not in store.columns]
    if not missing or rule is None:
        return store
    counted = np.flatnonzero(store.read(np.arange(len(store))) >= 0) if store.is_records else np.empty(0, np.int64)
    starts, ends = store.starts[:-1].astype(np.int64), store.starts[1:].astype(np.int64)
    prefixes = np.append(counted, len(store))[np.searchsorted(counted, starts)] - starts
    if missing != ["prefix"] or not len(counted) or not prefixes.any():
        fields = dict.fromkeys(FIELDS[name] for name in missing)
        chats = " or a prompt and a completion" * (missing == ["prefix"])
        raise InputError(
            f"the mask {rule.text!r} reads {', '.join(fields)} of each record, and data {data!r} has none. Give JSON "
            f"lines with tokens and {', '.join(fields)}{chats and ',' + chats}."
        )
    return TokenStore(
        store.tokens, store.starts, columns={**store.columns, "prefix": np.repeat(prefixes, ends - starts)}
    )
