"""Generates from a list of prompts with an engine."""

import time
from collections.abc import Callable, Collection, Hashable, Sequence

import msgspec

from meshwright.core.errors import InputError
from meshwright.serve.drawing.sampling import LIKELIEST, Sampling
from meshwright.serve.request import Finish, Prompt, TokenEngine, TokenRequest

OnToken = Callable[[int, int], None]
"""Called with the index of a prompt and its next token, except for the end token."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens after one prompt; ``finish`` is "stop" after an end token, "length" at the limit."""

    tokens: tuple[int, ...]
    finish: Finish


class GenerationPace(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a generation. ``first_token_s`` is the time until every prompt has its first token; ``tokens_per_s``
    is the rate of all prompts together after that, None if no token follows."""

    first_token_s: float
    tokens_per_s: float | None
    num_tokens: int


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """A completion for each prompt, and the speed of the whole generation."""

    completions: tuple[Completion, ...]
    pace: GenerationPace


def as_requests(
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    sampling: Sampling | Sequence[Sampling] = LIKELIEST,
    end_tokens: Collection[int] = (),
) -> list[TokenRequest]:
    """Returns a request for each prompt, which ends after ``max_tokens`` tokens or at any of ``end_tokens``.

    ``sampling`` is one for all prompts, or one for each; the n-th copy of a prompt gets the n-th sample number of its
    seed. Raises InputError for no prompt, or an empty one.
    """
    if not prompts:
        raise InputError("there is no prompt. Give at least one.")
    samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    last_copy_of_prompt, requests = dict[Hashable, int](), list[TokenRequest]()
    for prompt_number, (prompt, base_sampling) in enumerate(zip(prompts, samplings, strict=True), start=1):
        if not len(prompt):
            raise InputError(f"prompt {prompt_number} is empty. Give at least one word or token.")
        request = TokenRequest.of(prompt, max_tokens=max_tokens, stop_tokens=frozenset(end_tokens))
        key = request.prompt, request.source
        copy_number = last_copy_of_prompt[key] = last_copy_of_prompt.get(key, -1) + 1
        own_sampling = msgspec.structs.replace(base_sampling, number=base_sampling.number + copy_number)
        requests.append(msgspec.structs.replace(request, sampling=own_sampling))
    return requests


def generate(engine: TokenEngine, requests: Sequence[TokenRequest], on_token: OnToken | None = None) -> Generated:
    """Runs all requests and returns their tokens and speed. Raises InputError for a request that could never run."""
    start_s = time.perf_counter()
    tokens_of: list[list[int]] = [[] for _ in requests]
    finish_of: dict[int, Finish] = {}
    begun_places, num_early_tokens, first_token_s = set[int](), 0, 0.0
    for outputs in engine.steps(requests):
        for place, output in outputs:
            begun_places.add(place)
            if output.token is not None:
                tokens_of[place].append(output.token)
                if on_token is not None:
                    on_token(place, output.token)
            if output.finish is not None:
                finish_of[place] = output.finish
        if not first_token_s and len(begun_places) == len(requests):
            first_token_s, num_early_tokens = time.perf_counter() - start_s, sum(map(len, tokens_of))
    rest_s, num_tokens = time.perf_counter() - start_s - first_token_s, sum(map(len, tokens_of))
    tokens_per_s = (num_tokens - num_early_tokens) / rest_s if num_tokens > num_early_tokens else None
    return Generated(
        completions=tuple(Completion(tokens=tuple(row), finish=finish_of[i]) for i, row in enumerate(tokens_of)),
        pace=GenerationPace(first_token_s=first_token_s, tokens_per_s=tokens_per_s, num_tokens=num_tokens),
    )


def generate_uncached(engine: TokenEngine, request: TokenRequest) -> list[int]:
    """Returns a request's likeliest tokens, recomputing the whole sequence for each token, as without a cache.

    Raises InputError if the temperature is not 0.
    """
    if request.sampling.temperature:
        raise InputError(f"temperature={request.sampling.temperature}: each pass would draw anew. Give 0.")
    tokens = list[int]()
    for _ in range(request.max_tokens):
        extended_request = msgspec.structs.replace(request, prompt=(*request.prompt, *tokens), max_tokens=1)
        (completion,) = generate(engine, [extended_request]).completions
        tokens += completion.tokens
        if completion.finish == "stop":
            break
    return tokens
