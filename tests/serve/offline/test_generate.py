"""Prompts continued: as the cache-less sampler continues them, on any mesh, in any company."""

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.core.errors import InputError
from meshwright.serve.drawing.sampling import Sampling
from meshwright.serve.offline.generate import as_requests, generate, generate_uncached
from meshwright.serve.opening import _options_for
from meshwright.serve.options import USUAL_ENGINE
from tests.parallel.generate_cases import LLAMA, engine_on, float_params, likeliest, step_of

PROMPTS = [[5, 9, 60, 2, 7, 7, 1, 8, 30], [3], [11, 12, 13]]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def params():
    return float_params(LLAMA)


@pytest.fixture(scope="module")
def step():
    return step_of(LLAMA, {})


@pytest.fixture(scope="module")
def engine(step, params):
    return engine_on(step, step.place(params))


def tokens_of(engine, prompts, **options) -> list[list[int]]:
    found = generate(engine, as_requests(prompts, max_tokens=NUM_TOKENS, **options))
    return [list(one.tokens) for one in found.completions]


def expected(params, prompt: list[int]) -> list[int]:
    return likeliest(LLAMA, params, prompt, NUM_TOKENS)


def test_the_likeliest_tokens_are_those_of_the_sampler_without_a_cache(engine, params):
    found = tokens_of(engine, PROMPTS)
    assert found == [expected(params, prompt) for prompt in PROMPTS]
    assert [len(tokens) for tokens in found] == [NUM_TOKENS] * 3


def test_a_mesh_gives_the_same_tokens(engine, params):
    split = step_of(LLAMA, {"data": 2, "tensor": 2})
    options = {"sampling": Sampling(temperature=0.8, top_k=20, seed=4)}
    assert tokens_of(engine_on(split, split.place(params)), PROMPTS, **options) == tokens_of(engine, PROMPTS, **options)


def test_a_prompt_is_continued_alike_in_any_company(engine):
    options = {"sampling": Sampling(temperature=1.0, seed=9)}
    together = tokens_of(engine, PROMPTS, **options)
    assert [tokens_of(engine, [prompt], **options)[0] for prompt in PROMPTS] == together
    assert tokens_of(engine, PROMPTS[::-1], **options) == together[::-1]


def test_the_same_prompt_again_is_another_sample(engine):
    first, second = tokens_of(engine, [PROMPTS[0]] * 2, sampling=Sampling(temperature=1.0))
    assert first != second
    assert tokens_of(engine, [PROMPTS[0]], sampling=Sampling(temperature=1.0, number=1)) == [second]


def test_an_end_token_ends_its_own_row(engine, params):
    end = expected(params, PROMPTS[0])[3]
    found = generate(engine, as_requests(PROMPTS, max_tokens=NUM_TOKENS, end_tokens=[end])).completions
    for prompt, one in zip(PROMPTS, found, strict=True):
        tokens = expected(params, prompt)
        place = tokens.index(end) if end in tokens else None
        assert list(one.tokens) == tokens[:place]
        assert one.finish == ("length" if place is None else "stop")
    assert found[0].finish == "stop"


def test_tokens_are_told_as_they_come(engine):
    told: list[tuple[int, int]] = []
    found = generate(engine, as_requests(PROMPTS, max_tokens=3), lambda row, token: told.append((row, token)))
    assert sorted(told[:3]) == sorted((row, found.completions[row].tokens[0]) for row in range(3))
    for row in range(3):
        assert tuple(token for place, token in told if place == row) == found.completions[row].tokens
    pace = found.pace
    assert pace.num_tokens == 9
    assert pace.first_token_s > 0
    assert pace.tokens_per_s is not None


def test_one_token_has_no_pace_after_it(engine):
    found = generate(engine, as_requests(PROMPTS[:1], max_tokens=1))
    assert found.pace.tokens_per_s is None
    assert len(found.completions[0].tokens) == 1


def test_an_engine_for_some_requests_compiles_two_programs(params):
    """Prompts of 9, 1 and 3 tokens; fewer sequences than three decode in the end."""
    step = step_of(LLAMA, {})
    engine = engine_on(step, step.place(params))
    requests = [as_requests([prompt], max_tokens=1 + 2 * n)[0] for n, prompt in enumerate(PROMPTS, start=1)]
    engine.warm_up(requests=requests)
    compiled = set(step._compiled)
    assert [shape.longest > 1 for shape in sorted(compiled, key=lambda shape: -shape.longest)] == [True, False]
    found = generate(engine, requests).completions
    assert set(step._compiled) == compiled
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert list(one.tokens) == expected(params, prompt)[: len(one.tokens)]


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ([9, 3, 1], 2048, (4, 256)),
        ([200, 100, 50, 7], 2048, (4, 256)),
        ([300], 2048, (1, 512)),
        ([1500] * 40, 8192, (0, 2048)),
        ([1500], 1600, (1, 1600)),
        ([40], 64, (1, 64)),
    ],
)
def test_like_requests_have_engines_with_the_same_programs(lengths, most, expected):
    """Slots and positions are rounded up, up to the model's; of many requests only some run at once."""
    requests = as_requests([[1] * length for length in lengths], max_tokens=20)
    options = _options_for(requests, USUAL_ENGINE, most)
    assert (options.max_requests, options.max_len) == expected
    own = replace(USUAL_ENGINE, max_requests=3, max_len=100)
    assert _options_for(requests, own, most) == own


def test_without_a_cache_the_likeliest_tokens_are_the_same(step, params):
    engine = engine_on(step, step.place(params), prefix_cache=False)
    (request,) = as_requests(PROMPTS[:1], max_tokens=NUM_TOKENS)
    assert generate_uncached(engine, request) == expected(params, PROMPTS[0])
    # every token is from a pass over the whole text
    assert sum(one.prefilled for one in engine.state().sums.values()) == sum(range(9, 9 + NUM_TOKENS))
    with pytest.raises(InputError, match=r"temperature=1.0: each pass would draw anew"):
        generate_uncached(engine, as_requests(PROMPTS[:1], max_tokens=2, sampling=Sampling(temperature=1.0))[0])
    (ended,) = as_requests(PROMPTS[:1], max_tokens=NUM_TOKENS, end_tokens=expected(params, PROMPTS[0])[2:3])
    assert generate_uncached(engine, ended) == expected(params, PROMPTS[0])[:2]


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([], 1, "there is no prompt"),
        ([[1], []], 1, "prompt 2 is empty"),
        ([[64]], 1, "the prompt has token 64, outside of V=64. Give 0 to 63."),
        ([[1]], 0, "max_tokens=0 must be at least 1"),
        ([[1] * 20], 5, "need 25 positions; this engine has 24"),
    ],
)
def test_prompts_that_have_no_place_are_refused(engine, prompts, max_tokens, message):
    with pytest.raises(InputError, match=message):
        generate(engine, as_requests(prompts, max_tokens=max_tokens))


@pytest.mark.slow
def test_int8_goes_on_for_as_long(params):
    step = step_of(LLAMA, {"tensor": 2}, weights="int8", cache_dtype="int8")
    found = tokens_of(engine_on(step, step.place(params)), PROMPTS)
    assert all(len(tokens) == NUM_TOKENS and np.all(np.array(tokens) < LLAMA.vocab_size) for tokens in found)
