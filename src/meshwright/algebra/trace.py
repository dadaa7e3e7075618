"""What the rules of op kinds share: the trace they add steps to, and the few moves they are made of.

Collectives are never written in a rule: each says in which shardings it can work locally and calls `moved`
(or `reshard`), which is where they come from.
"""

from typing import Any, Protocol

from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.core.errors import InputError


class Trace(Protocol):
    """What a rule may do: look up declared shardings, add steps, need earlier results, hand on cotangents.

    ``contribute(name, array)`` says that ``array`` is one addend of the cotangent of ``name``.
    """

    slice_axes: tuple[str, ...]
    keeps_logits: bool

    @property
    def shardings(self) -> Any:
        """Declared shardings, with the ``strategy`` whose choices a rule may look at."""

    def declared(self, name: str) -> ShardedArray: ...
    def cotangent(self, name: str) -> ShardedArray: ...
    def add(self, *steps: Step) -> None: ...
    def need(self, *arrays: ShardedArray) -> None: ...
    def contribute(self, name: str, array: ShardedArray) -> None: ...


def local(op: str, inputs: tuple[ShardedArray, ...], result: ShardedArray, *more: ShardedArray, **fields: Any) -> Step:
    """A step on one device's blocks."""
    return Step(op=op, inputs=inputs, result=result, more=more, **fields)


def moved(trace: Trace, array: ShardedArray, target: ShardedArray) -> ShardedArray:
    """``target``, with the steps added that lead from ``array`` to it."""
    trace.add(*reshard(array, target))
    return target


def like(array: ShardedArray, other: ShardedArray) -> ShardedArray:
    """``array`` with the axes that ``other`` has on the dims they share."""
    return array.resharded({d: other.axes_of(d) for d in array.dims if d in other.dims})


def axes_beside(array: ShardedArray, other: ShardedArray) -> tuple[str, ...]:
    """Mesh axes on the dims of ``array`` that ``other`` lacks: where ``other`` is broadcast, its cotangent is a sum
    over them."""
    return tuple(axis for dim in array.dims if dim not in other.dims for axis in array.axes_of(dim))


def require_whole(array: ShardedArray, dim: str, kind: str) -> None:
    """Raise InputError where a dim that an op reduces over is split."""
    if array.axes_of(dim):
        raise InputError(
            f"{kind} needs {dim} whole, and {array} splits it over {', '.join(array.axes_of(dim))}. "
            f"Assign those axes to another dim (T, for the residual stream)."
        )
