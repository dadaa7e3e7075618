"""Computes a model's logits on one device: the forward steps of its training program without the loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.transformer import Span, spans, transformer
from meshwright.nn.activations import capped
from meshwright.nn.context import Context
from meshwright.nn.interpreter import run
from meshwright.nn.weights import Params
from meshwright.spec.model import Model, require_runnable
from meshwright.spec.strategy import Strategy, make_mesh


def logits_fn(model: Model) -> Callable[..., jax.Array]:
    """Returns a function (params, tokens[B,T], documents[B,T], encoder tokens) -> logits[B,T,V] in float32."""
    require_runnable(model)

    def logits(
        params: Params,
        tokens: jax.Array,
        documents: jax.Array | None = None,
        encoder_tokens: jax.Array | None = None,
    ) -> jax.Array:
        options = ProgramOptions(documents=documents is not None)
        # Keeping every result leaves the logits whole: other policies may compute the loss in chunks.
        derived = derive(transformer(model, options), Strategy(mesh=make_mesh({}), remat="none"))
        context = Context(model=model, derived=derived, mesh=make_mesh({}), options=options)
        given: dict[str, Any] = {"tokens": tokens, "positions": _positions(tokens), "documents": documents}
        if encoder_tokens is not None:
            given |= {"encoder_tokens": encoder_tokens, "encoder_positions": _positions(encoder_tokens)}
        blocks = {steps.block.name: steps for steps in derived.blocks}
        for stack in derived.program.stacks:
            x = _run(context, blocks[stack.first], {**given, **params}, stack.carry)
            for span in spans(stack.layers):
                x = _span(context, blocks, span, stack.carry, x, params, given)
            result = "logits" if stack is derived.program.stacks[-1] else blocks[stack.last].block.ops[-1].out
            given[result] = _run(context, blocks[stack.last], {**params, stack.carry: x}, result)
        return capped(given["logits"], model.logit_softcap)

    return logits


def _positions(tokens: jax.Array) -> jax.Array:
    """Returns the position of each token in its row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def _run(context: Context, steps: BlockSteps, values: dict[str, Any], result: str) -> jax.Array:
    """Runs a block on values by name and returns one of its results."""
    declared = context.derived.declared
    used = {name for op in steps.block.ops for name in op.inputs}
    env = {declared[name]: value for name, value in values.items() if name in used and value is not None}
    found = run(context, steps.forward, env, until=result)
    return next(found[step.result] for step in steps.forward if step.result.name == result)


def _span(
    context: Context,
    blocks: dict[str, BlockSteps],
    span: Span,
    carry: str,
    x: jax.Array,
    params: Params,
    given: dict[str, Any],
) -> jax.Array:
    """Returns the stream ``carry`` after consecutive layers."""

    def turn(stream: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        for position, kind in enumerate(span.pattern):
            place, per_turn = span.place(position)
            layer = span.starts[kind] + number * per_turn + place
            used = {name for op in blocks[kind].block.ops for name in op.inputs}
            own = {n: lax.dynamic_index_in_dim(p, layer, keepdims=False) for n, p in params.items() if n in used}
            stream = _run(context, blocks[kind], {**given, **own, carry: stream}, blocks[kind].block.result)
        return stream, None

    return lax.scan(turn, x, jnp.arange(span.repeats))[0]
