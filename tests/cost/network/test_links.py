"""The links of every kind of cluster, and what levels with other figures change."""

import pytest

from meshwright.core.errors import InputError
from meshwright.cost.network.collectives import group_rates
from meshwright.cost.network.links import physical_links
from meshwright.cost.network.placement import physical_placement, place_axes
from meshwright.spec.chip import chip
from meshwright.spec.cluster import NetworkLevel, make_cluster, parse_cluster

# rack and pod as in How Meta trains Llama 3: nodes of a rack, racks of a pod, pods with a seventh of the links
LLAMA = make_cluster(
    chip("h100"),
    (8, 2, 192, 8),
    levels=(
        NetworkLevel(name="domain"),
        NetworkLevel(name="nodes"),
        NetworkLevel(name="racks", hop_s=7e-6),
        NetworkLevel(name="pods", oversubscription=7, hop_s=1e-5),
    ),
)


def test_figures_of_the_chip_and_of_the_levels():
    links = physical_links(LLAMA)
    assert [(link.name, link.level, link.size) for link in links] == [
        ("domain", "nvlink", 8), ("nodes", "network", 2), ("racks", "network", 192), ("pods", "network", 8)
    ]  # fmt: skip
    assert [link.bytes_per_s for link in links] == [450e9, 50e9, 50e9, pytest.approx(50e9 / 7)]
    assert [link.hop_s for link in links] == [1e-6, 5e-6, 7e-6, 1e-5]
    plain = physical_links(parse_cluster("h100:8x2x192x8"))
    assert [link.bytes_per_s for link in plain] == [450e9, 50e9, 50e9, 50e9]


def test_levels_alike_are_one_level():
    """Splitting a network into racks and pods of the same rate changes nothing but the hops of odd sizes."""
    for axes in (("data",), ("fsdp",), ("data", "fsdp"), ("tensor",)):
        mesh = {"data": 64, "fsdp": 8, "tensor": 4}
        flat, deep = (place_axes(parse_cluster(t), mesh)[0] for t in ("h100:8x256", "h100:8x2x16x8"))
        one, other = group_rates(flat, axes), group_rates(deep, axes)
        for kind in one.kinds:
            assert other[kind].seconds_per_byte == pytest.approx(one[kind].seconds_per_byte)
            assert other[kind].floor_s == pytest.approx(one[kind].floor_s)


def test_the_slowest_level_binds():
    """Bytes that one chip carries through each level, written out: 8 x 2 x 192 chips share what leaves a pod."""
    placed = physical_placement(LLAMA)
    whole = group_rates(placed, ("domain", "nodes", "racks", "pods"))
    assert whole["all_gather"].seconds_per_byte == pytest.approx((1 / 8 - 1 / 24576) / 50e9)
    assert whole["all_gather"].level == "network"
    pods = group_rates(placed, ("pods",))
    assert pods["all_gather"].seconds_per_byte == pytest.approx(7 / 8 / (50e9 / 7))
    assert pods.latency_s == pytest.approx(3 * 1e-5)
    # two nodes and eight pods: a pod's links carry half of what a node's do, at a seventh of the rate
    both = group_rates(placed, ("nodes", "pods"))
    assert both["all_gather"].seconds_per_byte == pytest.approx(7 * (1 / 2 - 1 / 16) / 50e9)
    assert both["all_to_all"].seconds_per_byte == pytest.approx(7 * (1 - 2 / 16) / 16 / 50e9)


def test_minor_axes_fill_the_inner_levels_and_one_axis_may_span_several():
    (placed,) = place_axes(LLAMA, {"data": 8, "fsdp": 96, "context": 4, "tensor": 8})
    assert placed.describe() == {
        "data": "pods (8)",
        "fsdp": "96 of racks (192)",
        "context": "nodes (2) x 2 of racks (192)",
        "tensor": "domain (8)",
    }


def test_torus_slices_and_machine():
    links = physical_links(parse_cluster("2*v5p:4x4x8_twisted"))
    assert [(link.name, link.twisted) for link in links] == [("x", True), ("y", True), ("z", False), ("slices", False)]
    assert [link.level for link in physical_links(parse_cluster("cpu:4"))] == ["host"]
    with pytest.raises(InputError, match="nic_bytes_per_s of h100-pcie is not known"):
        physical_links(parse_cluster("h100-pcie:2x2"))
