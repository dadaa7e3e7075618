"""Engines that split caches beyond their heads, and weights in two dims: from where they win."""

import pytest
from msgspec.structs import replace

from meshwright.cost.formulas.serving import WeightStationary
from meshwright.cost.network.placement import place_axes
from meshwright.cost.train_step import price_strategy
from meshwright.plan.serving.fleet import engine_strategy
from meshwright.plan.serving.planner import service_setting
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import make_mesh

LLAMA = load_model("llama3-70b")
PLAIN = replace(LLAMA, gated=False, activation="gelu", d_ff=4 * LLAMA.d_model, num_heads=1024, num_kv_heads=1024)
"""Two products in a feed-forward block and F = 4 D, as in the book; heads enough for any ``tensor``."""


def mlp_s(cluster, layout, **mesh):
    """Seconds of the collectives of a feed-forward block of 4,096 sequences, best placed, by the data sheet."""
    job = Job(kind="decode", batch_seqs=4096, seq_len=1024)
    setting, found = replace(service_setting(PLAIN, cluster), job=job), []
    for placement in place_axes(cluster, make_mesh(mesh)):
        strategy = replace(engine_strategy(mesh, "", layout), placement=placement.describe())
        costs = price_strategy(setting, strategy).costs.all
        own = [c for c in costs if c.step.is_collective and c.step.block == "layer"]
        found.append(sum(float(c.network_s) for c in own if c.step.result.name in ("h1", "g", "u", "m", "y")))
    return min(found)


def test_weights_in_two_dims_win_where_the_closed_form_says():
    """Priced from derived steps on a v5p: with X = 4, one axis of the torus, as the closed form but for latency, which
    4,096 sequences hide; 1-D is better on 64 chips and 2-D on 128, and the closed form says 72."""
    wins = {}
    for name in ("v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8"):
        cluster = parse_cluster(name)
        count, link = cluster.num_chips, 2 * cluster.chip.ici_link_bytes_per_s
        form = WeightStationary(d_model=PLAIN.d_model, d_ff=PLAIN.d_ff, num_chips=count)
        one, two = mlp_s(cluster, "prompts", tensor=count), mlp_s(cluster, "widths", context=4, tensor=count // 4)
        assert one == pytest.approx(form.tensor_comms_s(4096, axis_bytes_per_s=link), rel=1e-3)
        assert two == pytest.approx(form.comms_s(4096, over_d=4, axis_bytes_per_s=link), rel=1e-3)
        wins[count] = min(two, mlp_s(cluster, "widths", context=2, tensor=count // 2)) < one
    assert form.min_chips == 72
    assert wins == {64: False, 128: True, 256: True}
