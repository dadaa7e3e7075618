"""Local steps of every op as JAX functions of one device's blocks: one file per op, named as in `algebra.ops`.

Each file has ``STEPS``: name of a step -> function of (context, step, blocks of the inputs) that returns one block per
result. Optimizer steps get a `nn.context.UpdateContext` as context.
"""

import functools
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax

LocalStep = Callable[..., Any]


@functools.cache
def local_steps() -> dict[str, LocalStep]:
    """Returns the function of each local step by name, from every file of this folder."""
    files = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {name: function for file in files for name, function in file.STEPS.items()}


def of_arrays(function: Callable[..., Any]) -> LocalStep:
    """Returns the local step that calls ``function`` with the input arrays only."""
    return lambda context, step, *arrays: function(*arrays)


def backward_of(forward: LocalStep) -> LocalStep:
    """Returns the backward step of a forward step: its vjp at its inputs."""
    return lambda context, step, dout, *inputs: jax.vjp(functools.partial(forward, context, step), *inputs)[1](dout)
