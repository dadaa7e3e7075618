"""Transfers from one place to another over one or several legs: which is the slowest, and when the bytes arrive.

A leg is a channel that the bytes pass: host links (PCIe), chip links, the network, memory, or a calculation on what
arrived. Legs that pass the bytes on as they come work at the same time (pipelined): the slowest sets the pace.
Source: How to Scale Your Model, exercises 2.5 and 2.6.
"""

import math
import re

import msgspec

from meshwright.core.errors import InputError, nearest
from meshwright.core.units import parse_bytes, parse_count
from meshwright.cost.formulas.roofline import dtype_bytes
from meshwright.spec.chip import Chip, known, peak


class TransferLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One leg: ``amount`` (bytes; FLOPs of a calculation) over ``lanes`` equal lanes of ``rate`` a second each."""

    name: str
    channel: str
    amount: float
    rate: float
    lanes: int = 1
    hops: int = 0
    hop_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """When the first byte is through: hops x the latency of a hop."""
        return self.hops * self.hop_s

    @property
    def send_s(self) -> float:
        """Seconds for all of it once it flows."""
        return self.amount / (self.rate * self.lanes)

    @property
    def alone_s(self) -> float:
        """This leg by itself, from the start to its last byte."""
        return self.latency_s + self.send_s


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Legs in the order in which the bytes pass them."""

    legs: tuple[TransferLeg, ...]

    def __post_init__(self) -> None:
        """Refuse a transfer that goes nowhere."""
        if not self.legs:
            raise InputError("a transfer needs a leg. Give --from and --to, or a --leg such as hbm.")

    @property
    def first_byte_s(self) -> float:
        """When the first byte arrives at the end: the latencies of all legs."""
        return sum(leg.latency_s for leg in self.legs)

    @property
    def pipelined_s(self) -> float:
        """When the last byte arrives with all legs at work at once: first byte + the slowest leg."""
        return self.first_byte_s + self.slowest.send_s

    @property
    def in_turn_s(self) -> float:
        """When it arrives if each leg waits for the whole of the one before: the sum."""
        return sum(leg.alone_s for leg in self.legs)

    @property
    def slowest(self) -> TransferLeg:
        """The leg that sets the pace."""
        return max(self.legs, key=lambda leg: leg.send_s)

    @property
    def bound_by(self) -> str:
        """ "latency" where the hops take longer than the slowest leg, else that leg's channel."""
        return "latency" if self.first_byte_s > self.slowest.send_s else self.slowest.channel


class _Channel(msgspec.Struct, frozen=True):
    """Figure of the chip for one lane, what a lane is, and the figure for the latency of a hop."""

    figure: str
    lane: str
    hop: str | None = None


CHANNELS: dict[str, _Channel] = {
    "hbm": _Channel("hbm_bytes_per_s", "memory of a chip"),
    "vmem": _Channel("vmem_bytes_per_s", "on-chip memory of a chip"),
    "pcie": _Channel("pcie_bytes_per_s", "PCIe of a chip"),
    "ici": _Channel("ici_link_bytes_per_s", "one link, one way", "ici_hop_s"),
    "nvlink": _Channel("nvlink_bytes_per_s", "port of a chip, one way", "nvlink_hop_s"),
    "network": _Channel("nic_bytes_per_s", "network card of a chip", "network_hop_s"),
    "dcn": _Channel("dcn_bytes_per_s_per_host", "network of a host", "dcn_hop_s"),
    "compute": _Channel("", "matrix units of a chip"),
}
"""Word of a leg -> where one lane's rate comes from. ``bound_by`` uses the same words."""

_LEG = re.compile(r"(?:([^@]+)@)?([a-z]+)(?:\*(\d+))?(?::(\d+)\s*(?:hops?)?)?")


def channel_leg(
    chip: Chip,
    channel: str,
    amount: float,
    *,
    lanes: int = 1,
    hops: int = 0,
    dtype: str = "bf16",
    name: str | None = None,
) -> TransferLeg:
    """A leg over ``lanes`` of a channel of the chip; ``amount`` is FLOPs for "compute" and bytes for all others."""
    row = CHANNELS.get(channel)
    if row is None:
        raise InputError(f"{channel!r} is no channel of a leg.{nearest(channel, CHANNELS)}")
    if lanes < 1:
        raise InputError(f"leg {channel}*{lanes} has no lane. Give 1 or more.")
    return TransferLeg(
        name=name or row.lane,
        channel=channel,
        amount=amount,
        rate=known(chip, row.figure) if row.figure else peak(chip, dtype),
        lanes=lanes,
        hops=hops,
        hop_s=getattr(chip, row.hop) if row.hop else 0.0,
    )


def parse_leg(text: str, chip: Chip, *, num_bytes: float, dtype: str = "bf16") -> TransferLeg:
    """The leg of ``"hbm"``, ``"pcie*16"``, ``"ici*2:6hops"``, ``"15GB@ici*2"`` or ``"275GFLOP@compute"``.

    ``[AMOUNT@]CHANNEL[*LANES][:HOPS]``; the amount is the whole array where it is left out.
    """
    match = _LEG.fullmatch(text.strip())
    if match is None:
        raise InputError(f"leg {text!r} is not [AMOUNT@]CHANNEL[*LANES][:HOPS]. Write for example 15GB@ici*2:6hops.")
    amount, channel, lanes, hops = match.groups()
    if channel == "compute" and amount is None:
        raise InputError(f"leg {text!r} needs its FLOPs. Write for example 275GFLOP@compute.")
    return channel_leg(
        chip,
        channel,
        num_bytes if amount is None else _amount(amount),
        lanes=int(lanes or 1),
        hops=int(hops or 0),
        dtype=dtype,
    )


def _amount(text: str) -> float:
    """Bytes or FLOPs: ``15GB``, ``275GFLOP``, ``2.7e11``."""
    return parse_bytes(text.strip().removesuffix("FLOPs").removesuffix("FLOP"))


def array_bytes(text: str) -> float:
    """Bytes of ``"15GB"``, or of an array ``"bf16[8,128,8192]"`` (sizes such as 128Ki are read)."""
    match = re.fullmatch(r"\s*([a-z]+\d*)\[([^\]]+)\]\s*", text)
    if match is None:
        return parse_bytes(text)
    sizes = [parse_count(part.strip(), what=f"size of {text!r}") for part in match.group(2).split(",")]
    return math.prod(sizes) * dtype_bytes(match.group(1))
