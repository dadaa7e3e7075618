"""Measurements as jobs: models against published sizes, clusters, the rules of docs/accuracy.md, seconds by hand."""

import pytest

from meshwright.accuracy.cases import cases_of, chip_of, cluster_of, model_of, training_case
from meshwright.cost.work.ops import model_flops
from meshwright.spec.chip import chip, peak
from meshwright.spec.strategy import make_mesh, standard_assignment
from meshwright.spec.weights import num_active_params, num_params
from tests.accuracy.recorded import GPT, LLAMA, case, published, record

MOE = {"experts": 64, "top_k": 2, "d_ff_expert": 2048}


def strategy(**fields):
    return case(**fields).strategy


def assumed(**fields):
    return case(**fields).setting.assumptions


def split(**fields):
    """Mesh axes of more than one device."""
    return {axis: size for axis, size in strategy(**fields).mesh.items() if size > 1}


# -- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mpt-7b", 6.65),
        ("mpt-30b", 29.98),
        ("gpt3-175b", 175.0),
        ("gpt-530B", 529.6),
        ("gpt-1T", 1008.0),
        ("llama2-7b", 6.74),
        ("llama2-13b", 13.02),
        ("llama3.1-8b", 8.03),
        ("llama3.1-70b", 70.6),
        ("llama3.1-405b", 405.9),
        ("mistral-7b", 7.24),
        ("mixtral-8x7b", 46.7),
        ("mixtral-8x22b", 141.0),
        ("deepseek-v3-671b", 671.0),
        ("kimi-k2", 1040.0),
        ("qwen3-235b-a22b", 235.0),
        ("qwen3-30b-a3b", 30.5),
        ("gpt-oss-120b", 116.8),
        ("llama4-maverick", 400.0),
    ],
)
def test_sizes_of_recorded_models(name, billions):
    """Parameters as their makers publish them."""
    shapes = [one.model for one in published() if one.model and one.model.name == name]
    assert num_params(model_of(shapes[0], 2048)) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("deepseek-v3-671b", 37.0), ("qwen3-235b-a22b", 22.0), ("llama4-maverick", 17.0)],
)
def test_parameters_that_one_token_uses(name, billions):
    shapes = [one.model for one in published() if one.model and one.model.name == name]
    assert num_active_params(model_of(shapes[0], 2048)) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_block_without_a_gate_is_gpt2_s():
    gpt, llama = case(model=GPT).setting.model, case().setting.model
    assert (gpt.family, gpt.norm, gpt.gated, gpt.tied_embeddings, gpt.learned_positions) == (
        *("gpt2", "layer_norm", False),
        *(True, True),
    )
    assert (llama.family, llama.norm, llama.gated, llama.tied_embeddings) == ("llama", "rms_norm", True, False)


def test_layers_with_experts():
    """The first are dense, then every second has experts: layers 2, 4, ... counted from 1."""
    model = case(
        model=LLAMA | {"layers": 8, "moe": MOE | {"first_k_dense": 3, "interleave": 2, "n_shared": 2}}
    ).setting.model
    assert model.dense_layers == (0, 1, 2, 4, 6)
    assert (model.num_experts, model.experts_per_token, model.d_ff_expert, model.d_ff_shared) == (64, 2, 2048, 4096)


def test_latent_attention():
    shape = LLAMA | {"moe": MOE, "attention": "mla", "q_lora_rank": 1536, "kv_lora_rank": 512, "n_kv_heads": 32}
    model = case(model=shape).setting.model
    assert model.latent_attention
    assert (model.head_dim, model.v_head_dim, model.kv_lora_rank) == (192, 128, 512)


def test_windows_on_every_or_every_second_layer():
    shape = LLAMA | {"layers": 4, "sliding_window": 128}
    assert case(model=shape).setting.model.sliding_layers == (0, 1, 2, 3)
    assert case(model=shape | {"attention": "alternating sliding/full"}).setting.model.sliding_layers == (0, 2)
    assert case().setting.model.sliding_layers == ()


# -- clusters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("H100-SXM-80GB", "h100"),
        ("H100-SXM", "h100"),
        ("A100-SXM-80GB", "a100"),
        ("A100-SXM-40GB", "a100-40gb"),
        ("V100-SXM2-32GB", "v100"),
        ("GB200-NVL72", "gb200"),
        ("GB300-NVL72", "gb300"),
        ("B200-SXM", "b200"),
        ("B300-SXM", "b300"),
        ("TPU-v4", "v4p"),
        ("TPU-v5e", "v5e"),
        ("TPU-v5p", "v5p"),
        ("TPU-v6e", "v6e"),
        ("TPU-v7x", "tpu7x"),
        ("TPU7x (Ironwood)", "tpu7x"),
        ("MI300X", "mi300x"),
    ],
)
def test_chips(hardware, name):
    assert chip_of(record(hardware=hardware)).name == name


@pytest.mark.parametrize(
    ("hardware", "num_chips", "shape"),
    [
        ("H100-SXM", 256, (8, 32)),
        ("H100-SXM", 4, (4, 1)),
        ("H100-SXM", 12, (6, 2)),
        ("GB300-NVL72", 256, (64, 4)),
        ("GB200-NVL72", 64, (64, 1)),
        ("GB200-NVL72", 144, (72, 2)),
        ("GB200-NVL72", 8, (8, 1)),
    ],
)
def test_domains(hardware, num_chips, shape):
    """Whole domains; of 72 chips the 64 are used that divide."""
    assert cluster_of(record(hardware=hardware, n_chips=num_chips)).shape == shape


@pytest.mark.parametrize(
    ("hardware", "num_chips", "slices", "shape"),
    [
        ("TPU-v5e", 256, None, {16}),
        ("TPU-v5e", 1024, 4, {16}),
        ("TPU-v6e", 32, 1, {4, 8}),
        ("TPU-v5p", 512, 1, {8}),
        ("TPU-v5p", 128, 1, {4, 8}),
        ("TPU-v4", 384, 2, {4, 12}),
        ("TPU-v4", 8, 1, {2}),
    ],
)
def test_tori(hardware, num_chips, slices, shape):
    """Near to a cube; a v4 or v5p is made of cubes of 4 x 4 x 4 where it can be, and so closes into rings."""
    found = cluster_of(record(hardware=hardware, n_chips=num_chips, slices=slices))
    assert set(found.shape) == shape
    assert (found.num_chips, found.num_slices) == (num_chips, slices or 1)
    assert any(found.wraps) == (max(found.shape) >= 12 or num_chips > 32)


def test_the_network_that_a_note_states():
    """Gb/s of a node of eight; four 200 Gb/s cards for eight chips on A3 High."""
    own = chip("a100").nic_bytes_per_s
    assert chip_of(record(hardware="A100-SXM-80GB")).nic_bytes_per_s == own
    assert chip_of(record(hardware="A100-SXM-80GB", note="800 Gb/s inter-node; x")).nic_bytes_per_s == 800e9 / 8 / 8
    assert chip_of(record(hardware="A100-SXM-80GB", note="0 Gb/s inter-node")).nic_bytes_per_s == own
    assert chip_of(record(note="per_device_batch 4; A3-High network")).nic_bytes_per_s == 4 * 200e9 / 8 / 8


# -- strategies -----------------------------------------------------------------------------------------


def test_zero_stages():
    assert split(parallelism={"dp": 16}) == {"data": 16}
    for stage in (1, 2, 3):
        found = strategy(parallelism={"dp": 16, "zero_stage": stage})
        assert found.mesh == make_mesh({"fsdp": 16})
        assert found.zero == stage
    assert strategy(parallelism={"dp": 16}).zero == 0


def test_the_stream_between_blocks():
    """Split over tensor where the source says so, and on TPUs."""
    eager = {"tp": 4, "dp": 4}
    assert strategy(parallelism=eager).assignment == standard_assignment(zero=0, sequence_parallel=False)
    assert strategy(parallelism=eager | {"sp": True}).assignment == standard_assignment(zero=0)
    tpu = strategy(hardware="TPU-v5p", n_chips=64, parallelism={"tp": 4, "dp": 16, "zero_stage": 3})
    assert tpu.assignment == standard_assignment(zero=3)


def test_slices_and_nodes_hold_whole_copies():
    """ZeRO-3 inside a slice, or a node where the note says so; ZeRO-1 over all."""
    two = {"hardware": "TPU-v5e", "n_chips": 512, "slices": 2, "parallelism": {"dp": 512, "zero_stage": 3}}
    assert split(**two, global_batch_seqs=512) == {"data": 2, "fsdp": 256}
    assert split(note="FSDP 8 in node, DP across") == {"data": 2, "fsdp": 8}
    assert split(note="FSDP 8 in node", parallelism={"dp": 16, "zero_stage": 1}) == {"fsdp": 16}


def test_experts_take_what_the_replicas_share_with_them():
    moe = LLAMA | {"moe": MOE}
    wide = {"dp": 4, "tp": 4, "ep": 16, "zero_stage": 1}
    assert split(model=moe, parallelism=wide) == {"expert": 4, "tensor": 4}
    assert split(model=moe, parallelism=wide | {"dp": 16, "tp": 1, "ep": 8}) == {"expert": 8, "fsdp": 2}
    assert split(parallelism=wide | {"dp": 16, "tp": 1}) == {"fsdp": 16}, "a dense model has no experts to split"
    sliced = {"hardware": "TPU-v5e", "n_chips": 512, "slices": 2, "global_batch_seqs": 512}
    assert split(**sliced, model=moe, parallelism={"dp": 512, "ep": 512, "zero_stage": 3}) == {"expert": 512}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"recompute": "none"}, "none"),
        ({"recompute": "unknown"}, "none"),
        ({"recompute": None}, "none"),
        ({"recompute": "full"}, "every-1"),
        ({"recompute": "selective"}, "none"),
        ({"recompute": "full", "group": "maxtext-a3"}, "block"),
        ({"recompute": "selective", "group": "maxtext-a3"}, "selective"),
    ],
)
def test_recomputation(fields, kept):
    assert strategy(**fields).remat == kept


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("qkv_proj_offloaded", ("qr", "kr", "v", "logits")),
        ("custom(offload qkv+out+layer input)", ("qr", "kr", "v", "a", "logits")),
        ("custom(offload decoder_layer_input)", ("logits",)),
    ],
)
def test_policies_of_maxtext(policy, kept):
    tpu = {"hardware": "TPU-v6e", "parallelism": {"dp": 16, "zero_stage": 3}, "recompute": "selective"}
    assert strategy(**tpu, remat_policy=policy).remat == kept


def test_software():
    """Compiled on TPUs and by MaxText; fp16 marks the stacks of 2021, and one source turns every overlap off."""
    assert assumed().software == "eager"
    assert assumed(precision="fp16").software == "eager-2021"
    assert assumed(hardware="TPU-v5e").software == assumed(group="maxtext-a3").software == "compiled"
    assert assumed(source="MooreThreads/SimuMax docs/a100.md").software == "eager-in-turn"
    assert assumed(source="MooreThreads/SimuMax docs", precision="fp16").software == "eager-in-turn"


def test_attention_with_alibi_is_portable():
    """Its kernels were written in Triton for all chips in 2023."""
    assert assumed().attention_kernel == "tuned"
    assert assumed(note="ALiBi positions; x").attention_kernel == "portable"
    cases, _ = cases_of(published(), training_case)
    assert {c.record.group for c in cases if c.setting.assumptions.attention_kernel == "portable"} == {"llm-foundry"}


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 2),  # 64 sequences over 16 replicas of 2
        ({"micro_batch": 4}, 1),
        ({"micro_batch": None}, 1),
        ({"micro_batch": None, "parallelism": {"pp": 4, "dp": 4}}, 16),
        ({"micro_batch": 2, "parallelism": {"pp": 4, "dp": 4}}, 8),
        ({"micro_batch": 1, "hardware": "TPU-v5e"}, 1),
        ({"micro_batch": 64}, 1),
    ],
)
def test_microbatches(fields, count):
    assert strategy(**fields).num_microbatches == count


def test_pipelines():
    found = strategy(parallelism={"pp": 4, "dp": 4, "vpp": 2})
    assert (found.schedule, found.chunks, found.mesh["pipeline"]) == ("interleaved", 2, 4)
    assert strategy(parallelism={"pp": 4, "dp": 4}).schedule == "1f1b"


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"),
    [
        (32, 4, 4),  # eight layers of a stage in four chunks of two
        (48, 4, 6),
        (40, 8, 1),  # five do not divide into chunks of at least two, but as one
        (12, 4, 1),
        (36, 4, 3),  # nine: three chunks of three
        (32, 1, 1),
    ],
)
def test_chunks_where_their_number_is_not_printed(layers, stages, chunks):
    """As many as leave two layers in each; one where the note does not say that they were used."""
    fields = {"model": LLAMA | {"layers": layers}, "n_chips": 16, "parallelism": {"pp": stages, "dp": 16 // stages}}
    found = strategy(**fields, note="micro-batch, VPP and recompute not printed")
    assert found.chunks == chunks
    assert found.schedule == ("interleaved" if chunks > 1 else "1f1b")
    assert strategy(**fields).chunks == 1
    assert strategy(**fields, note="VPP 2").chunks == 1


def test_context_is_exchanged_where_the_note_says_so():
    assert strategy(parallelism={"cp": 4, "dp": 4}).context_attention == "gather"
    assert strategy(parallelism={"cp": 4, "dp": 4}, note="CP uses a2a").context_attention == "ulysses"


@pytest.mark.parametrize(
    ("precision", "hardware", "dtype"),
    [
        ("bf16", "H100-SXM", "bf16"),
        ("unstated", "A100-SXM-80GB", "bf16"),
        ("fp16", "A100-SXM-80GB", "bf16"),
        ("fp16", "V100-SXM2-32GB", "fp16"),
        ("fp8", "H100-SXM", "fp8"),
        ("mxfp8", "B200-SXM", "fp8"),
        ("nvfp4", "GB200-NVL72", "fp4"),
        ("int8 (script default quantization=int8)", "TPU-v5p", "int8"),
    ],
)
def test_precision(precision, hardware, dtype):
    assert strategy(precision=precision, hardware=hardware).matmul_dtype == dtype


def test_the_state_of_gpus_and_tpus():
    assert strategy().state == "bf16-master-fp32-grads"
    assert strategy(hardware="TPU-v5e").state == "bf16-master"


def test_a_torus_is_laid_out_in_whole_axes():
    """As device meshes are made: tensor on one of two axes of 16, though other layouts could be faster."""
    split_both = {"hardware": "TPU-v5e", "n_chips": 256, "global_batch_seqs": 256}
    found = strategy(**split_both, parallelism={"tp": 16, "dp": 16, "zero_stage": 3})
    assert {found.placement[axis] for axis in ("fsdp", "tensor")} == {"x (16)", "y (16)"}


# -- seconds --------------------------------------------------------------------------------------------

TOKENS = 64 * 2048


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ({"step_s": 3.5, "tokens_per_s": 1.0, "mfu": 0.1}, 3.5),
        ({"tokens_per_s": 50_000.0, "tokens_per_s_per_chip": 1.0}, TOKENS / 50_000),
        ({"tokens_per_s_per_chip": 3000.0, "tflops_per_chip": 1.0}, TOKENS / 3000 / 16),
    ],
)
def test_seconds_from_times_and_rates(measured, seconds):
    assert case(measured=measured).measured_s == pytest.approx(seconds)


def test_seconds_from_utilisation():
    """6 N D + 12 B T^2 N H L, by hand for a gpt of width 4096 with 32 layers, biases and norms left out."""
    gpt = case(model=GPT, measured={"tflops_per_chip": 400.0, "mfu": 0.9})
    matrices = 32 * 12 * 4096**2 + 50304 * 4096
    flops = 6 * matrices * TOKENS + 12 * 64 * 2048**2 * 32 * 128 * 32
    assert gpt.measured_s == pytest.approx(flops / 400e12 / 16)
    assert flops == model_flops(gpt.setting.model, gpt.setting.job)
    by_share = case(model=GPT, measured={"mfu": 0.4})
    assert by_share.measured_s == pytest.approx(flops / (0.4 * 989.4e12) / 16)


def test_utilisation_of_a_chip_without_bf16():
    v100 = case(model=GPT, measured={"mfu": 0.4}, hardware="V100-SXM2-32GB", precision="fp16")
    assert v100.measured_s == pytest.approx(
        model_flops(v100.setting.model, v100.setting.job) / (0.4 * peak(chip("v100"), "fp16")) / 16
    )


def test_flops_that_count_recomputation():
    """96 B T L D^2 (1 + T / 6D + V / 16LD): Narayanan et al. (2021), equation 3."""
    found = case(model=GPT, measured={"tflops_per_chip": 150.0}, note="TFLOP/s counts recompute FLOPs")
    flops = 96 * 64 * 2048 * 32 * 4096**2 * (1 + 2048 / (6 * 4096) + 50304 / (16 * 32 * 4096))
    assert found.measured_s == pytest.approx(flops / 150e12 / 16)
    model_only = case(model=GPT, measured={"tflops_per_chip": 150.0})
    assert found.measured_s / model_only.measured_s == pytest.approx(4 / 3, rel=0.01)


# -- what is not predicted ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "decode"}, "kind decode: only training"),
        ({"measured": {}}, "no step time, throughput or utilisation"),
        ({"model": None}, "no model"),
        ({"seq_len": None, "global_batch_seqs": None}, "no seq_len and no global_batch_seqs"),
        ({"n_chips": 0}, "no n_chips"),
        ({"global_batch_seqs": 0}, "no global_batch_seqs"),
        ({"hardware": "H900"}, "unknown chip 'h900'. Did you mean 'h800'"),
        ({"precision": "fp9"}, "precision 'fp9' is not known"),
        ({"precision": "fp8", "hardware": "A100-SXM-80GB"}, "a100 has no fp8 matrix rate"),
        ({"parallelism": {"tp": 3}}, "tensor 3 do not divide 16 chips"),
        ({"hardware": "TPU-v5e", "slices": 3}, "16 chips do not divide into 3 slices"),
        ({"hardware": "TPU-v5e", "n_chips": 512}, "larger than a pod of v5e"),
        ({"hardware": "H100-PCIe"}, "of h100-pcie is not known"),
        ({"hardware": "cpu"}, "Give a number of devices"),
        ({"model": LLAMA | {"n_kv_heads": 5}}, "num_kv_heads=5 does not divide num_heads=32"),
    ],
)
def test_reasons(fields, reason):
    _, (found,) = cases_of([record(**fields)], training_case)
    assert reason in found.reason
    assert "\n" not in found.reason
