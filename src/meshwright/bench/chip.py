"""Which chip of the catalogue a device of JAX is."""

import re

from meshwright.core.errors import InputError
from meshwright.spec.chip import Chip, chips


def chip_of_kind(device_kind: str) -> Chip:
    """The chip whose ``device_kind`` matches most of the text; an InputError for a device of none."""
    # "A100-SXM4-80GB": what stands between the words does not matter.
    words = device_kind.strip().lower().replace("-", " ").replace("_", " ")
    known = (one for one in chips().values() if one.device_kind)
    found = [(match[0], one) for one in known if (match := re.search(one.device_kind, words))]
    if found:
        # "h100 pcie" is longer than "h100", which matches too
        return max(found, key=lambda pair: len(pair[0]))[1]
    raise InputError(
        f"the devices call themselves {device_kind!r}, which is no chip of the catalogue. Name the chip that they are "
        f"like: --chip h200 (see meshwright show chips)."
    )
