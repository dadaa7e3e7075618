"""What the texts have in mind: a generic dense transformer by its letters, and meshes whose axes are torus axes."""

import math

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.transformer import parse_block
from meshwright.calculators.serving.replica import ServingReplica
from meshwright.calculators.sharding.einsum_cost import einsum_rates
from meshwright.cost.network.collectives import GroupRates, group_rates
from meshwright.spec.chip import Chip, chip_from_table
from meshwright.spec.cluster import Cluster, make_cluster
from meshwright.spec.model import Model
from meshwright.spec.strategy import Rules, Strategy
from tests.oracles.worked import Inputs

TWO_MATMULS = """
tmp[B,F] = in[B,D] * win[D,F]
out[B,D] = tmp[B,F] * wout[F,D]
"""
"""The book's layer of chapter 5."""


def dense(
    *,
    D: int,
    F: int | None = None,
    N: int | None = None,
    K: int | None = None,
    H: int = 128,
    L: int = 1,
    V: int = 32000,
    tied: bool = False,
) -> Model:
    """Gated, without biases; F = 4 D, full heads and N H = D where they are not given."""
    heads = D // H if N is None else N
    return Model(
        name="dense",
        family="llama",
        num_layers=L,
        d_model=D,
        d_ff=4 * D if F is None else F,
        num_heads=heads,
        num_kv_heads=heads if K is None else K,
        head_dim=H,
        vocab_size=V,
        tied_embeddings=tied,
    )


def rates(cluster: Cluster, mesh: dict[str, int], axes: tuple[str, ...] | str) -> GroupRates:
    """Rates of a group of mesh axes, where every mesh axis is a torus axis, as `shard` lays them."""
    assert tuple(mesh.values()) == cluster.shape
    laid = einsum_rates(cluster, mesh)
    assert all(" x " not in words for words in laid.laid.describe().values())
    return group_rates(laid.laid, axes)


def serving(i: Inputs) -> ServingReplica:
    """A model of the row's parameters on as many chips as it has, of its memory and bandwidth."""
    figures = {"hbm_bytes": i.get("cap", i.get("hbm")), "hbm_bytes_per_s": i.get("hbm_bw", i.get("bw"))}
    table = {"name": "row", "topology": "switched"} | {name: figure for name, figure in figures.items() if figure}
    return ServingReplica(
        cluster=make_cluster(chip_from_table(table), (i.get("chips", 1),)),
        params=i["params"],
        kv_token_bytes=i.get("kv_per_token"),
        weights={2: "bf16", 1: "int8", 0.5: "int4"}[i["bytes"]],
        peak_flops=i.get("peak", math.inf),
    )


def counting(base: str, *, link_bytes_per_s: float) -> Chip:
    """A chip so slow to send, without latency, that seconds of a collective are bytes through its links."""
    return chip_from_table({"base": base, "ici_link_bytes_per_s": link_bytes_per_s, "ici_hop_s": 0.0})


def two_matmuls(mesh: dict[str, int], assignment: dict[str, Rules]) -> BlockSteps:
    """The derived steps of the book's layer, everything kept for the backward pass."""
    weights = {name: Variable(name, tuple(dims), "weight") for name, dims in (("win", "DF"), ("wout", "FD"))}
    program = Program((parse_block("layer", TWO_MATMULS, weights),), weights)
    (layer,) = derive(program, Strategy(mesh=mesh, assignment=assignment, remat="none")).blocks
    return layer
