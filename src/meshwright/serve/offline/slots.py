"""JetStream's interface: a prompt is prefilled, inserted into a slot, and all slots generate together."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from msgspec.structs import replace

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import checked
from meshwright.nn.weights import Params
from meshwright.parallel.generation.held_arrays import Cache
from meshwright.parallel.generation.packed_step import PackedRows, PackedShape, PackedStep
from meshwright.serve.drawing.sampling import LIKELIEST, Sampling, as_arrays, draw


class Prefix(NamedTuple):
    """A prefilled prompt: the pages of its keys and values, its length, and the logits [V] of the next token."""

    cache: Cache
    length: int
    logits: Array


class DecodeState(NamedTuple):
    """The pages of all slots; for each slot its latest token, which is not cached yet, and its number of cached tokens
    (0: the slot is free)."""

    cache: Cache
    tokens: np.ndarray
    lengths: np.ndarray


class SlotEngine:
    """Runs sequences in the slots of a packed step; each slot has fixed pages. Raises CannotRunError for a step that
    shards sequences or has adapters, mask data, window pages or an encoder, InputError for another number of pages.
    """

    @checked
    def __init__(self, step: PackedStep) -> None:
        has_more = step.has_windows or step.mask_fields or step.storage.adapters or step.model.encoder
        if step.num_owners > 1 or has_more:
            raise CannotRunError(
                "slots support only unsharded sequences of tokens: no adapters, no masks with data, no window pages, "
                "no encoder. Use meshwright.serve.engine.Engine."
            )
        storage = replace(step.storage, num_pages=0)
        prefill_step = PackedStep(step.model, step.strategy, max_len=step.max_len, max_seqs=1, storage=storage)
        self._step, self._alone, self._each = step, prefill_step.on(step.mesh), step.cache_sizes["Bp"]
        if step.cache_sizes["Pg"] != step.max_seqs * self._each:
            raise InputError(f"{step.max_seqs} slots have {self._each} pages each. Give the storage num_pages=0.")

    def init_decode_state(self) -> DecodeState:
        """Returns a state whose slots are all free."""
        return DecodeState(self._step.init_cache(), *np.zeros((2, self._step.max_seqs), np.int32))

    def prefill(self, params: Params, tokens: Sequence[int]) -> Prefix:
        """Runs a prompt, padded to a power of two of rows. Raises InputError for a wrong length or token."""
        step, seq_len = self._alone, len(tokens)
        if not 0 < seq_len < step.max_len:
            raise InputError(f"a prompt has {seq_len:,} tokens. Give 1 to {step.max_len - 1:,}, one less than max_len.")
        if not 0 <= min(tokens) <= max(tokens) < (vocab := step.model.vocab_size):
            raise InputError(f"a prompt has tokens {min(tokens)} to {max(tokens)}. Give 0 to {vocab - 1:,}, below V.")
        num_rows = max(8, step.row_parts(2), 1 << (seq_len - 1).bit_length())
        shape = PackedShape(num_rows, 1, 1, num_rows)
        positions = np.arange(seq_len)
        rows = _rows(positions, np.asarray(tokens), positions, np.arange(self._each)[None])
        rows = rows._replace(counts=np.array([seq_len]), lengths=np.array([seq_len]), last=np.array([seq_len - 1]))
        rows = PackedRows.joined([rows._replace(first=np.zeros(1, int))], shape)
        logits, cache = step.step(params, step.init_cache(), jnp.zeros(1, jnp.int32), rows, num_rows)
        return Prefix(cache, seq_len, logits[0])

    def insert(self, prefix: Prefix, state: DecodeState, slot: int, sampling: Sampling = LIKELIEST) -> DecodeState:
        """Copies a prompt's pages into a slot, draws its first token, donates ``state``; InputError: bad slot."""
        if not 0 <= slot < len(state.lengths):
            raise InputError(f"there is no slot {slot}. Give 0 to {len(state.lengths) - 1}, below max_seqs.")
        cache = _inserted(state.cache, prefix.cache, slot * self._each)
        tokens, lengths = state.tokens.copy(), state.lengths.copy()
        tokens[slot], lengths[slot] = _drawn(prefix.logits[None], sampling, np.zeros(1, np.int32))[0], prefix.length
        return DecodeState(cache, tokens, lengths)

    def generate(self, params: Params, state: DecodeState, sampling: Sampling = LIKELIEST) -> tuple[DecodeState, Array]:
        """Draws the next token of each slot; returns the state and logits [S, V]. Raises InputError for a full slot."""
        step, slots = self._step, np.arange(self._step.max_seqs)
        if state.lengths.max() >= step.max_len:
            raise InputError(f"a slot has used all its {step.max_len:,} positions. Free it: lengths[slot] = 0.")
        page_table = slots[:, None] * self._each + np.arange(self._each)
        rows = _rows(slots, state.tokens, state.lengths, page_table)
        page_len = step.storage.page_len
        rows = rows._replace(slots=page_table[slots, state.lengths // page_len] * page_len + state.lengths % page_len)
        logits, cache = step.step(params, state.cache, jnp.zeros(len(slots), jnp.int32), rows, 1)
        tokens = _drawn(logits, sampling, np.zeros(len(slots), np.int32) + state.lengths)
        return DecodeState(cache, tokens, state.lengths + (state.lengths > 0)), logits


def _rows(row_ids: np.ndarray, tokens: np.ndarray, positions: np.ndarray, pages: np.ndarray) -> PackedRows:
    """Returns rows that are separate sequences, written to the cache slots of their positions."""
    return PackedRows(
        tokens=tokens,
        sources=np.full(len(row_ids), -1),
        positions=positions,
        slots=positions,
        first=row_ids,
        counts=np.ones(len(row_ids), int),
        lengths=positions + 1,
        pages=pages,
        last=row_ids,
    )


@partial(jax.jit, donate_argnums=0)
def _inserted(cache: Cache, prefix: Cache, first: Array) -> Cache:
    def into(name: str) -> Array | tuple[Array, ...]:
        if isinstance(cache[name], tuple):  # an array per layer, whose first dim is pages
            layer_pairs = zip(cache[name], prefix[name], strict=True)
            return tuple(jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=0) for old, new in layer_pairs)
        return jax.lax.dynamic_update_slice_in_dim(cache[name], prefix[name], first, axis=1)

    return {name: into(name) for name in cache}


def _drawn(logits: Array, sampling: Sampling, counts: np.ndarray) -> np.ndarray:
    return np.asarray(draw(logits, as_arrays([sampling] * len(logits)), counts))
