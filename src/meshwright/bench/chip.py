"""Which chip of the catalogue a device of JAX is."""

import re

from meshwright.core.errors import InputError
from meshwright.spec.chip import Chip, chip

KINDS: tuple[tuple[str, str], ...] = (
    (r"\bgb300\b", "gb300"),
    (r"\bgb200\b", "gb200"),
    (r"\bb300\b", "b300"),
    (r"\bb200\b", "b200"),
    (r"\bh200\b", "h200"),
    (r"\bh800\b", "h800"),
    (r"\bh100 pcie\b", "h100-pcie"),
    (r"\bh100\b", "h100"),
    (r"\ba100\b.*\b40gb\b", "a100-40gb"),
    (r"\ba100\b", "a100"),
    (r"\bv100\b", "v100"),
    (r"\bp100\b", "p100"),
    (r"\bk40m?\b", "k40"),
    (r"\btpu ?7x\b|\btpu v7x?\b", "tpu7x"),
    (r"\btpu v6( lite|e)\b", "v6e"),
    (r"\btpu v5( lite|e)\b", "v5e"),
    (r"\btpu v5p?$", "v5p"),
    (r"\btpu v4\b", "v4p"),
    (r"\btpu v3\b", "v3"),
    (r"\btpu v2\b", "v2"),
    (r"\bmi355x\b", "mi355x"),
    (r"\bmi325x\b", "mi325x"),
    (r"\bmi300x\b", "mi300x"),
    (r"\bmi250x\b", "mi250x"),
    (r"^cpu$", "cpu"),
)
"""What a device calls itself, in small letters, and the chip; the first that is found in it counts."""

OTHERS = r"\bnvl\b|\bv4 lite\b|\bh100 96gb\b"
"""Boards whose name holds that of a chip that they are not: other memory or other clocks."""


def chip_of_kind(device_kind: str) -> Chip:
    """The catalogue's chip; an InputError for a device that is not in it."""
    # "A100-SXM4-80GB": what stands between the words does not matter.
    words = device_kind.strip().lower().replace("-", " ").replace("_", " ")
    if not re.search(OTHERS, words):
        for pattern, name in KINDS:
            if re.search(pattern, words):
                return chip(name)
    raise InputError(
        f"the devices call themselves {device_kind!r}, which is no chip of the catalogue. Name the chip that they are "
        f"like: --chip h200 (see meshwright show chips)."
    )
