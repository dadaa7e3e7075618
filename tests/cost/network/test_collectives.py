"""Collective times: the ring formulas, levels, placements, and scalar == array."""

import itertools
import math

import numpy as np
import pytest

from meshwright.algebra.rewrites.torus import group_legs as scattered_legs
from meshwright.algebra.rewrites.torus import parts_of
from meshwright.core.dims import COLLECTIVES
from meshwright.core.errors import InputError
from meshwright.cost.network import collectives
from meshwright.cost.network.legs import group_legs
from meshwright.cost.network.placement import physical_placement, place_axes, place_mesh
from meshwright.spec.calibration import Calibration, CollectiveRate, Efficiency
from meshwright.spec.chip import known
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.strategy import Strategy
from tests.torus_legs import ring


def test_what_binds_a_collective():
    rates = collectives.leg_rates([ring(4, 4.5e10)])
    assert collectives.collective_bound_by("all_gather", 256, rates) == "latency"
    assert collectives.collective_bound_by("all_gather", 2 * 1024 * 4096, rates) == "ici"


def test_kinds_in_units_of_an_all_gather():
    """AllToAll on a line of 16: a quarter of the array over its middle link, where an AllGather sends 15/16."""
    ringed, line = collectives.leg_rates([ring(16, 1e11)]), collectives.leg_rates([ring(16, 1e11, wraps=False)])
    for rates, exchange in ((ringed, 1 / 4), (line, 1 / 4 / (15 / 16))):
        once = rates["all_gather"].seconds_per_byte
        assert rates["reduce_scatter"].seconds_per_byte == once
        assert rates["all_reduce"].seconds_per_byte == 2 * once
        assert rates["all_to_all"].seconds_per_byte == pytest.approx(exchange * once)


def test_shares_of_a_link():
    assert collectives.ring_link_share("all_gather", 4, two_way=False) * 64**2 == 3072
    assert collectives.ring_link_share("all_to_all", 4, two_way=False) * 64**2 == 1536


def test_scalar_equals_array():
    sizes, wraps = np.array([1, 2, 4, 16]), np.array([False, False, True, True])
    many = collectives.leg_rates([ring(sizes, 9e10, wraps=wraps, sharing=np.array([1, 2, 1, 4]))])
    volume = np.array([1e3, 1e6, 1e9, 1e9])
    for i, (size, wrap, share) in enumerate(zip([1, 2, 4, 16], wraps.tolist(), [1, 2, 1, 4], strict=True)):
        one = collectives.leg_rates([ring(size, 9e10, wraps=wrap, sharing=share)])
        for kind in COLLECTIVES:
            array = np.broadcast_to(collectives.collective_time(kind, volume, many), 4)
            assert array[i] == pytest.approx(collectives.collective_time(kind, float(volume[i]), one), rel=1e-15)
    assert np.broadcast_to(collectives.collective_time("all_reduce", volume, many), 4)[0] == 0.0


def test_switched_domain_then_network():
    (placed,) = place_axes(parse_cluster("h100:8x4"), {"data": 2, "fsdp": 4, "tensor": 4})
    assert [link.parts for link in placed.links] == [(("fsdp", 2), ("tensor", 4)), (("data", 2), ("fsdp", 2))]
    tensor = collectives.group_rates(placed, ("tensor",))
    assert tensor["all_gather"].level == "nvlink"
    assert tensor["all_gather"].seconds_per_byte == pytest.approx(0.75 / 450e9)
    fsdp = collectives.group_rates(placed, ("fsdp",))
    assert fsdp["all_gather"].level == "network"
    # two members per domain, each fetching half of what crosses the network
    assert fsdp["all_gather"].seconds_per_byte == pytest.approx(0.5 / 2 / 50e9)
    assert fsdp["permute"].seconds_per_byte == pytest.approx(1 / 50e9)


def test_slices_take_the_outermost_factor_over_dcn():
    cluster = parse_cluster("4*v5e:16x16")
    placed = place_axes(cluster, {"data": 4, "fsdp": 64, "tensor": 4})[0]
    data = collectives.group_rates(placed, ("data",))
    assert data["all_gather"].level == "dcn"
    assert data["all_gather"].seconds_per_byte == pytest.approx(0.75 / 3.125e9)
    assert collectives.group_rates(placed, ("fsdp",))["all_gather"].level == "ici"
    wider = place_axes(cluster, {"data": 16, "fsdp": 16, "tensor": 4})[0]
    both_levels = collectives.group_rates(wider, ("data",))
    assert (both_levels.size, both_levels["all_gather"].level) == (16, "dcn")
    # the four members in a slice share the crossing
    assert both_levels["all_gather"].seconds_per_byte == pytest.approx(0.75 / 4 / 3.125e9)
    assert collectives.group_rates(wider, ("data", "fsdp"))["all_gather"].level == "ici"


def test_the_named_mesh_on_a_whole_pod():
    cluster = parse_cluster("v5p:16x20x28")
    mesh = {"data": 35, "fsdp": 32, "context": 2, "tensor": 4}
    found = place_axes(cluster, mesh)
    assert 1 <= len(found) <= 12
    for placed in found:
        check_covers(placed, mesh)
        data = [(link.size, factor) for link in placed.links for axis, factor in link.parts if axis == "data"]
        assert data == [(20, 5), (28, 7)]
        whole = collectives.group_rates(placed, tuple(mesh))
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
    assert collectives.group_rates(first, ("tensor",))["all_gather"].seconds_per_byte == pytest.approx(1 / 1.8e11)
    assert collectives.group_rates(first, ("fsdp",))["all_gather"].seconds_per_byte == pytest.approx(1 / 3.6e11)


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
    assert collectives.collective_time("all_reduce", 1e9, collectives.group_rates(placed, ("tensor", "data"))) == 0.0


def test_refusals():
    cluster = parse_cluster("v5e:4x4")
    with pytest.raises(InputError, match="mesh fsdp 8 has 8 devices, but v5e:4x4 has 16 chips"):
        place_axes(cluster, {"fsdp": 8})
    placed = place_axes(cluster, {"fsdp": 16})[0]
    with pytest.raises(InputError, match=r"'fdsp' is not an axis of the mesh. Did you mean 'fsdp'"):
        collectives.group_rates(placed, ("fdsp",))
    with pytest.raises(InputError, match="no rate of gather over"):
        collectives.group_rates(placed, ("fsdp",))["gather"]
    with pytest.raises(InputError, match="give a calibration"):
        collectives.group_rates(place_axes(parse_cluster("cpu:4"), {"fsdp": 4})[0], ("fsdp",))
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
    rates = collectives.group_rates(placed, ("fsdp",), measured)
    assert collectives.collective_time("all_gather", 1e6, rates) == pytest.approx(1e-4 + 0.75e6 / 2e9)
    assert collectives.collective_time("all_reduce", 1e6, rates) == pytest.approx(2e-4 + 1.5e6 / 1e9)
    assert collectives.received_share("all_to_all", 4) == pytest.approx(3 / 16)
    with pytest.raises(InputError, match="no rate of all_to_all over"):
        rates["all_to_all"]


def test_efficiency_slows_its_own_level():
    placed = place_axes(parse_cluster("v5e:16x16"), {"fsdp": 256})[0]
    slow = Calibration(name="seen", chip="v5e", efficiency=Efficiency(ici=0.5), hop_s={"ici": 3e-6})
    sheet, seen = collectives.group_rates(placed, ("fsdp",)), collectives.group_rates(placed, ("fsdp",), slow)
    assert seen["all_gather"].seconds_per_byte == pytest.approx(2 * sheet["all_gather"].seconds_per_byte)
    assert seen.latency_s == pytest.approx(3 * sheet.latency_s)


def busiest_link(size, wraps):
    """Sends a block of 1/n^2 from every device to every other, the shortest way round, link by link."""
    carried = np.zeros((size, 2))
    for source in range(size):
        for target in range(size):
            ahead = (target - source) % size if wraps else target - source
            back = (source - target) % size if wraps else source - target
            forth = ahead >= 0 and (ahead < back or back < 0)
            ways = {0: (ahead, 1.0), 1: (back, 1.0)}
            both = wraps and ahead == back  # half of the block goes each way round
            for way, (hops, block) in ways.items():
                if both or (way == 0) == forth:
                    for hop in range(hops):
                        link = (source + hop) % size if way == 0 else (source - hop - 1) % size
                        carried[link, way] += block / (1 + both)
    return carried.max() / size**2


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 15, 16])
def test_an_all_to_all_link_by_link(size):
    """The busiest link of a line and of a ring carries what the formulas say, for as long as the priced time."""
    for wraps in (False, True):
        assert collectives.busiest_link_share(size, wraps) == pytest.approx(busiest_link(size, wraps))
    share = collectives.ring_link_share("all_to_all", size, two_way=True)
    assert share == pytest.approx(busiest_link(size, True))
    assert collectives.leg_rates([ring(size, 1.0)])["all_to_all"].seconds_per_byte == pytest.approx(share)


def test_all_to_all_over_lines_of_one_cross_section():
    """64 GB, 1 GB of each of 64 v5e, over 8 links of 45 GB/s across the middle: a quarter each way = 44.4 ms.

    8x8: 16 GB / (8 x 45e9); 4x16: the ring of 16 is cut twice, 16 GB / (4 x 2 x 45e9).
    """
    for text in ("v5e:8x8", "v5e:4x16"):
        placed = physical_placement(parse_cluster(text))
        assert collectives.collective_time("all_to_all", 64e9, collectives.group_rates(placed, "xy")) == pytest.approx(
            16e9 / (8 * 45e9)
        )


@pytest.mark.parametrize(
    ("text", "axes", "kind", "seconds", "level"),
    [
        # 31/32 of 256 MB through a port of 450 GB/s, 24/32 / 8 of it from a card of 50 GB/s: 551, 480 us
        ("h100:8x4", ("domain", "nodes"), "all_gather", 256e6 * 31 / 32 / 450e9, "nvlink"),
        # 24/32 of its 8 MB go to other nodes
        ("h100:8x4", ("domain", "nodes"), "all_to_all", 8e6 * 24 / 32 / 50e9, "network"),
        # the first byte after a hop, the others behind it
        ("h100:8x4", ("domain", "nodes"), "permute", 5e-6 + 256e6 / 50e9, "network"),
        # two rings of 90 GB/s; 25 GB/s of a host over its 8 chips is 3.125 GB/s
        ("4*v5e:16x16", ("slices", "x", "y"), "all_gather", 256e6 / 180e9, "ici"),
        ("4*v5e:16x16", ("slices", "x", "y"), "all_to_all", 0.25e6 * 3 / 4 / 3.125e9, "dcn"),
        ("4*v5e:16x16", ("slices", "x", "y"), "permute", 10e-6 + 256e6 / 3.125e9, "dcn"),
    ],
)
def test_the_level_that_takes_the_time_binds(text, axes, kind, seconds, level):
    rates = collectives.group_rates(physical_placement(parse_cluster(text)), axes)
    assert collectives.collective_time(kind, 256e6, rates) == pytest.approx(seconds)
    assert collectives.collective_bound_by(kind, 256e6, rates) == level


@pytest.mark.parametrize(
    ("text", "mesh", "words", "seconds_per_byte"),
    [
        # the whole ring of 8 although 16 chips beside it are free: V / (2 x 90e9)
        ("v5p:8x4x4", {"X": 8}, {"X": "x (8)"}, 1 / 1.8e11),
        ("v5p:8x4x4", {"X": 4}, {"X": "y (4)"}, 1 / 1.8e11),
        # no ring: a part of one, and an axis without wraparound
        ("v5e:16x16", {"X": 8}, {"X": "8 of x (16)"}, 7 / 8 / 45e9),
        ("v5e:4x4", {"X": 4}, {"X": "x (4)"}, 3 / 4 / 45e9),
        ("v5e:4x4", {"X": 3}, {"X": "3 of x (4)"}, 2 / 3 / 45e9),
        # in one slice; over lines of 2 and 4 at once
        ("2*v5e:16x16", {"Y": 16}, {"Y": "x (16)"}, 1 / 9e10),
        ("v5e:4x4", {"X": 8}, {"X": "2 of x (4) x y (4)"}, 7 / 8 / 9e10),
        ("h100:8x4", {"X": 4}, {"X": "4 of domain (8)"}, 3 / 4 / 450e9),
    ],
)
def test_where_a_smaller_mesh_is_laid(text, mesh, words, seconds_per_byte):
    placed = place_mesh(parse_cluster(text), mesh)
    assert placed.describe() == words
    assert collectives.group_rates(placed, mesh)["all_gather"].seconds_per_byte == pytest.approx(seconds_per_byte)


@pytest.mark.parametrize(("text", "mesh"), [("v5e:4x4", {"X": 6}), ("h100:8x4", {"X": 12})])
def test_a_mesh_that_is_no_part(text, mesh):
    with pytest.raises(InputError, match="Make the two equal"):
        place_mesh(parse_cluster(text), mesh)


@pytest.mark.parametrize("text", ["v5p:4x4x8", "v5p:8x8x12", "v5e:16x16", "v5e:16x8", "v5e:4x8", "v5p:2x3x4"])
def test_an_all_to_all_against_every_pair_of_a_torus(text):
    """Bytes on the busiest link of each axis if every chip sends every other its part, axis after axis.

    Of n^2 parts, (n / size)^2 go from one place of an axis to another, over n / size lines of chips.
    """
    cluster = parse_cluster(text)
    n, link = cluster.num_chips, known(cluster.chip, "ici_link_bytes_per_s")
    busiest = max(
        busiest_link(size, wraps) * size / n / link for size, wraps in zip(cluster.shape, cluster.wraps, strict=True)
    )
    rates = collectives.group_rates(physical_placement(cluster), physical_placement(cluster).mesh)
    assert rates["all_to_all"].seconds_per_byte == pytest.approx(busiest)


@pytest.mark.parametrize(
    ("text", "mesh", "seconds_per_byte"),
    [
        # lines of 8 and of every other chip, of which two groups share the links: 31/32 of the array over 1.5 links;
        # then half of what is left, a 32nd, between neighbours
        ("v5e:8x8", {"fsdp": 64}, 31 / 32 / 1.5 + 1 / 2 / 32),
        # rings of 16, and of every other chip, over three links of both; then the neighbours' 1/128
        ("v5e:16x16", {"fsdp": 256}, 1 / 3 + 1 / 2 / 128),
        # rings of 8 and 4 over four links, then a ring of 4 with a 32nd of the array over two
        ("v5p:4x4x8", {"fsdp": 128}, 1 / 4 + 1 / 2 / 32),
        # at once: axes of unequal lengths, a ring and a line over three links
        ("v5e:8x16", {"fsdp": 128}, 1 / 3),
        # at once: a part of a slice, 2 of x, whose links no other group inside shares, and y
        ("v5e:8x8", {"data": 4, "fsdp": 16}, 15 / 16 / 2),
        # at once, in the book: three rings
        ("v5p-book:4x4x8", {"fsdp": 128}, 1 / 6),
        # two whole axes and a part of the third: every other chip of z and the ring of y, then x with a 16th
        ("v5p:4x4x8", {"fsdp": 64, "tensor": 2}, 1 / 3 + 1 / 2 / 16),
    ],
)
def test_a_sum_that_fills_a_slice_runs_in_two_turns(text, mesh, seconds_per_byte):
    cluster = parse_cluster(text)
    placement = place_axes(cluster, mesh)[0]
    rates = collectives.leg_rates(group_legs(placement, ("fsdp",)))
    link = known(cluster.chip, "ici_link_bytes_per_s")
    assert rates["reduce_scatter"].seconds_per_byte * link == pytest.approx(seconds_per_byte, rel=1e-12)
    assert rates["reduce_scatter"].floor_s == rates["all_gather"].floor_s
    once = collectives.leg_rates(group_legs(placement, ("fsdp",)), scatters="once")["reduce_scatter"].seconds_per_byte
    in_turns = rates["reduce_scatter"].seconds_per_byte > rates["all_gather"].seconds_per_byte * (1 + 1e-12)
    assert once == rates["all_reduce" if in_turns else "all_gather"].seconds_per_byte


CLUSTERS = (
    "v2:4x4", "v3:4x8", "v4p:4x4x8_twisted", "v4p:2x2x2", "v5e:2x2", "v5e:4x4", "v5e:8x16", "v5e:16x16", "v5p:4x4x1",
    "v5p:2x3x4", "v5p:8x8x12", "v6e:8x8", "tpu7x:4x4x8", "2*v5e:8x8", "4*v5p:4x4x4", "v5p-book:4x4x4", "a100:8x4",
    "h100:8x2", "b200:8x64", "gb200:72x2",
)  # fmt: skip


def some_meshes(num_chips):
    """Meshes of three axes with at most 4 chips in the first and the last."""
    for data, tensor in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)):
        if num_chips % (data * tensor) == 0:
            yield {"data": data, "fsdp": num_chips // data // tensor, "tensor": tensor}


def laid_groups(texts):
    """Yields a cluster, a placement of a mesh on it, and a group of mesh axes."""
    for text in texts:
        cluster = parse_cluster(text)
        for mesh in some_meshes(cluster.num_chips):
            for placed in place_axes(cluster, mesh):
                for count in (1, 2, 3):
                    for axes in itertools.combinations(mesh, count):
                        yield cluster, placed, axes


@pytest.mark.parametrize("text", CLUSTERS)
def test_no_collective_costs_more_than_the_all_reduce_that_contains_it(text):
    """An AllReduce is a ReduceScatter and an AllGather, on every chip, slice and group, and more bytes take longer."""
    sizes = np.array([0, 1, 1e3, 1e6, 3e7, 1e9, 1e12])
    for cluster, placed, axes in laid_groups([text]):
        for calibration in (None, fitted_calibration(cluster.chip)):
            rates = collectives.group_rates(placed, axes, calibration)
            times = {
                kind: np.broadcast_to(collectives.collective_time(kind, sizes, rates), sizes.shape)
                for kind in COLLECTIVES
            }
            for kind in ("reduce_scatter", "all_gather"):
                assert (times[kind] <= times["all_reduce"] * (1 + 1e-12)).all(), (placed.describe(), axes, kind)
            assert all((np.diff(one) >= 0).all() for one in times.values())


def test_the_turns_that_are_priced_are_those_that_run():
    """Chips of each turn by the price, and by the legs of the step that the executor runs."""
    found = set()
    for cluster, placed, axes in laid_groups(one for one in CLUSTERS if one.startswith(("v2", "v3", "v4", "v5", "v6"))):
        legs = [leg for leg in group_legs(placed, axes) if leg.level == "ici"]
        if not legs or cluster.chip.variant == "book":
            continue
        strategy = Strategy(mesh=dict(placed.mesh), placement=placed.describe())
        run = scattered_legs(strategy, axes, scatters=True).of("reduce_scatter", 10**9)
        parts = [part for axis in axes for part in parts_of(strategy.placement, axis)]
        assert math.prod(run.parts) == math.prod(part.size for part in parts)
        turns = math.prod(leg.size // leg.later for leg in legs), math.prod(leg.later for leg in legs)
        assert run.sizes[: len(turns)][: 1 + (turns[1] > 1)] == turns[: 1 + (turns[1] > 1)], (placed.describe(), axes)
        found.add(turns[1] > 1)
    assert found == {True, False}
