import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.nn.weights import init_params
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train import sample
from meshwright.train.sample import generate, logits_fn
from tests.train.small import MODEL


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=p.shape) * 0.3, jnp.float32) for n, p in init_params(MODEL, 0).items()}


def test_logits_give_the_loss_of_the_training_step(params):
    rows = np.random.default_rng(1).integers(0, MODEL.vocab_size, (2, 17)).astype(np.int32)
    tokens, labels = jnp.asarray(rows[:, :-1]), rows[:, 1:]
    logits = np.asarray(jax.jit(logits_fn(MODEL))(params, tokens), np.float64)
    assert logits.shape == (2, 16, MODEL.vocab_size)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probs, labels[..., None], -1).mean()
    step = TrainStep(MODEL, Strategy(mesh=make_mesh({}), remat="full", state="fp32"))
    loss, _ = step.gradients(params, {"tokens": tokens, "labels": jnp.asarray(labels)})
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_greedy_tokens_are_the_likeliest_at_every_place(params):
    prompt = [5, 9, 200]
    found = generate(MODEL, params, prompt, num_tokens=6, window=32)
    sequence = jnp.asarray([prompt + found], jnp.int32)
    likeliest = np.asarray(jnp.argmax(logits_fn(MODEL)(params, sequence), axis=-1))[0]
    assert found == likeliest[len(prompt) - 1 : -1].tolist()


def test_a_sequence_longer_than_the_window_goes_on_from_its_end(params):
    prompt = list(range(20))
    short = generate(MODEL, params, prompt[-8:], num_tokens=1, window=8)
    assert generate(MODEL, params, prompt, num_tokens=1, window=8) == short
    assert len(generate(MODEL, params, prompt, num_tokens=5, window=8)) == 5


def test_one_seed_gives_one_sample(params):
    def draw(seed):
        return generate(MODEL, params, [1, 2], num_tokens=12, temperature=1.5, seed=seed, window=32)

    assert draw(0) == draw(0) != draw(1)


def test_the_program_is_compiled_once(params):
    sample._next_token.cache_clear()
    generate(MODEL, params, [1], num_tokens=5, window=16)
    generate(MODEL, params, [1, 2, 3], num_tokens=5, temperature=0.7, window=16)
    assert sample._next_token(MODEL)._cache_size() == 1


def test_the_end_token_stops(params):
    found = generate(MODEL, params, [5, 9, 200], num_tokens=6, window=32)
    assert generate(MODEL, params, [5, 9, 200], num_tokens=6, window=32, end_token=found[0]) == []


@pytest.mark.parametrize(("prompt", "message"), [([], "prompt is empty"), ([300], "outside of V=300")])
def test_bad_prompts_are_refused(params, prompt, message):
    with pytest.raises(InputError, match=message):
        generate(MODEL, params, prompt, num_tokens=1)
