"""Computes a model's logits on one device: the forward steps of its training program without the loss."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.transformer import transformer
from meshwright.nn.activations import capped
from meshwright.nn.context import Context
from meshwright.nn.forward import run_block, run_stack
from meshwright.nn.weights import Params
from meshwright.spec.model import Model, require_runnable
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import without_mtp


def logits_fn(model: Model) -> Callable[..., Array]:
    """Returns a function (params, tokens[B,T], documents[B,T], encoder tokens) -> logits[B,T,V] in float32, which takes
    what the model's mask reads by name."""
    require_runnable(model)
    model = without_mtp(model)

    def logits(
        params: Params,
        tokens: Array,
        documents: Array | None = None,
        encoder_tokens: Array | None = None,
        **data: Array,
    ) -> Array:
        options = ProgramOptions(documents=documents is not None)
        # Keeping every result leaves the logits whole: other policies may compute the loss in chunks.
        derived = derive(transformer(model, options), Strategy(mesh=make_mesh({}), remat="none"))
        context = Context(model=model, derived=derived, mesh=make_mesh({}), options=options)
        given: dict[str, Any] = {"tokens": tokens, "positions": _positions(tokens), "documents": documents} | data
        if encoder_tokens is not None:
            given |= {"encoder_tokens": encoder_tokens, "encoder_positions": _positions(encoder_tokens)}
        if (features := data.get("encoder_features")) is not None:
            given["encoder_positions"] = _positions(jnp.zeros((len(features), features.shape[-1] // 2)))

        def layer(
            steps: BlockSteps, number: Array, values: Mapping[str, Any], shared: dict[str, Array]
        ) -> tuple[Array, dict[str, Array]]:
            result, env = run_block(context, steps, {**values, **shared})
            return result, {**shared, **{name: env[derived.declared[name]] for name in steps.block.shares}}

        results = {block.name: block.ops[-1].out for block in derived.program.blocks}
        for stack in derived.program.stacks:
            result, _ = run_stack(context, stack, params, given, layer, dict[str, Array]())
            given[results[stack.last]] = result
        # bias and cap are parts of the loss that keeps the logits
        biased = result + params["unembed_bias"][None, None] if model.logit_bias else result
        return capped(biased, model.logit_softcap)

    return logits


def _positions(tokens: Array) -> Array:
    """Returns the position of each token in its row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
