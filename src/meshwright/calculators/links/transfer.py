"""Transfers over one or several legs: which leg is the slowest, and when the bytes arrive.

A leg is a channel that the bytes pass: host links (PCIe), chip links, the network, memory, or a calculation on the
arrived bytes. Legs are pipelined: all work at the same time and the slowest sets the pace. Source: How to Scale Your
Model, exercises 2.5 and 2.6.
"""

import math
import re
from collections.abc import Sequence

import msgspec

from meshwright.core.errors import InputError, nearest
from meshwright.core.units import parse_bytes, parse_count
from meshwright.cost.formulas.roofline import dtype_bytes
from meshwright.report.answer import Facts
from meshwright.spec.chip import Chip, known, peak


class TransferLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One leg: ``amount`` (bytes; FLOPs of a calculation) over ``lanes`` equal lanes of ``rate`` a second each.

    The first byte is through after ``latency_s``: hops x the latency of a hop.
    """

    name: str
    channel: str
    amount: float
    rate: float
    lanes: int = 1
    hops: int = 0
    latency_s: float = 0.0

    @property
    def send_s(self) -> float:
        """Seconds for all of it once it flows."""
        return self.amount / (self.rate * self.lanes)


def transfer_times(legs: Sequence[TransferLeg]) -> Facts:
    """Returns when bytes arrive over legs in the order in which they pass them. Raises InputError for none.

    The first byte takes the latencies of all legs; with all legs at work at once (``time_s_pipelined``) the last one
    follows after the slowest leg; where each leg waits for the whole of the one before (``time_s_in_turn``), times add
    up. ``bound_by`` is "latency" where the hops take longer than the slowest leg, else that leg's channel.
    """
    if not legs:
        raise InputError("a transfer needs a leg. Give --from and --to, or a --leg such as hbm.")
    slowest_leg = max(legs, key=lambda leg: leg.send_s)
    first_byte_s = sum(leg.latency_s for leg in legs)
    return {
        "first_byte_s": first_byte_s,
        "slowest_leg_s": slowest_leg.send_s,
        "slowest_leg": slowest_leg.name,
        "time_s_pipelined": first_byte_s + slowest_leg.send_s,
        "time_s_in_turn": sum(leg.latency_s + leg.send_s for leg in legs),
        "bound_by": "latency" if first_byte_s > slowest_leg.send_s else slowest_leg.channel,
    }


CHANNELS: dict[str, tuple[str, str, str]] = {
    "hbm": ("hbm_bytes_per_s", "memory of a chip", ""),
    "vmem": ("vmem_bytes_per_s", "on-chip memory of a chip", ""),
    "pcie": ("pcie_bytes_per_s", "PCIe of a chip", ""),
    "ici": ("ici_link_bytes_per_s", "one link, one way", "ici_hop_s"),
    "nvlink": ("nvlink_bytes_per_s", "port of a chip, one way", "nvlink_hop_s"),
    "network": ("nic_bytes_per_s", "network card of a chip", "network_hop_s"),
    "dcn": ("dcn_bytes_per_s_per_host", "network of a host", "dcn_hop_s"),
    "compute": ("", "matrix units of a chip", ""),
}
"""Channel -> the chip's figure for one lane, what a lane is, and the figure for the latency of a hop."""

_LEG = re.compile(r"(?:([^@]+)@)?([a-z]+)(?:\*(\d+))?(?::(\d+)\s*(?:hops?)?)?")


def channel_leg(
    chip: Chip, channel: str, amount: float, *, lanes: int = 1, hops: int = 0, dtype: str = "bf16", name: str = ""
) -> TransferLeg:
    """Returns a leg over ``lanes`` of a channel of the chip; ``amount`` is FLOPs for "compute", else bytes. Raises
    InputError for an unknown channel and for fewer than one lane."""
    if channel not in CHANNELS:
        raise InputError(f"{channel!r} is no channel of a leg.{nearest(channel, CHANNELS)}")
    if lanes < 1:
        raise InputError(f"leg {channel}*{lanes} has no lane. Give 1 or more.")
    rate_field, lane_name, hop_field = CHANNELS[channel]
    return TransferLeg(
        name=name or lane_name,
        channel=channel,
        amount=amount,
        rate=known(chip, rate_field) if rate_field else peak(chip, dtype),
        lanes=lanes,
        hops=hops,
        latency_s=hops * getattr(chip, hop_field) if hop_field else 0.0,
    )


def parse_leg(text: str, chip: Chip, *, num_bytes: float, dtype: str = "bf16") -> TransferLeg:
    """Returns the leg of ``"hbm"``, ``"pcie*16"``, ``"ici*2:6hops"``, ``"15GB@ici*2"`` or ``"275GFLOP@compute"``.

    ``[AMOUNT@]CHANNEL[*LANES][:HOPS]``; the amount is the whole array where it is left out.
    """
    leg_match = _LEG.fullmatch(text.strip())
    if leg_match is None:
        raise InputError(f"leg {text!r} is not [AMOUNT@]CHANNEL[*LANES][:HOPS]. Write for example 15GB@ici*2:6hops.")
    amount_text, channel, lanes_text, hops_text = leg_match.groups()
    if channel == "compute" and amount_text is None:
        raise InputError(f"leg {text!r} needs its FLOPs. Write for example 275GFLOP@compute.")
    if amount_text is not None:
        num_bytes = parse_bytes(amount_text.strip().removesuffix("FLOPs").removesuffix("FLOP"))
    return channel_leg(chip, channel, num_bytes, lanes=int(lanes_text or 1), hops=int(hops_text or 0), dtype=dtype)


def array_bytes(text: str) -> float:
    """Returns bytes of ``"15GB"``, or of an array such as ``"bf16[8,128,8Ki]"``."""
    array_match = re.fullmatch(r"\s*([a-z]+\d*)\[([^\]]+)\]\s*", text)
    if array_match is None:
        return parse_bytes(text)
    dim_sizes = [parse_count(part.strip(), what=f"size of {text!r}") for part in array_match.group(2).split(",")]
    return math.prod(dim_sizes) * dtype_bytes(array_match.group(1))
