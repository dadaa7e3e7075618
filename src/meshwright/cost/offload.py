"""Seconds of PCIe transfers of offloaded optimizer state and activations."""

import msgspec

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.cost.memory.chip import MemoryParts
from meshwright.cost.pipeline import PipelineCost


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of transfers over PCIe.

    ``activations_s`` is for the kept results of one repeat of a block in one direction, which its pass can hide.
    ``optimizer_s`` is for the optimizer's state, both ways once a step, exposed. ``serial_s`` is for all transfers of a
    step."""

    activations_s: Number = 0.0
    optimizer_s: Number = 0.0
    serial_s: Number = 0.0


NOTHING = Transfers()


def offloaded(
    parts: MemoryParts, pcie_bytes_per_s: float | None, pipeline: PipelineCost, chosen: tuple[str, ...]
) -> Transfers:
    """Returns the transfers of the ``chosen`` items; none for (). Raises InputError if PCIe's rate is not known."""
    if not chosen:
        return NOTHING
    if pcie_bytes_per_s is None:
        raise InputError("offload needs the chip's pcie_bytes_per_s, which is not known. Give it in a chip's file.")
    activations_s: Number = 0.0
    optimizer_s: Number = 0.0
    if "activations" in chosen:
        activations_s = parts.moved_bytes(pipeline) / pcie_bytes_per_s
    if "optimizer" in chosen:
        optimizer_s = 2 * parts.optimizer_bytes(pipeline) / pcie_bytes_per_s
    num_layers = pipeline.layers_held(parts.num_layers)
    return Transfers(
        activations_s=activations_s,
        optimizer_s=optimizer_s,
        serial_s=2 * activations_s * num_layers * pipeline.microbatches + optimizer_s,
    )
