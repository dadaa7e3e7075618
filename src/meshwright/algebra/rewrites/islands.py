"""The steps between islands: what crosses them of each trained weight, how often, and in how many bits."""

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from meshwright.algebra.derived import Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.kinds import Updated
from meshwright.algebra.steps import Step
from meshwright.core.dims import ISLANDS
from meshwright.core.errors import InputError
from meshwright.spec.strategy import Strategy

BITS_DTYPE = {32: "fp32", 8: "int8", 4: "int4"}


class OuterSum(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a collective over islands: it is due every ``period`` steps, and begins ``overlap`` steps earlier.

    It is of ``num_layers`` layers of its weight, with several fragments every ``num_fragments``-th from layer
    ``fragment`` on; 0 for a weight outside of the layers, which may be in any fragment.
    """

    period: int = 1
    bits: int = 32
    fragment: int = 0
    num_fragments: int = 1
    overlap: int = 0
    num_layers: int = 0

    @property
    def words(self) -> str:
        """``"every 30 steps, 4 bits, fragment 1 of 3"``."""
        parts = [f"every {self.period} steps" if self.period > 1 else "every step", f"{self.bits} bits"]
        parts += [f"fragment {self.fragment + 1} of {self.num_fragments}"] * (self.num_fragments > 1)
        return ", ".join(parts)


def across_islands(derived: Derived, strategy: Strategy) -> Derived:
    """Returns the steps of one island with those between the islands of a strategy as ``outer``.

    Each island has its own sum of gradients ("gradients"), or its own outer gradient, the weights at its last exchange
    less those of now: partial sums over the axis ``islands``, each device of its shard, wanted whole. Raises InputError
    for more fragments than layers.
    """
    if strategy.num_islands == 1:
        return derived
    if strategy.outer_fragments > derived.num_layers:
        fragments_text = f"strategy.outer_fragments={strategy.outer_fragments}"
        raise InputError(f"{fragments_text}: fragments are of whole layers, and the model has {derived.num_layers}.")
    outer_steps = [step for weight in derived.weights.values() for step in _sums(derived, weight, strategy)]
    return replace(derived, outer=tuple(sorted(outer_steps, key=lambda step: step.details.fragment)))


def _sums(derived: Derived, weight: Updated, strategy: Strategy) -> Iterator[Step]:
    """Yields the collectives of one weight, one for each fragment that has a part of it."""
    prefix = "d" if strategy.islands_sync == "gradients" else "outer_"
    whole = weight.shard.replace(name=f"{prefix}{weight.shard.name}", dtype=BITS_DTYPE[strategy.outer_bits])
    num_fragments = strategy.outer_fragments
    repeat = next((b.repeat for b in derived.blocks if b.is_layer and weight.shard.name in b.block.reads), 0)
    is_first = weight.shard.name in derived.blocks[0].block.reads
    fragments = range(min(num_fragments, repeat)) if repeat else [0 if is_first else num_fragments - 1]
    for fragment in fragments:
        details = OuterSum(
            period=strategy.outer_every,
            bits=strategy.outer_bits,
            fragment=fragment,
            num_fragments=num_fragments,
            overlap=strategy.outer_overlap,
            num_layers=len(range(fragment, repeat, num_fragments)),
        )
        for step in reshard(whole.replace(unreduced=(ISLANDS,)), whole):
            yield replace(step, details=details, phase="update", scope="outer", block="islands")
