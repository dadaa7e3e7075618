"""Computes a model's logits on one device: the forward steps of its training program without the loss."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.program import Stack
from meshwright.algebra.transformer import Span, spans, transformer
from meshwright.nn.activations import capped
from meshwright.nn.context import Context
from meshwright.nn.interpreter import Environment, run
from meshwright.nn.weights import Params
from meshwright.spec.model import Model, require_runnable
from meshwright.spec.strategy import Strategy, make_mesh

_Carry = TypeVar("_Carry")


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
        blocks = derived.by_name

        def layer(steps: BlockSteps, number: jax.Array, own: Params, stream: jax.Array) -> jax.Array:
            return run_block(context, steps, {**given, **own, steps.block.carry: stream})[0]

        for stack in derived.program.stacks:
            x, _ = run_block(context, blocks[stack.first], {**given, **params})
            x = over_layers(derived, stack, params, layer, x)
            result = "logits" if stack is derived.program.stacks[-1] else blocks[stack.last].block.ops[-1].out
            given[result], _ = run_block(context, blocks[stack.last], {**params, stack.carry: x}, until=result)
        return capped(given["logits"], model.logit_softcap)

    return logits


def _positions(tokens: jax.Array) -> jax.Array:
    """Returns the position of each token in its row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def run_block(
    context: Context, steps: BlockSteps, values: Mapping[str, Any], *, until: str = ""
) -> tuple[jax.Array, Environment]:
    """Runs the forward steps of a block on values by name, up to the step ``until`` if given; returns its result and
    the results of all steps."""
    declared = context.derived.declared
    env = {declared[name]: values[name] for name in steps.block.reads if values.get(name) is not None}
    env = run(context, steps.forward, env, until=until)
    return env[declared[until or steps.block.result or steps.block.ops[-1].out]], env


def over_layers(
    derived: Derived,
    stack: Stack,
    params: Params,
    layer: Callable[[BlockSteps, jax.Array, Params, _Carry], _Carry],
    carry: _Carry,
) -> _Carry:
    """Runs ``carry = layer(block, number, own weights, carry)`` for every layer of a stack in order, a loop for each
    span; a layer is numbered among those of its kind."""
    blocks = derived.by_name

    def iteration(span: Span, carry: _Carry, number: jax.Array) -> tuple[_Carry, None]:
        for position, kind in enumerate(span.pattern):
            place, per_turn = span.place(position)
            index = span.starts[kind] + number * per_turn + place
            own = {
                name: lax.dynamic_index_in_dim(params[name], index, keepdims=False)
                for name in blocks[kind].block.reads
                if name in params
            }
            carry = layer(blocks[kind], index, own, carry)
        return carry, None

    for span in spans(stack.layers):
        carry, _ = lax.scan(partial(iteration, span), carry, jnp.arange(span.repeats, dtype=jnp.int32))
    return carry
