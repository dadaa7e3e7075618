"""Legs of groups on torus axes, as tests write them."""

from meshwright.cost.network.legs import Leg


def ring(size, link_bytes_per_s, *, wraps=True, sharing=1):
    """Returns a leg on one torus axis: n/2 hops where it wraps, else n - 1."""
    hops = sharing * (size / 2 * wraps + (size - 1) * (1 - wraps))
    return Leg(level="ici", size=size, bytes_per_s=link_bytes_per_s, wraps=wraps, sharing=sharing, hops=hops)
