"""The steps between islands: what crosses them of each trained weight, how often, and in how many bits."""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from meshwright.algebra.derived import Derived
from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.frozen import moved_buffers
from meshwright.algebra.steps import Step
from meshwright.core.dims import ISLANDS
from meshwright.core.errors import InputError
from meshwright.spec.strategy import Strategy

BITS_DTYPE = {32: "fp32", 8: "int8", 4: "int4"}


class OuterSum(msgspec.Struct, frozen=True, kw_only=True):
    """Details of a collective over islands: it is due every ``period`` steps, and begins ``overlap`` steps earlier.

    It is of ``num_layers`` layers of its weight, with several fragments every ``num_fragments``-th from layer
    ``fragment`` on; 0 for a weight outside of the layers.
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
    less those of now: partial sums over the axis ``islands``, each device of its shard, wanted whole. What training
    moves without a gradient is a part of the latter only. Raises InputError as `fragment_numbers`.
    """
    if strategy.num_islands == 1:
        return derived
    repeat_of = {name: b.repeat for b in derived.blocks if b.is_layer for name in b.block.reads}
    shards = derived.shards
    if strategy.islands_sync != "gradients":
        shards |= {name: derived.declared[name] for name in sorted(moved_buffers(derived.program))}
    forms = {name: (repeat_of.get(name, 0), len(shard.dims)) for name, shard in shards.items()}
    numbers = fragment_numbers(forms, strategy.outer_fragments)
    outer_steps = [step for name in shards for step in _sums(shards[name], strategy, forms[name][0], numbers[name])]
    return replace(derived, outer=tuple(sorted(outer_steps, key=lambda step: step.details.fragment)))


def fragment_numbers(forms: Mapping[str, tuple[int, int]], count: int) -> dict[str, range]:
    """Maps weights, each given by its layers (0: it is of no layer) and dims of one, to those of ``count`` fragments
    that have a part: layer i is in fragment i mod count (Streaming DiLoCo, arXiv 2501.18512).

    What is no layer follows as further layers of the weights that have the most: matrices, then vectors, by name. As no
    sizes are needed, a derivation says what a run sends. Raises InputError if a fragment has nothing.
    """
    most_layers = max((layers for layers, _ in forms.values()), default=0)
    others = sorted((num_dims < 2, name) for name, (layers, num_dims) in forms.items() if not layers)
    numbers = {name: range(min(count, layers)) for name, (layers, _) in forms.items() if layers}
    for i, (_, name) in enumerate(others, most_layers):
        numbers[name] = range(i % count, i % count + 1)
    if len(set().union(*numbers.values())) < count:
        raise InputError(f"outer_fragments={count} is more than this model has layers and other weights. Use fewer.")
    return numbers


def _sums(shard: ShardedArray, strategy: Strategy, repeat: int, numbers: range) -> Iterator[Step]:
    """Yields the collectives of one weight, one for each fragment that has a part of it."""
    prefix = "d" if strategy.islands_sync == "gradients" else "outer_"
    whole = shard.replace(name=f"{prefix}{shard.name}", dtype=BITS_DTYPE[strategy.outer_bits])
    num_fragments = strategy.outer_fragments
    for fragment in numbers:
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
