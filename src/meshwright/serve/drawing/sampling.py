"""Samples the next token of each sequence from its logits.

A sample depends only on the logits of its own sequence, its `Sampling`, and the number of earlier samples, never on the
rest of the batch.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meshwright.core.errors import InputError


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings of one sequence. ``temperature`` 0 takes the likeliest token. ``top_k`` 0, ``top_p`` 1 and
    ``min_p`` 0 exclude no token; all apply after the temperature, ``top_k`` first, and ``min_p`` is a share of the
    likeliest token's probability. ``number`` distinguishes samples of one seed.

    Before the temperature, logits get ``logit_bias`` (pairs of token and addend); those of tokens in prompt or output
    are divided by ``repetition_penalty``, or multiplied where negative; ``presence_penalty`` is subtracted for tokens
    in the output, ``frequency_penalty`` once per occurrence. Source of these rules: vLLM's and OpenAI's APIs.

    Raises InputError for a value that is out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    number: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature={self.temperature} must be 0 (the likeliest token) or a positive number.")
        if not 0 <= self.top_k < 2**31:
            raise InputError(f"top_k={self.top_k} must be 0 (all tokens) or between 1 and {2**31 - 1}.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} must be more than 0 and at most 1 (all tokens).")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed} must be between 0 and {2**32 - 1}.")
        if not 0 <= self.number < 2**31:
            raise InputError(f"number={self.number} must be between 0 and {2**31 - 1}.")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p={self.min_p} must be between 0 (all tokens) and 1.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise InputError(f"repetition_penalty={self.repetition_penalty} must be a positive number; 1 is none.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise InputError(f"{name}={getattr(self, name)} must be between -2 and 2; 0 is none.")
        for token, bias in self.logit_bias:
            if token < 0 or not -100 <= bias <= 100:
                raise InputError(f"logit_bias={token}: {bias} must be a token >= 0 with a bias from -100 to 100.")

    @property
    def adjusts(self) -> bool:
        """True if a penalty or ``logit_bias`` changes logits."""
        is_neutral = self.repetition_penalty == 1 and not self.presence_penalty and not self.frequency_penalty
        return bool(self.logit_bias) or not is_neutral


LIKELIEST = Sampling()


HostOrDeviceArray = Array | np.ndarray
"""An array on the devices or on the host."""

SamplingRows = dict[str, HostOrDeviceArray]
"""Field of `Sampling` -> an array [B] of its value for every row of a batch."""

_DTYPES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint32,
    "number": np.int32,
}


def as_arrays(rows: Sequence[Sampling]) -> SamplingRows:
    """Returns the samplings of all rows as an array [B] for each field."""
    return {name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in _DTYPES.items()}


@jax.jit
def draw(logits: Float[Array, "B V"], rows: SamplingRows, counts: Int[Array, " B"] | np.ndarray) -> Int[Array, " B"]:
    """Returns the next token of each row, [B] int32; ``counts`` are the tokens that the rows sampled before.

    The argmax of logit / temperature plus Gumbel noise is a sample of the softmax.
    """
    top_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = jnp.any(rows["temperature"] > 0)  # no noise is made if all rows are greedy
    tokens: Array = lax.cond(is_random, lambda: _sample(logits, rows, counts, top_tokens), lambda: top_tokens)
    return tokens


def _sample(logits: Array, rows: SamplingRows, counts: HostOrDeviceArray, top_tokens: Array) -> Array:
    temperature, top_k, top_p, min_p, seed, sample_number = (jnp.asarray(rows[name]) for name in _DTYPES)
    scores = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    is_limited = jnp.any((top_k > 0) | (top_p < 1))  # [B, V] is sorted only if a row needs it
    is_kept = lax.cond(is_limited, lambda: kept_tokens(scores, top_k, top_p), lambda: jnp.ones(scores.shape, bool))
    is_kept &= scores >= scores.max(axis=-1, keepdims=True) + jnp.log(min_p)[:, None]
    fold_in = jax.vmap(jax.random.fold_in)
    # depends only on seed, number and count: the rest of the batch changes nothing
    rng_keys = fold_in(fold_in(jax.vmap(jax.random.key)(seed), sample_number), jnp.asarray(counts))
    gumbel_noise = jax.vmap(lambda key: jax.random.gumbel(key, (logits.shape[1],)))(rng_keys)
    drawn_tokens = jnp.argmax(jnp.where(is_kept, scores + gumbel_noise, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn_tokens, top_tokens)


def kept_tokens(logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]) -> Bool[Array, "B V"]:
    """True for the fewest likeliest tokens whose probabilities reach ``top_p`` within the ``top_k`` likeliest (0: all).

    Of equal logits the earlier token ranks first. At least one token is kept.
    """
    token_of_rank = jnp.argsort(-logits, axis=-1, stable=True)
    rank_of_token = jnp.argsort(token_of_rank, axis=-1)
    is_in_top_k = jnp.arange(logits.shape[1])[None] < jnp.where(top_k > 0, top_k, logits.shape[1])[:, None]
    ranked_logits = jnp.take_along_axis(logits, token_of_rank, axis=-1)
    probabilities = jax.nn.softmax(jnp.where(is_in_top_k, ranked_logits, -jnp.inf), axis=-1)
    prob_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # rounding may bring the sum before an unlikely token to 1
    is_kept = is_in_top_k & ((prob_before < top_p[:, None]) | (top_p[:, None] >= 1))
    return jnp.take_along_axis(is_kept, rank_of_token, axis=-1)
