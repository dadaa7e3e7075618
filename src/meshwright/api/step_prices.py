"""Prices of the steps that a server runs on this machine's devices."""

from meshwright.api.rates import known_rates
from meshwright.core.errors import UserError
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.simulate.step_prices import StepPrices
from meshwright.spec.chip import chip_of_kind
from meshwright.spec.slices import slice_shapes


def step_prices(step: PackedStep) -> StepPrices:
    """Returns what prices steps, with the rates of its devices: those kept of this machine, else the chip's own."""
    prices = StepPrices(step.model, step.strategy, step.derived)
    try:
        chip = chip_of_kind(step.mesh.devices.flat[0].device_kind)
        cluster = slice_shapes(chip, step.strategy.num_chips)[0]
        calibration = known_rates(cluster)
    except UserError:
        return prices  # a chip that is not catalogued
    if calibration or cluster.kind != "host":
        prices.set_rates(cluster, calibration, step.storage)
    return prices
