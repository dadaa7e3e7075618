"""The context of local steps: what they need in addition to their arrays."""

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
    """What the steps that update weights need in addition to their arrays.

    ``number`` counts updates from 1. ``rate`` is the learning rate, and ``decays`` the weight decays by weight name.
    ``beta1``, ``beta2`` and ``momentum`` are decays of running means. ``sizes`` are the true sizes of dims that devices
    store padded with zeros. Properties are computed once for all weights: XLA would round copies of them differently.
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
        """Adam's bias corrections 1 - beta^number of running means that began at zero, for ``beta1`` and ``beta2``."""
        return 1 - self.beta1**self.number, 1 - self.beta2**self.number

    @cached_property
    def growing_decay(self) -> Array:
        """The decay 1 - t^-0.8 of running means at update t. Source: Shazeer and Stern, Adafactor (2018)."""
        return 1 - self.number.astype(jnp.float32) ** -0.8


@dataclass(frozen=True, kw_only=True)
class Context:
    """One derivation of one model, as one device runs it.

    ``mesh`` has the sizes of the axes. ``order`` says which positions of a sequence each device has. ``divergent``: see
    `nn.collectives.Ring`. With ``offload`` the results saved for the backward pass are in host memory. ``seq_len`` is
    the maximum length of a sequence in generation, 0 in training, and ``longest`` the most rows of one sequence in a
    packed step. With ``alike`` a row's norms have the same bits whatever the number of rows. ``dtype`` is the
    activations' in generation, since int8 weights do not determine it. Only the GSPMD form has ``constrain``, which is
    `with_sharding_constraint` and is applied to each result with its declared sharding.
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
        """Returns the entries on one device of a dim of the model (not of the batch), padding included."""
        return held_dims(self.model.dims, self.mesh)[dim] // math.prod(self.mesh[axis] for axis in array.axes_of(dim))
