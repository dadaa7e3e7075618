"""Prompts continued: as the cache-less sampler continues them, on any mesh, in any company."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.parallel.generation.generate_step import GenerateStep
from meshwright.serve.drawing.sampling import Sampling, draw
from meshwright.serve.offline.generate import generate, padded
from meshwright.spec.strategy import Strategy, make_mesh
from tests.parallel.generate_cases import LLAMA, MAX_LEN, float_params, likeliest


def step_of(model, axes, **options):
    strategy = Strategy(mesh=make_mesh(axes), state="fp32")
    given = {"max_len": MAX_LEN, "batch_seqs": 4, "cache_dtype": "fp32", **options}
    return GenerateStep(model, strategy, **given)


PROMPTS = [[5, 9, 60, 2, 7, 7, 1, 8, 30], [3], [11, 12, 13]]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def params():
    return float_params(LLAMA)


@pytest.fixture(scope="module")
def step():
    return step_of(LLAMA, {})


def tokens_of(step, params, prompts, **options) -> list[list[int]]:
    found = generate(step, step.place(params), prompts, max_tokens=NUM_TOKENS, **options)
    return [list(one.tokens) for one in found.completions]


def expected(params, prompt: list[int]) -> list[int]:
    return likeliest(LLAMA, params, prompt, NUM_TOKENS)


def test_the_likeliest_tokens_are_those_of_the_sampler_without_a_cache(step, params):
    found = tokens_of(step, params, PROMPTS)
    assert found == [expected(params, prompt) for prompt in PROMPTS]
    assert [len(tokens) for tokens in found] == [NUM_TOKENS] * 3


def test_a_mesh_gives_the_same_tokens(step, params):
    split = step_of(LLAMA, {"data": 2, "tensor": 2})
    options = {"sampling": Sampling(temperature=0.8, top_k=20, seed=4)}
    assert tokens_of(split, params, PROMPTS, **options) == tokens_of(step, params, PROMPTS, **options)


def test_a_length_that_the_axes_do_not_divide_has_room_for_its_prompts(params):
    """9 tokens and 2 more are 11; the axis ``tensor`` cuts positions of a prompt in two."""
    step = step_of(LLAMA, {"tensor": 2}, max_len=11)
    found = generate(step, step.place(params), PROMPTS[:1], max_tokens=2).completions
    assert list(found[0].tokens) == expected(params, PROMPTS[0])[:2]
    with pytest.raises(InputError, match="need 12 positions; the cache has 11"):
        generate(step, {}, PROMPTS[:1], max_tokens=3)


def test_a_prompt_is_continued_alike_in_any_company(step, params):
    options = {"sampling": Sampling(temperature=1.0, seed=9)}
    together = tokens_of(step, params, PROMPTS, **options)
    assert [tokens_of(step, params, [prompt], **options)[0] for prompt in PROMPTS] == together
    assert tokens_of(step, params, PROMPTS[::-1], **options) == together[::-1]


def test_the_same_prompt_again_is_another_sample(step, params):
    first, second = tokens_of(step, params, [PROMPTS[0]] * 2, sampling=Sampling(temperature=1.0))
    assert first != second
    assert tokens_of(step, params, [PROMPTS[0]], sampling=Sampling(temperature=1.0, number=1)) == [second]


def test_an_end_token_ends_its_own_row(step, params):
    whole = expected(params, PROMPTS[0])
    end = whole[3]
    found = generate(step, step.place(params), PROMPTS, max_tokens=NUM_TOKENS, end_tokens=[end]).completions
    for prompt, one in zip(PROMPTS, found, strict=True):
        tokens = expected(params, prompt)
        place = tokens.index(end) if end in tokens else None
        assert list(one.tokens) == tokens[:place]
        assert one.finish == ("length" if place is None else "end")
    assert found[0].finish == "end"


def test_tokens_are_told_as_they_come(step, params):
    told: list[tuple[int, int]] = []
    found = generate(
        step, step.place(params), PROMPTS, max_tokens=3, on_token=lambda row, token: told.append((row, token))
    )
    assert told == [(row, found.completions[row].tokens[count]) for count in range(3) for row in range(3)]
    pace = found.pace
    assert pace.num_tokens == 9
    assert pace.first_token_s > 0
    assert pace.tokens_per_s is not None


def test_one_token_has_no_pace_after_it(step, params):
    found = generate(step, step.place(params), PROMPTS[:1], max_tokens=1)
    assert found.pace.tokens_per_s is None
    assert len(found.completions[0].tokens) == 1


def test_nothing_is_compiled_after_the_first_tokens(step, params):
    draw.clear_cache()
    tokens_of(step, params, PROMPTS)
    compiled, drawn = len(step._compiled), draw._cache_size()
    assert drawn == 1
    tokens_of(step, params, [PROMPTS[2] * 3, PROMPTS[0]], sampling=Sampling(temperature=1.0, top_p=0.5))
    assert (len(step._compiled), draw._cache_size()) == (compiled, drawn)


def test_rows_without_a_prompt_have_a_token(step):
    tokens, lengths = padded(step, PROMPTS)
    assert tokens.shape == (4, 16)
    assert lengths.tolist() == [9, 1, 3, 1]
    assert tokens[2].tolist() == PROMPTS[2] + [0] * 13


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "message"),
    [
        ([], 1, "0 prompts; the step takes 1 to 4"),
        ([[1]] * 5, 1, "5 prompts; the step takes 1 to 4"),
        ([[1], []], 1, "prompt 2 is empty"),
        ([[64]], 1, "prompt 1 has token 64, outside of V=64. Give 0 to 63."),
        ([[1]], 0, "max_tokens=0 must be at least 1"),
        ([[1] * 20], 5, "need 25 positions; the cache has 24"),
    ],
)
def test_prompts_that_have_no_place_are_refused(step, prompts, max_tokens, message):
    with pytest.raises(InputError, match=message):
        generate(step, {}, prompts, max_tokens=max_tokens)


@pytest.mark.slow
def test_int8_goes_on_for_as_long(params):
    step = step_of(LLAMA, {"tensor": 2}, weights="int8", cache_dtype="int8")
    placed = step.place(params)
    assert placed["wq"].dtype == jnp.int8
    found = tokens_of(step, params, PROMPTS)
    assert all(len(tokens) == NUM_TOKENS and np.all(np.array(tokens) < LLAMA.vocab_size) for tokens in found)
