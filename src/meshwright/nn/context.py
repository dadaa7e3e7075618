"""What the local ops of a derivation need to know besides their arrays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax

from meshwright.algebra.derived import Derived
from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.algebra.notation import ShardedArray
from meshwright.spec.model import Model

Constrain = Callable[[ShardedArray, jax.Array], jax.Array]


def as_given(array: ShardedArray, value: jax.Array) -> jax.Array:
    """The value itself."""
    return value


@dataclass(frozen=True, kw_only=True)
class Context:
    """One derivation of one model, as one device runs it.

    ``mesh`` are the sizes of the axes. ``in_order`` promises that the positions of a row rise along it, so that
    attention may leave out what lies after a query; they do not where rows are dealt out in zigzag. ``divergent``
    says that devices of other groups may be doing something else (inside a pipeline's tick). With ``offload`` what
    layers hold for their backward pass waits in host memory. ``seq_len`` is the length that a row may reach where it
    comes a few positions at a time; 0 where rows are whole. ``dtype`` is that of the stream where int8 weights do not
    say it. ``constrain`` is applied to every result that has its declared sharding: the GSPMD form passes
    `with_sharding_constraint`.
    """

    model: Model
    derived: Derived
    mesh: Mapping[str, int]
    options: ProgramOptions = PLAIN
    in_order: bool = True
    divergent: bool = False
    offload: bool = False
    seq_len: int = 0
    dtype: str = "fp32"
    constrain: Constrain = field(default=as_given)

    def local_size(self, array: ShardedArray, dim: str) -> int:
        """Entries of a dim of the model (not of the batch) on one device."""
        return self.model.dims[dim] // math.prod(self.mesh[axis] for axis in array.axes_of(dim))
