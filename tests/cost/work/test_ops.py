"""FLOPs and bytes of every local op kind, and what a whole step executes."""

import math
import re

import msgspec
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops import step_kinds
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import transformer
from meshwright.cost.setting import Setting
from meshwright.cost.work.ops import mfu_words, model_flops, num_matmul_params, op_flops, op_hbm_bytes
from meshwright.cost.work.slots import SlotSizes, expert_slots
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import REMAT_POLICIES, STATE_BYTES, Strategy, make_mesh
from meshwright.spec.weights import num_active_params, num_params, params_by_part, weight_table

DIMS = {"B": 8.0, "T": 16.0, "D": 32.0, "F": 64.0, "N": 4.0, "K": 2.0, "H": 8.0, "V": 128.0}
MESH = {"data": 2, "fsdp": 2, "context": 4, "tensor": 2}


def sizes(**changes):
    return SlotSizes(**{"dims": DIMS, "mesh": MESH, "state": "bf16-adam", **changes})


def step(op, inputs, result, *more, **fields):
    arrays = [parse_array(text) for text in (*inputs, result, *more)]
    end = len(inputs)
    if op.startswith("attention"):
        fields.setdefault("details", Attention())
    return Step(op=op, inputs=tuple(arrays[:end]), result=arrays[end], more=tuple(arrays[end + 1 :]), **fields)


def test_einsum_counts_every_distinct_dim_once_on_one_device():
    up = step("einsum", ["h[B_{data,fsdp}, T_context, D]", "w[D, F_tensor]"], "u[B_{data,fsdp}, T_context, F_tensor]")
    assert op_flops(up, sizes()) == 2 * (8 / 4) * (16 / 4) * 32 * (64 / 2)
    assert op_hbm_bytes(up, sizes()) == 2 * (2 * 4 * 32 + 32 * 32 + 2 * 4 * 32)
    assert op_hbm_bytes(up, sizes(state="fp32")) == 2 * op_hbm_bytes(up, sizes())


def test_a_result_that_is_added_is_read_once_more():
    inputs, result = ["h[B, T, D]", "w[D, F]"], "u[B, T, F]"
    alone, added = (step("einsum", inputs, result, accumulates=adds) for adds in (False, True))
    assert op_hbm_bytes(added, sizes()) - op_hbm_bytes(alone, sizes()) == 2 * 8 * 16 * 64


def attention_steps():
    q, o = "q[B_{data,fsdp}, T_context, N_tensor, H]", "o[B_{data,fsdp}, T_context, N_tensor, H]"
    k, v = "k[B_{data,fsdp}, T, K_tensor, H]", "v[B_{data,fsdp}, T, K_tensor, H]"
    lse = "lse[B_{data,fsdp}, T_context, N_tensor]"
    forward = step("attention", [q, k, v], o)
    backward = step("attention_backward", [o, o, lse, q, k, v], q, k, v)
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


def test_a_window_and_a_causal_kernel_meet_fewer_keys():
    forward, backward = attention_steps()
    rows = (8 / 4) * (4 / 2) * (16 / 4)
    near = msgspec.structs.replace(forward, details=Attention(window=5))
    assert op_flops(near, sizes()) == 4 * rows * 5 * 8
    assert op_flops(msgspec.structs.replace(forward, details=Attention(window=99)), sizes()) == op_flops(
        forward, sizes()
    )
    assert op_flops(backward, sizes(causal=True)) == op_flops(backward, sizes()) / 2
    # the first 5 of 16 queries meet 5 / 2 keys on average, the other 11 meet 5
    assert op_flops(near, sizes(causal=True)) == pytest.approx(4 * rows * (5 * 2.5 + 11 * 5) / 16 * 8)


def test_a_query_meets_the_keys_of_its_chunk():
    """16 positions in chunks of 5: three whole ones, and one position more."""
    forward, _ = attention_steps()
    rows = (8 / 4) * (4 / 2) * (16 / 4)
    near = msgspec.structs.replace(forward, details=Attention(window=5, chunked=True))
    assert op_flops(near, sizes()) == pytest.approx(4 * rows * (15 * 5 + 1 * 1) / 16 * 8)
    assert op_flops(near, sizes(causal=True)) == pytest.approx(4 * rows * (15 * 2.5 + 1 * 0.5) / 16 * 8)
    wide = msgspec.structs.replace(forward, details=Attention(window=99, chunked=True))
    assert op_flops(wide, sizes(causal=True)) == op_flops(forward, sizes(causal=True))


def test_values_may_be_narrower_than_keys():
    q, k, v = "q[B, T, N, H]", "k[B, T, N, H]", "v[B, T, N, Hv]"
    counted = sizes(dims=DIMS | {"Hv": 4.0})
    pairs = 8 * 4 * 16 * 16
    assert op_flops(step("attention", [q, k, v], "o[B, T, N, Hv]"), counted) == 2 * pairs * (8 + 4)
    backward = step("attention_backward", ["o[B, T, N, Hv]", "o[B, T, N, Hv]", "lse[B, T, N]", q, k, v], q, k, v)
    assert op_flops(backward, counted) == 2 * pairs * (3 * 8 + 2 * 4)


def test_round_a_ring_every_key_comes_by_and_queries_are_read_again():
    q, o = "q[B, T_context, N, H]", "o[B, T_context, N, H]"
    k, v = "k[B, T_context, K, H]", "v[B, T_context, K, H]"
    ring = step("attention", [k, v, q, k, v], o, details=Attention(ring=("context",)))
    whole = step("attention", [q, k.replace("_context", ""), v.replace("_context", "")], o)
    assert op_flops(ring, sizes()) == op_flops(whole, sizes())
    one = 2 * 8 * (16 / 4) * 8 * (2 * 4 + 2 * 2)  # q, o, k and v
    assert op_hbm_bytes(ring, sizes()) == 4 * one
    # devices have 4 positions: a window of 5 begins one device before at most, chunks of 4 and of 6 where and before
    for near, blocks in (
        (Attention(window=5), 2),
        (Attention(window=4, chunked=True), 1),
        (Attention(window=6, chunked=True), 2),
    ):
        details = msgspec.structs.replace(near, ring=("context",))
        assert op_hbm_bytes(msgspec.structs.replace(ring, details=details), sizes()) == blocks * one


def test_a_bias_is_added_on_the_way_out_of_its_product():
    add = step("bias_add", ["y[B, T, F]", "b[F]"], "z[B, T, F]")
    assert op_hbm_bytes(add, sizes()) == 2 * 64
    back = step("bias_add_backward", ["z[B, T, F]"], "b[F]")
    assert op_hbm_bytes(back, sizes()) == 2 * (8 * 16 * 64 + 64)


def test_experts_move_a_row_for_every_slot():
    """256 slots of width 32 for 128 tokens with two experts each."""
    counted = sizes(dims=DIMS | {"E": 4.0, "C": 64.0, "Ea": 2.0})
    slots, tokens, chosen = "xe[E, C, D]", "x[B, T, D]", "c[B, T, Ea]"
    assert op_hbm_bytes(step("dispatch", [tokens, chosen], slots), counted) == 2 * (2 * 256 * 32 + 256)
    back = step("dispatch_backward", [slots, chosen], tokens)
    assert op_hbm_bytes(back, counted) == 2 * (256 * 32 + 256 + 128 * 32)
    combine = step("combine", [slots, chosen], tokens)
    assert op_hbm_bytes(combine, counted) == 2 * (256 * 32 + 256 + 128 * 32)
    back = step("combine_backward", [tokens, chosen], slots)
    assert op_hbm_bytes(back, counted) == 2 * (2 * 256 * 32 + 256)


def test_slots_are_the_tokens_sent_to_an_expert():
    mixtral = catalogue.load_model("mixtral-8x7b")
    assert expert_slots(mixtral, num_tokens=4096) == {"C": 1024, "Er": 4}
    assert expert_slots(mixtral, num_tokens=4096, factor=1.5) == {"C": 1536, "Er": 4}
    assert expert_slots(catalogue.load_model("tiny"), num_tokens=4096) == {}


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
    arrays = [f"{name}[D_fsdp, F_tensor]" for name in ("dw", "w", "mu", "nu")]
    adamw = step("adamw", arrays, "w[D_fsdp, F_tensor]")
    parts = STATE_BYTES[state]
    local = 16 * 32
    expected = local * (2 * parts["gradients"] + 2 * parts["weights"] + 2 * parts["optimizer"])
    assert op_hbm_bytes(adamw, sizes(state=state)) == expected


def sizes_of(model, job, mesh):
    """Sizes of a whole batch on a mesh."""
    dims = model.dims | {"B": job.batch_seqs, "T": job.seq_len} | expert_slots(model, num_tokens=job.tokens_per_step)
    return SlotSizes(dims={name: float(size) for name, size in dims.items()}, mesh=mesh, state="bf16-adam")


def attention_flops(model, job, *, keys_only=False):
    """Forward FLOPs of attention: 2 B T S N (H + Hv), of S no more than a window; the part of H alone if asked."""
    near, far = (min(model.sliding_window or 0, job.seq_len), model.head_dim), (job.seq_len, model.full_heads[1])
    layers = [near if layer in model.sliding_layers else far for layer in range(model.num_layers)]
    widths = sum(keys * (width + (0 if keys_only else model.v_head_dim or width)) for keys, width in layers)
    return 2 * job.batch_seqs * job.seq_len * widths * model.num_heads


def derived_flops(model, job, axes, **choices):
    """FLOPs of the forward and of the backward pass on all devices."""
    mesh = make_mesh(axes)
    derived = derive(transformer(model), Strategy(mesh=mesh, remat="none", **choices))
    counted, found = sizes_of(model, job, mesh), {"forward": 0.0, "backward": 0.0}
    for block in derived.blocks:
        for name in found:
            local = (s for s in getattr(block, name) if not s.is_collective)
            found[name] += block.repeat * sum(op_flops(s, counted) for s in local) * math.prod(mesh.values())
    return found


@pytest.mark.parametrize("name", [name for name in catalogue.models() if not catalogue.load_model(name).encoder])
def test_every_program_has_the_flops_of_its_active_matrices(name):
    """2 per active matrix parameter and token forward, 4 backward; the unembedding counts, the look-up does not."""
    model, job = catalogue.load_model(name), Job(batch_seqs=16, seq_len=2048)
    look_up = params_by_part(model)["embedding"] - (model.vocab_size * model.d_model if model.tied_embeddings else 0)
    vectors = sum(w.num_active_params for w in weight_table(model) if w.kind == "vector")
    forward = 2 * (num_active_params(model) - look_up - vectors) * job.tokens_per_step
    # streams are predicted and corrected with one router
    twice = 2 * sum(w.num_params for w in weight_table(model) if w.name == "layers.mix_router") * job.tokens_per_step
    attention = attention_flops(model, job)
    found = derived_flops(model, job, {})
    assert found["forward"] == pytest.approx(forward + twice + attention, rel=1e-6)
    # the scores are made once more
    again = attention_flops(model, job, keys_only=True)
    assert found["backward"] == pytest.approx(2 * (forward + twice + attention) + again, rel=1e-6)
    assert model_flops(model, job) == pytest.approx(3 * (forward + attention), rel=1e-6)


@pytest.mark.parametrize("name", ["t5-11b", "opus-mt-en-de", "whisper-large-v3"])
def test_what_an_encoder_adds_is_in_the_flops_of_the_model(name):
    """Its rows are of another length, and of its first convolution twice as long again."""
    model, job = catalogue.load_model(name), Job(batch_seqs=16, seq_len=256)
    assert model_flops(model, job) == pytest.approx(3 * derived_flops(model, job, {})["forward"], rel=1e-9)


@pytest.mark.parametrize("way", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("name", ["gpt2", "deepseek-v2-lite", "gpt-oss-20b"])
def test_no_split_changes_the_flops(name, way):
    model, job = catalogue.load_model(name), Job(batch_seqs=16, seq_len=2048)
    axes = {"data": 2, "fsdp": 2, "expert": 2, "context": 2, "tensor": 2}
    alone, split = derived_flops(model, job, {}), derived_flops(model, job, axes, context_attention=way)
    assert split["forward"] == pytest.approx(alone["forward"], rel=1e-9)
    assert split["backward"] == pytest.approx(alone["backward"], rel=1e-9)


@pytest.mark.parametrize("name", catalogue.models())
def test_every_step_of_every_program_has_its_bytes(name):
    model, job = catalogue.load_model(name), Job(batch_seqs=16, seq_len=2048)
    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    derived = derive(transformer(model), Strategy(mesh=mesh))
    counted = sizes_of(model, job, mesh)
    for step, _ in derived.steps():
        if not step.is_collective:
            moved = op_hbm_bytes(step, counted)
            assert moved >= 0
            assert moved > 0 or step.op in ("copy", "slice", "sum_loss_backward")


def test_model_flops_without_keys_that_no_query_sees():
    job = Job(batch_seqs=4, seq_len=8192)
    for name in ("llama3-8b", "deepseek-v3"):
        model = catalogue.load_model(name)
        whole, causal = (model_flops(model, job, causal=choice) for choice in (False, True))
        assert whole - causal == pytest.approx(3 * attention_flops(model, job) / 2)
    mistral = catalogue.load_model("mistral-7b")
    whole, causal = (model_flops(mistral, job, causal=choice) for choice in (False, True))
    # of a window of half the sequence, the first half of the queries sees half: 3/4 in all
    assert whole - causal == pytest.approx(3 * attention_flops(mistral, job) / 4)
    scout, long = catalogue.load_model("llama4-scout"), Job(batch_seqs=1, seq_len=20_480)  # two chunks and a half
    near, far = 36 * (2 * 8192**2 + 4096**2), 12 * 20_480**2
    assert model_flops(scout, long) == 6 * num_matmul_params(scout) * 20_480 + 12 * 40 * 128 * (near + far)
    assert model_flops(scout, long) - model_flops(scout, long, causal=True) == 6 * 40 * 128 * (near + far)


@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_every_derived_local_step_has_a_row(remat):
    derived = derive(transformer(catalogue.load_model("tiny")), Strategy(mesh=make_mesh({"fsdp": 2}), remat=remat))
    local = {s.op for s, _ in derived.steps() if not s.is_collective}
    assert local <= set(step_kinds())
    assert {"einsum", "attention_backward", "adamw", "embed_backward"} <= local


def test_model_flops_of_llama3_70b():
    model, job = catalogue.load_model("llama3-70b"), Job(batch_seqs=1024, seq_len=4096)
    parts = params_by_part(model)
    assert num_matmul_params(model) == num_params(model) - parts["embedding"] - parts["norm"]
    attention = 12 * 1024 * 4096**2 * 64 * 128 * 80
    assert model_flops(model, job) - attention == 6 * num_matmul_params(model) * 2**22
    # 6 x 70e9 per token (How to Scale Your Model, section 6.2), which leaves attention out
    assert (model_flops(model, job) - attention) / 2**22 == pytest.approx(4.2e11, rel=0.01)


def test_a_tied_table_counts_once_as_the_unembedding():
    tied = catalogue.load_model("llama3.2-1b")
    assert tied.tied_embeddings
    assert num_matmul_params(tied) == num_params(tied) - params_by_part(tied)["norm"]


@pytest.mark.parametrize(
    "axes", [{}, {"fsdp": 4, "tensor": 2}, {"data": 2, "context": 2, "tensor": 2}, {"data": 8}], ids=str
)
@pytest.mark.parametrize("remat", ["none", "block", "full"])
def test_executed_flops_are_the_model_s_and_what_is_made_again(axes, remat):
    """Backward makes the scores again (14 for 12 of attention); block remat all of a layer but its last product."""
    model, job = catalogue.load_model("tiny"), Job(batch_seqs=16, seq_len=64)
    strategy = Strategy(mesh=make_mesh(axes), remat=remat)
    counted = Setting(model, parse_cluster("cpu:8"), job).sizes(strategy)  # which meets every key
    derived = derive(transformer(model), strategy)
    executed = sum(n * op_flops(s, counted) for s, n in derived.steps(1) if not s.is_collective) * strategy.num_chips
    pairs_width = 16 * 64**2 * model.num_heads * model.head_dim * model.num_layers
    again = 2 * pairs_width
    if remat != "none":
        parts = params_by_part(model)
        layer = parts["attention"] + parts["mlp"] - model.num_layers * model.d_model * model.d_ff
        again += 2 * layer * job.tokens_per_step + 4 * pairs_width
    fused = any(s.op == "fused_head" for s, _ in derived.steps(1))
    if remat == "full" and not fused:  # where it is, as the trainer runs it, logits are made once
        again += 2 * model.d_model * model.vocab_size * job.tokens_per_step
    assert executed == pytest.approx(model_flops(model, job) + again, rel=1e-12)


@pytest.mark.parametrize(
    "name",
    ["llama3-8b", "gpt-oss-20b", "gemma3-27b", "mistral-7b", "mixtral-8x7b", "deepseek-v3", "with mtp", "llama4-scout"],
)
@pytest.mark.parametrize("length", [64, 8192])
def test_the_words_of_mfu_are_the_flops_that_it_counts(name, length):
    """The printed formula, computed by hand: 6 N D, and what follows with letters for sizes."""
    model, job = catalogue.load_model(name.replace("with mtp", "deepseek-v3")), Job(batch_seqs=3, seq_len=length)
    model = msgspec.structs.replace(model, mtp_weight=0.1) if name == "with mtp" else model
    words = mfu_words(model)
    params = num_matmul_params(model) + ("both unembeddings" in words) * model.d_model * model.vocab_size
    products, _, scores = words.partition(",")[0].partition(" + ")
    assert products == "6 FLOPs a parameter and token"
    window = re.search(r"W the (?:window|chunk) of ([\d,]+) or T", words)
    letters = {"B": 3, "T": length, "N": model.num_heads, "H": model.head_dim, "Hv": model.v_head_dim}
    letters |= {"L": model.num_layers, "W": min(int(window[1].replace(",", "")), length) if window else 0}
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", "*", scores.replace("^", "**"))
    by_hand = 6 * params * job.tokens_per_step + eval(text, {}, letters)
    assert by_hand == pytest.approx(model_flops(model, job), rel=1e-9)
