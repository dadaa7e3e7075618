"""Counts of a transformer that no worked answer covers: windows, latent caches, stages, refusals, arrays."""

import pytest

from meshwright.core.errors import InputError
from meshwright.cost.formulas import accounting
from meshwright.cost.work.ops import model_flops
from meshwright.spec.catalogue import load_model
from meshwright.spec.job import Job
from meshwright.spec.strategy import STATE_BYTES


def test_a_window_ends_the_cache_of_its_layers():
    gemma = load_model("gemma3-27b")
    per_position = 2 * 2 * gemma.num_kv_heads * gemma.head_dim
    num_full = gemma.num_layers - len(gemma.sliding_layers)
    assert accounting.kv_cache_bytes(gemma, 512) == 512 * gemma.num_layers * per_position
    assert (
        accounting.kv_cache_bytes(gemma, 32768) == (32768 * num_full + 1024 * len(gemma.sliding_layers)) * per_position
    )


def test_latent_attention_keeps_its_latent():
    assert accounting.kv_cache_bytes(load_model("deepseek-v3"), 1) == 2 * 61 * (512 + 64)


def test_attention_takes_half_of_the_flops_at_its_length():
    llama = load_model("llama3-70b")
    seq_len = round(accounting.attention_equal_len(llama))
    job, short = (Job(batch_seqs=1, seq_len=length) for length in (seq_len, 1))
    head = 6 * llama.d_model * llama.vocab_size * seq_len
    matrices = model_flops(llama, short) - 12 * llama.num_heads * llama.head_dim * llama.num_layers
    assert model_flops(llama, job) - head == pytest.approx(2 * (seq_len * matrices - head), rel=1e-6)


def test_generation_reuses_a_cache_once_per_head_of_a_group():
    work = accounting.attention_work(queries=1, keys=1 << 20, heads=64, kv_heads=8, head_dim=128)
    assert work.intensity == pytest.approx(8, rel=1e-4)


@pytest.mark.parametrize("state", STATE_BYTES)
def test_stage_0_is_everything_and_stage_3_a_share_of_it(state):
    parts = [accounting.state_bytes(1e9, state=state, part=part) for part in ("weights", "gradients", "optimizer")]
    stages = [accounting.zero_bytes(1e9, state=state, stage=stage, num_shards=8) for stage in accounting.ZERO_SHARDS]
    assert stages[0] == sum(parts)
    assert stages[3] == sum(parts) / 8
    assert stages == sorted(stages, reverse=True)


def test_policies_keep_less_and_less():
    widths = [
        sum(accounting.saved_widths(load_model("llama3-8b"), policy).values())
        for policy in ("none", "selective", "block")
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == load_model("llama3-8b").d_model
    assert accounting.train_flops_per_param() == 6


def test_refusals():
    with pytest.raises(InputError, match="Did you mean 'bf16-adam'"):
        accounting.bytes_per_param("bf16-adamw")
    with pytest.raises(InputError, match="stage 4 does not exist"):
        accounting.zero_bytes(1e9, state="fp32", stage=4, num_shards=8)


def test_a_token_keeps_a_slot_with_each_of_its_experts():
    """DeepSeek-V2: layer 0 is dense, the other 59 send a token to 6 experts of width 1536."""
    deepseek = load_model("deepseek-v2")
    widths = accounting.saved_widths(deepseek, ("x1", "g", "ge"))
    assert widths["x"] == widths["x1"] == deepseek.d_model
    assert widths["g"] == pytest.approx(12288 / 60)
    assert widths["ge"] == pytest.approx(59 * 6 * 1536 / 60)


def test_activations_beside_an_encoder_are_those_of_a_pair_of_tokens():
    """With every layer's input kept: a stream of each stack, which have as many layers."""
    model = load_model("t5-11b")
    widths = accounting.saved_widths(model, "block")
    assert set(widths) == {"encoder_x", "x"}
    assert sum(widths.values()) == 2 * model.d_model
