"""Memory of a chip as the tensor axis, the sequence length or the recomputation changes."""

from itertools import pairwise

import pytest

from meshwright.calculators.sweeps.memory_sweep import memory_sweep
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import REMAT_POLICIES, Assumptions, Strategy, make_mesh

LLAMA, NODE = load_model("llama3-8b"), parse_cluster("h100:8x1")
PLAIN = Strategy(mesh=make_mesh({}))


def sweep(axis, *, cluster=NODE, axes=(), **more):
    return memory_sweep(LLAMA, cluster, axis, seq_len=4096, template=PLAIN, axes=dict(axes), **more)


def test_every_bar_is_what_the_estimate_says():
    for point in (*sweep("tensor"), *sweep("seq", values=["1024", "8192"]), *sweep("remat", axes={"tensor": 2})):
        known = estimate_step(Setting(LLAMA, NODE, point.job), point.strategy)
        assert point.total_bytes == pytest.approx(known.hbm_bytes_per_chip)
        assert point.items == pytest.approx(known.memory)


def test_bars_are_of_the_software_that_is_assumed():
    eager = Assumptions(software="eager")
    for point in sweep("remat", values=["none", "full"], assumptions=eager):
        known = estimate_step(Setting(LLAMA, NODE, point.job, assumptions=eager), point.strategy)
        assert point.items == pytest.approx(known.memory)


def test_tensor_takes_from_fsdp():
    """The state stays, what a sequence leaves behind is shared by more chips."""
    points = sweep("tensor")
    assert [point.label for point in points] == ["tensor 1", "tensor 2", "tensor 4", "tensor 8"]
    assert [point.strategy.mesh["fsdp"] for point in points] == [8, 4, 2, 1]
    assert [point.job.batch_seqs for point in points] == [8, 4, 2, 1]
    for before, after in pairwise(points):
        assert after.items["optimizer"] == pytest.approx(before.items["optimizer"], rel=1e-3)
        # halved but for what every device of the tensor axis keeps whole
        assert 0.5 <= after.items["activations"] / before.items["activations"] < 0.6


def test_activations_grow_with_the_sequence():
    short, long = sweep("seq", values=["4096", "8192"])
    assert long.items["activations"] == pytest.approx(2 * short.items["activations"])
    assert long.items["weights"] == short.items["weights"]
    assert [point.job.seq_len for point in sweep("seq")] == [1024 << power for power in range(8)]


def test_recomputation_keeps_less():
    kept = {point.strategy.remat: point.items["activations"] for point in sweep("remat")}
    assert tuple(kept) == REMAT_POLICIES
    assert kept["none"] > kept["selective"] > kept["matmuls"] > kept["sqrt"] > kept["block"] > kept["full"]


def test_microbatches_are_as_many_as_asked_for():
    one, four = sweep("remat", values=["block"])[0], sweep("remat", values=["block"], microbatch_seqs=4)[0]
    assert four.job.batch_seqs == 4 * one.job.batch_seqs
    assert four.items["activations"] == pytest.approx(4 * one.items["activations"])


def test_points_that_cannot_be_had():
    pair = parse_cluster("h100:8x2")
    fits, splits_heads = sweep("tensor", values=["8", "16"], cluster=pair)
    assert fits.items
    assert "tensor=16 does not divide K=8 kv heads" in splits_heads.reason
    with pytest.raises(CannotRunError, match="no point of the sweep can be had on h100:8x2"):
        sweep("tensor", values=["16"], cluster=pair)
    with pytest.raises(InputError, match="do not make up the 8 chips"):
        sweep("seq", axes={"tensor": 3})
    with pytest.raises(InputError, match="are too long to count"):
        sweep("seq", values=["2000000"])
