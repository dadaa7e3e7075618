"""Prices of the steps that a server runs on this machine's devices."""

from collections.abc import Sequence
from contextlib import suppress

from meshwright.api.rates import rates_for
from meshwright.core.errors import UserError
from meshwright.serve.engine import Engine
from meshwright.simulate.step_prices import StepPrices
from meshwright.spec.chip import chip_of_kind
from meshwright.spec.slices import slice_shapes


def step_prices(engines: Sequence[Engine]) -> StepPrices:
    """Returns what prices the steps of like engines, with the rates of their devices: those kept of this machine, else
    the chip's own. Peaks are those of a device of each engine together."""
    step = engines[0].packed
    prices = StepPrices(step.model, step.strategy, step.derived)
    with suppress(UserError):  # a chip that is not catalogued, or whose rates lack a dtype
        cluster = slice_shapes(chip_of_kind(step.mesh.devices.flat[0].device_kind), step.strategy.num_chips)[0]
        rates = rates_for(cluster, None, fitted=True, measures=False)
        if rates or cluster.kind != "host":
            prices.set_rates(cluster, rates, step.storage)
            prices.peak_flops_per_s *= len(engines)
            prices.peak_bytes_per_s *= len(engines)
    return prices
