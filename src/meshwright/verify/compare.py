"""Derived collectives against compiled ones: kind, mesh axes, bytes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from meshwright.algebra.derive import Derived
from meshwright.algebra.notation import local_elements
from meshwright.algebra.steps import num_moves, num_ways, sent_element_bytes
from meshwright.verify.hlo import Collective

Key = tuple[str, tuple[str, ...]]
"""(kind, mesh axes in the mesh's order)."""


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
    """Traffic of one training step as derived.

    ``dims`` are those of the global batch (B all sequences); ``width`` the bytes of an element whose array
    names no dtype. ``layer_by_layer``: gradients are summed over replicas layer by layer, else as stacked arrays.
    """
    per_microbatch = {**dims, "B": dims["B"] // num_microbatches}
    counts: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for step, times in derived.steps(num_microbatches):
        if not step.is_collective:
            continue
        element = sent_element_bytes(step, width=width, num_microbatches=num_microbatches)
        size = round(float(local_elements(step.full, per_microbatch, mesh) * element))
        entry = counts[_key(step.op, step.axes, mesh)]
        times = times * int(num_moves(step, dims=dims, mesh=mesh)) if step.op == "permute" else times
        stacked = step.phase == "update" or (step.scope == "step" and not layer_by_layer)
        entry[0] += 1 if stacked else times * int(num_ways(step, dims=per_microbatch, mesh=mesh))
        entry[1] += times * size
    return {key: Traffic(*value) for key, value in counts.items()}


def compiled_traffic(found: Iterable[Collective], mesh: Mapping[str, int]) -> dict[Key, Traffic]:
    """Traffic of one call of a compiled program, from its collectives."""
    counts: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for collective in found:
        entry = counts[_key(collective.kind, collective.axes, mesh)]
        entry[0] += collective.trips * collective.num_arrays
        entry[1] += collective.total_bytes
    return {key: Traffic(*value) for key, value in counts.items()}


def _key(kind: str, axes: Iterable[str], mesh: Mapping[str, int]) -> Key:
    wanted = set(axes)
    return kind, tuple(a for a in mesh if a in wanted and mesh[a] > 1)
