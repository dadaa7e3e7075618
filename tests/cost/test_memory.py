"""Memory items against counts by hand, and the rules that hold between strategies."""

import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.cost.memory import ITEMS, memory_limit, total_bytes, training_memory
from meshwright.cost.step_costs import op_sizes, strategy_sizes
from meshwright.spec import catalogue
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, REMAT_POLICIES, STATE_BYTES, Strategy, make_mesh
from meshwright.spec.weights import num_params, params_by_part

TINY = catalogue.model("tiny")
MESHES = (
    {},
    {"fsdp": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "context": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
)


def memory(axes, *, model=TINY, remat="block", batch_seqs=32, seq_len=512, microbatches=1, state="bf16-adam", **kwargs):
    strategy = Strategy(mesh=make_mesh(axes), remat=remat, num_microbatches=microbatches, state=state)
    derived = derive(transformer(model), strategy, symbolic=kwargs.pop("symbolic", False))
    sizes = strategy_sizes(model, Job(batch_seqs=batch_seqs, seq_len=seq_len), strategy, **kwargs)
    return training_memory(derived, sizes, num_microbatches=microbatches)


def test_the_items_are_the_agreed_ones_and_sum_to_the_total():
    items = memory({"fsdp": 2, "tensor": 2})
    assert tuple(items) == ITEMS
    assert total_bytes(items) == sum(float(size) for size in items.values())
    assert items["kv_cache"] == 0


@pytest.mark.parametrize("state", STATE_BYTES)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_state_is_bytes_per_parameter_over_the_chips_that_share_it(axes, state):
    """Matrices are split over fsdp, context and tensor; norm scales are the same everywhere."""
    items, parts = memory(axes, state=state), STATE_BYTES[state]
    shards = np.prod([axes.get(axis, 1) for axis in ("fsdp", "context", "tensor")])
    norms = params_by_part(TINY)["norm"]
    elements = (num_params(TINY) - norms) / shards + norms
    for item in ("weights", "gradients", "optimizer"):
        assert items[item] == pytest.approx(elements * parts[item], rel=1e-12)


def test_ten_bytes_per_parameter_of_llama3_70b_over_8192_chips():
    """How to Scale Your Model, sections 5.1.1 and 6.2: bf16 weights and two fp32 moments, 700 GB in all."""
    model = catalogue.model("llama3-70b")
    items = memory({"fsdp": 1024, "context": 2, "tensor": 4}, model=model, batch_seqs=1024, seq_len=4096)
    norms = params_by_part(model)["norm"]
    assert items["weights"] + items["optimizer"] == pytest.approx(10 * (num_params(model) - norms) / 8192 + 10 * norms)
    assert 8192 * (items["weights"] + items["optimizer"] - 10 * norms) == pytest.approx(7e11, rel=0.01)


def test_state_of_llama3_8b_is_the_argument_size_of_the_compiled_step():
    """The same step compiled for v5e:4x4 (fsdp 4, tensor 4) takes arguments of 4.68 GiB a chip."""
    items = memory({"fsdp": 4, "tensor": 4}, model=catalogue.model("llama3-8b"), batch_seqs=16, seq_len=4096)
    assert (items["weights"] + items["optimizer"]) / 2**30 == pytest.approx(4.68, abs=0.01)


def test_block_remat_keeps_the_input_of_every_layer_and_the_head():
    items = memory({"fsdp": 2, "context": 2, "tensor": 2})
    tokens = 32 * 512
    stream = 2 * tokens * 256 / 8
    gathered = 2 * tokens * 256 / 4
    per_token = 4 * tokens * (1 / 8 + 2 / 4)
    assert items["activations"] >= 8 * stream + stream + gathered
    assert items["activations"] <= 8 * stream + stream + gathered + 4 * per_token
    assert items["logits"] == 4 * tokens * 4096 / 8


def test_full_remat_holds_one_chunk_of_logits_and_its_cotangent():
    assert memory({"fsdp": 2, "tensor": 2}, remat="full")["logits"] == 2 * 4 * 1024 * 4096 / 2
    few_tokens = memory({"fsdp": 2}, remat="full", batch_seqs=2, seq_len=128)
    assert few_tokens["logits"] == 2 * 4 * 128 * 4096


def test_gathered_weights_are_those_of_the_largest_block():
    """tiny's embedding table is larger than one of its layers; without fsdp nothing is gathered."""
    assert memory({"fsdp": 2})["communication"] == 2 * 4096 * 256
    assert memory({"data": 2, "tensor": 2})["communication"] == 0


def test_microbatches_divide_activations_and_add_a_float32_sum_of_gradients():
    one, four = memory({"fsdp": 2}), memory({"fsdp": 2}, microbatches=4)
    for item in ("activations", "logits"):
        assert four[item] == pytest.approx(one[item] / 4)
    assert four["gradients"] == 3 * one["gradients"]
    assert four["workspace"] < one["workspace"]
    assert four["weights"] == one["weights"]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_less_remat_needs_more_memory(axes):
    totals = {remat: float(total_bytes(memory(axes, remat=remat))) for remat in REMAT_POLICIES}
    assert totals["none"] > totals["matmuls"] > totals["block"] > totals["full"]
    assert totals["none"] > totals["selective"] > totals["block"]


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_axes_of_one_device_cost_nothing(axes, remat):
    """Symbolic steps name every axis; with sizes of 1 they must need what the steps without them need."""
    symbolic, concrete = (memory(axes, remat=remat, symbolic=flag) for flag in (True, False))
    assert {k: float(v) for k, v in symbolic.items()} == pytest.approx({k: float(v) for k, v in concrete.items()})


def test_scores_in_memory_enlarge_the_working_set():
    fused, written = (memory({"fsdp": 2}, scores=where) for where in ("on_chip", "in_memory"))
    pairs = 16 * 8 * 512 * 512
    assert written["workspace"] - fused["workspace"] >= 0.5 * pairs * (8 + 2)
    assert {k: v for k, v in written.items() if k != "workspace"} == {
        k: v for k, v in fused.items() if k != "workspace"
    }


def test_many_candidates_at_once():
    derived = derive(transformer(TINY), Strategy(mesh=make_mesh({})), symbolic=True)
    fsdp, tensor, counts = np.array([1.0, 2, 8]), np.array([4.0, 2, 1]), np.array([1, 2, 4])
    mesh = {"data": np.ones(3), "fsdp": fsdp, "context": np.ones(3), "tensor": tensor}
    sizes = op_sizes(TINY, seq_len=512, microbatch_seqs=32 / counts, mesh=mesh, state="fp32")
    many = training_memory(derived, sizes, num_microbatches=counts)
    for i in range(3):
        axes = {"fsdp": int(fsdp[i]), "tensor": int(tensor[i])}
        one = memory(axes, microbatches=int(counts[i]), state="fp32")
        for item in ITEMS:
            assert np.broadcast_to(many[item], 3)[i] == pytest.approx(float(one[item]), rel=1e-12)


def test_the_limit_is_what_the_compiler_offers_where_that_is_known():
    assert memory_limit(parse_cluster("v5e:4x4")) == 15.75 * 2**30
    assert memory_limit(parse_cluster("h100:8")) == 80e9
    assert memory_limit(parse_cluster("cpu:8")) == float("inf")
    measured = Calibration(name="here", chip="cpu", memory_bytes=2e9)
    assert memory_limit(parse_cluster("cpu:8"), measured) == 2e9


def test_zero_stages_split_what_their_assignment_says():
    """ZeRO-1 is an assignment too: weights whole on every replica, what the optimizer updates split over them."""
    whole = {name: axes for name, axes in DEFAULT_ASSIGNMENT["weight"].items() if name != "D"}
    zero1 = DEFAULT_ASSIGNMENT | {"weight": whole, "optimizer": DEFAULT_ASSIGNMENT["weight"]}
    strategy = Strategy(mesh=make_mesh({"fsdp": 8}), assignment=zero1)
    derived = derive(transformer(TINY), strategy)
    items = training_memory(
        derived, strategy_sizes(TINY, Job(batch_seqs=32, seq_len=512), strategy), num_microbatches=1
    )
    norms = params_by_part(TINY)["norm"]
    assert items["weights"] == 2 * num_params(TINY)
    assert items["gradients"] == 2 * num_params(TINY)
    assert items["optimizer"] == 8 * ((num_params(TINY) - norms) / 8 + norms)
    assert items["communication"] == 0
