"""Runs derived steps, forward and backward, on one device's blocks."""

from collections.abc import Iterable

import jax
import msgspec

from meshwright.algebra.kinds import nothing
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.steps import Step
from meshwright.nn.collectives import communicate
from meshwright.nn.context import Context
from meshwright.nn.ops import local_steps

Environment = dict[ShardedArray, jax.Array]


def run(context: Context, steps: Iterable[Step], env: Environment, *, until: str = "") -> Environment:
    """``env`` with the results of the steps added, in their order; stops after the one named ``until``, if given.

    An array is known by its name and its sharding, so that a gathered weight and its shard are two entries.
    """
    env = dict(env)
    for step in steps:
        results = run_step(context, step, [env[a] for a in step.inputs])
        for array, value in zip((step.result, *step.more), results, strict=True):
            if array is step.result and step.accumulates:
                value = env[array] + value
            if context.derived.declared.get(array.name) == array:
                value = context.constrain(array, value)
            env[array] = value
        if until and step.result.name == until:
            break
    return env


def run_step(context: Context, step: Step, inputs: list[jax.Array]) -> tuple[jax.Array, ...]:
    """The results of one step, its instructions labelled with it.

    Blocks on their way round a ring stay what they are: attention passes them on.
    """
    with jax.named_scope(str(step.label)):
        return _run_step(context, step, inputs)


def run_update(steps: Iterable[Step], env: Environment) -> Environment:
    """``env`` with the results of an optimizer's steps added; collectives and products carry labels of their own, the
    rest is one label's."""
    env = dict(env)
    for step in steps:
        inputs = [env[a] for a in step.inputs]
        if step.is_collective:
            results = communicate(step, *inputs)
        elif kind_of(step).flops is nothing:
            results = local_steps()[step.op](None, step, *inputs)
        else:
            label = msgspec.structs.replace(step.label, block="update", phase="update")
            with jax.named_scope(str(label)):
                results = local_steps()[step.op](None, step, *inputs)
        for array, value in zip((step.result, *step.more), results if step.more else (results,), strict=True):
            env[array] = value
    return env


def _run_step(context: Context, step: Step, inputs: list[jax.Array]) -> tuple[jax.Array, ...]:
    if isinstance(step.details, Round):
        return (inputs[0],)
    if step.is_collective:
        return (communicate(step, inputs[0]),)
    results = local_steps()[step.op](context, step, *inputs)
    return results if isinstance(results, tuple) else (results,)
