"""Routes through a cluster, and the links that they may use against a maximum flow."""

import itertools
from collections import deque

import pytest

from meshwright.calculators.links.routes import disjoint_paths, neighbours, parse_place, route, torus_hops
from meshwright.calculators.links.transfer import transfer_times
from meshwright.core.errors import InputError
from meshwright.spec.cluster import parse_cluster


def legs(text, source, target, num_bytes=1e9, **how):
    cluster = parse_cluster(text)
    return route(cluster, parse_place(source, cluster), parse_place(target, cluster), num_bytes, **how)


def summary(found):
    return [(one.channel, one.lanes, one.hops, one.amount) for one in found]


def max_flow(cluster, source, target):
    """Ways that share no link, found one after the other; a way may undo a part of an earlier one."""
    used, count = set(), 0
    while True:
        came, waiting = {source: None}, deque([source])
        while waiting and target not in came:
            here = waiting.popleft()
            for there in neighbours(cluster, here):
                if there not in came and (here, there) not in used:
                    came[there] = here
                    waiting.append(there)
        if target not in came:
            return count
        there, count = target, count + 1
        while came[there] is not None:
            here = came[there]
            if (there, here) in used:
                used.remove((there, here))
            else:
                used.add((here, there))
            there = here


@pytest.mark.parametrize(
    ("text", "step"),
    [
        *((text, 7) for text in ("v5e:4x4", "v5e:2x4", "v5e:1x4", "v5e:16x2", "v5p:2x2x4", "v5p:4x4x4")),
        ("v5p:4x4x8_twisted", 29),
        pytest.param("v5p:4x4x8_twisted", 7, marks=pytest.mark.slow),
    ],
)
def test_paths_are_the_maximum_flow(text, step):
    """Of every seventh pair of chips, or fewer."""
    cluster = parse_cluster(text)
    chips = list(itertools.product(*map(range, cluster.shape)))
    for source, target in itertools.islice(itertools.combinations(chips, 2), 0, None, step):
        ways = disjoint_paths(cluster, source, target)
        assert len(ways) == len(ways[-1]) == max_flow(cluster, source, target), (source, target)
        assert ways[0] == (torus_hops(cluster, source)[target],)


@pytest.mark.parametrize(
    ("text", "source", "target", "hops"),
    [
        # next to each other at the corner of 8x4 lines: one link, or around the square beside it
        ("v5e:8x4", (0, 0), (0, 1), (1, 3)),
        # on rings of 4 all six links: one hop, three the other way round, and three beside each of four neighbours
        ("v5p:4x4x4", (0, 0, 0), (0, 0, 1), (1, 3, 3, 3, 3, 3)),
        # across a ring of 4 both ways, and around it on either side of the other two axes
        ("v5p:4x4x4", (0, 0, 0), (0, 0, 2), (2, 2, 4, 4, 4, 4)),
        ("v5e:4x4", (0, 0), (3, 3), (6, 6)),
        # a line of 16 has one way from its end
        ("v5e:1x8", (0, 0), (0, 5), (5,)),
    ],
)
def test_hops_of_disjoint_paths(text, source, target, hops):
    assert disjoint_paths(parse_cluster(text), source, target)[-1] == hops


def test_as_many_paths_as_arrive_first():
    """v5e: 1 kB alone takes a hop of 1 us and 22 ns, over two paths 3 us; 15 MB 334 us alone, 170 us over two."""
    assert summary(legs("v5e:8x4", "0,0", "0,1", 1e3)) == [("ici", 1, 1, 1e3)]
    assert summary(legs("v5e:8x4", "0,0", "0,1", 15e6)) == [("ici", 2, 3, 15e6)]
    assert transfer_times(legs("v5e:8x4", "0,0", "0,1", 1e3))["time_s_pipelined"] == pytest.approx(1e-6 + 1e3 / 45e9)
    moved = transfer_times(legs("v5e:8x4", "0,0", "0,1", 15e6))
    assert moved["time_s_pipelined"] == pytest.approx(3e-6 + 15e6 / 2 / 45e9)
    (leg,) = legs("v5p:4x4x4", "0,0,0", "0,0,1", 1e9)
    assert (leg.name, leg.latency_s) == ("6 paths, 1 and 3 hops", pytest.approx(3e-6))


def test_hops_wrap_where_the_axis_does():
    assert torus_hops(parse_cluster("v5e:4x4"), (0, 0))[3, 3] == 6
    assert torus_hops(parse_cluster("v5e:16x16"), (0, 0))[15, 9] == 1 + 7


def test_from_chip_to_chip():
    assert summary(legs("v5e:4x4", "0,0", "3,3")) == [("ici", 2, 6, 1e9)]
    assert summary(legs("h100:8x4", "0,0", "5,0")) == [("nvlink", 1, 1, 1e9)]
    assert summary(legs("h100:8x4", "3", "8")) == [("network", 1, 1, 1e9)]
    assert summary(legs("h100:8x2x4", "0,0,0", "0,1,1")) == [("network", 1, 2, 1e9)]
    assert legs("v5e:4x4", "1,1", "1,1") == []


def test_between_slices_through_the_hosts():
    found = legs("2*v5e:4x4", "0:3,3", "1:0,0", 3e9)
    assert [one.channel for one in found] == ["pcie", "dcn", "pcie"]
    moved = transfer_times(found)
    assert moved["bound_by"] == "pcie"
    assert moved["time_s_pipelined"] == pytest.approx(3e9 / 15e9 + 1e-5)
    assert [one.channel for one in legs("2*v5e:4x4", "host:0,0", "1:0,0")] == ["dcn", "pcie"]
    assert [one.channel for one in legs("2*v5e:4x4", "host:0,0", "host:1:0,0")] == ["dcn"]


def test_from_everywhere_into_one_chip():
    """How to Scale Your Model, exercise 2.6: over PCIe of all, then 15 of 16 parts over the corner's two links."""
    found = legs("v5e-book:4x4", "hosts", "0,0", 16e9)
    assert summary(found) == [("pcie", 16, 0, 16e9), ("ici", 2, 6, 15e9)]
    assert [one.send_s for one in found] == [pytest.approx(0.0667, rel=1e-2), pytest.approx(0.167, rel=1e-2)]
    over_dcn = legs("v5e-book:4x4", "hosts", "0,0", 16e9, via="dcn")
    assert summary(over_dcn) == [("dcn", 1, 1, 8e9), ("pcie", 1, 0, 16e9)]
    assert summary(legs("v5p:4x4x4", "chips", "1,2,3", 64.0)) == [("ici", 6, 6, 63.0)]
    assert summary(legs("h100:8x4", "chips", "0,0", 32.0)) == [("nvlink", 1, 1, 7.0), ("network", 1, 1, 24.0)]
    assert summary(legs("v5e:4x4", "hosts", "chips")) == [("pcie", 16, 0, 1e9)]
    assert [one.channel for one in legs("v5e:4x4", "hosts", "host:0,0")] == ["pcie", "ici", "pcie"]


@pytest.mark.parametrize(
    ("text", "source", "target", "message"),
    [
        ("v5e:4x4", "0,4", "0,0", "not on v5e:4x4: coordinates count from 0 below 4x4"),
        ("v5e:4x4", "0,0,0", "0,0", "not on v5e:4x4"),
        ("v5e:4x4", "1:0,0", "0,0", "not on v5e:4x4"),
        ("v5e:4x4", "16", "0,0", "not on v5e:4x4"),
        ("v5e:4x4", "TPU", "0,0", "place 'TPU' is not understood"),
        ("2*v5e:4x4", "hosts", "0,0", "those of one slice"),
        ("v5e:4x4", "0,0", "chips", "Use --axis and --collective"),
        ("cpu:4", "0", "1", "no data sheet"),
    ],
)
def test_refusals(text, source, target, message):
    with pytest.raises(InputError, match=message):
        legs(text, source, target)
