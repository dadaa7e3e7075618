"""Bytes of an update by the training state, worked out by hand for one matrix of a layer."""

import pytest

from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of, op_kind
from meshwright.algebra.sizes import OpSizes
from meshwright.core.dims import DTYPE_BYTES

DIMS = {"D": 512, "F": 1024, "L": 2}
WEIGHT = Updated(shard=ShardedArray("w", ("D", "F"), ((), ())), inputs=("D",), layers="L")
ENTRIES = 512 * 1024


def bytes_of(optimizer, state):
    """Bytes that one entry of the weight costs, without what is kept of rows and columns."""
    sizes = OpSizes(dims=DIMS, mesh={}, state=state)
    steps = op_kind(optimizer).update(WEIGHT)
    # a step on all layers at once has two layers
    return {
        step.op: float(kind_of(step).hbm_bytes(step, sizes)) / ENTRIES / (2 if "L" in step.inputs[0].dims else 1)
        for step in steps
    }


@pytest.mark.parametrize(
    ("state", "gradient", "weight", "master"),
    [("bf16-adam", 2, 2, 0), ("bf16-master", 2, 2, 4), ("bf16-master-fp32-grads", 4, 2, 4), ("fp32", 4, 4, 0)],
)
def test_the_width_of_gradients_and_the_master_copy_count_for_every_optimizer(state, gradient, weight, master):
    moved = 2 * gradient + 2 * (weight + master)
    assert bytes_of("adamw", state) == {"adamw": moved + 2 * 8}
    assert bytes_of("lion", state) == {"lion": moved + 2 * 4}
    change = DTYPE_BYTES["fp32"]
    muon = bytes_of("muon", state)
    assert muon["muon_apply"] == change + 2 * (weight + master)
    assert muon["muon_momentum"] == 2 * gradient + 3 * 4
    adafactor = bytes_of("adafactor", state)
    assert adafactor["adafactor_apply"] == change + 2 * (weight + master)
    assert adafactor["adafactor_sums"] == pytest.approx(2 * gradient, rel=0.02)
    assert adafactor["adafactor_scale"] == pytest.approx(gradient + 4, rel=0.02)
    assert adafactor["adafactor_weights"] == pytest.approx(master or weight, rel=0.02)
