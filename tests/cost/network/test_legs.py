"""Twisted tori: which rings close, and what an AllToAll gains, against the shortest ways counted one by one."""

import itertools
from collections import deque

import pytest

from meshwright.calculators.links.routes import torus_hops
from meshwright.cost.network.collectives import collective_time, group_rates
from meshwright.cost.network.legs import TWIST_GAIN, group_legs, ring_hops, tree_hops
from meshwright.cost.network.placement import physical_placement, place_mesh
from meshwright.spec.cluster import parse_cluster
from tests.speed import took


def neighbours(cluster, chip):
    """By the wiring: leaving a short axis of a twisted torus arrives k further along the longer ones."""
    longest, shift = max(cluster.shape), min(cluster.shape)
    for axis, step in itertools.product(range(3), (1, -1)):
        there = list(chip)
        there[axis] += step
        if not 0 <= there[axis] < cluster.shape[axis]:
            there[axis] %= cluster.shape[axis]
            if cluster.twisted and cluster.shape[axis] < longest:
                for other in range(3):
                    if cluster.shape[other] == longest:
                        there[other] = (there[other] + shift) % longest
        yield tuple(there)


def distances(cluster):
    """Chip -> links on the shortest way from chip 0, 0, 0, by a search over the wiring."""
    found, waiting = {(0, 0, 0): 0}, deque([(0, 0, 0)])
    while waiting:
        here = waiting.popleft()
        for there in neighbours(cluster, here):
            if there not in found:
                found[there] = found[here] + 1
                waiting.append(there)
    return found


@pytest.mark.parametrize(
    ("shape", "gain"), [("4x4x8", "k x k x 2k"), ("8x4x8", "k x 2k x 2k"), ("8x8x16", "k x k x 2k")]
)
def test_the_gain_is_a_little_below_what_the_wiring_allows(shape, gain):
    """All six links of a twisted torus are used alike; of the plain one those of the longest axis bind."""
    plain, twisted = parse_cluster(f"v5p:{shape}"), parse_cluster(f"v5p:{shape}_twisted")
    found = distances(twisted)
    average = sum(found.values()) / len(found)
    ideal = (6 / average) / (2 / (max(plain.shape) / 4))
    assert 0.9 * ideal < TWIST_GAIN[gain] < ideal
    rates = [group_rates(physical_placement(one), ("x", "y", "z")) for one in (plain, twisted)]
    exchange = [collective_time("all_to_all", 1e12, one) for one in rates]
    assert exchange[0] / exchange[1] == pytest.approx(TWIST_GAIN[gain])
    assert rates[0]["all_gather"].seconds_per_byte == rates[1]["all_gather"].seconds_per_byte


@pytest.mark.parametrize("text", ["v5p:4x4x8_twisted", "v5p:8x4x8_twisted", "v5p:4x8x12"])
def test_shortest_ways(text):
    cluster = parse_cluster(text)
    assert torus_hops(cluster, (0, 0, 0)) == distances(cluster)


def test_a_twisted_axis_closes_only_with_the_longer_ones():
    placed = physical_placement(parse_cluster("v5p:4x4x8_twisted"))
    wraps = {axes: [leg.wraps for leg in group_legs(placed, axes)] for axes in ("x", "z", "xy", "xz", "xyz")}
    assert wraps == {"x": [False], "z": [True], "xy": [False, False], "xz": [True, True], "xyz": [True] * 3}
    gains = {axes: {leg.twist_gain for leg in group_legs(placed, axes)} for axes in ("z", "xz", "xyz")}
    assert gains == {"z": {1.0}, "xz": {1.0}, "xyz": {1.63}}


def test_meshes_on_a_twisted_torus():
    """Four chips along a short axis are a line there and a ring on the plain torus."""
    mesh = {"data": 4, "fsdp": 8, "tensor": 4}
    for text, closed in (("v5p:4x8x4", True), ("v5p:4x8x4_twisted", False)):
        placed = place_mesh(parse_cluster(text), mesh)
        (leg,) = group_legs(placed, ("tensor",))
        assert leg.wraps == closed


def test_more_axes_than_the_torus_has_are_placed_at_once():
    """Not by every order of ten axes."""
    with took() as cpu:
        placed = place_mesh(parse_cluster("v5p:8x8x16"), dict.fromkeys("abcdefghij", 2))
    assert len(placed.mesh) == 10
    assert cpu.yardsticks < 10


def test_hops_of_rings_and_trees():
    assert [(ring_hops(n), tree_hops(n)) for n in (1, 2, 3, 8, 9, 256)] == [
        (0, 0), (1, 1), (2, 2), (7, 3), (8, 4), (255, 8)
    ]  # fmt: skip
