"""Runs the forward steps of a model's blocks and stacks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.program import Stack
from meshwright.algebra.transformer import Span, spans
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.context import Context
from meshwright.nn.interpreter import Environment, run
from meshwright.nn.order import after
from meshwright.nn.weights import Params

_State = TypeVar("_State")


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
    number, values by name, state)``. ``number`` counts layers of one kind. If weights are tuples of layers the loops
    are unrolled: XLA's CPU programs copy the weights that a loop reads from a stacked array. A layer that shares
    results runs without a loop, so that the state may grow from layer to layer.
    """
    steps_by_block = {steps.block.name: steps for steps in context.derived.blocks}
    declared = context.derived.declared

    def row(weight: Array | tuple[Array, ...], index: Array | int) -> Array:
        is_split = isinstance(weight, tuple)
        return weight[index] if is_split else lax.dynamic_index_in_dim(weight, index, keepdims=False)

    def in_order(name: str, weight: Array) -> Array:
        """Returns a layer's weight; with heads it keeps the dim order of the stacked array: else XLA for TPUs copies
        that whole array into the order of the products before a loop whose iterations have several layers of a kind."""
        dims = declared[name].dims
        has_heads = len(dims) == 3 and dims[0] != "E"
        return with_layout_constraint(weight, Layout((0, 1, 2))) if has_heads else weight

    def iteration(span: Span, carry: tuple[Array, _State], repeat: Array | int) -> tuple[tuple[Array, _State], None]:
        stream, state = carry
        for kind_index, kind in enumerate(span.pattern):
            layer_no = span.row(kind_index, repeat)
            if kind_index and default_platform() == "cuda":
                # else the weights of all layers of the iteration are copied at its start
                layer_no = after(layer_no, [stream])
            weights = {name: row(params[name], layer_no) for name in steps_by_block[kind].block.reads if name in params}
            if default_platform() == "tpu" and span.pattern.count(kind) > 1:
                weights = {name: in_order(name, array) for name, array in weights.items()}
            stream, state = layer(steps_by_block[kind], layer_no, {**given, **weights, stack.carry: stream}, state)
        return (stream, state), None

    named = {**given, **params}
    stream: Any = named.get(stack.carry)
    if stack.first:
        stream, env = run_block(context, first := steps_by_block[stack.first], named)
        given = {**given, **{name: env[declared[name]] for name in first.block.shares}}
    carry = stream, state
    has_tuples = any(isinstance(weight, tuple) for weight in params.values())
    for span in spans(stack.layers):
        is_unrolled = has_tuples or any(steps_by_block[kind].block.shares for kind in span.pattern)
        for repeat in range(span.repeats if is_unrolled else 0):
            carry, _ = iteration(span, carry, repeat)
        if is_unrolled:
            continue
        carry, _ = lax.scan(partial(iteration, span), carry, jnp.arange(span.repeats, dtype=jnp.int32))
    stream, state = carry
    if not stack.last:
        return stream, state
    head = steps_by_block[stack.last]
    is_loss_head = head.block.ops[-1].out != "logits" and any(step.result.name == "logits" for step in head.forward)
    until = "logits" if is_loss_head else ""
    return run_block(context, head, {**named, stack.carry: stream}, until=until)[0], state
