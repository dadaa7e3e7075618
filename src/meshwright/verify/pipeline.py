"""The collectives that the text of a compiled pipeline must have: of every branch, whether a tick takes it or not."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from meshwright.algebra.derive import BlockSteps, Derived
from meshwright.algebra.notation import local_elements
from meshwright.algebra.schedule_ticks import TickTables
from meshwright.algebra.steps import Step, sent_element_bytes
from meshwright.algebra.weight_gradients import counts_of, meetings
from meshwright.verify.compare import Key, Traffic, _key

Counted = tuple[Step, int, int]
"""A step, how many arrays it moves in the text, and how often the bytes of one of the step's own."""


def pipeline_traffic(
    derived: Derived, tables: TickTables, dims: Mapping[str, int], mesh: Mapping[str, int], *, width: int
) -> dict[Key, Traffic]:
    """Traffic of one training step, each slot of a tick counted in all ticks.

    ``dims`` are those of the global batch (B all sequences, C of one microbatch); ``width`` the bytes of an element
    whose array names no dtype. Where some backward passes are split and some are not, both are there. What stands in
    the loop as often as it runs are the sends: one for each way, in every tick.
    """
    count = tables.schedule.num_microbatches
    one = {**dims, "B": dims["B"] // count}
    found: dict[Key, list[int]] = defaultdict(lambda: [0, 0])
    for step, arrays, times in _counted(derived, tables):
        element = sent_element_bytes(step, width=width, num_microbatches=count)
        entry = found[_key(step.op, step.axes, mesh)]
        entry[0] += arrays
        entry[1] += times * round(float(local_elements(step.full, one, mesh) * element))
    return {key: Traffic(*value) for key, value in found.items()}


def _counted(derived: Derived, tables: TickTables) -> Iterator[Counted]:
    used = ((block, name) for block in derived.blocks for op in block.block.ops for name in op.inputs)
    counted = ((block, name) for block in derived.blocks for name in counts_of(block))
    rows = {name: _rows(block, tables) for block, name in (*used, *counted)}
    for block in derived.blocks:
        yield from _of_block(block, tables)
    ways = {"forward": tables.x_channels, "backward": tables.dx_channels}
    for step in derived.boundary:
        sends = sum(channel.offset != 0 for channel in ways[step.phase]) if step.op == "permute" else 1
        yield step, tables.num_ticks * sends, tables.num_ticks * sends
    if tables.schedule.weight_copies > 1:
        yield from ((step, 1, rows[step.result.name.removeprefix("d")]) for step in meetings(derived))
    for step in (*derived.ends, *derived.update):
        if step.is_collective:
            yield step, 1, rows.get(step.result.name, 1)


def _of_block(block: BlockSteps, tables: TickTables) -> Iterator[Counted]:
    layers = block.repeat // tables.schedule.num_virtual_stages if block.block.carry else 1
    for step in (*block.forward, *block.backward):
        if not step.is_collective:
            continue
        if step.scope == "step":
            yield step, 1, _rows(block, tables)
            continue
        twice = step in block.backward and bool(block.block.carry) and tables.has_whole and tables.has_split
        times = tables.num_ticks * layers * (2 if twice else 1)
        yield step, times, times


def _rows(block: BlockSteps, tables: TickTables) -> int:
    """Layers of a kind that a device stores."""
    return block.repeat // tables.schedule.num_devices if block.block.carry else 1
