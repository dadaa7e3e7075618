"""Uses the routers' counts of a training step: for metrics, and to move the corrections that follow the load."""

import jax.numpy as jnp

from meshwright.algebra.derived import Derived
from meshwright.algebra.rewrites.split_backward import counts_of
from meshwright.nn.experts.balance import correction_move, routing_metrics
from meshwright.nn.weights import Params
from meshwright.spec.model import Model

FromCounts = tuple[Params, Params]
"""`routing_metrics` by name, and the move [layers, E] of each correction by the name of its buffer."""


def without_counts(derived: Derived, grads: Params, model: Model) -> tuple[Params, FromCounts]:
    """Returns the gradients of weights and, from the counts among ``grads``, metrics of the layers with experts (one
    kind of layers after the other) and the moves of corrections (none unless the program has a rate).

    The counts are [layers, Er, E] of each kind, under the names of `counts_of`; without any both results are {}.
    """
    counts = {name: grads[name] for name in sorted(grads.keys() - derived.shards.keys())}
    of_weights = {name: grads[name] for name in derived.shards}
    if not counts:
        return of_weights, ({}, {})
    metrics = routing_metrics(jnp.concatenate(list(counts.values())), experts_per_token=model.experts_per_token)
    moves = {
        op.inputs[1]: float(rate) * correction_move(counts[name])
        for steps in derived.blocks
        for name in counts_of(steps)
        for op in steps.block.ops
        if (rate := dict(op.attributes).get("correction_rate"))
    }
    return of_weights, (metrics, moves)
