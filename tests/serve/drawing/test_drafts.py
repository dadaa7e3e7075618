"""Drafts: what comes out is, token for token, what comes out without them, at any temperature."""

import itertools

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from scipy import stats

from meshwright.batching.limits import SchedulerLimits
from meshwright.serve.drawing.drafts import Drafting, ModelDrafter, NgramDrafter
from meshwright.serve.drawing.sampling import Sampling, as_arrays, draw
from meshwright.serve.engine import Engine
from meshwright.serve.request import TokenRequest
from tests.logits import logits_fn
from tests.parallel.generate_cases import LLAMA, float_params, likeliest
from tests.serve.test_engine import (
    NUM_PAGES,
    NUM_TOKENS,
    PAGE_LEN,
    PROMPTS,
    assert_whole,
    engine_on,
    request,
    step_of,
    tokens_of,
)
from tests.tier import sampled

REPEATING = [5, 9, 60, 2, 5, 9, 60, 2, 5, 9]


@pytest.fixture(scope="module")
def params():
    return float_params(LLAMA)


@pytest.fixture(scope="module")
def step():
    return step_of()


@pytest.fixture(scope="module")
def small():
    """A step of a smaller model with the same vocabulary."""
    return step_of(msgspec.structs.replace(LLAMA, num_layers=1))


def drafting_engine(step, params, drafter, **options) -> Engine:
    given = {"max_requests": 4, "token_budget": 24, "page_len": PAGE_LEN, "num_pages": NUM_PAGES, **options}
    limits = SchedulerLimits(num_drafts=drafter.num_drafts, **given)
    return Engine(step, step.place(params), limits, drafter=drafter)


def other_params(seed: int) -> dict:
    """Weights of the small model: the first layer of the large one, disturbed."""
    noise = np.random.default_rng(seed)
    shapes = float_params(msgspec.structs.replace(LLAMA, num_layers=1))
    return {name: array + 0.1 * noise.normal(size=array.shape).astype(np.float32) for name, array in shapes.items()}


@pytest.mark.parametrize(
    ("kind", "temperature"),
    sampled(itertools.product(("ngram", "itself", "small"), (0.0, 1.0)), ("ngram", 0.0)),
)
def test_tokens_are_those_without_drafts(step, small, params, kind, temperature):
    requests = [
        request(prompt, sampling=Sampling(temperature=temperature, seed=number, top_k=20), logprobs=2)
        for number, prompt in enumerate([*PROMPTS, REPEATING])
    ]
    expected = engine_on(step, step.place(params)).run(requests)
    drafter = {
        "ngram": lambda: NgramDrafter(3, shortest=1),
        "itself": lambda: ModelDrafter(step, step.place(params), 3),
        "small": lambda: ModelDrafter(small, small.place(other_params(1)), 3),
    }[kind]()
    engine = drafting_engine(step, params, drafter, watermark=0.0)
    for _ in range(2):  # the second time prefixes are there
        found = engine.run(requests)
        assert list(map(tokens_of, found)) == list(map(tokens_of, expected))
        logprobs = [[one.logprob.logprob for one in outputs] for outputs in found]
        np.testing.assert_allclose(logprobs, [[one.logprob.logprob for one in each] for each in expected], atol=1e-5)
        assert_whole(engine)
    state = engine.state()
    assert state.drafted >= state.accepted
    if kind == "itself":
        assert state.accepted == state.drafted > 50
    if kind == "ngram" and not temperature:
        assert state.accepted > 0


def test_a_preempted_request_drafts_again(step, params):
    expected = [likeliest(LLAMA, params, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = drafting_engine(step, params, ModelDrafter(step, step.place(params), 2), watermark=0.0)
    taken = [engine._owners[0].pages.free.pop() for _ in range(14)]
    engine._owners[0].pages.take(14)
    found = engine.run(list(map(request, PROMPTS)))
    engine._owners[0].pages.free += taken
    engine._owners[0].pages.give(14)
    assert list(map(tokens_of, found)) == expected
    assert engine.state().preemptions > 0
    assert_whole(engine)


def test_requests_with_penalties_have_no_drafts(step, params):
    sampling = Sampling(frequency_penalty=1.5)
    (expected,) = engine_on(step, step.place(params)).run([request(REPEATING, sampling=sampling)])
    engine = drafting_engine(step, params, NgramDrafter(3, shortest=1))
    (found,) = engine.run([request(REPEATING, sampling=sampling)])
    assert tokens_of(found) == tokens_of(expected)
    assert engine.state().drafted == 0


def test_a_stop_token_among_drafts_ends_the_text(step, params):
    tokens = likeliest(LLAMA, params, PROMPTS[0], NUM_TOKENS)
    stop = tokens[4]
    engine = drafting_engine(step, params, ModelDrafter(step, step.place(params), 3))
    (found,) = engine.run([request(PROMPTS[0], stop_tokens=frozenset([stop]))])
    assert (tokens_of(found), found[-1].finish) == (tokens[: tokens.index(stop)], "stop")
    assert_whole(engine)


def test_nothing_compiles_after_warm_up(step, small, params):
    drafter = ModelDrafter(small, small.place(other_params(2)), 2)
    engine = drafting_engine(step, params, drafter)
    engine.warm_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled"))
        engine.run([request(prompt, logprobs=number % 2 or None) for number, prompt in enumerate(PROMPTS)])


def test_tokens_have_the_models_distribution(step, small, params):
    """Second tokens of many seeds, against the forward pass: a chi-squared test with expected counts of 5 at least."""
    prompt, count = PROMPTS[3], 1500
    engine = drafting_engine(step, params, ModelDrafter(small, small.place(other_params(3)), 2), prefix_cache=True)
    sampling = [Sampling(temperature=0.7, seed=7, number=number) for number in range(count)]
    found = engine.run([TokenRequest(prompt=tuple(prompt), max_tokens=3, sampling=one) for one in sampling])
    second = [tokens_of(outputs)[1] for outputs in found]
    logits = jax.jit(logits_fn(LLAMA))
    every = np.arange(LLAMA.vocab_size, dtype=np.int32)
    rows = np.concatenate([np.tile(np.array(prompt, np.int32), (len(every), 1)), every[:, None]], axis=1)
    scores = jax.nn.softmax(logits(params, rows) / 0.7, axis=-1)
    probabilities = np.asarray(scores[0, -2] @ scores[:, -1], float)
    counts = np.bincount(second, minlength=len(every))
    often = probabilities * count >= 5
    observed = [*counts[often], counts[~often].sum()]
    expected = [*probabilities[often] * count, probabilities[~often].sum() * count]
    assert len(observed) > 5
    assert stats.chisquare(observed, np.array(expected) * count / sum(expected)).pvalue > 1e-4
    assert 0 < engine.state().accepted < engine.state().drafted


def test_draws_of_two_models_agree_as_often_as_the_bound_says():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 50)).astype(np.float32)
    rows = as_arrays([Sampling(temperature=1.0, seed=3, number=number) for number in range(4000)])
    drawn = [draw(jnp.tile(one, (4000, 1)), rows, np.zeros(4000, np.int32)) for one in (first, second)]
    distance = 0.5 * float(np.abs(np.asarray(jax.nn.softmax(first) - jax.nn.softmax(second))).sum())
    agree = float((np.asarray(drawn[0]) == np.asarray(drawn[1])).mean())
    assert agree >= (1 - distance) / (1 + distance) - 3 * (0.25 / 4000) ** 0.5
    assert agree <= 1 - distance + 3 * (0.25 / 4000) ** 0.5


def test_ngrams_find_the_latest_place():
    drafter = NgramDrafter(3)
    table = np.zeros((1, 1), np.int32)

    def proposed(tokens, most=3):
        return drafter.propose([Drafting(1, 0, tokens, 0, most)], table)[0]

    assert proposed([1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    assert proposed([1, 2, 3, 4, 1, 2, 9, 8, 1, 2]) == [9, 8, 1]
    assert proposed([1, 2, 3, 4, 1, 2, 9, 8, 1, 2, 9], most=1) == [8]
    drafter.leave(1)
    assert proposed([7]) == []
    assert proposed([7, 8, 6, 7, 8, 8]) == []
