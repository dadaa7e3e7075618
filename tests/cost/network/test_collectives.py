"""Collective times: the ring formulas, levels, placements, and scalar == array."""

import math

import numpy as np
import pytest

from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import (
    collective_bound_by,
    collective_time,
    group_rates,
    leg_rates,
    received_share,
    ring_link_share,
)
from meshwright.cost.network.legs import group_legs
from meshwright.cost.network.placement import physical_placement, place_axes
from meshwright.spec.calibration import Calibration, CollectiveRate, Efficiency
from meshwright.spec.chip import known
from meshwright.spec.cluster import parse_cluster
from tests.torus_legs import ring


def test_what_binds_a_collective():
    rates = leg_rates([ring(4, 4.5e10)])
    assert collective_bound_by("all_gather", 256, rates) == "latency"
    assert collective_bound_by("all_gather", 2 * 1024 * 4096, rates) == "ici"


def test_kinds_in_units_of_an_all_gather():
    ringed, line = leg_rates([ring(16, 1e11)]), leg_rates([ring(16, 1e11, wraps=False)])
    for rates, exchange in ((ringed, 0.25), (line, 0.5)):
        once = rates["all_gather"].seconds_per_byte
        assert rates["reduce_scatter"].seconds_per_byte == once
        assert rates["all_reduce"].seconds_per_byte == 2 * once
        assert rates["all_to_all"].seconds_per_byte == pytest.approx(exchange * once)


def test_shares_of_a_link():
    assert ring_link_share("all_gather", 4, two_way=False) * 64**2 == 3072
    assert ring_link_share("all_to_all", 4, two_way=False) * 64**2 == 1536
    assert ring_link_share("all_to_all", 4, two_way=True) / ring_link_share("all_gather", 4, two_way=True) == 0.25


def test_scalar_equals_array():
    sizes, wraps = np.array([1, 2, 4, 16]), np.array([False, False, True, True])
    many = leg_rates([ring(sizes, 9e10, wraps=wraps, sharing=np.array([1, 2, 1, 4]))])
    volume = np.array([1e3, 1e6, 1e9, 1e9])
    for i, (size, wrap, share) in enumerate(zip([1, 2, 4, 16], wraps.tolist(), [1, 2, 1, 4], strict=True)):
        one = leg_rates([ring(size, 9e10, wraps=wrap, sharing=share)])
        for kind in COLLECTIVES:
            array = np.broadcast_to(collective_time(kind, volume, many), 4)
            assert array[i] == pytest.approx(collective_time(kind, float(volume[i]), one), rel=1e-15)
    assert np.broadcast_to(collective_time("all_reduce", volume, many), 4)[0] == 0.0


def test_switched_domain_then_network():
    (placed,) = place_axes(parse_cluster("h100:8x4"), {"data": 2, "fsdp": 4, "tensor": 4})
    assert [link.parts for link in placed.links] == [(("fsdp", 2), ("tensor", 4)), (("data", 2), ("fsdp", 2))]
    tensor = group_rates(placed, ("tensor",))
    assert tensor.level == "nvlink"
    assert tensor["all_gather"].seconds_per_byte == pytest.approx(0.75 / 450e9)
    fsdp = group_rates(placed, ("fsdp",))
    assert fsdp.level == "network"
    # two members per domain, each fetching half of what crosses the network
    assert fsdp["all_gather"].seconds_per_byte == pytest.approx(0.5 / 2 / 50e9)
    assert fsdp["permute"].seconds_per_byte == pytest.approx(1 / 50e9)


def test_slices_take_the_outermost_factor_over_dcn():
    cluster = parse_cluster("4*v5e:16x16")
    placed = place_axes(cluster, {"data": 4, "fsdp": 64, "tensor": 4})[0]
    data = group_rates(placed, ("data",))
    assert data.level == "dcn"
    assert data["all_gather"].seconds_per_byte == pytest.approx(0.75 / 3.125e9)
    assert group_rates(placed, ("fsdp",)).level == "ici"
    wider = place_axes(cluster, {"data": 16, "fsdp": 16, "tensor": 4})[0]
    both_levels = group_rates(wider, ("data",))
    assert (both_levels.size, both_levels.level) == (16, "dcn")
    # the four members in a slice share the crossing
    assert both_levels["all_gather"].seconds_per_byte == pytest.approx(0.75 / 4 / 3.125e9)
    assert group_rates(wider, ("data", "fsdp")).level == "ici"


def test_the_named_mesh_on_a_whole_pod():
    cluster = parse_cluster("v5p:16x20x28")
    mesh = {"data": 35, "fsdp": 32, "context": 2, "tensor": 4}
    found = place_axes(cluster, mesh)
    assert 1 <= len(found) <= 12
    for placed in found:
        check_covers(placed, mesh)
        data = [(link.size, factor) for link in placed.links for axis, factor in link.parts if axis == "data"]
        assert data == [(20, 5), (28, 7)]
        whole = group_rates(placed, tuple(mesh))
        assert whole.size == 8960
        assert whole["all_gather"].seconds_per_byte == pytest.approx(1 / (3 * 1.8e11))


def check_covers(placed, mesh):
    for link in placed.links:
        assert math.prod(factor for _, factor in link.parts) == link.size
    for axis, size in mesh.items():
        factors = [factor for link in placed.links for name, factor in link.parts if name == axis]
        assert math.prod(factors) == size


@pytest.mark.parametrize("text", ["v5p:4x4x8", "v5e:4x4", "v5e:16x16", "v5p:2x2x4", "h100:8x4", "cpu:8", "2*v5p:4x4x4"])
def test_every_placement_uses_every_chip_once(text):
    cluster = parse_cluster(text)
    n = cluster.num_chips.bit_length() - 1
    for tensor in range(n + 1):
        for context in range(n + 1 - tensor):
            mesh = {"data": 2 ** (n - tensor - context), "context": 2**context, "tensor": 2**tensor}
            for placed in place_axes(cluster, mesh):
                check_covers(placed, mesh)
                assert set(placed.describe()) == set(mesh)


def test_whole_axes_come_first():
    first = place_axes(parse_cluster("v5p:16x16x32"), {"fsdp": 512, "tensor": 16})[0]
    assert first.describe() == {"fsdp": "x (16) x z (32)", "tensor": "y (16)"}
    assert group_rates(first, ("tensor",))["all_gather"].seconds_per_byte == pytest.approx(1 / 1.8e11)
    assert group_rates(first, ("fsdp",))["all_gather"].seconds_per_byte == pytest.approx(1 / 3.6e11)


def test_legs_of_a_shared_axis():
    """On one ring of 16: tensor 4 inside is a line, fsdp 4 outside a ring whose links four groups share."""
    placed = place_axes(parse_cluster("v5e:16x1"), {"fsdp": 4, "tensor": 4})[0]
    (tensor,), (fsdp,), (both,) = (group_legs(placed, axes) for axes in (("tensor",), ("fsdp",), ("fsdp", "tensor")))
    assert (tensor.wraps, tensor.sharing, tensor.hops) == (False, 1, 3)
    assert (fsdp.wraps, fsdp.sharing, fsdp.hops) == (True, 4, 8)
    assert (both.wraps, both.sharing, both.size) == (True, 1, 16)
    middle = place_axes(parse_cluster("v5e:16x1"), {"data": 2, "fsdp": 2, "tensor": 4})[0]
    (leg,) = group_legs(middle, ("fsdp",))
    assert (leg.wraps, leg.sharing, leg.hops) == (False, 4, 4)
    (around,) = group_legs(middle, ("data", "tensor"))
    assert (around.wraps, around.sharing, around.size) == (True, 2, 8)


def test_axes_of_size_one_cost_nothing():
    placed = place_axes(parse_cluster("v5e:4x4"), {"data": 1, "fsdp": 16, "tensor": 1})[0]
    assert placed.describe()["tensor"] == "1 chip"
    assert collective_time("all_reduce", 1e9, group_rates(placed, ("tensor", "data"))) == 0.0


def test_refusals():
    cluster = parse_cluster("v5e:4x4")
    with pytest.raises(InputError, match="mesh fsdp 8 has 8 devices and v5e:4x4 16 chips"):
        place_axes(cluster, {"fsdp": 8})
    placed = place_axes(cluster, {"fsdp": 16})[0]
    with pytest.raises(InputError, match=r"'fdsp' is not an axis of the mesh. Did you mean 'fsdp'"):
        group_rates(placed, ("fdsp",))
    with pytest.raises(InputError, match="no rate of the collective 'gather'"):
        group_rates(placed, ("fsdp",))["gather"]
    with pytest.raises(InputError, match="give a calibration"):
        group_rates(place_axes(parse_cluster("cpu:4"), {"fsdp": 4})[0], ("fsdp",))
    with pytest.raises(InputError, match="nic_bytes_per_s of trn3 is not known"):
        place_axes(parse_cluster("trn3:4x2"), {"fsdp": 8})


def test_this_machine_takes_its_rates_from_a_calibration():
    measured = Calibration(
        name="here",
        chip="cpu",
        collectives=(
            CollectiveRate(kind="all_gather", group_size=4, latency_s=1e-4, bytes_per_s=2e9),
            CollectiveRate(kind="all_reduce", group_size=4, latency_s=2e-4, bytes_per_s=1e9),
        ),
    )
    placed = place_axes(parse_cluster("cpu:8"), {"data": 2, "fsdp": 4})[0]
    rates = group_rates(placed, ("fsdp",), measured)
    assert collective_time("all_gather", 1e6, rates) == pytest.approx(1e-4 + 0.75e6 / 2e9)
    assert collective_time("all_reduce", 1e6, rates) == pytest.approx(2e-4 + 1.5e6 / 1e9)
    assert received_share("all_to_all", 4) == pytest.approx(3 / 16)
    with pytest.raises(InputError, match="no rate of the collective 'all_to_all'"):
        rates["all_to_all"]


def test_efficiency_slows_its_own_level():
    placed = place_axes(parse_cluster("v5e:16x16"), {"fsdp": 256})[0]
    slow = Calibration(name="seen", chip="v5e", efficiency=Efficiency(ici=0.5), hop_s={"ici": 3e-6})
    sheet, seen = group_rates(placed, ("fsdp",)), group_rates(placed, ("fsdp",), slow)
    assert seen["all_gather"].seconds_per_byte == pytest.approx(2 * sheet["all_gather"].seconds_per_byte)
    assert seen.latency_s == pytest.approx(3 * sheet.latency_s)


@pytest.mark.parametrize("text", ["v5p:4x4x8", "v5p:8x8x12", "v5e:16x16", "v5e:16x8"])
def test_an_all_to_all_against_every_pair_of_a_torus(text):
    """Bytes on the links of each axis if every chip sends every other its part the shortest way, axis after axis."""
    cluster = parse_cluster(text)
    n, link = cluster.num_chips, known(cluster.chip, "ici_link_bytes_per_s")
    busiest = 0.0
    for size, wraps in zip(cluster.shape, cluster.wraps, strict=True):
        steps = [abs(a - b) for a in range(size) for b in range(size)]
        hops = sum(min(s, size - s) if wraps else s for s in steps) / size**2
        # n^2 pairs of 1/n^2 of the array, over two directions of as many links as chips (a line: the gaps)
        links = 2 * n if wraps else 2 * n * (size - 1) / size
        busiest = max(busiest, hops / links / link)
    rates = group_rates(physical_placement(cluster), physical_placement(cluster).mesh)
    if all(cluster.wraps):
        assert rates["all_to_all"].seconds_per_byte == pytest.approx(busiest)
    else:
        # lines are priced one way, as the convention has it: between the average link and twice the busiest one
        assert busiest < rates["all_to_all"].seconds_per_byte < 4 * busiest
