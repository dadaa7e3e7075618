"""Groups on switches as arrays: the same as placing and pricing each mesh by itself, and fast."""

import itertools
import time

import numpy as np
import pytest

from meshwright.cost.network import KINDS, collective_time, group_rates
from meshwright.cost.placement import place_axes
from meshwright.cost.switched import switched_group_rates, switched_rates, switched_split
from meshwright.spec.calibration import Calibration, Efficiency
from meshwright.spec.chip import chip
from meshwright.spec.cluster import NetworkLevel, make_cluster, parse_cluster

AXES = ("data", "fsdp", "expert", "tensor")
OVERSUBSCRIBED = {"domain": 1, "nodes": 1, "racks": 2, "pods": 7}
SLOWER = tuple(NetworkLevel(name=name, oversubscription=over) for name, over in OVERSUBSCRIBED.items())


def meshes(num_chips, num_axes):
    if num_axes == 1:
        yield (num_chips,)
        return
    for first in (n for n in range(1, num_chips + 1) if num_chips % n == 0):
        for rest in meshes(num_chips // first, num_axes - 1):
            yield (first, *rest)


CLUSTERS = {
    "two levels": parse_cluster("h100:8x12"),
    "three levels": parse_cluster("h100:8x3x4"),
    "four levels": make_cluster(chip("h100"), (4, 2, 3, 4), levels=SLOWER),
    "a domain of 72": parse_cluster("gb200:72x2"),
}


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("calibration", [None, Calibration(name="c", chip="h100", efficiency=Efficiency(network=0.7))])
def test_equal_to_each_mesh_by_itself(name, calibration):
    cluster = CLUSTERS[name]
    sizes = np.array(list(meshes(cluster.num_chips, 4)))
    stride = np.cumprod(sizes[:, ::-1], axis=1)[:, ::-1] // sizes
    for axis, size, behind in zip(AXES, sizes.T, stride.T, strict=True):
        many = switched_group_rates(cluster, stride=behind, size=size, calibration=calibration)
        for index in range(0, len(sizes), 7):
            (placed,) = place_axes(cluster, dict(zip(AXES, sizes[index].tolist(), strict=True)))
            one = group_rates(placed, (axis,), calibration)
            assert (many.size[index], many.level[index]) == (one.size, one.level)
            for kind, num_bytes in itertools.product(KINDS, (1e3, 1e9)):
                together = np.broadcast_to(collective_time(kind, num_bytes, many), len(sizes))[index]
                assert together == pytest.approx(collective_time(kind, num_bytes, one), rel=1e-12)


def test_axes_used_together_multiply_on_each_level():
    cluster = CLUSTERS["four levels"]
    sizes = np.array(list(meshes(cluster.num_chips, 4)))
    stride = np.cumprod(sizes[:, ::-1], axis=1)[:, ::-1] // sizes
    splits = [switched_split(cluster, stride=b, size=s) for b, s in zip(stride.T, sizes.T, strict=True)]
    apart = switched_rates(cluster, [a * b for a, b in zip(splits[0], splits[2], strict=True)])
    for index in range(0, len(sizes), 11):
        (placed,) = place_axes(cluster, dict(zip(AXES, sizes[index].tolist(), strict=True)))
        one = group_rates(placed, ("data", "expert"))
        assert apart["all_gather"].seconds_per_byte[index] == pytest.approx(one["all_gather"].seconds_per_byte)
    joint = switched_group_rates(cluster, stride=stride[:, 2], size=sizes[:, 1] * sizes[:, 2])
    product = switched_rates(cluster, [a * b for a, b in zip(splits[1], splits[2], strict=True)])
    assert np.allclose(joint["all_reduce"].seconds_per_byte, product["all_reduce"].seconds_per_byte)


def test_a_hundred_thousand_groups_take_a_moment():
    cluster = parse_cluster("h100:8x2x16x32")
    rng = np.random.default_rng(0)
    stride, size = 2 ** rng.integers(0, 7, 100_000), 2 ** rng.integers(0, 7, 100_000)
    spent = []
    for _ in range(3):
        start = time.process_time()
        switched_group_rates(cluster, stride=stride, size=size)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.3
