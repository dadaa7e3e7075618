"""Budget of a training run: FLOPs, days, utilisation, money, energy. Sizes may be NumPy arrays."""

import math

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError

DAY_S = 86400.0
YEAR_S = 365 * DAY_S


def training_flops(num_params: Number, num_tokens: Number) -> Number:
    """Returns 6 N D: 2 per parameter and token forward, 4 backward, without attention's own products.

    Source: How to Scale Your Model, section 4.2.
    """
    return 6 * num_params * num_tokens


def train_seconds(flops: Number, *, num_chips: Number = 1, peak_flops: Number, mfu: Number = 1.0) -> Number:
    """Returns the seconds of ``flops``: flops / (chips x peak x MFU). Source: How to Scale Your Model, section 6.2."""
    return flops / (num_chips * peak_flops * mfu)


def days(seconds: Number) -> Number:
    """Returns days of 24 hours."""
    return seconds / DAY_S


def years(seconds: Number) -> Number:
    """Returns years of 365 days."""
    return seconds / YEAR_S


def petaflop_days(flops: Number) -> Number:
    """Returns the days that ``flops`` take at 1e15 FLOP/s."""
    return flops / (1e15 * DAY_S)


def available_flops(chip_hours: Number, peak_flops: Number) -> Number:
    """Returns the FLOPs that ``chip_hours`` could do at peak."""
    return chip_hours * 3600 * peak_flops


def mfu_from_hours(flops: Number, chip_hours: Number, peak_flops: Number) -> Number:
    """Returns the MFU of a run from its FLOPs and chip-hours. Source: How to Scale Your Model, exercise 4.7."""
    return flops / available_flops(chip_hours, peak_flops)


def rescaled_days(run_days: Number, *, chips_from: Number, chips_to: Number) -> Number:
    """Returns the days on ``chips_to`` chips of a run of ``run_days`` on ``chips_from``, at equal utilisation."""
    return run_days * chips_from / chips_to


def min_chips(num_bytes: float, bytes_per_chip: float) -> int:
    """Returns the fewest chips whose memory holds ``num_bytes``. Raises InputError for a chip without memory."""
    if bytes_per_chip <= 0:
        raise InputError(f"a chip of {bytes_per_chip:g} bytes has no memory. Give its memory in bytes.")
    return math.ceil(num_bytes / bytes_per_chip)


def cost_usd(seconds: Number, *, num_chips: Number, price_usd_per_hour: Number) -> Number:
    """Returns the dollars of all chips for these seconds, at a price per chip-hour."""
    return seconds / 3600 * num_chips * price_usd_per_hour


def power_w(num_chips: Number, watts_per_chip: Number) -> Number:
    """Returns the watts of all chips, without hosts, network or cooling."""
    return num_chips * watts_per_chip


def energy_kwh(seconds: Number, *, num_chips: Number, watts_per_chip: Number) -> Number:
    """Returns the kWh of all chips at constant power, without hosts, network or cooling."""
    return power_w(num_chips, watts_per_chip) * seconds / 3.6e6


def global_batch(microbatch_seqs: Number, *, data_parallel: Number, num_microbatches: Number) -> Number:
    """Returns the sequences per step: sequences of a microbatch x replicas x accumulated microbatches."""
    return microbatch_seqs * data_parallel * num_microbatches


def num_microbatches(global_batch_seqs: Number, *, data_parallel: Number, microbatch_seqs: Number) -> Number:
    """Returns the microbatches to accumulate for a global batch; a fraction if the division is not even."""
    return global_batch_seqs / (data_parallel * microbatch_seqs)


def flops_per_dollar(peak_flops: Number, *, price_usd_per_hour: Number, mfu: Number = 1.0) -> Number:
    """Returns the FLOPs that a dollar buys on one chip at ``mfu``."""
    return peak_flops * mfu * 3600 / price_usd_per_hour


def flops_per_joule(peak_flops: Number, *, watts_per_chip: Number, mfu: Number = 1.0) -> Number:
    """Returns the FLOPs per joule of one chip, without its host; the chip draws full power at any utilisation."""
    return peak_flops * mfu / watts_per_chip


def facility_energy_kwh(chips_kwh: Number, *, pue: Number, host_share: Number = 0.0) -> Number:
    """Returns energy at the building's meter: chips, hosts and network (``host_share`` of chips), cooling (``pue``)."""
    return chips_kwh * (1 + host_share) * pue


def floor_area_m2(num_chips: Number, *, chips_per_rack: Number, m2_per_rack: Number = 1.0) -> Number:
    """Returns the floor area of the racks. With 1 m2 a rack, 16,000 H100 in racks of 32 take the 500 m2 of the source.

    Source: Scaling systems for LLMs (slides).
    """
    return num_chips / chips_per_rack * m2_per_rack
