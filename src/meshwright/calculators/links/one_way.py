"""A torus axis whose ring is used in one direction only, and how much of an array crosses one of its links.

Source: How to Scale Your Model, exercise 3.10.
"""

from meshwright.core.dims import CollectiveKind
from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import GroupRates, KindRate, ring_link_share
from meshwright.cost.network.legs import Leg, ring_hops
from meshwright.spec.calibration import Calibration


def is_ring(legs: tuple[Leg, ...]) -> bool:
    """True if the group is one whole torus axis that wraps around."""
    return len(legs) == 1 and legs[0].level == "ici" and bool(legs[0].wraps) and legs[0].size > 1


def one_way_rates(legs: tuple[Leg, ...], calibration: Calibration | None = None) -> GroupRates:
    """Returns the rates of a ring when data goes one way round: V / w, half as fast as both ways, n - 1 hops.

    An AllToAll takes half as long as an AllGather: a block goes half way round on average. In both directions it goes a
    quarter, on twice the links. Raises InputError for a group that is no ring.
    """
    if not is_ring(legs):
        raise InputError(
            "--one-way needs a ring: one torus axis that wraps around, such as an axis of 16 of v5e:16x16."
        )
    leg, share, hop_s = legs[0], 1.0, legs[0].hop_s
    if calibration is not None:
        share, hop_s = calibration.efficiency.ici, calibration.hop_s.get("ici", hop_s)
    each, floor = leg.sharing / (leg.bytes_per_s * share), ring_hops(leg.size) * hop_s
    once = KindRate(each, floor, level="ici")
    return GroupRates(
        size=leg.size,
        kinds={
            "all_gather": once,
            "reduce_scatter": once,
            "all_reduce": KindRate(2 * each, 2 * floor, level="ici"),
            "all_to_all": KindRate(each / 2, floor, level="ici"),
            "permute": KindRate(each, hop_s, level="ici"),
        },
    )


def link_bytes(kind: CollectiveKind, num_bytes: float, legs: tuple[Leg, ...], *, two_way: bool) -> float | None:
    """Returns bytes of the array that cross one link of a ring in one direction; None for a group that is no ring."""
    if not is_ring(legs):
        return None
    return num_bytes if kind == "permute" else num_bytes * ring_link_share(kind, legs[0].size, two_way=two_way)
