"""Every mesh of eight devices against one device, in values and gradients, and against its derived collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.core.errors import CannotRunError
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.train_step import State, TrainStep
from meshwright.verify.compare import compiled_traffic, derived_traffic
from meshwright.verify.hlo import collectives
from tests.parallel.small import BATCH_SEQS, MODEL, POLICIES, SEQ_LEN, batch, meshes_of_eight, strategy

RELATIVE = 1e-5  # float32, of the largest entry of each array


def keep_gradients() -> optax.GradientTransformation:
    """An optimizer that changes nothing and leaves the gradients in its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


@pytest.fixture(scope="module")
def one_device():
    step = TrainStep(MODEL, strategy({}), optimizer=keep_gradients())
    state, metrics = step.step(step.init(0), batch())
    return {n: np.asarray(p) for n, p in step.init(0).params.items()}, state.opt_state, metrics


CASES = [
    (axes, POLICIES[i % len(POLICIES)], 2 if i % 3 == 2 and axes["data"] * axes["fsdp"] <= 4 else 1)
    for i, axes in enumerate(meshes_of_eight())
]


def name(value):
    return "x".join(f"{a}{n}" for a, n in value.items() if n > 1) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("axes", "remat", "num_microbatches"), CASES, ids=name)
def test_mesh_equals_one_device_and_its_derivation(axes, remat, num_microbatches, one_device):
    params, gradients, metrics = one_device
    step = TrainStep(MODEL, strategy(axes, remat=remat, num_microbatches=num_microbatches), optimizer=keep_gradients())
    compiled = step.lower(BATCH_SEQS, SEQ_LEN).compile()
    state = step.init(0)
    for key, expected in params.items():
        np.testing.assert_array_equal(np.asarray(state.params[key]), expected)
    state, found = compiled(state, jax.device_put(batch(), step.batch_shardings))

    assert float(found.loss) == pytest.approx(float(metrics.loss), rel=RELATIVE)
    assert float(found.grad_norm) == pytest.approx(float(metrics.grad_norm), rel=RELATIVE)
    for key, expected in gradients.items():
        largest = float(np.max(np.abs(expected)))
        np.testing.assert_allclose(np.asarray(state.opt_state[key]), expected, rtol=0, atol=RELATIVE * largest)

    mesh = step.strategy.mesh
    dims = {**MODEL.dims, "B": BATCH_SEQS, "T": SEQ_LEN}
    derived = derived_traffic(step.declared, dims, mesh, num_microbatches=num_microbatches, width=4)
    assert compiled_traffic(collectives(compiled.as_text(), mesh), mesh) == derived


@pytest.mark.slow
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "axes", [{"fsdp": 2, "context": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=name
)
def test_every_policy_and_microbatching(axes, remat, num_microbatches, one_device):
    test_mesh_equals_one_device_and_its_derivation(strategy(axes).mesh, remat, num_microbatches, one_device)


@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}], ids=name)
def test_gspmd_form_gives_the_same_loss_and_gradients(axes, one_device):
    _, gradients, metrics = one_device
    step = TrainStep(MODEL, strategy(axes), optimizer=keep_gradients(), form="gspmd")
    state, found = step.step(step.init(0), batch())
    assert float(found.loss) == pytest.approx(float(metrics.loss), rel=RELATIVE)
    for key, expected in gradients.items():
        largest = float(np.max(np.abs(expected)))
        np.testing.assert_allclose(np.asarray(state.opt_state[key]), expected, rtol=0, atol=RELATIVE * largest)


def test_kept_result_names_are_taken_as_a_policy(one_device):
    _, gradients, _ = one_device
    step = TrainStep(MODEL, strategy({"fsdp": 8}, remat=("q", "x1")), optimizer=keep_gradients())
    state, _ = step.step(step.init(0), batch())
    largest = float(np.max(np.abs(gradients["wq"])))
    np.testing.assert_allclose(np.asarray(state.opt_state["wq"]), gradients["wq"], rtol=0, atol=RELATIVE * largest)


def test_clipping_scales_the_update_by_the_global_norm():
    plain = TrainStep(MODEL, strategy({"fsdp": 2, "tensor": 2}), optimizer=optax.sgd(1.0))
    clipped = TrainStep(MODEL, strategy({"fsdp": 2, "tensor": 2}), optimizer=optax.sgd(1.0), max_grad_norm=0.01)
    start = np.asarray(plain.init(0).params["w_up"])
    state, metrics = plain.step(plain.init(0), batch())
    state_clipped, _ = clipped.step(clipped.init(0), batch())
    moved, moved_clipped = (np.asarray(s.params["w_up"]) - start for s in (state, state_clipped))
    np.testing.assert_allclose(moved_clipped, moved * 0.01 / float(metrics.grad_norm), rtol=1e-3, atol=1e-8)


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
        state, _ = step.step(state, jax.device_put(batch(), step.batch_shardings))
    assert step.compile._cache_size() == 1


def test_too_few_devices_are_named():
    with pytest.raises(CannotRunError, match="fsdp=16 needs 16 devices and there are 8"):
        device_mesh({"fsdp": 16})
