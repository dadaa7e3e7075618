"""Adafactor's second moments by rows and columns, for arrays that hold a matrix per layer and expert.

Not optax's form, which factors the two largest dims of an array: they may be layers or heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.algebra.kinds import Updated
from meshwright.algebra.ops.adafactor import outputs, stacked
from meshwright.algebra.ops.adafactor import update as adafactor_steps
from meshwright.nn.interpreter import run_update
from meshwright.nn.weights import Params
from meshwright.train.optimizers.sharded import Places, on_shards

DECAY_POWER = 0.8
"""Of the decay 1 - t^-0.8. Source: Shazeer and Stern, 2018."""


class FactoredState(NamedTuple):
    """Updates done; running means of squared gradients over the outputs and over the inputs of matrices, and whole
    for vectors. Means keep the dims they were taken over, with size 1."""

    count: Any
    rows: Params
    columns: Params
    whole: Params


def scale_by_adafactor(places: Callable[[], Places], weights: dict[str, Updated]) -> optax.GradientTransformation:
    """Gradients divided by the factored root of their second moments, each matrix clipped to RMS 1 and scaled by the
    RMS of its weights. Source: Shazeer and Stern, 2018, algorithms 4 and 5, section 8.

    ``weights`` are those of one device: which dims make up the matrices.
    """

    def left_out(name: str, kept: tuple[str, ...]) -> tuple[int, ...]:
        """Axes of a weight's array that a mean over all other dims of its matrices lacks."""
        weight = weights[name]
        held = {weight.layers, *weight.batch, *kept}
        return tuple(i for i, dim in enumerate(stacked(weight, name).dims) if dim not in held)

    def init(params: Params) -> FactoredState:
        def empty(name: str, over: tuple[int, ...]) -> jax.Array:
            shape = [1 if axis in over else size for axis, size in enumerate(params[name].shape)]
            return jnp.zeros(shape, jnp.float32)

        matrices = [name for name in params if weights[name].inputs]
        return FactoredState(
            jnp.zeros((), jnp.int32),
            {name: empty(name, left_out(name, weights[name].inputs)) for name in matrices},
            {name: empty(name, left_out(name, outputs(weights[name]))) for name in matrices},
            {name: empty(name, ()) for name in params if name not in matrices},
        )

    def update(grads: Params, state: FactoredState, params: Params | None = None) -> tuple[Params, FactoredState]:
        assert params is not None
        count, at = state.count + 1, places()
        decay = 1 - count.astype(jnp.float32) ** -DECAY_POWER
        found: dict[str, tuple[jax.Array, ...]] = {}
        for name, grad in grads.items():
            weight = at.weights[name]
            if weight.inputs:
                kept = ((weight.inputs, state.rows[name]), (outputs(weight), state.columns[name]))
                means = [mean.squeeze(left_out(name, dims)) for dims, mean in kept]
            else:
                means = [state.whole[name]]
            found[name] = _updated(at, weight, (grad, params[name]), means, decay)
        after = FactoredState(
            count,
            {n: jnp.expand_dims(found[n][1], left_out(n, weights[n].inputs)) for n in state.rows},
            {n: jnp.expand_dims(found[n][2], left_out(n, outputs(weights[n]))) for n in state.columns},
            {n: found[n][1] for n in state.whole},
        )
        return {name: found[name][0] for name in grads}, after

    return optax.GradientTransformation(init, update)


def _updated(
    places: Places, weight: Updated, values: tuple[jax.Array, jax.Array], means: list[jax.Array], decay: jax.Array
) -> tuple[jax.Array, ...]:
    """The change of one weight, and its running means after it."""
    *steps, _ = adafactor_steps(weight)
    first, keeping = steps[0], next(step for step in steps if "decay" in {array.name for array in step.inputs})
    (own,) = next(step.inputs for step in steps if step.result.name.endswith(".weights"))
    before = [array for array in keeping.inputs if array.name.endswith(".before")]
    after = [array for array in keeping.more if array.name.endswith(".after")]
    given = dict(zip((first.inputs[0], own, *before, keeping.inputs[-1]), (*values, *means, decay), strict=True))
    results = (steps[-1].result, *after)

    def body(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        env = run_update(steps, dict(zip(given, blocks, strict=True)))
        return tuple(env[array] for array in results)

    return on_shards(body, places, given, results)
