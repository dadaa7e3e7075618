"""Draws the tokens of a step on the devices, so that the next step can start before the host has read them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int

from meshwright.nn.order import sum_of_halves
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.serve.drawing.sampling import LIKELIEST, HostOrDeviceArray, SamplingRows, as_arrays, draw
from meshwright.serve.request import MOST_LOGPROBS, TokenLogprob, TokenRequest

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class TokenHistory(NamedTuple):
    """Arrays [slots, V]: whether the slot's prompt has a token, how often its output has it, the bias that is added to
    its logit, and whether it is a stop token, which must not be drawn before ``min_tokens`` of output."""

    in_prompt: Array
    in_output: Array
    bias: Array
    late: Array


class Drawn(NamedTuple):
    """The token drawn from each row of logits. Log-probabilities are of unadjusted logits, None if not computed.

    ``logprob`` [O] is for a row's target, else its token; ``top``, ``top_logprob`` [O, 20] are the likeliest tokens.
    """

    token: HostOrDeviceArray
    logprob: Any = None
    top: Any = None
    top_logprob: Any = None

    def on_host(self) -> "Drawn":
        """Waits for the step and returns a copy whose arrays are NumPy arrays."""
        return Drawn(*jax.tree.map(np.asarray, self))

    def logprob_of(self, row: int, token: int, num_top: int) -> TokenLogprob:
        """Returns ``token`` with the log-probability of a row and the ``num_top`` likeliest tokens of that row."""
        top_pairs = zip(self.top[row][:num_top].tolist(), self.top_logprob[row][:num_top].tolist(), strict=True)
        return TokenLogprob(token=token, logprob=float(self.logprob[row]), top=tuple(top_pairs))


@jax.jit
def _draw(logits: Array, latest: Array, rows: SamplingRows, more: dict[str, Array]) -> tuple[Array, Int[Array, " O"]]:
    tokens = draw(logits, rows, more["counts"])
    return latest.at[more["slots"]].set(tokens, mode="drop"), tokens


@partial(jax.jit, donate_argnums=2)  # the history, [S, V], is written in place
def _draw_adjusted(
    logits: Array, latest: Array, history: TokenHistory, rows: SamplingRows, more: dict[str, Array]
) -> tuple[Array, TokenHistory, Drawn]:
    slots, drawn_counts, target_tokens = more["slots"], more["counts"], more["targets"]
    row_history = jax.tree.map(lambda array: array.at[slots].get(mode="clip"), history)
    # summed in an order that does not depend on the number of rows
    shifted_logits = logits - logits.max(axis=-1, keepdims=True)
    logprobs = shifted_logits - jnp.log(sum_of_halves(jnp.exp(shifted_logits)))
    repetition_penalty, presence_penalty, frequency_penalty = (more[name][:, None] for name in _PENALTIES)
    is_seen = row_history.in_prompt | (row_history.in_output > 0)
    repetition_factor = jnp.where(is_seen, repetition_penalty, 1.0)
    new_logits = logits + jnp.where(more["has_bias"][:, None], row_history.bias, 0.0)
    new_logits = jnp.where(new_logits > 0, new_logits / repetition_factor, new_logits * repetition_factor)
    new_logits -= presence_penalty * (row_history.in_output > 0) + frequency_penalty * row_history.in_output
    token_ids = jnp.arange(logits.shape[1])
    allowed_bits = more["allowed"][:, token_ids // 32] >> (token_ids % 32)[None] & 1
    new_logits = jnp.where(row_history.late & more["early"][:, None] | (allowed_bits == 0), -jnp.inf, new_logits)
    tokens = draw(new_logits, rows, drawn_counts)
    scored_tokens = jnp.where(target_tokens >= 0, target_tokens, tokens)
    token_logprobs = jnp.take_along_axis(logprobs, scored_tokens[:, None], axis=1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, min(MOST_LOGPROBS, logits.shape[1]))
    history = history._replace(in_output=history.in_output.at[slots, tokens].add(1, mode="drop"))
    return latest.at[slots].set(tokens, mode="drop"), history, Drawn(tokens, token_logprobs, top_tokens, top_logprobs)


@partial(jax.jit, donate_argnums=0)
def _enter(history: TokenHistory, slot: HostOrDeviceArray, own: Sequence[HostOrDeviceArray]) -> TokenHistory:
    return TokenHistory(*(array.at[slot].set(row) for array, row in zip(history, own, strict=True)))


class OutputRow(NamedTuple):
    """A row with logits: the request's slot (the number of slots: the drawn token is discarded), how many tokens were
    drawn for the request before, and the token whose log-probability is returned (-1: the drawn token)."""

    slot: int
    num_before: int
    target: int = -1


class TokenDrawer:
    """Keeps the latest token of each of ``num_slots`` slots on the devices, with their sampling and adjustments."""

    def __init__(self, num_slots: int, vocab_size: int, sharding: Sharding, programs: ProgramStore) -> None:
        self._programs, self._sharding = programs, sharding  # the sharding of logits
        self._compiled: dict[tuple[int, bool], jax.stages.Compiled] = {}
        self.latest: Array = jnp.zeros(num_slots, jnp.int32)
        self._size = num_slots, vocab_size
        self._fields = as_arrays([LIKELIEST] * (num_slots + 1))  # the last is for rows that draw nothing
        self._penalties = {name: np.full(num_slots + 1, getattr(LIKELIEST, name), np.float32) for name in _PENALTIES}
        self._fewest = np.zeros(num_slots + 1, np.int32)
        self._has_bias = np.zeros(num_slots + 1, bool)
        self._history: TokenHistory | None = None
        self._all_allowed: dict[int, Array] = {}

    def enter(self, slot: int, request: TokenRequest, output: Sequence[int]) -> None:
        """Assigns a slot to a request that has drawn the tokens ``output`` before (after a preemption; else none)."""
        sampling = request.sampling
        for name, array in (self._fields | self._penalties).items():
            array[slot] = getattr(sampling, name)
        self._has_bias[slot] = bool(sampling.logit_bias)
        # without stop tokens, the stop tokens of the slot's previous request would apply
        self._fewest[slot] = request.min_tokens if request.stop_tokens else 0
        if not adjusts(request):
            return
        vocab_size = self._size[1]
        is_in_prompt, is_late = np.zeros(vocab_size, bool), np.zeros(vocab_size, bool)
        counts_in_output, biases = np.bincount(output, minlength=vocab_size), np.zeros(vocab_size)
        is_in_prompt[list(request.prompt)] = True
        for token, bias in sampling.logit_bias:
            biases[token] += bias
        is_late[list(request.stop_tokens)] = True
        slot_history = is_in_prompt, counts_in_output.astype(np.int32), biases.astype(np.float32), is_late
        self._history = _enter(self._history or self._no_history(), np.int32(slot), slot_history)

    def _no_history(self) -> TokenHistory:
        return TokenHistory(*(jnp.zeros(self._size, dtype) for dtype in (bool, np.int32, np.float32, bool)))

    def draw(
        self, logits: Array, rows: Sequence[OutputRow], *, adjusted: bool, allowed: HostOrDeviceArray | None = None
    ) -> Drawn:
        """Dispatches the draw from logits [O, V] for ``rows``, the first of O rows, and returns its device arrays.

        ``adjusted`` applies penalties, biases, minimum lengths and the mask ``allowed`` (bits [O, V / 32]; None: all
        tokens), and computes log-probabilities.
        """
        num_rows = logits.shape[0]
        program, settings = self.compiled(num_rows, adjusted), self._given(num_rows, rows)
        if not adjusted:
            self.latest, tokens = program(logits, self.latest, *settings)
            return Drawn(tokens)
        if allowed is None:
            if num_rows not in self._all_allowed:
                self._all_allowed[num_rows] = jnp.full(self._mask_shape(num_rows), -1, jnp.int32)
            allowed = self._all_allowed[num_rows]
        settings[1]["allowed"] = allowed
        self.latest, self._history, drawn_rows = program(
            logits, self.latest, self._history or self._no_history(), *settings
        )
        return Drawn(*drawn_rows)

    def _mask_shape(self, num_rows: int) -> tuple[int, int]:
        return num_rows, -(-self._size[1] // 32)

    def _given(self, num_rows: int, rows: Sequence[OutputRow]) -> tuple[SamplingRows, dict[str, HostOrDeviceArray]]:
        """Returns the sampling and adjustment arrays of ``rows``, padded to ``num_rows`` rows that draw nothing."""
        slots, drawn_counts = np.full(num_rows, self._size[0], np.int32), np.zeros(num_rows, np.int32)
        target_tokens = np.full(num_rows, -1, np.int32)
        if rows:
            slots[: len(rows)], drawn_counts[: len(rows)], target_tokens[: len(rows)] = np.array(rows, np.int32).T
        array_by_name: dict[str, HostOrDeviceArray] = {name: array[slots] for name, array in self._penalties.items()}
        array_by_name |= {"slots": slots, "counts": drawn_counts, "targets": target_tokens}
        array_by_name |= {"early": drawn_counts < self._fewest[slots], "has_bias": self._has_bias[slots]}
        return {name: array[slots] for name, array in self._fields.items()}, array_by_name

    def compiled(self, size: int, adjusted: bool) -> jax.stages.Compiled:
        """Returns the program that draws from ``size`` rows, compiled at the first call."""
        if (size, adjusted) not in self._compiled:
            logits_struct = jax.ShapeDtypeStruct((size, self._size[1]), np.float32, sharding=self._sharding)
            latest_struct = jax.ShapeDtypeStruct(self._size[:1], np.int32)
            function: jax.stages.Wrapped = _draw_adjusted if adjusted else _draw
            rows, array_by_name = self._given(size, [])
            if adjusted:
                array_by_name["allowed"] = np.zeros(self._mask_shape(size), np.int32)
            history_structs = [jax.eval_shape(self._no_history)] if adjusted else []
            arguments = (logits_struct, latest_struct, *history_structs, rows, array_by_name)
            program_name = f"draw-{size}{'-adjusted' if adjusted else ''}"
            self._compiled[size, adjusted] = self._programs.get(program_name, lambda: function.lower(*arguments))
        return self._compiled[size, adjusted]


def adjusts(request: TokenRequest) -> bool:
    """True if a request adjusts its logits: by a penalty, a bias, or a minimum output length with stop tokens."""
    return request.sampling.adjusts or bool(request.min_tokens and request.stop_tokens)
