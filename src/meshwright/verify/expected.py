"""Collectives that a compiled program should contain according to the derivation, step by step."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.ops.muon import filled_share
from meshwright.algebra.rewrites.rings import num_moves, num_ways
from meshwright.algebra.rewrites.split_backward import counts_of, meetings
from meshwright.algebra.schedules.ticks import TickTables
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.labels import StepLabel
from meshwright.cost.step_costs import sent_element_bytes


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """One derived collective: it moves ``num_arrays`` arrays in one step, together ``full_bytes``, over ``axes``.

    ``full_bytes`` are of the whole array on the group, as in a `CompiledCollective`; ``element_bytes`` of one element.
    """

    label: StepLabel
    kind: str
    axes: tuple[str, ...]
    num_arrays: int
    full_bytes: int
    element_bytes: int


def expected_collectives(
    derived: Derived,
    dims: Mapping[str, int],
    mesh: Mapping[str, int],
    *,
    num_microbatches: int,
    width: int,
    layer_by_layer: bool = True,
) -> Iterator[Expected]:
    """Yields the collectives of one step of training, prefill or generation.

    ``dims`` are those of the global batch (B all sequences); ``width`` is the bytes of an element whose array
    names no dtype. ``layer_by_layer``: gradients are summed over replicas layer by layer, else as stacked arrays.
    """
    counted = _counted(derived, dims, mesh, num_microbatches=num_microbatches, layer_by_layer=layer_by_layer)
    return _expected(counted, dims, mesh, num_microbatches=num_microbatches, width=width)


_Counted = tuple[Step, int, int]
"""A step, the number of arrays that it moves, and how often it moves its own bytes."""


def _expected(
    counted: Iterable[_Counted], dims: Mapping[str, int], mesh: Mapping[str, int], *, num_microbatches: int, width: int
) -> Iterator[Expected]:
    sizes = _sizes(dims, mesh, num_microbatches)
    for step, arrays, times in counted:
        element = int(sent_element_bytes(step, width=width, num_microbatches=num_microbatches))
        filled = filled_share(step, sizes)
        yield Expected(
            label=step.label,
            kind=step.op,
            axes=active_axes(step.axes, mesh),
            num_arrays=arrays,
            full_bytes=times * round(float(sizes.elements(step.full) * element * filled)),
            element_bytes=element,
        )


def _counted(
    derived: Derived, dims: Mapping[str, int], mesh: Mapping[str, int], *, num_microbatches: int, layer_by_layer: bool
) -> Iterator[_Counted]:
    sizes = _sizes(dims, mesh, num_microbatches)
    for step, times in derived.steps(num_microbatches):
        if step.is_collective:
            runs = int(times) * (int(num_moves(step, sizes)) if step.op == "permute" else 1)
            stacked = step.phase == "update" or (step.scope == "step" and not layer_by_layer)
            yield step, 1 if stacked else runs * int(num_ways(step, sizes)), runs


def _sizes(dims: Mapping[str, int], mesh: Mapping[str, int], num_microbatches: int) -> OpSizes:
    """Returns the sizes of one microbatch."""
    return OpSizes(dims={**dims, "B": dims["B"] // num_microbatches}, mesh=mesh, state="fp32")


def active_axes(axes: Iterable[str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of more than one device, in the mesh's order."""
    wanted = set(axes)
    return tuple(axis for axis in mesh if axis in wanted and mesh[axis] > 1)


# -- pipelines ------------------------------------------------------------------------------------------


def expected_of_pipeline(
    derived: Derived, tables: TickTables, dims: Mapping[str, int], mesh: Mapping[str, int], *, width: int
) -> Iterator[Expected]:
    """Yields the collectives that a compiled pipeline contains: each branch counts once per tick, taken or not.

    ``dims`` are those of the global batch (B all sequences, C of one microbatch). Split and whole backward passes both
    count where a schedule has both. Sends count as often as they run: once per direction and tick.
    """
    count = tables.schedule.num_microbatches
    return _expected(_counted_in_text(derived, tables), dims, mesh, num_microbatches=count, width=width)


def _counted_in_text(derived: Derived, tables: TickTables) -> Iterator[_Counted]:
    used = ((block, name) for block in derived.blocks for op in block.block.ops for name in op.inputs)
    counted = ((block, name) for block in derived.blocks for name in counts_of(block))
    rows = {name: _rows(block, tables) for block, name in (*used, *counted)}
    for block in derived.blocks:
        for step in (*block.forward, *block.backward):
            if step.is_collective:
                times = runs_in_text(step, block, tables)
                yield (step, 1, _rows(block, tables)) if step.scope == "step" else (step, times, times)
    ways = {"forward": tables.x_channels, "backward": tables.dx_channels}
    for step in derived.boundary:
        sends = sum(channel.offset != 0 for channel in ways[step.phase]) if step.op == "permute" else 1
        times = tables.num_ticks * sends
        yield step, times, times
    if tables.schedule.weight_copies > 1:
        yield from ((step, 1, rows[step.result.name.removeprefix("d")]) for step in meetings(derived))
    for step in (*derived.ends, *derived.update):
        if step.is_collective:
            yield step, 1, rows.get(step.result.name, 1)


def runs_in_text(step: Step, block: BlockSteps, tables: TickTables) -> int:
    """Returns how often the text of a pipeline contains a step of a block: once per tick and layer, and twice if the
    schedule has both split and whole backward passes."""
    layers = block.repeat // tables.schedule.num_virtual_stages if block.block.carry else 1
    twice = step in block.backward and bool(block.block.carry) and tables.has_whole and tables.has_split
    return tables.num_ticks * layers * (2 if twice else 1)


def _rows(block: BlockSteps, tables: TickTables) -> int:
    """Returns the number of layers of a block that one device stores."""
    return block.repeat // tables.schedule.num_devices if block.block.carry else 1
