"""Worked answers on clusters: chips, hosts, cores, memory, FLOP/s and power of whole pods."""

import math
from typing import Any

from meshwright.cost.formulas.anatomy import pod_totals
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster
from tests.oracles.worked import Answers


def pod(name: str) -> dict[str, Any]:
    """Sums over a whole pod of a TPU in the book's variant."""
    shape = "x".join(map(str, chip(name).pod_shape))
    return pod_totals(parse_cluster(f"{name}:{shape}"))


def h100(num_chips: int) -> dict[str, Any]:
    """Sums over H100 in domains of eight."""
    return pod_totals(parse_cluster(f"h100:8x{num_chips // 8}"))


ANSWERS: Answers = {
    "book-2.2-v5p-podsize": lambda i: parse_cluster("v5p:" + "x".join(map(str, i["shape"]))).num_chips,
    "book-ex2.2-v5e-cores": lambda i: pod("v5e-book")["num_cores"],
    "book-ex2.2-v5e-hbm": lambda i: pod("v5e-book")["hbm_bytes"],
    "book-ex2.2-v5p-cores": lambda i: pod("v5p-book")["num_cores"],
    "book-ex2.2-v5p-flops": lambda i: pod("v5p-book")["peak_flops"],
    "book-ex2.2-v5p-hbm": lambda i: pod("v5p-book")["hbm_bytes"],
    "book-ex2.2-v5p-hosts": lambda i: pod("v5p-book")["num_hosts"],
    "s000-podv5p": lambda i: pod("v5p")["num_chips"],
    "s000-power": lambda i: h100(i["gpus"])["power_w"],
    "s001-gpus": lambda i: parse_cluster(f"h100:{i['per_node']}x{i['nodes']}").num_chips,
    "s004-cluster-flops": lambda i: h100(i["gpus"])["peak_flops"],
    "s004-cluster-hbm": lambda i: h100(i["gpus"])["hbm_bytes"] / 2**50,
    "s004-cluster-tc": lambda i: h100(i["gpus"])["num_tensor_cores"],
    "s004-pod": lambda i: parse_cluster(f"h100:8x{i['gpus'] // 8}x{i['racks']}").num_chips,
    "s004-rack": lambda i: parse_cluster(f"h100:{i['gpus']}x{i['servers']}").num_chips,
    "s004-v5p-pod": lambda i: pod("v5p")["num_chips"],
}


def test_the_pod_of_the_catalogue_is_the_largest_that_can_be_named():
    v5p = chip("v5p")
    assert v5p.max_chips == math.prod(v5p.pod_shape) == 8960
    assert pod("v5p")["num_hosts"] == 8960 / 4
