"""Computes a model's logits on one device: the forward steps of its training program without the loss."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.program import Stack
from meshwright.algebra.transformer import Span, spans, transformer
from meshwright.nn.activations import capped
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.context import Context
from meshwright.nn.interpreter import Environment, run
from meshwright.nn.order import after
from meshwright.nn.weights import Params
from meshwright.spec.model import Model, require_runnable
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import without_mtp

_State = TypeVar("_State")


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

        def layer(steps: BlockSteps, number: Array, values: Mapping[str, Any], state: None) -> tuple[Array, None]:
            return run_block(context, steps, values)[0], None

        results = {block.name: block.ops[-1].out for block in derived.program.blocks}
        for stack in derived.program.stacks:
            result, _ = run_stack(context, stack, params, given, layer, None)
            given[results[stack.last]] = result
        return capped(result, model.logit_softcap)

    return logits


def _positions(tokens: Array) -> Array:
    """Returns the position of each token in its row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def run_block(
    context: Context, steps: BlockSteps, values: Mapping[str, Any], *, until: str = ""
) -> tuple[Array, Environment]:
    """Runs the forward steps of a block on values by name, up to the result ``until`` if given; returns its result and
    the results of all steps."""
    declared = context.derived.declared
    env = {declared[name]: values[name] for name in steps.block.reads if values.get(name) is not None}
    env = run(context, steps.forward, env, until=until)
    return env[declared[until or steps.block.result or steps.block.ops[-1].out]], env


def run_stack(
    context: Context,
    stack: Stack,
    params: Params,
    given: Mapping[str, Any],
    layer: Callable[[BlockSteps, Array, Mapping[str, Any], _State], tuple[Array, _State]],
    state: _State,
) -> tuple[Array, _State]:
    """Runs a stack; returns its result (the logits if it ends in the loss) and the last state.

    Between the first and the last block the layers run in order, a loop for each span: ``stream, state = layer(block,
    number, values by name, state)``. ``number`` counts layers of the same kind. Where weights are tuples of layers the
    loops are unrolled: XLA's programs for CPUs copy the weights that a loop takes from a stack.
    """
    blocks = {steps.block.name: steps for steps in context.derived.blocks}

    def row(weight: Any, index: Any) -> Array:
        is_split = isinstance(weight, tuple)
        return weight[index] if is_split else lax.dynamic_index_in_dim(weight, index, keepdims=False)

    def iteration(span: Span, carry: tuple[Array, _State], number: Any) -> tuple[Any, None]:
        stream, state = carry
        for position, kind in enumerate(span.pattern):
            index = span.row(position, number)
            if position and default_platform() == "cuda":
                # else the weights of all layers of the iteration are copied at its start
                index = after(index, [stream])
            own = {name: row(params[name], index) for name in blocks[kind].block.reads if name in params}
            stream, state = layer(blocks[kind], index, {**given, **own, stack.carry: stream}, state)
        return (stream, state), None

    stream, _ = run_block(context, blocks[stack.first], {**given, **params})
    carry = stream, state
    unrolled = any(isinstance(weight, tuple) for weight in params.values())
    for span in spans(stack.layers):
        for number in range(span.repeats if unrolled else 0):
            carry, _ = iteration(span, carry, number)
        if unrolled:
            continue
        carry, _ = lax.scan(partial(iteration, span), carry, jnp.arange(span.repeats, dtype=jnp.int32))
    stream, state = carry
    last = blocks[stack.last]
    is_loss_head = last.block.ops[-1].out != "logits" and any(step.result.name == "logits" for step in last.forward)
    until = "logits" if is_loss_head else ""
    return run_block(context, last, {**given, **params, stack.carry: stream}, until=until)[0], state
