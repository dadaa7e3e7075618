"""What lives in host memory, and the seconds that its way over PCIe takes."""

import msgspec

from meshwright.core.errors import InputError
from meshwright.cost.arrays import Number
from meshwright.cost.memory import MemoryParts
from meshwright.cost.pipeline import Pipeline


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds over PCIe: ``activations_s`` one repeat's kept results one way, which its pass can hide;
    ``optimizer_s`` the optimizer's state there and back once a step, which nothing hides; ``serial_s`` all of a step.
    """

    activations_s: Number = 0.0
    optimizer_s: Number = 0.0
    serial_s: Number = 0.0


NOTHING = Offload()


def offloaded(
    parts: MemoryParts, pcie_bytes_per_s: float | None, pipeline: Pipeline, chosen: tuple[str, ...]
) -> Offload:
    """The transfers of what a strategy offloads; none for ()."""
    if not chosen:
        return NOTHING
    if pcie_bytes_per_s is None:
        raise InputError("offload needs the chip's pcie_bytes_per_s, which is not known. Give it in a cluster file.")
    activations: Number = 0.0
    optimizer: Number = 0.0
    if "activations" in chosen:
        activations = parts.moved_bytes(pipeline) / pcie_bytes_per_s
    if "optimizer" in chosen:
        optimizer = 2 * parts.optimizer_bytes(pipeline) / pcie_bytes_per_s
    layers = pipeline.layers_held(parts.num_layers)
    return Offload(
        activations_s=activations,
        optimizer_s=optimizer,
        serial_s=2 * activations * layers * pipeline.microbatches + optimizer,
    )
