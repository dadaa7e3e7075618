"""FLOPs and bytes of every local op kind, and what a whole step executes."""

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.notation import parse_array
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import transformer
from meshwright.cost.ops import OP_ROWS, OpSizes, model_flops, num_matmul_params, op_flops, op_hbm_bytes
from meshwright.cost.step_costs import strategy_sizes
from meshwright.spec import catalogue
from meshwright.spec.job import Job
from meshwright.spec.strategy import REMAT_POLICIES, STATE_BYTES, Strategy, make_mesh
from meshwright.spec.weights import num_params, params_by_part

DIMS = {"B": 8.0, "T": 16.0, "D": 32.0, "F": 64.0, "N": 4.0, "K": 2.0, "H": 8.0, "V": 128.0}
MESH = {"data": 2, "fsdp": 2, "context": 4, "tensor": 2}


def sizes(**changes):
    return OpSizes(**{"dims": DIMS, "mesh": MESH, "state": "bf16-adam", **changes})


def step(op, inputs, result, *more, **fields):
    arrays = [parse_array(text) for text in (*inputs, result, *more)]
    end = len(inputs)
    return Step(op=op, inputs=tuple(arrays[:end]), result=arrays[end], more=tuple(arrays[end + 1 :]), **fields)


def test_einsum_counts_every_distinct_dim_once_on_one_device():
    up = step("einsum", ["h[B_{data,fsdp}, T_context, D]", "w[D, F_tensor]"], "u[B_{data,fsdp}, T_context, F_tensor]")
    assert op_flops(up, sizes()) == 2 * (8 / 4) * (16 / 4) * 32 * (64 / 2)
    assert op_hbm_bytes(up, sizes()) == 2 * (2 * 4 * 32 + 32 * 32 + 2 * 4 * 32)
    assert op_hbm_bytes(up, sizes(state="fp32")) == 2 * op_hbm_bytes(up, sizes())


def test_a_result_that_is_added_is_read_once_more():
    inputs, result = ["h[B, T, D]", "w[D, F]"], "u[B, T, F]"
    alone, added = (step("einsum", inputs, result, attributes=marks) for marks in ((), (("accumulate", "true"),)))
    assert op_hbm_bytes(added, sizes()) - op_hbm_bytes(alone, sizes()) == 2 * 8 * 16 * 64


def attention_steps():
    q, o = "q[B_{data,fsdp}, T_context, N_tensor, H]", "o[B_{data,fsdp}, T_context, N_tensor, H]"
    k, v = "k[B_{data,fsdp}, T, K_tensor, H]", "v[B_{data,fsdp}, T, K_tensor, H]"
    here, everywhere = "p[B_{data,fsdp}, T_context]", "p[B_{data,fsdp}, T]"
    forward = step("attention", [q, k, v, here, everywhere], o)
    backward = step("attention_backward", [o, q, k, v, here, everywhere], q, k, v)
    return forward, backward


def test_attention_meets_every_gathered_key_without_a_causal_discount():
    forward, backward = attention_steps()
    pairs = (8 / 4) * (4 / 2) * (16 / 4) * 16  # B N T S on one device
    assert op_flops(forward, sizes()) == 4 * pairs * 8
    assert op_flops(backward, sizes()) == 10 * pairs * 8


@pytest.mark.parametrize(("number", "per_pair"), [(0, 3 * 4 + 2 * 2), (1, 6 * 4 + 5 * 2)])
def test_scores_in_memory_are_counted_only_there(number, per_pair):
    chosen = attention_steps()[number]
    pairs = (8 / 4) * (4 / 2) * (16 / 4) * 16
    more = op_hbm_bytes(chosen, sizes(scores="in_memory")) - op_hbm_bytes(chosen, sizes())
    assert more == pairs * per_pair


def test_a_look_up_moves_its_rows_and_not_the_table():
    lookup = step("embed", ["tokens[B, T]", "embed[V, D]"], "x[B, T, D]")
    tokens = lookup.inputs[0].replace(dtype="int32")
    lookup = Step(op="embed", inputs=(tokens, lookup.inputs[1]), result=lookup.result)
    assert op_flops(lookup, sizes()) == 0
    assert op_hbm_bytes(lookup, sizes()) == 4 * 8 * 16 + 2 * 2 * 8 * 16 * 32


def test_a_row_reduction_reads_its_row_twice_and_a_copy_moves_nothing():
    norm = step("rms_norm", ["x[B, T, D]", "scale[D]"], "h[B, T, D]")
    assert op_hbm_bytes(norm, sizes()) == 2 * (3 * 8 * 16 * 32 + 32)
    assert op_hbm_bytes(step("copy", ["x[B, T, D]"], "y[B, T, D]"), sizes()) == 0


@pytest.mark.parametrize("state", STATE_BYTES)
def test_the_optimizer_moves_its_state(state):
    adamw = step("adamw", ["dw[D_fsdp, F_tensor]", "w[D_fsdp, F_tensor]"], "w[D_fsdp, F_tensor]")
    parts = STATE_BYTES[state]
    local = 16 * 32
    expected = local * (2 * parts["gradients"] + 2 * parts["weights"] + 2 * parts["optimizer"])
    assert op_hbm_bytes(adamw, sizes(state=state)) == expected


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_every_derived_local_step_has_a_row(remat):
    derived = derive(transformer(catalogue.model("tiny")), Strategy(mesh=make_mesh({"fsdp": 2}), remat=remat))
    local = {s.op for s, _ in derived.steps() if not s.is_collective}
    assert local <= set(OP_ROWS)
    assert {"einsum", "attention_backward", "adamw", "embed_backward"} <= local


def test_model_flops_of_llama3_70b():
    model, job = catalogue.model("llama3-70b"), Job(batch_seqs=1024, seq_len=4096)
    parts = params_by_part(model)
    assert num_matmul_params(model) == num_params(model) - parts["embedding"] - parts["norm"]
    attention = 12 * 1024 * 4096**2 * 64 * 128 * 80
    assert model_flops(model, job) - attention == 6 * num_matmul_params(model) * 2**22
    # 6 x 70e9 per token (How to Scale Your Model, section 6.2), which leaves attention out
    assert (model_flops(model, job) - attention) / 2**22 == pytest.approx(4.2e11, rel=0.01)


def test_a_tied_table_counts_once_as_the_unembedding():
    tied = catalogue.model("llama3.2-1b")
    assert tied.tied_embeddings
    assert num_matmul_params(tied) == num_params(tied) - params_by_part(tied)["norm"]


@pytest.mark.parametrize(
    "axes", [{}, {"fsdp": 4, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}, {"data": 8}], ids=str
)
@pytest.mark.parametrize("remat", ["none", "block", "full"])
def test_executed_flops_are_the_model_s_and_what_is_made_again(axes, remat):
    """Backward makes the scores again (14 for 12 of attention); block remat all of a layer but its last product."""
    model, job = catalogue.model("tiny"), Job(batch_seqs=16, seq_len=64)
    strategy = Strategy(mesh=make_mesh(axes), remat=remat)
    counted = strategy_sizes(model, job, strategy)
    steps = derive(transformer(model), strategy).steps(1)
    executed = sum(n * op_flops(s, counted) for s, n in steps if not s.is_collective) * strategy.num_chips
    pairs_width = 16 * 64**2 * model.num_heads * model.head_dim * model.num_layers
    again = 2 * pairs_width
    if remat != "none":
        parts = params_by_part(model)
        layer = parts["attention"] + parts["mlp"] - model.num_layers * model.d_model * model.d_ff
        again += 2 * layer * job.tokens_per_step + 4 * pairs_width
    if remat == "full":
        again += 2 * model.d_model * model.vocab_size * job.tokens_per_step
    assert executed == pytest.approx(model_flops(model, job) + again, rel=1e-12)
