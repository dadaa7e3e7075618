"""Runs derived steps, forward and backward, on one device's blocks."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.kinds import nothing
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.dispatch import has_slots, is_at_experts
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.steps import Step
from meshwright.core.labels import FURTHER_ROUNDS
from meshwright.nn.collectives import communicate
from meshwright.nn.context import Context, UpdateContext
from meshwright.nn.contract import Turned
from meshwright.nn.experts.exchange import in_further_round, move_packed
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.ops import local_steps

Environment = dict[ShardedArray, Any]

Key = TypeVar("Key", bound=Hashable)


def run(context: Context, steps: Iterable[Step], env: Environment, *, until: str = "") -> Environment:
    """Runs steps in order and returns ``env`` with their results; stops after the result named ``until``, if given.

    The key of an array is its name with its sharding, so a gathered weight and its shard are two entries. Steps on
    expert devices run again for every further round of an exchange.
    """
    env = dict(env)
    for part_steps, runs_at_experts in _parts(list(steps)):
        env_before = dict(env)
        for step in part_steps:
            _run_step(context, step, env)
            if until and step.result.name == until:
                return env
        if runs_at_experts:
            _run_further_rounds(context, part_steps, env_before, env)
    return env


def _run_step(context: Context, step: Step, env: Environment, *, taken: Array | None = None) -> None:
    """Runs a step and adds its results to ``env``; ``taken`` counts rows of an exchange's earlier rounds."""
    with jax.named_scope(str(step.label)):
        result_values = _results(context, step, [env[a] for a in step.inputs])
    for array, value in zip((step.result, *step.more), result_values, strict=True):
        if array is step.result and step.accumulates:
            value = env[array] + value
        if context.constrain and context.derived.declared.get(array.name) == array:
            value = context.constrain(array, value)
        env[array] = value if taken is None else in_further_round(value, taken)


# -- further rounds of an exchange ----------------------------------------------------------------------


def _parts(steps: list[Step]) -> Iterator[tuple[list[Step], bool]]:
    """Yields (steps, True) for all steps of one pass on expert devices and (steps, False) for other steps. Independent
    steps between expert steps move before their group, dependent ones after it."""
    for is_backward in (False, True):
        step_numbers = [n for n, s in enumerate(steps) if is_at_experts(s) and (s.phase == "backward") == is_backward]
        if not step_numbers:
            continue
        steps_in = [steps[n] for n in step_numbers]
        results, steps_before, steps_after = {a for step in steps_in for a in step.results}, list[Step](), list[Step]()
        for step in (steps[n] for n in range(step_numbers[0], step_numbers[-1]) if n not in step_numbers):
            if results.isdisjoint(step.inputs):
                steps_before.append(step)
            else:
                results.update(step.results)
                steps_after.append(step)
        yield [*steps[: step_numbers[0]], *steps_before], False
        yield steps_in, True
        steps = [*steps_after, *steps[step_numbers[-1] + 1 :]]
    yield steps, False


def _run_further_rounds(context: Context, steps: list[Step], start: Environment, env: Environment) -> None:
    """Runs the further rounds of an exchange and adds their contributions to the results sent back from expert devices.

    The number of rounds depends on the data. Each round recomputes what it needs from the devices' own rows.
    """
    outputs = [array for step in steps for array in step.results if not (has_slots(array) and array.axes_of("E"))]
    input_values = (env[array] for step in steps for array in step.inputs)
    route = next((value.route for value in input_values if isinstance(value, Ragged) and value.route), None)
    if route is None or not outputs:
        return
    held_env = {a: v for a, v in start.items() if not (has_slots(a) and a.axes_of("E"))}
    # rows of tokens are sorted again, so that they need no memory for rounds that seldom run
    known_env = {a: v for a, v in held_env.items() if not (has_slots(a) and len(a.dims) > 2)}
    rerun_steps, missing_arrays = _needed(context, steps[0].block, outputs, known_env)
    if missing_arrays:
        # the second part of a split backward pass lacks the arrays from which its rows were computed
        known_env, (rerun_steps, _) = held_env, _needed(context, steps[0].block, outputs, held_env)
    used_arrays = [array for array in known_env if any(array in step.inputs for step in rerun_steps)]

    def one_more(carry: tuple[Array, list[Any]]) -> tuple[Array, list[Any]]:
        (taken, sums), values = jax.lax.optimization_barrier((carry, [known_env[array] for array in used_arrays]))
        round_env = {array: in_further_round(value, taken) for array, value in zip(used_arrays, values, strict=True)}
        for step in rerun_steps:
            _run_step(context, step, round_env, taken=taken)
        num_rows = replace(route, further=True).room
        return taken + num_rows, [total + round_env[array] for total, array in zip(sums, outputs, strict=True)]

    first_carry = (jnp.full((), route.room, jnp.int32), [env[array] for array in outputs])
    with jax.named_scope(FURTHER_ROUNDS):
        sums = jax.lax.while_loop(lambda carry: carry[0] < route.fullest, one_more, first_carry)[1]
    env |= zip(outputs, sums, strict=True)


def _needed(
    context: Context, block: str, results: list[ShardedArray], known: Environment
) -> tuple[list[Step], set[ShardedArray]]:
    """Returns a block's steps that compute ``results`` from ``known``, in order, and the inputs that are missing."""
    block_steps = next(steps for steps in context.derived.blocks if steps.block.name == block)
    all_steps = [*block_steps.forward, *(step for step in block_steps.backward if step.phase == "backward")]
    wanted_arrays, needed_steps = set(results), list[Step]()
    for step in reversed(all_steps):
        if not wanted_arrays.isdisjoint(step.results):
            needed_steps.insert(0, step)
            wanted_arrays.update(array for array in step.inputs if array not in known)
    available_arrays, missing_arrays = set(known), set[ShardedArray]()
    rerun_steps = list[Step]()
    for step in needed_steps:
        if not (step.only_moves and step.result in available_arrays):  # a gather of both passes runs once
            rerun_steps.append(step)
            missing_arrays |= set(step.inputs) - available_arrays
            available_arrays.update(step.results)
    return rerun_steps, missing_arrays


def run_update(
    context: UpdateContext | None, steps: Iterable[Step], env: Mapping[Key, Array], key: Callable[[ShardedArray], Key]
) -> dict[Key, Array]:
    """Runs the steps of a weight update and returns ``env`` with their results under the ``key`` of each array.

    A key that ignores the sharding gives a step the newest array of a name: all layers stacked, though derived steps
    are those of one layer. Collectives and products have labels of their own; elementwise steps share one.
    """
    value_by_key = dict(env)
    for step in steps:
        is_labelled = step.is_collective or kind_of(step).flops is nothing
        with nullcontext() if is_labelled else jax.named_scope(str(step.label)):
            results = _results(context, step, [value_by_key[key(array)] for array in step.inputs])
        value_by_key |= zip(map(key, step.results), results, strict=True)
    return value_by_key


def _results(context: Context | UpdateContext | None, step: Step, inputs: list[Array]) -> tuple[Array, ...]:
    """Runs one step and returns its results. A round of a ring returns its input: the attention op itself sends it."""
    if isinstance(step.details, Round):
        return (inputs[0],)
    is_plain = step.is_collective or not kind_of(step).is_einsum
    inputs = [array.plain if is_plain and isinstance(array, Turned) else array for array in inputs]
    if step.is_collective:
        return (move_packed(step, inputs[0]) if isinstance(inputs[0], Ragged) else communicate(step, inputs[0]),)
    results = local_steps()[step.op](context, step, *inputs)
    return results if isinstance(results, tuple) else (results,)
