"""What a training step makes of its routers' counts: metrics, and the moves of corrections that follow the load."""

import jax.numpy as jnp

from meshwright.algebra.derived import Derived
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.rewrites.split_backward import counts_of
from meshwright.nn.experts.balance import correction_move, routing_metrics
from meshwright.nn.weights import Params
from meshwright.spec.model import Model

FromCounts = tuple[Params, Params]
"""`routing_metrics` by name, and the move [layers, E] of each correction by the name of its buffer."""


def without_counts(derived: Derived, grads: Params, model: Model, options: ProgramOptions) -> tuple[Params, FromCounts]:
    """Returns the gradients of weights, and what the counts among ``grads`` give: metrics of the layers with experts,
    of one kind of layers after the other, and the moves of corrections, where the options have a rate.

    The counts are [layers, Er, E] of each kind, under the names of `counts_of`; without any both results are {}.
    """
    counts = {name: grads[name] for name in sorted(grads.keys() - derived.shards.keys())}
    of_weights = {name: grads[name] for name in derived.shards}
    if not counts:
        return of_weights, ({}, {})
    metrics = routing_metrics(jnp.concatenate(list(counts.values())), experts_per_token=model.experts_per_token)
    rate = options.correction_rate
    routers = {
        op.inputs[1]: next(iter(counts_of(steps)), "")
        for steps in derived.blocks
        for op in steps.block.ops
        if op.kind == "route" and len(op.inputs) > 1 and rate
    }
    return of_weights, (metrics, {name: rate * correction_move(counts[own]) for name, own in routers.items()})
