"""Reads records of tokens, and the arrays that a model's mask needs: a record's fields, or its prompt's length."""

from typing import Any, Literal

import msgspec
import numpy as np

from meshwright.core.errors import InputError
from meshwright.masks.mods import tree_walk
from meshwright.masks.names import Rule
from meshwright.train.data.text import SKIP, FileCorpus
from meshwright.train.data.token_store import TokenStore

FIELDS = {"prefix": "prefix", "enter": "parents", "leave": "parents", "spans": "spans", "is_global": "is_global"}
"""Name of an array that a mask reads -> field of a record of tokens from which it is made."""


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a record, and for its mask: the length of the prefix, the earlier position of each token's parent (-1
    for a root), the images as pairs [first, end), and 1 for each global token, else 0."""

    tokens: list[int]
    prefix: int | None = None
    parents: list[int] | None = None
    spans: list[tuple[int, int]] | None = None
    is_global: list[Literal[0, 1]] | None = None


class PairRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record with the tokens of a source and of its target."""

    source: list[int]
    target: list[int]


def open_records(corpus: FileCorpus, rule: Rule | None, *, vocab_size: int) -> TokenStore:
    """Reads records of tokens into memory, with the arrays that the mask ``rule`` reads.

    A token counts in the loss if it attends to the token before it and not the reverse: not in a prefix or in an
    image, and not where another branch of a tree begins. The source of a pair is its prefix. Raises InputError
    for a record that is malformed or has too large a token, unless the corpus leaves bad records out.
    """
    records = list[dict[str, np.ndarray]]()
    for record, where in corpus.records():
        try:
            records.append(_read(record, where, rule, vocab_size))
        except InputError as error:
            if corpus.bad is None:
                raise InputError(f"{str(error).removesuffix('.')}; {SKIP}.") from None
            corpus.bad.add(where)
    if not records:
        raise InputError(f"data {corpus.data!r} has no record of tokens that can be read.")
    record_edges = np.cumsum([0, *(len(record["tokens"]) for record in records)], dtype=np.uint64)
    columns = {name: np.concatenate([record[name] for record in records]) for name in records[0]}
    return TokenStore(columns.pop("tokens"), record_edges, columns=columns)


def _read(fields: dict[str, Any], where: str, rule: Rule | None, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns a record's tokens, complements where they have no loss, and by name the arrays that the mask reads."""
    num_source = 0
    try:
        if "tokens" not in fields and "source" in fields:
            pair = msgspec.convert(fields, PairRecord)
            fields, num_source = {"tokens": pair.source + pair.target, "prefix": len(pair.source)}, len(pair.source)
        record = msgspec.convert(fields, TokenRecord)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {str(error)[0].lower()}{str(error)[1:]}. Mend it.") from None
    seq_len, bad_tokens = len(record.tokens), [token for token in record.tokens if not 0 <= token < vocab_size]
    if bad_tokens or not seq_len:
        fault = f"has the token {bad_tokens[0]}" if bad_tokens else "has no tokens"
        raise InputError(f"{where} {fault}. Give tokens from 0 to {vocab_size - 1}, the vocabulary of the model.")
    tokens, is_counted = np.array(record.tokens, np.int32), np.arange(seq_len) >= num_source
    if rule is None:
        return {"tokens": np.where(is_counted, tokens, ~tokens)}
    columns = {name: _column(record, name, where) for name in rule.data if name in FIELDS}
    array_by_name = {"lengths": np.array([seq_len]), "documents": np.zeros((1, seq_len), np.int32)}
    array_by_name |= {name: column[:1] if name == "prefix" else column[None] for name, column in columns.items()}
    mask, positions = rule.make(*(array_by_name[name] for name in rule.data)), np.arange(seq_len - 1)
    is_counted[1:] &= mask(0, 0, positions + 1, positions) & ~mask(0, 0, positions, positions + 1)
    return {"tokens": np.where(is_counted, tokens, ~tokens), **columns}


def _column(record: TokenRecord, name: str, where: str) -> np.ndarray:
    """Returns the array ``name`` that a mask reads, with an int32 for each token of the record."""
    seq_len, field, column = len(record.tokens), FIELDS[name], np.zeros(len(record.tokens), np.int32)
    value: Any = getattr(record, field)
    if value is None:
        raise InputError(f"{where} has no {field}, which the mask of the model reads. Add it.")
    if name == "prefix":
        if not 0 <= value <= seq_len:
            raise InputError(f"{where}: prefix is {value}, of {seq_len} tokens. Use 0 to {seq_len}.")
        return column + np.int32(value)
    if name == "spans":
        for span_number, (first, end) in enumerate(value, start=1):
            if not 0 <= first < end <= seq_len or column[first:end].any():
                raise InputError(
                    f"{where}: span [{first}, {end}) is empty, overlaps another or exceeds the {seq_len} tokens. Give "
                    "the first token of each image and the one after its last."
                )
            column[first:end] = span_number
        return column
    if len(value) != seq_len:
        raise InputError(f"{where} has {seq_len} tokens and {len(value)} of {field}. Give one for each token.")
    if name == "is_global":
        return column + np.array(value, np.int32)
    for token, parent in enumerate(value):
        if not -1 <= parent < token:
            raise InputError(f"{where}: token {token} has the parent {parent}. Give an earlier one, or -1 for a root.")
    return tree_walk(np.array([value], np.int32))[name == "leave"][0]


def with_mask_data(store: TokenStore, rule: Rule | None, data: str) -> TokenStore:
    """Returns the store with the columns that the mask ``rule`` reads. If only "prefix" is missing, it becomes the
    number of tokens before the first one with a loss. Raises InputError if ``data`` lacks other columns."""
    missing_names = [name for name in (rule.data if rule else ()) if name in FIELDS and name not in store.columns]
    if missing_names == ["prefix"] and store.is_records:
        counted_indices = np.append(np.flatnonzero(store.read(np.arange(len(store))) >= 0), len(store))
        record_edges = store.starts.astype(np.int64)
        prefix_lens = counted_indices[np.searchsorted(counted_indices, record_edges[:-1])] - record_edges[:-1]
        if prefix_lens.any():
            columns = {**store.columns, "prefix": np.repeat(prefix_lens, np.diff(record_edges))}
            return TokenStore(store.tokens, store.starts, columns=columns)
    if missing_names:
        fields = ", ".join(dict.fromkeys(FIELDS[name] for name in missing_names))
        raise InputError(
            f"the mask of the model reads {fields} of each record, and data {data!r} has none. Give JSON lines with "
            f"tokens and {fields}{', or a prompt and a completion' * (fields == 'prefix')}."
        )
    return store
