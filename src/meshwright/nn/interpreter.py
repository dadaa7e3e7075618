"""Runs derived steps, forward and backward, on one device's blocks."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import jax
import msgspec
from jaxtyping import Array

from meshwright.algebra.kinds import nothing
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.steps import Step
from meshwright.nn.collectives import communicate
from meshwright.nn.context import Context
from meshwright.nn.ops import local_steps

Environment = dict[ShardedArray, Array]


def run(context: Context, steps: Iterable[Step], env: Environment, *, until: str = "") -> Environment:
    """Runs steps in order and returns ``env`` with their results; stops after the result named ``until``, if given.

    The key of an array is its name with its sharding, so a gathered weight and its shard are two entries.
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


def run_update(steps: Iterable[Step], env: Environment, sizes: Mapping[str, int] | None = None) -> Environment:
    """Runs the steps of an optimizer and returns ``env`` with their results; ``sizes`` are of dims that are padded.

    Collectives and products have labels of their own; elementwise steps share one.
    """
    env = dict(env)
    for step in steps:
        label = msgspec.structs.replace(step.label, block="update", phase="update")
        own = step.is_collective or kind_of(step).flops is nothing
        with nullcontext() if own else jax.named_scope(str(label)):
            results = _results(sizes or {}, step, [env[a] for a in step.inputs])
        env |= zip((step.result, *step.more), results, strict=True)
    return env


def _results(context: Context | Mapping[str, int], step: Step, inputs: list[Array]) -> tuple[Array, ...]:
    """Runs one step. A round of a ring returns its block unchanged: attention itself sends it on."""
    if isinstance(step.details, Round):
        return (inputs[0],)
    if step.is_collective:
        return (communicate(step, inputs[0]),)
    results = local_steps()[step.op](context, step, *inputs)
    return results if isinstance(results, tuple) else (results,)
