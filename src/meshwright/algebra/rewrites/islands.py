"""Sums between islands: for each trained weight the array that is exchanged, how often, and in how many bits."""

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

    It sums ``num_layers`` layers of its weight (0: a weight outside the layers): every ``num_fragments``-th layer from
    layer ``fragment`` on.
    """

    period: int = 1
    bits: int = 32
    fragment: int = 0
    num_fragments: int = 1
    overlap: int = 0
    num_layers: int = 0

    @property
    def words(self) -> str:
        """Period, bits and fragment as text: ``"every 30 steps, 4 bits, fragment 1 of 3"``."""
        parts = [f"every {self.period} steps" if self.period > 1 else "every step", f"{self.bits} bits"]
        parts += [f"fragment {self.fragment + 1} of {self.num_fragments}"] * (self.num_fragments > 1)
        return ", ".join(parts)


def across_islands(derived: Derived, strategy: Strategy) -> Derived:
    """Returns the derivation of one island with the sums between islands as ``outer``; unchanged for a single island.

    Each device sums its shards over the axis ``islands``: of gradients (``islands_sync`` "gradients"), else of outer
    gradients (weights after the last exchange less present weights), router corrections included. Raises InputError if
    a fragment would have no weights.
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
    """Maps each weight to the fragments, numbers below ``count``, that have a part of it: layer i is in fragment i mod
    count (Streaming DiLoCo, arXiv 2501.18512). ``forms`` maps names to layers (0: outside the layers) and dims of one
    layer.

    Weights outside the layers count as further layers after the last one, one each: matrices, then vectors, by name. No
    sizes are needed. Raises InputError if a fragment has no weights."""
    most_layers = max((layers for layers, _ in forms.values()), default=0)
    others = sorted((num_dims < 2, name) for name, (layers, num_dims) in forms.items() if not layers)
    numbers = {name: range(min(count, layers)) for name, (layers, _) in forms.items() if layers}
    for i, (_, name) in enumerate(others, most_layers):
        numbers[name] = range(i % count, i % count + 1)
    if (num_full := len(set().union(*numbers.values()))) < count:
        raise InputError(f"outer_fragments={count}: this model's layers and other weights fill {num_full}. Use fewer.")
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
