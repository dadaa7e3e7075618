"""An encoder and a decoder: stacks, roles, and the collectives of what the one hands to the other, written out."""

from collections import Counter

import msgspec
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.cost.work.ops import model_flops, op_flops
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Encoder
from meshwright.spec.strategy import Strategy, make_mesh

BOTH = msgspec.structs.replace(load_model("tiny"), name="both", encoder=Encoder(num_layers=3, length=96))
JOB = Job(batch_seqs=16, seq_len=32)


def derived(**choices):
    axes = choices.pop("axes", {"data": 2, "fsdp": 2, "tensor": 2})
    return derive(transformer(BOTH), Strategy(mesh=make_mesh(axes), **choices))


def block(name, **choices):
    return next(found for found in derived(**choices).blocks if found.block.name == name)


def test_blocks_are_known_by_their_role():
    """Labels and texts keep the names of blocks; nothing else goes by them."""
    program, plain = transformer(BOTH), transformer(load_model("tiny"))
    assert [(stack.first, set(stack.layers), len(stack.layers), stack.last) for stack in program.stacks] == [
        ("encoder_embed", {"encoder_layer"}, 3, "encoder_end"),
        ("embed", {"layer"}, BOTH.num_layers, "head"),
    ]
    assert [program.block_role(found.name) for found in program.blocks] == [
        "first",
        "layer",
        "last",
        "first",
        "layer",
        "head",
    ]
    assert [plain.block_role(found.name) for found in plain.blocks] == ["first", "layer", "head"]
    assert [program.shared_inputs(found.name) for found in program.blocks] == [
        (),
        (),
        (),
        (),
        ("encoded",),
        (),
    ]
    assert derived().num_layers == BOTH.num_layers + 3
    steps = [step for found in derived().blocks for step in (*found.forward, *found.backward)]
    assert {(step.block, step.role) for step in steps} == {(b.name, program.block_role(b.name)) for b in program.blocks}


def test_what_the_decoder_reads_is_gathered_once_and_its_cotangent_scattered_once():
    end, layer = block("encoder_end"), block("layer")
    assert [str(step) for step in end.forward] == [
        "encoded[B_{data,fsdp}, S_tensor, D] = rms_norm(encoder_x[B_{data,fsdp}, S_tensor, D], encoder_final_norm[D])",
        "encoded[B_{data,fsdp}, S, D] = AllGather_tensor(encoded[B_{data,fsdp}, S_tensor, D])",
    ]
    assert str(end.backward[0]) == (
        "dencoded[B_{data,fsdp}, S_tensor, D] = ReduceScatter_tensor(dencoded[B_{data,fsdp}, S, D]{U_tensor})"
    )
    made = [step for step in layer.backward if step.result.name == "dencoded"]
    assert [str(step) for step in made] == [
        f"dencoded[B_{{data,fsdp}}, S, D]{{U_tensor}} = dcross_{n}[B_{{data,fsdp}}, S, K_tensor, H] * "
        f"cross_w{n}[D, K_tensor, H]"
        for n in "vk"
    ]
    assert all(step.accumulates for step in made), "added to what the layers after have left"
    assert not any(step.is_collective and "encoded" in step.result.name for step in (*layer.forward, *layer.backward))
    assert not any(array.name == "encoded" for array in layer.kept), "held once, not by every layer"


def test_a_layer_with_cross_attention_has_three_gathers_and_three_scatters_of_the_stream():
    for name, count in (("encoder_layer", 2), ("layer", 3)):
        steps = [step for step in block(name, remat="none").forward if step.axes == ("tensor",)]
        assert Counter(step.op for step in steps) == {"all_gather": count, "reduce_scatter": count}


def test_whole_keys_of_another_length_meet_a_part_of_the_queries():
    """Where positions are split over ``context``, keys and values of cross-attention are gathered along S."""
    axes = {"context": 2}
    forward = [str(s) for s in block("layer", axes=axes, remat="none").forward if s.result.name.startswith("cross_k")]
    assert forward[-1] == "cross_k[B, S, K, H] = AllGather_context(cross_k[B, S_context, K, H])"
    backward = [str(s) for s in block("layer", axes=axes, remat="none").backward if s.result.name == "dcross_k"]
    assert backward == ["dcross_k[B, S_context, K, H] = ReduceScatter_context(dcross_k[B, S, K, H]{U_context})"]


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_only_causal_attention_goes_round_a_ring(way):
    names = {s.result.name for s in block("layer", axes={"context": 2}, context_attention=way).forward if s.axes}
    passing = {"kr_passing", "v_passing"}
    assert passing <= names if way == "ring" else not passing & names
    assert not any("passing" in name for name in names - passing)
    encoder = block("encoder_layer", axes={"context": 2}, context_attention=way).forward
    moves = {s.op for s in encoder if s.axes and s.result.name in ("encoder_kr", "encoder_v")}
    assert moves == ({"all_gather"} if way == "ring" else {"all_to_all"})


def test_flops_are_those_that_are_counted_by_hand():
    sizes = Setting(BOTH, parse_cluster("cpu:8"), JOB).sizes(Strategy(mesh=make_mesh({})))
    b, t, s, n, h, d, f = 16, 32, 96, BOTH.num_heads, BOTH.head_dim, BOTH.d_model, BOTH.d_ff
    k = BOTH.num_kv_heads
    project = 2 * d * h * (2 * n + 2 * k)
    per_layer = {
        "encoder_layer": b * s * project + 4 * b * n * s * s * h + 6 * b * s * d * f,
        "layer": (
            *(b * t * project + 4 * b * n * t * t * h + 6 * b * t * d * f,),
            *(b * t * 4 * d * n * h + b * s * 4 * d * k * h + 4 * b * n * t * s * h,),
        ),
    }
    found = {
        part.block.name: sum(op_flops(step, sizes) for step in part.forward)
        for part in derived(axes={}).blocks
        if part.block.carry
    }
    assert found == {"encoder_layer": per_layer["encoder_layer"], "layer": sum(per_layer["layer"])}
    layers = 3 * (found["encoder_layer"] * 3 + found["layer"] * BOTH.num_layers)
    assert model_flops(BOTH, JOB) == pytest.approx(layers + 6 * b * t * d * BOTH.vocab_size)


def test_it_is_priced():
    """One encoder's result and the sum of its cotangents are held, whatever the layers of the decoder."""
    cluster = parse_cluster("v5e:2x4")
    strategy = Strategy(mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    priced = price_strategy(Setting(BOTH, cluster, JOB), strategy)
    assert priced.estimate.step_s > 0
    assert 0 < priced.estimate.mfu < 1
    parts = memory_parts(priced.derived, priced.sizes)
    one = 16 / 4 * 96 * BOTH.d_model * 2
    alone = msgspec.structs.replace(priced.derived, program=_without_inputs(priced.derived.program), shared={})
    held = parts.shared_bytes - memory_parts(alone, priced.sizes).shared_bytes
    assert float(held) == 2 * one


def _without_inputs(program):
    stacks = tuple(msgspec.structs.replace(stack, inputs=()) for stack in program.stacks)
    return msgspec.structs.replace(program, stacks=stacks)


def test_layers_add_to_the_cotangent_of_one_table_of_biases():
    """It is summed over sequences once for all layers, in the block that prepares the table."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    found = derive(transformer(load_model("t5-11b")), Strategy(mesh=mesh))
    for prefix, layer_name in (("", "layer"), ("encoder_", "encoder_layer")):
        steps_of = {one.block.name: one for one in found.blocks}
        made = [step for step in steps_of[layer_name].backward if step.result.name == f"d{prefix}shared_bias"]
        assert [(step.op, step.accumulates) for step in made] == [("copy", True)]
        assert {step.op for step in steps_of[f"{prefix}bias"].backward if step.axes} == {"all_reduce"}
        assert not [s for s in steps_of[layer_name].forward if s.axes and "bias" in s.result.name]


def test_convolutions_are_products_that_tensor_splits():
    """The width between them is split, and the second one's sum is scattered over positions."""
    mesh = make_mesh({"fsdp": 2, "context": 2, "tensor": 2})
    found = derive(transformer(load_model("whisper-large-v3")), Strategy(mesh=mesh, remat="none"))
    steps = [step for step in found.blocks[0].forward if "_c" in step.result.name]
    assert [str(s.result) for s in steps if s.op == "einsum"] == [
        "encoder_c1[B_fsdp, Sf, Dc_tensor]",
        "encoder_c2[B_fsdp, S_context, D]{U_tensor}",
    ]
    assert [s.op for s in steps if s.result.name == "encoder_c2"] == ["einsum", "reduce_scatter"]
    assert not any(step.result.name == "dencoder_features" for step in found.blocks[0].backward)


@pytest.mark.parametrize("name", ["t5-11b", "bart-large", "whisper-large-v3", "opus-mt-en-de"])
def test_published_models_are_planned(name):
    model = load_model(name)
    setting = Setting(model, parse_cluster("v5p:2x2x4"), Job(batch_seqs=64, seq_len=256))
    best = rank_plans(setting, top=1).plans[0]
    assert best.strategy.num_chips == 16
    assert 0 < best.predicted.mfu < 1
