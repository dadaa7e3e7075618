"""The context of local steps: what they need besides their arrays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jaxtyping import Array

from meshwright.algebra.derived import Derived
from meshwright.algebra.layers import PLAIN, ProgramOptions
from meshwright.algebra.notation import ShardedArray
from meshwright.nn.attention.order import IN_ORDER, SequenceOrder
from meshwright.spec.model import Model
from meshwright.spec.strategy import held_dims


@dataclass(frozen=True, kw_only=True)
class UpdateContext:
    """What the steps that update weights need besides their arrays.

    ``number`` is that of this update, from 1. ``rate`` multiplies the change of a weight and its ``decays`` by name.
    ``beta1``, ``beta2`` and ``momentum`` are decays of running means. ``sizes`` are of dims that devices hold padded
    with zeros. Properties are computed once for all weights: XLA rounds copies of them in other ways.
    """

    number: Array
    rate: Array
    decays: Mapping[str, float]
    beta1: float
    beta2: float
    epsilon: float
    momentum: float
    sizes: Mapping[str, int]

    @cached_property
    def corrections(self) -> tuple[Array, Array]:
        """The shares of the gradients so far in running means that began at zero, by ``beta1`` and by ``beta2``."""
        return 1 - self.beta1**self.number, 1 - self.beta2**self.number

    @cached_property
    def growing_decay(self) -> Array:
        """The decay 1 - t^-0.8 of running means at update t. Source: Shazeer and Stern, Adafactor (2018)."""
        return 1 - self.number.astype(jnp.float32) ** -0.8


@dataclass(frozen=True, kw_only=True)
class Context:
    """One derivation of one model, as one device runs it.

    ``mesh`` has the sizes of the axes. ``order`` says which positions of a sequence each device has. ``divergent``: see
    `nn.collectives.Ring`. With ``offload`` the results that layers keep for their backward pass are in host memory.
    ``seq_len`` is the maximum length of a sequence in generation, 0 in training, and ``longest`` bounds the rows of a
    sequence among packed ones. With ``alike`` a row's norms are the same bits whatever the number of rows. ``dtype`` is
    the stream's in generation, since int8 weights do not determine it.
    ``constrain`` is applied to every result that has its declared sharding: only the GSPMD form has it, and passes
    `with_sharding_constraint`.
    """

    model: Model
    derived: Derived
    mesh: Mapping[str, int]
    options: ProgramOptions = PLAIN
    order: SequenceOrder = IN_ORDER
    divergent: bool = False
    offload: bool = False
    seq_len: int = 0
    longest: int = 1
    alike: bool = False
    dtype: str = "fp32"
    constrain: Callable[[ShardedArray, Array], Array] | None = None

    def local_size(self, array: ShardedArray, dim: str) -> int:
        """Returns the entries of a dim of the model (not of the batch) on one device."""
        return held_dims(self.model.dims, self.mesh)[dim] // math.prod(self.mesh[axis] for axis in array.axes_of(dim))
