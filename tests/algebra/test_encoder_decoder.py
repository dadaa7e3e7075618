"""An encoder and a decoder, in training and generation: stacks, roles, counts and collectives, written out."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.generation.cache import cache_table
from meshwright.algebra.generation.derive import derive_encoding, derive_phase
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.cost.work.ops import model_flops, op_flops, op_hbm_bytes
from meshwright.cost.work.sequences import LikeSequences
from meshwright.plan.planner import rank_plans
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.why.explain_service import explain_service
from meshwright.simulate.service import service_traffic, simulate_service
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Encoder
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh

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


ONE = Strategy(mesh=make_mesh({}), assignment=LAYOUTS["prompts"])
B, S, BEFORE = 5, 40, 10
"""Sequences, positions of their sources, and those of their own before the step."""


def counts(kind):
    """FLOPs of each block for all its layers, and the bytes of the steps that end in a name of one layer."""
    setting = Setting(BOTH, parse_cluster("v5e:2x4"), Job(kind=kind, batch_seqs=B, seq_len=S))
    sizes = setting.step_sizes(ONE, LikeSequences(B, 1.0, BEFORE * (kind == "decode"), float(S)))
    blocks = setting.derived(ONE).blocks
    flops = {block.name: block.repeat * sum(op_flops(step, sizes) for step in block.forward) for block in blocks}
    return flops, {step.result.name: op_hbm_bytes(step, sizes) for block in blocks for step in block.forward}


def test_the_encoder_is_counted_once_a_request():
    n, h, k, d, f = BOTH.num_heads, BOTH.head_dim, BOTH.num_kv_heads, BOTH.d_model, BOTH.d_ff
    flops, _ = counts("prefill")
    own = 2 * d * h * (2 * n + 2 * k) + 4 * n * S * h + 6 * d * f
    assert flops["encoder_layer"] == 3 * B * S * own
    assert flops["cross_layer"] == BOTH.num_layers * B * S * 4 * d * k * h
    of_row = 2 * d * h * (2 * n + 2 * k) + 4 * d * n * h + 4 * n * h * (1 + S) + 6 * d * f
    assert flops["layer"] == BOTH.num_layers * B * of_row, "the first row of each follows"


def test_each_step_of_the_decoder_reads_the_keys_of_sources():
    n, h, k, d, f = BOTH.num_heads, BOTH.head_dim, BOTH.num_kv_heads, BOTH.d_model, BOTH.d_ff
    flops, num_bytes = counts("decode")
    assert flops.keys() == {"embed", "layer", "head"}
    of_row = 2 * d * h * (2 * n + 2 * k) + 4 * d * n * h + 4 * n * h * (BEFORE + 1 + S) + 6 * d * f
    assert flops["layer"] == BOTH.num_layers * B * of_row
    for name, positions in (("cross_o", S), ("o", BEFORE + 1)):
        rows = 2 * B * n * h * 2
        caches = 2 * B * positions * k * h * 2
        assert rows + caches < num_bytes[name] < 1.05 * (rows + caches), "and the tables of pages"


def test_pages_of_sources_are_of_the_pool_of_all():
    """As many as a sequence and its source fill; no array is added."""
    table = cache_table(BOTH, batch_seqs=3, max_len=10, storage=Storage(page_len=4))
    assert [(row.name, row.shape[:2]) for row in table] == [("cache_k", (3 * (3 + 24), 4)), ("cache_v", (81, 4))]
    assert {row.name for row in table} <= {v.name for v in derive_encoding(BOTH, ONE).program.of_role("cache")}


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"data": 2, "tensor": 2}, {"context": 2}])
def test_sources_stay_with_their_owner(axes):
    """Heads split keys as they split caches, places of sequences split sources, and context their positions."""
    strategy = Strategy(mesh=make_mesh(axes), assignment=LAYOUTS["prompts"])
    derived = derive_encoding(BOTH, strategy)
    moved = {step.result.name for block in derived.blocks for step in block.forward if step.is_collective}
    owned = {"encoder_kr", "encoder_v", "cross_k", "cross_v"} if "context" in axes else {"encoder_a", "encoder_y"}
    assert moved == owned | ({"encoder_x"} if "tensor" in axes else set())
    phase = derive_phase(BOTH, strategy, prompts=True)
    assert [block.name for block in phase.blocks] == [*(b.name for b in derived.blocks), "embed", "layer", "head"]


SERVICE = Service(prompt_len=90, output_len=30, requests_per_s=20.0)


BIASED = msgspec.structs.replace(BOTH, relative_buckets=8, relative_shared=True)
"""All layers of a stack read one table of biases."""


@pytest.mark.parametrize("model", [BOTH, BIASED], ids=["rope", "bias"])
def test_a_service_has_room_for_sources_and_outputs(model):
    """Its explanation prices the same steps, and a light load meets them. Pages of 128 are whole."""
    result = plan_service(service_setting(model, parse_cluster("v5e:2x2")), SERVICE)
    plan = result.as_written
    pool = plan.generate
    held = pool.batch_seqs * (128 + 128) * BOTH.num_layers * 2 * BOTH.num_kv_heads * BOTH.head_dim * 2
    assert pool.memory["kv_cache"] == pytest.approx(held / pool.strategy.num_chips, rel=0.01)
    told = explain_service(plan)
    for name, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("memory left", "free_bytes")):
        assert told.value(name) == pytest.approx(getattr(plan.predicted, field), rel=1e-6)
    record = simulate_service(result, plan, service_traffic(SERVICE, duration_s=60, requests_per_s=0.1))
    assert np.median(record.ttft_s) == pytest.approx(plan.predicted.ttft_s, rel=0.05)


@pytest.mark.parametrize(
    "change", [{"prefix_share": 0.5}, {"chunk_len": 16}, {"prompt_len": 97}, {"output_len": 10**6}]
)
def test_services_that_an_encoder_does_not_have(change):
    setting = service_setting(BOTH, parse_cluster("v5e:2x2"))
    with pytest.raises(InputError, match=r"reads whole prompts|positions of both"):
        plan_service(setting, msgspec.structs.replace(SERVICE, **change))
