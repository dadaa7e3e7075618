"""Which layers a pipeline's devices hold, and in which order they are stored."""

from collections.abc import Sequence

import numpy as np

from meshwright.algebra.schedules.table import Schedule
from meshwright.core.errors import CannotRunError


def layer_permutation(schedule: Schedule, num_layers: int) -> np.ndarray:
    """The layer at each place of the stored order: places shared out evenly are what each device holds, chunk by chunk.

    0, 1, 2, ... where a device holds one piece. Where microbatches enter at both ends it is that of the first way: the
    second copy of the weights is not stored. For layers of one kind among several, ``num_layers`` is theirs.
    """
    size = layers_per_stage(schedule, num_layers)
    places = sorted((place.device, place.chunk, stage) for stage, place in enumerate(schedule.routes[0]))
    return np.concatenate([np.arange(stage * size, (stage + 1) * size) for _, _, stage in places])


def layers_per_stage(schedule: Schedule, num_layers: int) -> int:
    """Layers of every virtual stage. Raises CannotRunError where they are not equally many."""
    size, left = divmod(num_layers, schedule.num_virtual_stages)
    if left or not size:
        stages, chunks = schedule.num_devices, schedule.num_virtual_stages // schedule.num_devices
        wanted = [n for n in range(1, num_layers + 1) if num_layers % (n * chunks) == 0]
        instead = f"pipeline in {{{', '.join(map(str, wanted))}}}" if wanted else "fewer chunks"
        raise CannotRunError(
            f"pipeline={stages} with chunks={chunks} does not divide {num_layers} layers into equal stages, "
            f"which is what runs. Use {instead}."
        )
    return size


def layer_pattern(schedule: Schedule, names: Sequence[str]) -> tuple[str, ...]:
    """The blocks of one virtual stage, the same in each, from the block of every layer.

    Raises CannotRunError where stages differ: every device runs one program.
    """
    size = layers_per_stage(schedule, len(names))
    pattern = tuple(names[:size])
    for first in range(size, len(names), size):
        here = tuple(names[first : first + size])
        if here != pattern:
            layer = next(first + i for i in range(size) if here[i] != pattern[i])
            raise CannotRunError(
                f"pipeline={schedule.num_devices} gives stages of {size} layers that differ: layer {layer} is "
                f"{names[layer]!r} where layer {layer % size} is {pattern[layer % size]!r}, and all stages run one "
                f"program. Use stages whose number of layers the pattern of layers divides."
            )
    return pattern
