"""Derived collectives against compiled ones: how many arrays and bytes of each kind over which mesh axes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from meshwright.algebra.derived import Derived
from meshwright.algebra.schedules.ticks import TickTables
from meshwright.hlo.collectives import CompiledCollective
from meshwright.verify.expected import Expected, active_axes, expected_collectives, expected_of_pipeline
from meshwright.verify.traffic import TrafficKey as Key


class Traffic(msgspec.Struct, frozen=True):
    """How many arrays a kind of collective moves over some axes in one step, and their full bytes together."""

    num_arrays: int
    full_bytes: int


def derived_traffic(
    derived: Derived,
    dims: Mapping[str, int],
    mesh: Mapping[str, int],
    *,
    num_microbatches: int,
    width: int,
    layer_by_layer: bool = True,
) -> dict[Key, Traffic]:
    """Traffic of one step as derived; see `expected_collectives`."""
    return expected_traffic(
        expected_collectives(
            derived, dims, mesh, num_microbatches=num_microbatches, width=width, layer_by_layer=layer_by_layer
        )
    )


def pipeline_traffic(
    derived: Derived, tables: TickTables, dims: Mapping[str, int], mesh: Mapping[str, int], *, width: int
) -> dict[Key, Traffic]:
    """Traffic of one training step, each slot of a tick counted in all ticks; see `expected_of_pipeline`."""
    return expected_traffic(expected_of_pipeline(derived, tables, dims, mesh, width=width))


def expected_traffic(expected: Iterable[Expected]) -> dict[Key, Traffic]:
    """Derived collectives by kind and axes."""
    return _summed(((e.kind, e.axes), e.num_arrays, e.full_bytes) for e in expected)


def compiled_traffic(found: Iterable[CompiledCollective], mesh: Mapping[str, int]) -> dict[Key, Traffic]:
    """Traffic of one call of a compiled program, from its collectives."""
    return _summed(((c.kind, active_axes(c.axes, mesh)), c.trips * c.num_arrays, c.total_bytes) for c in found)


def _summed(entries: Iterable[tuple[Key, int, int]]) -> dict[Key, Traffic]:
    counts: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for key, arrays, size in entries:
        counts[key][0] += arrays
        counts[key][1] += size
    return {key: Traffic(*value) for key, value in counts.items()}


def num_permutes(tables: TickTables) -> int:
    """Sends between devices in every tick, in both directions."""
    return sum(channel.offset != 0 for channel in (*tables.x_channels, *tables.dx_channels))
