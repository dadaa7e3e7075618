"""Text from a trained model, on one device."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.core.errors import InputError
from meshwright.nn.forward import logits_fn
from meshwright.nn.weights import Params
from meshwright.spec.model import Model

DEFAULT_WINDOW = 128


@lru_cache(maxsize=4)
def _next_token(model: Model) -> Callable[..., jax.Array]:
    """Jitted: a token drawn after the first ``length`` of a padded window; temperature 0 takes the likeliest."""
    logits = logits_fn(model)

    @jax.jit
    def draw(params: Params, window: jax.Array, length: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
        last = lax.dynamic_index_in_dim(logits(params, window)[0], length - 1, axis=0, keepdims=False)
        drawn = jax.random.categorical(key, last / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(last))

    return draw


def generate(
    model: Model,
    params: Params,
    prompt_tokens: Sequence[int],
    *,
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    window: int = DEFAULT_WINDOW,
    end_token: int | None = None,
) -> list[int]:
    """Up to ``num_tokens`` tokens that continue the prompt; fewer when ``end_token`` comes, which is left out.

    Without a cache: each token runs the model over the last ``window`` tokens, padded to that length, so that it
    is compiled once. Give the length the model was trained on. Raises InputError for an empty prompt, or a
    token outside the vocabulary.
    """
    if not prompt_tokens:
        raise InputError("the prompt is empty. Give at least one token, such as the end of a text.")
    if max(prompt_tokens) >= model.vocab_size or min(prompt_tokens) < 0:
        raise InputError(f"the prompt has tokens outside of V={model.vocab_size}. Use the run's own tokenizer.")
    params = jax.device_put(params, jax.devices()[0])
    draw, tokens, key = _next_token(model), list(prompt_tokens), jax.random.key(seed)
    for index in range(num_tokens):
        recent = tokens[-window:]
        padded = np.zeros((1, window), np.int32)
        padded[0, : len(recent)] = recent
        drawn = draw(params, padded, np.int32(len(recent)), np.float32(temperature), jax.random.fold_in(key, index))
        if int(drawn) == end_token:
            break
        tokens.append(int(drawn))
    return tokens[len(prompt_tokens) :]
