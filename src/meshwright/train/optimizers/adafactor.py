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
from meshwright.train.optimizers.sharded import WeightLayout, on_shards

DECAY_POWER = 0.8
"""Of the decay 1 - t^-0.8. Source: Shazeer and Stern, 2018."""


class FactoredState(NamedTuple):
    """Number of updates; running means of squared gradients over the outputs and over the inputs of matrices, and
    unreduced for vectors. Reduced dims have size 1."""

    count: Any
    rows: Params
    columns: Params
    whole: Params


def scale_by_adafactor(layout: Callable[[], WeightLayout], weights: dict[str, Updated]) -> optax.GradientTransformation:
    """Divides gradients by the factored root of their second moments; clips each matrix to RMS 1 and scales it by the
    RMS of its weights. Source: Shazeer and Stern, 2018, algorithms 4 and 5, section 8.

    ``weights`` are unsharded; they say which dims make up the matrices.
    """

    def left_out(name: str) -> tuple[tuple[int, ...], ...]:
        """Returns the axes that each mean of a weight reduces: outputs and inputs of matrices, none of vectors."""
        weight = weights[name]
        if not weight.inputs:
            return ((),)
        dims, own = stacked(weight, name).dims, {weight.layers, *weight.batch}
        kept = ({*own, *weight.inputs}, {*own, *outputs(weight)})
        return tuple(tuple(i for i, dim in enumerate(dims) if dim not in each) for each in kept)

    def state(count: jax.Array, means: dict[str, list[jax.Array]]) -> FactoredState:
        matrices = [name for name in means if weights[name].inputs]
        return FactoredState(
            count,
            {name: means[name][0] for name in matrices},
            {name: means[name][1] for name in matrices},
            {name: means[name][0] for name in means if not weights[name].inputs},
        )

    def init(params: Params) -> FactoredState:
        def empty(name: str, over: tuple[int, ...]) -> jax.Array:
            shape = [1 if axis in over else size for axis, size in enumerate(params[name].shape)]
            return jnp.zeros(shape, jnp.float32)

        return state(jnp.zeros((), jnp.int32), {n: [empty(n, over) for over in left_out(n)] for n in params})

    def update(grads: Params, old: FactoredState, params: Params | None = None) -> tuple[Params, FactoredState]:
        assert params is not None
        count, at = old.count + 1, layout()
        decay = 1 - count.astype(jnp.float32) ** -DECAY_POWER
        changes, after = Params(), dict[str, list[jax.Array]]()
        for name, grad in grads.items():
            axes = left_out(name)
            before = (old.rows[name], old.columns[name]) if weights[name].inputs else (old.whole[name],)
            means = [mean.squeeze(over) for mean, over in zip(before, axes, strict=True)]
            changes[name], *means = _updated(at, at.weights[name], (grad, params[name]), means, decay)
            after[name] = [jnp.expand_dims(mean, over) for mean, over in zip(means, axes, strict=True)]
        return changes, state(count, after)

    return optax.GradientTransformation(init, update)


def _updated(
    layout: WeightLayout, weight: Updated, values: tuple[jax.Array, jax.Array], means: list[jax.Array], decay: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the change of one weight, and its new running means."""
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

    return on_shards(body, layout, given, results)
