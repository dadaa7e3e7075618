"""AdamW, Lion, Muon and Adafactor: the derived steps of an update, run on the shards of each device.

Sources: Loshchilov and Hutter, AdamW (2019); Chen et al., Lion (2023); Jordan, Muon (2024); Liu et al., Muon is
Scalable for LLM Training (2025), for its scale; Shazeer and Stern, Adafactor (2018).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from meshwright.algebra.derive import derive
from meshwright.algebra.rewrites.split_backward import state_of_layer, weight_updates
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import transformer
from meshwright.nn.context import UpdateContext
from meshwright.nn.interpreter import run_update
from meshwright.nn.weights import Params
from meshwright.parallel.held import Tree
from meshwright.parallel.optimizer import UpdateLayout, state_specs, weight_of
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy
from meshwright.train.optimizers.schedules import learning_rate
from meshwright.train.settings import TrainSettings


class MuonState(NamedTuple):
    """Number of updates, and the running mean of the gradients."""

    count: Any
    momentum: Params


class FactoredState(NamedTuple):
    """Number of updates, and running means of squared gradients: of matrices the means over outputs (``rows``) and over
    inputs (``columns``), of vectors each entry (``whole``). Reduced dims have size 1."""

    count: Any
    rows: Params
    columns: Params
    whole: Params


STATES: dict[str, type[Any]] = {
    "adamw": optax.ScaleByAdamState,
    "lion": optax.ScaleByLionState,
    "muon": MuonState,
    "adafactor": FactoredState,
}
"""Optimizer -> the tree of its state: the number of updates, then its running means by the names that they have in the
derived steps, ``WEIGHT.FIELD.state``."""


class DerivedUpdate:
    """`init` and `update` of the settings' optimizer, in float32. Only matrices get weight decay.

    Muon updates the matrices of layers; AdamW updates embeddings, the unembedding and vectors, at the same rate. States
    are trees like those of optax's chains of transformations, which checkpoints contain.
    """

    def __init__(self, model: Model, settings: TrainSettings) -> None:
        derived_program = derive(transformer(model), Strategy(mesh={}), optimizer=settings.optimizer)
        self.settings, self.rate_of, self.sizes = settings, learning_rate(settings), {"V": model.vocab_size}
        self.steps = {name: weight_steps.update for name, weight_steps in weight_updates(derived_program).items()}
        self.decays = {name: settings.weight_decay for name, weight in derived_program.weights.items() if weight.inputs}
        # each running mean of a weight, and the axes of the weight that it is over, which have size 1 in the state
        self.means = {
            name: {
                array.name: tuple(
                    axis for axis, dim in enumerate(weight.shard.dims, bool(weight.layers)) if dim not in array.dims
                )
                for array in state_of_layer(weight, self.steps[name])
            }
            for name, weight in derived_program.weights.items()
        }

    def init(self, params: Params) -> Tree:
        """Returns the state before the first update."""
        means_by_field: dict[str, Params] = defaultdict(dict)
        for name, param in params.items():
            for array_name, axes in self.means[name].items():
                shape = [1 if axis in axes else size for axis, size in enumerate(param.shape)]
                means_by_field[array_name.split(".")[1]][name] = jnp.zeros(shape, jnp.float32)

        def chain(kind: str) -> tuple[Any, ...]:
            field_means = (means_by_field[field] for field in STATES[kind]._fields[1:])
            update_count, schedule_count = (jnp.zeros((), jnp.int32) for _ in range(2))
            scale_state, mask_state = STATES[kind](update_count, *field_means), optax.MaskedState(optax.EmptyState())
            return scale_state, mask_state, optax.ScaleByScheduleState(schedule_count)

        kind = self.settings.optimizer
        return {state_kind: chain(state_kind) for state_kind in ("muon", "adamw")} if kind == "muon" else chain(kind)

    def update(
        self, grads: Params, state: Tree, params: Params, layout: UpdateLayout | None = None, /
    ) -> tuple[Params, Tree]:
        """Returns the new weights and the new state; without a ``layout`` all arrays are on one device."""
        body: Callable[..., tuple[Params, Tree]] = partial(self._update_shards, layout.steps if layout else self.steps)
        if layout is not None:
            param_specs = {name: layout.specs[name] for name in params}
            opt_state_specs = state_specs(state, params, param_specs)
            in_specs, out_specs = (param_specs, opt_state_specs, param_specs), (param_specs, opt_state_specs)
            body = jax.shard_map(body, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return body(grads, state, params)

    def _update_shards(
        self, steps: Mapping[str, Sequence[Step]], grads: Params, state: Tree, params: Params
    ) -> tuple[Params, Tree]:
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        leaf_names = [state_name(path, params) for path, _ in leaves]
        leaf_of = {name: leaf for name, (_, leaf) in zip(leaf_names, leaves, strict=True)}
        context = UpdateContext(
            number=leaf_of[""] + 1,
            rate=self.rate_of(leaf_of[""]),
            decays=self.decays,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            epsilon=self.settings.epsilon,
            momentum=self.settings.momentum,
            sizes=self.sizes,
        )
        new_params, new_leaf_of = Params(), Params()
        for name, param in params.items():
            old_arrays = {key: leaf_of[key].squeeze(axes) for key, axes in self.means[name].items()}
            arrays = {name: param, f"d{name}": grads[name], **old_arrays}
            new_arrays = run_update(context, steps[name], arrays, attrgetter("name"))
            new_params[name] = new_arrays[name]
            new_leaf_of |= {key: jnp.expand_dims(new_arrays[key], axes) for key, axes in self.means[name].items()}
        new_leaves = [new_leaf_of.get(name, leaf + 1) for name, (_, leaf) in zip(leaf_names, leaves, strict=True)]
        return new_params, jax.tree.unflatten(structure, new_leaves)


def state_name(path: tuple[Any, ...], params: Params) -> str:
    """Returns the name that a state's array has in the derived steps, ``WEIGHT.FIELD.state``; "" for a counter."""
    weight_name = weight_of(path, params)
    field = next((key.name for key in reversed(path) if isinstance(key, GetAttrKey)), "")
    return f"{weight_name}.{field}.state" if weight_name else ""
