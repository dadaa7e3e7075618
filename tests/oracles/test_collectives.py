"""Worked answers on collectives: seconds on the links of a mesh, latency, and what crosses one link."""

import pytest

from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import Sizes, parse_array
from meshwright.calculators.sharding.einsum_cost import einsum_rates, price_einsum
from meshwright.calculators.verbs.transfer import link_bytes
from meshwright.core.dims import CollectiveKind
from meshwright.cost.formulas.limits import ici_intensity, reduce_after_max_shards, reduce_after_min_dim
from meshwright.cost.formulas.roofline import Channel, Work, channel_rate, chip_roofline
from meshwright.cost.network.collectives import collective_time, latency_bound_bytes
from meshwright.cost.network.legs import group_legs
from meshwright.cost.network.placement import place_mesh
from meshwright.spec.chip import chip, known, peak
from meshwright.spec.cluster import Cluster, parse_cluster
from tests.oracles.shapes import rates
from tests.oracles.worked import Answers, Inputs

LINK = known(chip("v5e-book"), "ici_link_bytes_per_s")
CUBE = {"X": 4, "Y": 4, "Z": 4}
PLANE = {"X": 4, "Y": 4}


def seconds(cluster: Cluster, mesh: dict[str, int], arrays: str, dims: Sizes) -> float:
    """Seconds of the one collective from ``A[B_X]`` to ``A[B]``, as written, in bf16: what `shard` prints."""
    (step,) = reshard(*(parse_array(text).replace(dtype="bf16") for text in arrays.split("->")))
    (price,) = price_einsum((step,), dims, mesh, einsum_rates(cluster, mesh))
    return price.time_s


def exercise_3_2(i: Inputs, arrays: str) -> float:
    """The row's collective on a 4x4x4 of v4p."""
    return seconds(parse_cluster("v4p-book:4x4x4"), i["mesh"], arrays, {"B": i["B"], "D": i["D"]})


def through_a_link(i: Inputs, kind: CollectiveKind) -> float:
    """Scalars that one link of a ring used one way carries."""
    legs = group_legs(place_mesh(parse_cluster(f"v5p:{i['D']}x4x4"), {"X": i["D"]}), "X")
    return link_bytes(kind, i["N"] ** 2, legs, two_way=False)


def transfer_s(num_bytes: float, channel: Channel) -> float:
    """Seconds of bytes over one channel of a v5e."""
    return chip_roofline(Work(flops=0, num_bytes=num_bytes), chip("v5e-book"), dtype="bf16", channel=channel).transfer_s


def corner_gather(i: Inputs) -> float:
    """Seconds until a chip of a 4x4 of v5e has what the 15 others hold of an array, over its two links."""
    return collective_time("all_gather", i["bytes"] * 16 / 15, rates(parse_cluster("v5e:4x4"), PLANE, "XY"))


def over_gather(kind: str, cluster: Cluster, mesh: dict[str, int]) -> float:
    """How much longer a collective along X takes than an AllGather of the same array."""
    here = rates(cluster, mesh, "X")
    return collective_time(kind, 1e9, here) / collective_time("all_gather", 1e9, here)


def alpha() -> float:
    """C / W of a v5p in bf16."""
    return ici_intensity(peak(chip("v5p-book"), "bf16"), channel_rate(chip("v5p-book"), "ici"))


ANSWERS: Answers = {
    "book-3.2-ici-latbound": lambda i: latency_bound_bytes(LINK, hop_s=i["hop"]),
    "book-3.2-quiz2-ring": lambda i: transfer_s(i["E"] * i["F"] * i["bytes"], "ici"),
    "book-3.2-quiz2-small": lambda i: seconds(
        parse_cluster("v5e:4x4"), PLANE, "A[E_Y,F] -> A[E,F]", {"E": i["E"], "F": i["F"]}
    ),
    "book-3.4-ar-factor": lambda i: over_gather("all_reduce", parse_cluster("v5p:4x4x4"), CUBE),
    "book-7.6.3-buf": lambda i: latency_bound_bytes(LINK, hop_s=i["hop"], num_shards=i["shards"]),
    "book-ex2.6-ici": corner_gather,
    "book-ex2.6-pcie": lambda i: transfer_s(i["bytes"] / i["chips"], "pcie"),
    "book-ex3.10-a2a": lambda i: through_a_link(i, "all_to_all"),
    "book-ex3.10-ag": lambda i: through_a_link(i, "all_gather"),
    "book-ex3.10-bidi": lambda i: over_gather("all_to_all", parse_cluster("v5e:16x16"), {"X": 16, "Y": 16}),
    "book-ex3.10-uni": lambda i: (
        through_a_link({"N": 64, "D": 4}, "all_to_all") / through_a_link({"N": 64, "D": 4}, "all_gather")
    ),
    "book-ex3.2-agX": lambda i: exercise_3_2(i, "A[B_X,D_Y] -> A[B,D_Y]"),
    "book-ex3.2-agXY": lambda i: exercise_3_2(i, "A[B_XY,D] -> A[B,D]"),
    "book-ex3.2-arZ": lambda i: exercise_3_2(i, "A[B_X,D_Y]{U_Z} -> A[B_X,D_Y]"),
    "book-ex3.2-lat": lambda i: rates(parse_cluster("v4p:4x4x4"), CUBE, "XY")["all_gather"].time(0),
    "book-ex3.3": lambda i: seconds(parse_cluster("v4p:4x4x4"), CUBE, "A[B_X] -> A[B]", {"B": i["B"]}),
    "book-ex3.4-D": lambda i: reduce_after_min_dim(alpha()),
    "book-ex3.4-X": lambda i: reduce_after_max_shards(i["D"], alpha()),
    "book-ex3.4-cw": lambda i: alpha(),
    "s000-ar": lambda i: over_gather("all_reduce", parse_cluster("v5p:4x4x4"), CUBE),
}


def test_shard_prices_an_all_to_all_as_the_ring_does():
    cluster, mesh, dims = parse_cluster("v5e:16x16"), {"X": 16, "Y": 16}, {"I": 65536, "J": 65536}
    gather = seconds(cluster, mesh, "A[I_X,J] -> A[I,J]", dims)
    assert seconds(cluster, mesh, "A[I_X,J] -> A[I,J_X]", dims) == pytest.approx(gather / 4)
