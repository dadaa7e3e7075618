"""Runs derived steps, forward and backward, on one device's blocks."""

from collections.abc import Iterable
from contextlib import nullcontext

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
        with jax.named_scope(str(step.label)):
            results = _results(context, step, [env[a] for a in step.inputs])
        for array, value in zip((step.result, *step.more), results, strict=True):
            if array is step.result and step.accumulates:
                value = env[array] + value
            if context.derived.declared.get(array.name) == array:
                value = context.constrain(array, value)
            env[array] = value
        if until and step.result.name == until:
            break
    return env


def run_update(steps: Iterable[Step], env: Environment) -> Environment:
    """``env`` with the results of an optimizer's steps added; collectives and products carry labels of their own, the
    rest is one label's."""
    env = dict(env)
    for step in steps:
        label = msgspec.structs.replace(step.label, block="update", phase="update")
        own = step.is_collective or kind_of(step).flops is nothing
        with nullcontext() if own else jax.named_scope(str(label)):
            results = _results(None, step, [env[a] for a in step.inputs])
        env |= zip((step.result, *step.more), results, strict=True)
    return env


def _results(context: Context | None, step: Step, inputs: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Blocks on their way round a ring stay what they are: attention passes them on."""
    if isinstance(step.details, Round):
        return (inputs[0],)
    if step.is_collective:
        return (communicate(step, inputs[0]),)
    results = local_steps()[step.op](context, step, *inputs)
    return results if isinstance(results, tuple) else (results,)
