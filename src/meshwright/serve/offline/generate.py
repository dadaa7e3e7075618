"""Continues prompts token by token on a `GenerateStep`, all in one batch."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import jax
import msgspec
import numpy as np

from meshwright.core.errors import InputError
from meshwright.nn.weights import Params
from meshwright.parallel.generation.generate_step import Cache, GenerateStep
from meshwright.serve.drawing.sampling import LIKELIEST, Sampling, SamplingRows, as_arrays, draw

OnToken = Callable[[int, int], None]
"""Called with the index of a prompt and its next token, except for the end token."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens after one prompt; ``finish`` is "end" after an end token, "length" at the limit."""

    tokens: tuple[int, ...]
    finish: Literal["end", "length"]


class GenerationPace(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a generation. ``first_token_s`` is the time to the first token of all rows, without compilation;
    ``tokens_per_s`` is the rate of all rows together after it, None if no token follows."""

    compile_s: float
    first_token_s: float
    tokens_per_s: float | None
    num_tokens: int


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A completion for each prompt, and the pace of the batch."""

    completions: tuple[Completion, ...]
    pace: GenerationPace


def generate(
    step: GenerateStep,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling | Sequence[Sampling] = LIKELIEST,
    end_tokens: Collection[int] = (),
    on_token: OnToken | None = None,
) -> Generated:
    """Generates up to ``max_tokens`` tokens after each prompt; equal prompts get different samples.

    ``sampling`` is one for all prompts, or a sequence with one for each. Generation of a prompt stops at any of
    ``end_tokens``. Raises InputError for prompts that do not fit the step.
    """
    require_prompts(step, prompts, max_tokens=max_tokens)
    rows = as_arrays(_of_rows(prompts, sampling, step.batch_seqs))
    tokens, lengths = padded(step, prompts)
    start = time.perf_counter()
    step.compiled(tokens.shape[1])
    step.compiled(0)
    logits = np.zeros((step.batch_seqs, step.model.vocab_size), np.float32)
    jax.block_until_ready(draw(jax.device_put(logits, step.logits_sharding), rows, lengths * 0))
    compile_s = time.perf_counter() - start
    cache = jax.block_until_ready(step.init_cache())
    times = [time.perf_counter()]
    found: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for drawn in _drawn(step, params, cache, (tokens, lengths, rows), max_tokens):
        times.append(time.perf_counter())
        for row, mine in enumerate(found):
            if ended[row]:
                continue
            token = int(drawn[row])
            ended[row] = token in end_tokens
            if not ended[row]:
                mine.append(token)
                if on_token is not None:
                    on_token(row, token)
        if all(ended):
            break
    after_s, num_tokens = times[-1] - times[1], sum(map(len, found))
    num_after_first = num_tokens + sum(ended) - len(prompts)
    pace = GenerationPace(
        compile_s=compile_s,
        first_token_s=times[1] - times[0],
        tokens_per_s=num_after_first / after_s if num_after_first and after_s > 0 else None,
        num_tokens=num_tokens,
    )
    completions = (
        Completion(tokens=tuple(mine), finish="end" if end else "length")
        for mine, end in zip(found, ended, strict=True)
    )
    return Generated(completions=tuple(completions), pace=pace)


def require_prompts(step: GenerateStep, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
    """Raises InputError for no or too many prompts, empty or too long ones, and tokens outside the vocabulary."""
    if not 1 <= len(prompts) <= step.batch_seqs:
        raise InputError(f"{len(prompts)} prompts; the step takes 1 to {step.batch_seqs}. Change its batch_seqs.")
    if max_tokens < 1:
        raise InputError(f"max_tokens={max_tokens} must be at least 1.")
    vocab = step.model.vocab_size
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise InputError(f"prompt {number} is empty. Give at least one word or token.")
        if wrong := [token for token in (min(prompt), max(prompt)) if not 0 <= token < vocab]:
            raise InputError(f"prompt {number} has token {wrong[0]}, outside of V={vocab}. Give 0 to {vocab - 1}.")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_tokens > step.max_len:
        raise InputError(
            f"a prompt of {longest} tokens and {max_tokens} more need {longest + max_tokens} positions; the cache has "
            f"{step.max_len}. Shorten them, or give a larger max_len."
        )


def _of_rows(
    prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], num_rows: int
) -> list[Sampling]:
    """Returns the sampling of each row; the n-th copy of a prompt gets the n-th sample number of its seed."""
    given = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for prompt, one in zip(prompts, given, strict=True):
        times = seen.get(tuple(prompt), 0)
        seen[tuple(prompt)] = times + 1
        found.append(msgspec.structs.replace(one, number=one.number + times))
    return [*found, *[LIKELIEST] * (num_rows - len(found))]


def padded(step: GenerateStep, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts padded to rows of equal length, and their lengths; a row without a prompt has length 1."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = np.zeros((step.batch_seqs, step.padded_length(longest)), np.int32)
    lengths = np.ones(step.batch_seqs, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    return tokens, lengths


def _drawn(
    step: GenerateStep,
    params: Params,
    cache: Cache,
    given: tuple[np.ndarray, np.ndarray, SamplingRows],
    max_tokens: int,
) -> Iterator[np.ndarray]:
    """Yields the next token of every row, ``max_tokens`` times. Each step is dispatched before the host reads its input
    token, so that devices do not wait for the host; a step after the last end token is discarded."""
    tokens, lengths, rows = given
    logits, cache = step.prefill(params, cache, tokens, lengths)
    drawn = draw(logits, rows, np.zeros(step.batch_seqs, np.int32))
    for count in range(max_tokens):
        following = drawn
        if count + 1 < max_tokens:
            logits, cache = step.generate(params, cache, drawn, lengths + count)
            following = draw(logits, rows, np.full(step.batch_seqs, count + 1, np.int32))
        yield np.asarray(drawn)
        drawn = following
