"""Every mesh of eight devices against one device, in values and gradients, and against its derived collectives."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.nn.ops import fused_head
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.train_step import State, TrainStep
from tests.logits import logits_fn
from tests.parallel.cases import (
    RELATIVE,
    assert_equal,
    first_params,
    first_state,
    keep_gradients,
    on_one_device,
    run,
    run_step,
)
from tests.parallel.small import BATCH_SEQS, MODEL, POLICIES, SEQ_LEN, batch, meshes_of_eight, strategy


def _case(number, axes):
    """Policies and microbatches dealt out over the meshes; the default tier has those of fsdp and tensor and one more,
    `test_strategies` those of one axis and others of three."""
    num_microbatches = 2 if number % 3 == 2 and axes["data"] * axes["fsdp"] <= 4 else 1
    quick = sorted(axes.values()) == [1, 2, 2, 2] and axes["fsdp"] == axes["tensor"] == 2
    marks = () if quick else (pytest.mark.slow,)
    return pytest.param(axes, POLICIES[number % len(POLICIES)], num_microbatches, marks=marks)


CASES = [_case(number, axes) for number, axes in enumerate(meshes_of_eight())]


def name(value):
    return "x".join(f"{a}{n}" for a, n in value.items() if n > 1) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("axes", "remat", "num_microbatches"), CASES, ids=name)
def test_mesh_equals_one_device_and_its_derivation(axes, remat, num_microbatches):
    step = TrainStep(MODEL, strategy(axes, remat=remat, num_microbatches=num_microbatches), optimizer=keep_gradients())
    state, params = step.init(0), first_params(MODEL)
    assert state.params.keys() == params.keys()
    for key, expected in params.items():
        np.testing.assert_array_equal(np.asarray(state.params[key]), expected)
    found = run_step(step, state=state)
    assert_equal(found, on_one_device(MODEL))
    assert found.compiled == found.derived


TIED = msgspec.structs.replace(MODEL, num_kv_heads=2, tied_embeddings=True)


@pytest.mark.parametrize(
    ("axes", "num_microbatches"),
    [
        pytest.param({"data": 8}, 1, marks=pytest.mark.slow),
        ({"fsdp": 2, "context": 2, "tensor": 2}, 1),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_grouped_heads_and_tied_embeddings(axes, num_microbatches):
    step = TrainStep(TIED, strategy(axes, num_microbatches=num_microbatches), optimizer=keep_gradients())
    found = run_step(step)
    assert_equal(found, on_one_device(TIED))
    assert found.compiled == found.derived


@pytest.mark.parametrize(
    "axes", [{"fsdp": 2, "tensor": 2}, pytest.param({"fsdp": 2}, marks=pytest.mark.slow)], ids=name
)
def test_a_loss_head_of_several_chunks(axes, monkeypatch):
    monkeypatch.setattr(fused_head, "CHUNK_TOKENS", BATCH_SEQS * SEQ_LEN // 8)
    chunked = run(MODEL, strategy(axes, remat="full"))
    assert_equal(chunked, on_one_device(MODEL))
    assert f"[{BATCH_SEQS // 2},{SEQ_LEN // 4},{MODEL.vocab_size // axes.get('tensor', 1)}]" in chunked.hlo


def test_assignments_that_are_only_derived_are_refused():
    ours = strategy({"data": 4, "tensor": 2})
    whole_t = {**ours.assignment, "activation": {**ours.assignment["activation"], "T": ("context",)}}
    for changes in ({"assignment": whole_t}, {"mesh": {"data": 4, "foo": 2}}):
        with pytest.raises(CannotRunError, match=r"not executed in this version|is not a mesh axis"):
            TrainStep(MODEL, msgspec.structs.replace(ours, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "axes", [{"fsdp": 2, "context": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=name
)
def test_every_policy_and_microbatching(axes, remat, num_microbatches):
    test_mesh_equals_one_device_and_its_derivation(strategy(axes).mesh, remat, num_microbatches)


@pytest.mark.parametrize(
    "axes",
    [pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow), {"data": 2, "context": 2, "tensor": 2}],
    ids=name,
)
def test_gspmd_form_gives_the_same_loss_and_gradients(axes):
    step = TrainStep(MODEL, strategy(axes), optimizer=keep_gradients(), form="gspmd")
    assert_equal(run_step(step), on_one_device(MODEL))


def test_kept_result_names_are_taken_as_a_policy():
    assert_equal(run(MODEL, strategy({"fsdp": 8}, remat=("q", "x1"))), on_one_device(MODEL))


def test_clipping_scales_the_update_by_the_global_norm():
    plain = TrainStep(MODEL, strategy({"fsdp": 2, "tensor": 2}), optimizer=optax.sgd(1.0))
    clipped = TrainStep(MODEL, strategy({"fsdp": 2, "tensor": 2}), optimizer=optax.sgd(1.0), max_grad_norm=0.01)
    start = first_params(MODEL)["w_up"]
    state, metrics = plain.step(first_state(plain), batch())
    state_clipped, _ = clipped.step(first_state(clipped), batch())
    moved, moved_clipped = (np.asarray(s.params["w_up"]) - start for s in (state, state_clipped))
    np.testing.assert_allclose(moved_clipped, moved * 0.01 / float(metrics.grad_norm), rtol=1e-3, atol=1e-8)


@pytest.mark.slow
def test_five_adamw_steps_are_the_same_on_two_meshes():
    losses = []
    for axes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        step = TrainStep(MODEL, strategy(axes), optimizer=optax.adamw(1e-2), max_grad_norm=1.0)
        state: State = step.init(3)
        run = []
        for _ in range(5):
            state, metrics = step.step(state, batch())
            run.append(float(metrics.loss))
        losses.append(run)
    np.testing.assert_allclose(losses[0], losses[1], rtol=RELATIVE)
    assert losses[0][-1] < losses[0][0]


def test_no_recompilation_after_the_first_step():
    step = TrainStep(MODEL, strategy({"fsdp": 4, "tensor": 2}))
    state = step.init(0)
    for _ in range(3):
        state, _ = step.step(state, step.place(batch()))
    assert step.compile._cache_size() == 1


@pytest.mark.parametrize("form", ["shard_map", pytest.param("gspmd", marks=pytest.mark.slow)])
def test_a_batch_without_labels_has_no_loss_and_no_gradient(form):
    step = TrainStep(MODEL, strategy({"fsdp": 2}), optimizer=keep_gradients(), form=form)
    state, metrics = step.step(step.init(0), {**batch(), "labels": jnp.full((BATCH_SEQS, SEQ_LEN), -1, jnp.int32)})
    assert (float(metrics.loss), float(metrics.grad_norm)) == (0, 0)
    assert all(not np.asarray(gradient).any() for gradient in state.opt_state.values())


def test_too_few_devices_are_named():
    with pytest.raises(CannotRunError, match="fsdp=16 needs 16 devices and there are 8"):
        device_mesh({"fsdp": 16})


@pytest.mark.parametrize(("remat", "again"), [("none", False), ("block", True)])
def test_one_cpu_really_computes_again_what_remat_says(remat, again):
    """Written out, the compiler would merge the second computation of the queries with the first."""
    step = TrainStep(MODEL, strategy({}, remat=remat), optimizer=optax.sgd(0.1))
    state = step.init(0)
    text = step.compile.lower(state, step.place(batch())).compile().as_text()
    assert "layer:forward:q=einsum" in text
    assert ("layer:recompute:q=einsum" in text) is again


def test_logits_of_the_forward_pass_give_the_loss_of_the_training_step():
    params, rows = first_params(MODEL), batch()
    logits = np.asarray(jax.jit(logits_fn(MODEL))(params, rows["tokens"]), np.float64)
    assert logits.shape == (BATCH_SEQS, SEQ_LEN, MODEL.vocab_size)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probs, np.asarray(rows["labels"])[..., None], -1).mean()
    loss, _ = TrainStep(MODEL, strategy({}, remat="full")).gradients(params, rows)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("axes", "sizes", "text"),
    [
        ({"context": 8}, {"num_heads": 6, "num_kv_heads": 3}, r"N=6 of \S+\[.*\] does not divide by .*context.*=8"),
        ({"tensor": 4}, {"d_ff": 66}, r"F=66 of .* does not divide by tensor=4"),
        ({"fsdp": 8}, {"d_model": 36}, r"D=36 of .* does not divide by fsdp.*=8"),
    ],
)
def test_uneven_splits_are_refused_before_anything_is_compiled(axes, sizes, text):
    ulysses = msgspec.structs.replace(strategy(axes), context_attention="ulysses")
    with pytest.raises(InputError, match=text):
        TrainStep(msgspec.structs.replace(MODEL, **sizes), ulysses)
