"""Strategies run on emulated devices: loss, gradients and compiled collectives of one, and the same on one device."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax

from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.hlo.collectives import collectives
from meshwright.nn.weights import Params, init_params
from meshwright.parallel.train_step import State, TrainStep
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, held_dims, make_mesh, standard_assignment
from tests.parallel.small import BATCH_SEQS, MODEL, SEQ_LEN, batch, mean_slots
from tests.traffic import Key, Traffic, compiled_traffic, derived_traffic

RELATIVE = 1e-5  # float32, of the largest entry of each array

DEEP = msgspec.structs.replace(MODEL, name="deep", num_layers=4)
"""Layers enough that loops of several turns stay loops: XLA writes out those of one, and shares their gathers."""
MOE = msgspec.structs.replace(
    MODEL, name="moe", family="mixtral", num_experts=4, experts_per_token=2, d_ff_expert=32, gates_sum_to_one=True
)
DEEP_MOE = msgspec.structs.replace(MOE, name="deep-moe", num_layers=4)


class Run(NamedTuple):
    """What one step of a strategy came to."""

    loss: float
    grad_norm: float
    gradients: dict[str, np.ndarray]
    compiled: dict[Key, Traffic]
    derived: dict[Key, Traffic]
    hlo: str


def keep_gradients() -> optax.GradientTransformation:
    """An optimizer that changes nothing and leaves the gradients in its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


def strategy_of(axes: Mapping[str, int], *, zero: int = 3, sequence_parallel: bool = True, **choices: Any) -> Strategy:
    """A float32 strategy of the product's own assignment."""
    assignment = standard_assignment(zero=zero, sequence_parallel=sequence_parallel)
    return Strategy(mesh=make_mesh(axes), state="fp32", assignment=assignment, **choices)


@lru_cache(maxsize=16)
def first_params(model: Model) -> Params:
    """The weights of seed 0, made once for all meshes: `test_train_step` shows that `init` makes the same on each."""
    return jax.tree.map(np.asarray, jax.jit(lambda seed: init_params(model, seed))(0))


def first_state(step: TrainStep) -> State:
    """What ``step.init(0)`` gives, of float32 weights that are already made."""
    params = jax.device_put(step.from_canonical(first_params(step.model)), step.state_shardings.params)
    return State(params, step.init_optimizer(params))


def run(
    model: Model, strategy: Strategy, *, options: ProgramOptions = PLAIN, given: Mapping[str, Any] | None = None
) -> Run:
    """One step on one global batch."""
    return run_step(TrainStep(model, strategy, optimizer=keep_gradients(), options=options), given=given)


def run_step(step: TrainStep, *, state: State | None = None, given: Mapping[str, Any] | None = None) -> Run:
    """One step from ``state``, or from the first weights, of a step that keeps its gradients."""
    model, strategy = step.model, step.strategy
    placed = step.place(given or batch())
    state = state or first_state(step)
    compiled = step.compile.lower(state, placed).compile()
    state, metrics = compiled(state, placed)
    mesh, parts = strategy.mesh, strategy.num_microbatches
    slots = {"C": mean_slots(model, parts), "Er": len(ROUTING_ROWS)}
    dims = {**held_dims(model.dims, strategy.mesh), "B": BATCH_SEQS, "T": SEQ_LEN, **slots}
    derived = derived_traffic(
        step.declared,
        dims,
        mesh,
        num_microbatches=parts,
        width=4,
        layer_by_layer=strategy.gradient_sync == "overlapped",
    )
    found = collectives(compiled.as_text(), mesh)
    gradients = {name: np.asarray(value) for name, value in step.to_canonical(state.opt_state).items()}
    return Run(
        float(metrics.loss),
        float(metrics.grad_norm),
        gradients,
        compiled_traffic(found, mesh),
        derived,
        compiled.as_text(),
    )


@lru_cache(maxsize=8)
def on_one_device(model: Model, options: ProgramOptions = PLAIN) -> Run:
    """The same batch with nothing split."""
    return run(model, strategy_of({}), options=options)


def assert_equal(found: Run, expected: Run) -> None:
    """Loss, norm, and every array of gradients, by its largest entry."""
    assert abs(found.loss / expected.loss - 1) < RELATIVE
    assert abs(found.grad_norm / expected.grad_norm - 1) < RELATIVE
    assert found.gradients.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        scale = np.abs(value).max()
        assert scale > 0, f"{name} has no gradient"
        np.testing.assert_allclose(found.gradients[name], value, rtol=0, atol=RELATIVE * scale, err_msg=name)
