"""One file per op: its sharding rules forward and backward, and FLOPs, bytes and group of the steps they make.

`nn.ops` has a file of the same name for each, with the JAX functions. Some ops occur only in derived steps, in no
program."""

import functools
import pkgutil
from importlib import import_module

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError, nearest


@functools.cache
def op_names() -> tuple[str, ...]:
    """Returns the names of the ops: the files of this folder."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__))


@functools.cache
def op_kind(name: str) -> OpKind:
    """Returns the kind of an op, from the file of its name. Raises InputError for a name that no file has."""
    if name not in op_names():
        raise InputError(f"there is no op {name!r}.{nearest(name, op_names())}")
    kind = import_module(f"{__name__}.{name}").OP
    assert isinstance(kind, OpKind)
    return kind


@functools.cache
def step_kinds() -> dict[str, StepKind]:
    """Maps the name of a local step to its kind, for the steps of every op."""
    return {name: kind for op in op_names() for name, kind in op_kind(op).steps.items()}


def kind_of(step: Step) -> StepKind:
    """Returns the kind of a local step."""
    return step_kinds()[step.op]
