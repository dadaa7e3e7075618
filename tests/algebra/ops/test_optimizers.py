"""Updates by hand: bytes by the training state, and where Muon sends matrices, what fills them up and what it costs."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import kind_of, op_kind
from meshwright.algebra.ops.muon import padding_factor, update
from meshwright.algebra.sizes import OpSizes
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.work.host_work import amounts_of

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


WQ = Updated(
    shard=ShardedArray("wq", ("D", "N", "H"), (("fsdp",), ("tensor",), ())), inputs=("D",), layers="L", layer_axes=()
)
SIZES = OpSizes(dims={"L": 5.0, "D": 64.0, "N": 4.0, "H": 8.0}, mesh={"fsdp": 4, "tensor": 2}, state="fp32")


def steps_of(op):
    return [step for step in update(WQ) if step.op == op]


def test_one_exchange_a_split_dim_there_and_back():
    there, further, back, home = steps_of("all_to_all")
    assert [step.axes for step in (there, further, back, home)] == [("fsdp",), ("tensor",), ("tensor",), ("fsdp",)]
    assert str(further.result) == "wq.momentum[L_{fsdp,tensor}, D, N, H]"
    assert str(home.result) == "wq.update[L, D_fsdp, N_tensor, H]"
    assert update(WQ)[-1].result == WQ.shard


@pytest.mark.parametrize(("layers", "share"), [(5, 8 / 5), (8, 1), (9, 16 / 9), (32, 1)])
def test_layers_are_filled_up_to_the_devices_that_share_a_matrix(layers, share):
    (step,) = steps_of("muon")
    assert padding_factor(step, msgspec.structs.replace(SIZES, dims={**SIZES.dims, "L": layers})) == pytest.approx(
        share
    )
    many = padding_factor(step, msgspec.structs.replace(SIZES, dims={"L": np.array([5, 8])}))
    assert many == pytest.approx([8 / 5, 1])


def test_flops_of_the_iteration_by_hand():
    """Five layers on eight devices: one matrix of 64 x 32 each, five turns of 4 n^2 m + 2 n^3."""
    (step,) = steps_of("muon")
    by_hand = 5 * (4 * 32**2 * 64 + 2 * 32**3)
    assert kind_of(step).flops(step, SIZES) == pytest.approx(by_hand)
    assert amounts_of(step, SIZES).flop == pytest.approx(by_hand)


def test_vectors_and_what_is_outside_the_layers_go_to_adamw():
    norm = Updated(shard=ShardedArray("attn_norm", ("D",), ((),)), layers="L")
    table = Updated(shard=ShardedArray("embed", ("V", "D"), ((), ("fsdp",))), inputs=("V",))
    assert [step.op for weight in (norm, table) for step in update(weight)] == ["adamw", "adamw"]
