"""An encoder and a decoder with cross-attention: what runs on one device and on meshes, beside plain JAX."""

from functools import lru_cache, partial

import jax
import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.nn.weights import init_params
from meshwright.parallel.pipeline.stages import strategy_schedule
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.strategy import held_dims
from tests.logits import logits_fn
from tests.parallel.cases import RELATIVE, keep_gradients, run, strategy_of
from tests.parallel.plain_encoder_decoder import BATCH_SEQS, SEQ_LEN, SHARED, T5, WHISPER, batch, padded, plain_loss
from tests.traffic import pipeline_traffic

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@lru_cache
def params_of(model):
    """Weights of which none is zero, so that biases matter."""
    draw = np.random.default_rng(2).normal
    return {n: np.asarray(a + 0.1 * draw(size=a.shape), np.float32) for n, a in init_params(model, 0).items()}


@lru_cache
def plain(model, rows=batch):
    """Loss and gradients of plain JAX."""
    with jax.numpy_rank_promotion("allow"):
        loss, gradients = jax.jit(jax.value_and_grad(partial(plain_loss, model)))(params_of(model), rows(model))
    return float(loss), {name: np.asarray(value) for name, value in gradients.items()}


STRATEGIES = {
    "one": ({}, {}),
    "mesh": (MESH, {}),
    "whole-stream": (MESH, {"remat": "none", "num_microbatches": 2, "zero": 1, "sequence_parallel": False}),
    "ulysses": ({"fsdp": 2, "context": 2, "tensor": 2}, {"remat": "selective", "context_attention": "ulysses"}),
    "segments": ({"context": 4, "tensor": 2}, {"remat": "every-2", "context_attention": "ring"}),
    "ahead": (MESH, {"prefetch": True, "collective_matmul": "one-way"}),
    "stages": ({"pipeline": 2, "data": 2, "tensor": 2}, {"num_microbatches": 2}),
    "uneven-stages": ({"pipeline": 4, "context": 2}, {"num_microbatches": 4, "schedule": "gpipe"}),
    "chunks": ({"pipeline": 2, "fsdp": 2}, {"num_microbatches": 4, "schedule": "interleaved", "chunks": 2}),
    "split": ({"pipeline": 2, "tensor": 2}, {"num_microbatches": 4, "schedule": "zb-h1", "remat": "block"}),
    "both-ways": ({"pipeline": 2, "tensor": 2}, {"num_microbatches": 4, "schedule": "dualpipe"}),
}
SAMPLE = {T5: (), SHARED: ("one",), WHISPER: ()}
"""The rest of the grid is slow."""


@pytest.mark.parametrize(
    ("model", "axes", "choices"),
    [
        pytest.param(model, *strategy, id=f"{name}-{model.name}", marks=() if name in sample else pytest.mark.slow)
        for model, sample in SAMPLE.items()
        for name, strategy in STRATEGIES.items()
    ],
)
def test_loss_and_gradients_are_those_of_plain_jax(model, axes, choices):
    """The cotangent of the encoder's result is summed over the decoder's layers, then goes back through the encoder."""
    assert_equals_plain(model, strategy_of(axes, **choices))


@pytest.mark.parametrize(
    ("model", "axes", "choices"),
    [
        pytest.param(T5, *STRATEGIES["one"], id="one"),
        pytest.param(T5, *STRATEGIES["ulysses"], id="ulysses", marks=pytest.mark.slow),
        pytest.param(WHISPER, *STRATEGIES["segments"], id="segments", marks=pytest.mark.slow),
        pytest.param(T5, *STRATEGIES["stages"], id="stages", marks=pytest.mark.slow),
    ],
)
def test_padding_of_the_encoder_is_not_seen(model, axes, choices):
    """By the encoder or by cross-attention, with any loss or gradient."""
    assert_equals_plain(model, strategy_of(axes, **choices), rows=padded, options=ProgramOptions(encoder_lengths=True))


def assert_equals_plain(model, strategy, *, rows=batch, options=PLAIN):
    """Loss and every gradient."""
    step = TrainStep(model, strategy, optimizer=keep_gradients(), options=options)
    params = jax.device_put(step.from_canonical(params_of(model)), step.state_shardings.params)
    loss, gradients = step.gradients(params, rows(model))
    gradients = step.to_canonical(gradients)
    expected, of_plain = plain(model, rows)
    assert abs(float(loss) / expected - 1) < RELATIVE
    assert gradients.keys() == of_plain.keys()
    for name, value in of_plain.items():
        # what all keys have in common changes no weight: the bias of keys has a gradient of nothing but rounding
        scale = np.abs(of_plain[name.replace("bk", "bv")] if name.endswith("bk") else value).max()
        assert scale > 0, f"{name} has no gradient"
        np.testing.assert_allclose(np.asarray(gradients[name]), value, rtol=0, atol=RELATIVE * scale, err_msg=name)


def gradients_of(model, axes, choices):
    step = TrainStep(model, strategy_of(axes, **choices))
    params = jax.device_put(step.from_canonical(params_of(model)), step.state_shardings.params)
    loss, gradients = step.gradients(params, batch(model))
    return float(loss), step.to_canonical(gradients)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("uneven-stages", "chunks", "split", "both-ways")]
)
def test_stages_pass_on_the_stream_of_layers_that_norm_it(name):
    """As BART's and Marian's do: a layer of zeros in the place of one of the other stack would leave nothing of it."""
    model = msgspec.structs.replace(WHISPER, name="bart-like", sum_norms=True, pre_norms=False)
    expected_loss, expected = gradients_of(model, *STRATEGIES["one"])
    loss, gradients = gradients_of(model, *STRATEGIES[name])
    assert abs(loss / expected_loss - 1) < RELATIVE
    for weight, value in expected.items():
        scale = np.abs(expected[weight.replace("bk", "bv")] if weight.endswith("bk") else value).max()
        np.testing.assert_allclose(gradients[weight], value, rtol=0, atol=10 * RELATIVE * scale, err_msg=weight)


@pytest.mark.slow
def test_compiled_collectives_are_the_derived_ones():
    """But for the table of tokens, which both stacks gather before their first layer, and the compiler once."""
    found = run(T5, strategy_of(MESH), given=batch(T5))
    gathers = ("all_gather", ("fsdp",))
    compiled, derived = found.compiled.pop(gathers), found.derived.pop(gathers)
    assert found.compiled == found.derived
    table_bytes = T5.vocab_size // MESH["tensor"] * T5.d_model * 4
    assert derived.num_arrays - compiled.num_arrays == 1
    assert derived.full_bytes - compiled.full_bytes == table_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [(T5, "stages"), (SHARED, "stages"), (T5, "split")])
def test_stages_have_exactly_the_derived_collectives(model, name):
    axes, choices = STRATEGIES[name]
    strategy = strategy_of(axes, **choices)
    found = run(model, strategy, given=batch(model))
    derived, tables = derive(transformer(model), strategy), tick_tables(strategy_schedule(strategy))
    dims = {**held_dims(model.dims, strategy.mesh), "B": BATCH_SEQS, "T": SEQ_LEN}
    assert found.compiled == pipeline_traffic(derived, tables, dims, strategy.mesh, width=4)


def test_logits_see_the_whole_row_of_the_encoder_and_nothing_later_of_their_own():
    given = batch(T5)
    logits = jax.jit(logits_fn(T5))
    first = logits(params_of(T5), given["tokens"], None, given["encoder_tokens"])
    later = {name: given[name].copy() for name in ("tokens", "encoder_tokens")}
    later["tokens"][:, 9:] += 1
    moved = logits(params_of(T5), later["tokens"] % T5.vocab_size, None, given["encoder_tokens"])
    np.testing.assert_array_equal(first[:, :9], moved[:, :9])
    later["encoder_tokens"][:, -1] += 1
    moved = logits(params_of(T5), given["tokens"], None, later["encoder_tokens"] % T5.vocab_size)
    assert np.abs(first - moved)[:, 0].max() > 0, "the first position sees the last of the encoder"


def test_what_does_not_run_says_so():
    with pytest.raises(InputError, match="takes one document a row"):
        transformer(T5, ProgramOptions(documents=True))
    with pytest.raises(InputError, match=r"encoder\.length is 0, give a positive number"):
        msgspec.structs.replace(T5, encoder=msgspec.structs.replace(T5.encoder, length=0))
