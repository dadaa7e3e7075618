"""The local steps of every op as JAX functions of one device's blocks: one file per op, named as in `algebra.ops`.

Each file has ``STEPS``: name of a step -> function of (context, step, blocks of the step's inputs) that gives one block
for each of its results.
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
    """Name of a local step -> its function, from every file of this folder."""
    files = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {name: function for file in files for name, function in file.STEPS.items()}


def of_arrays(function: Callable[..., Any]) -> LocalStep:
    """The step that a function of its arrays alone is."""
    return lambda context, step, *arrays: function(*arrays)


def backward_of(forward: LocalStep) -> LocalStep:
    """Cotangents of the inputs from that of the result and the inputs: the vjp of the forward step."""
    return lambda context, step, dout, *inputs: jax.vjp(functools.partial(forward, context, step), *inputs)[1](dout)
