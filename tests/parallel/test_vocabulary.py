"""A vocabulary that ``tensor`` does not divide: what fills it up has no probability, no gradient and no token."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from meshwright.core.errors import CannotRunError
from meshwright.nn.ops.linear_cross_entropy import logits_backward, logits_statistics
from meshwright.parallel.train_step import State, TrainStep
from meshwright.spec.model import Model
from meshwright.spec.strategy import held_dims
from meshwright.train.optimizers.table import make_optimizer
from meshwright.train.settings import TrainSettings
from tests.parallel.cases import assert_equal, first_params, keep_gradients, run, strategy_of
from tests.parallel.generate_cases import LLAMA, assert_close, float_params, step_of, with_cache, without_cache
from tests.parallel.small import MODEL, batch

ODD = msgspec.structs.replace(MODEL, name="odd", vocab_size=MODEL.vocab_size - 3)
TIED = msgspec.structs.replace(ODD, name="odd-tied", tied_embeddings=True, logit_softcap=2.0)


def given(model: Model) -> dict[str, np.ndarray]:
    rows = batch()
    return {name: np.where(rows[name] < 0, -1, rows[name] % model.vocab_size) for name in ("tokens", "labels")}


def test_sizes_are_filled_up_to_equal_parts():
    assert held_dims({"V": 50257, "D": 8}, {"tensor": 2}) == {"V": 50258, "D": 8}
    assert held_dims({"V": 50257}, {"tensor": np.array([1, 2, 4])})["V"].tolist() == [50257, 50258, 50260]
    assert held_dims({"V": 50257}, {}) == {"V": 50257}


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_logits_beyond_the_vocabulary_do_not_count(softcap):
    """Exactly, on a device that has no token too."""
    rng = np.random.default_rng(0)
    logits, labels = jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32), jnp.asarray([[0, 4, -1], [2, 3, 1]])
    head = {"softcap": softcap}
    expected = logits_statistics(logits[..., :5], labels, first_row=0, **head)
    found = logits_statistics(logits, labels, first_row=0, vocab_size=5, **head)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    peak, total, picked = logits_statistics(logits, labels, first_row=8, vocab_size=5, **head)
    assert bool(jnp.isfinite(total).all())
    assert float(jnp.abs(total * jnp.exp(peak - expected[0])).max()) == 0
    assert not picked.any()
    slopes = jnp.ones((2, 3)), -jnp.ones((2, 3))
    whole = logits_backward(logits[..., :5], labels, expected[0], *slopes, first_row=0, **head)
    filled = logits_backward(logits, labels, expected[0], *slopes, first_row=0, vocab_size=5, **head)
    np.testing.assert_array_equal(filled[..., :5], whole)
    assert not filled[..., 5:].any()


CASES = [
    (ODD, {"tensor": 2}, {}),
    (TIED, {"tensor": 2, "fsdp": 2}, {"remat": "full"}),
    (ODD, {"pipeline": 2, "tensor": 2}, {"num_microbatches": 2}),
    (TIED, {"tensor": 4, "data": 2}, {"zero": 1}),
    (msgspec.structs.replace(ODD, name="few", vocab_size=5), {"tensor": 4}, {}),
]


@pytest.mark.parametrize(
    ("model", "axes", "choices"),
    [case if number < 1 else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(CASES)],
)
def test_loss_and_gradients_are_those_of_one_device(model, axes, choices):
    found = run(model, strategy_of(axes, **choices), given=given(model))
    assert_equal(found, run(model, strategy_of({}), given=given(model)))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_the_state_of_every_mesh_has_one_form(optimizer):
    """Filled up with zeros, which stay zero over steps, and cut off in what a checkpoint has."""
    strategy = strategy_of({"tensor": 2, "fsdp": 2})
    settings = TrainSettings(optimizer=optimizer)
    step = TrainStep(TIED, strategy, optimizer=make_optimizer(TIED, settings, strategy.state))
    state, _ = step.step(step.init(0), given(TIED))
    assert state.params["embed"].shape[0] == TIED.vocab_size + 1
    assert not np.asarray(state.params["embed"])[TIED.vocab_size :].any()
    shapes, shardings = step.canonical
    assert shapes.params["embed"].shape[0] == TIED.vocab_size
    cut = step.to_canonical(state.params)
    assert {name: array.shape for name, array in cut.items()} == {n: s.shape for n, s in shapes.params.items()}
    jax.tree.map(lambda sharding, shape: sharding.shard_shape(shape.shape), State(*shardings), State(*shapes))
    again = step.from_canonical(cut)
    for name, array in state.params.items():
        assert again[name].sharding == array.sharding
        np.testing.assert_array_equal(again[name], array)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [ODD, pytest.param(msgspec.structs.replace(MODEL, name="257", vocab_size=257), marks=pytest.mark.slow)]
)
def test_adafactor_means_leave_padding_out(model):
    """Steps of a filled vocabulary train as those of one device: means of squares are over its own tokens."""

    def after_two(axes):
        strategy, settings = strategy_of(axes), TrainSettings(optimizer="adafactor", warmup_steps=0, learning_rate=0.1)
        step = TrainStep(model, strategy, optimizer=make_optimizer(model, settings, strategy.state))
        state = step.init(0)
        for _ in range(2):
            state, metrics = step.step(state, given(model))
        return step.to_canonical(state.params), float(metrics.loss)

    found, alone = after_two({"tensor": 2}), after_two({})
    assert found[1] == pytest.approx(alone[1], rel=1e-5)
    for name, array in found[0].items():
        np.testing.assert_allclose(array, np.asarray(alone[0][name]), rtol=1e-4, atol=1e-5, err_msg=name)


def test_weights_of_a_seed_are_those_of_one_device():
    step = TrainStep(ODD, strategy_of({"tensor": 2}), optimizer=keep_gradients())
    for name, array in step.to_canonical(step.init(0).params).items():
        np.testing.assert_allclose(array, first_params(ODD)[name], rtol=1e-6)


def test_the_gspmd_form_names_the_vocabulary():
    with pytest.raises(CannotRunError, match=f"tensor must divide the vocabulary of {ODD.vocab_size}"):
        TrainStep(ODD, strategy_of({"tensor": 2}), optimizer=keep_gradients(), form="gspmd")


@pytest.mark.parametrize("options", [{}, pytest.param({"weights": "int8"}, marks=pytest.mark.slow)])
def test_generation_has_the_logits_of_tokens_alone(options):
    model = msgspec.structs.replace(LLAMA, name="odd", vocab_size=61)
    params = float_params(model)
    found = with_cache(step_of(model, {"tensor": 4}, **options), params, num_steps=2).logits
    assert found.shape[-1] == 61
    alone = with_cache(step_of(model, {}, **options), params, num_steps=2).logits
    assert_close(found, alone)
    if not options:
        assert_close(found, without_cache(model, params, num_steps=2))
