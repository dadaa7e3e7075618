"""Tricks of serving against figures by hand."""

import pytest

from meshwright.calculators.serving.replica import ServingReplica
from meshwright.calculators.serving.tricks import tricks
from meshwright.core.errors import InputError
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import peak
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.weights import num_params

ASKED = {"prompt_len": 8192, "output_len": 512, "acceptance": 0.8, "draft_cost": 0.05}


def replica(model, cluster, **fields):
    at = parse_cluster(cluster)
    return ServingReplica(
        cluster=at, model=load_model(model), peak_flops=peak(at.chip, "bf16"), price_usd_per_hour=1.2, **fields
    )


def rows_of(model="llama3-70b", cluster="v5e:4x4", **fields):
    return {row["trick"]: row for row in tricks(replica(model, cluster, **fields), **ASKED)}


def test_bytes_of_a_token():
    """64 heads of 128 in 80 layers: 2 x 64 x 128 x 80 x 2 bytes; 8 kv heads have an eighth, int8 and pairs half."""
    found = {name: row["kv_token_bytes"] for name, row in rows_of().items()}
    plain = 2 * 64 * 128 * 80 * 2
    assert found["none of these"] == found["drafts"] == found["int4 weights"] == plain
    assert found["8 kv heads"] == plain / 8
    assert found["one kv head"] == plain / 64
    assert found["int8 caches"] == found["2 layers a cache"] == plain / 2
    # 67 of 80 layers keep 1,024 of 8,704 positions
    assert found["window 1,024, 67 layers"] == pytest.approx(plain * (13 + 67 * 1024 / 8704) / 80)
    assert found["all together*"] == pytest.approx(plain / 8 / 2 / 2 * (13 + 67 * 1024 / 8704) / 80)


def test_steps_and_rates_of_the_largest_batch():
    """8 kv heads: (16 x 17.18 GB - 2 x 70.6e9) over 8,704 x 327,680 bytes hold 46 caches or one less."""
    at, row = replica("llama3-70b", "v5e:4x4"), rows_of()["8 kv heads"]
    each, params = 8704 * 327_680, num_params(at.model)
    batch = (16 * at.memory_bytes - 2 * params) // each
    step_s = (batch * each + 2 * params) / (16 * at.hbm_bytes_per_s)
    assert row["largest_batch"] == batch
    assert row["tpot_s"] == row["step_s"] == pytest.approx(step_s)
    assert row["tokens_per_s_per_chip"] == pytest.approx(batch / step_s / 16)
    assert row["usd_per_million_output"] == pytest.approx(16 * 1.2 / 3600 / (batch / step_s) * 1e6)
    assert rows_of(weights="int8", kv="int8")["8 kv heads"] == row


def test_drafts_are_the_best_number_of_them():
    """Four sequences are bound by memory for up to some 30 tokens of each: drafts as in the closed form."""
    row = rows_of()["drafts"]
    tokens = (1 - 0.8 ** (row["drafts"] + 1)) / (1 - 0.8)
    assert row["drafts"] == 8
    assert row["tpot_s"] == pytest.approx(row["step_s"] * (1 + 8 * 0.05) / tokens)


def test_pages_hold_what_is_used():
    """A mean sequence has 8,192 + 256 positions and half a page of 16 free, in place of 8,704."""
    found = rows_of("llama2-13b", "v5e:4x4")
    at = replica("llama2-13b", "v5e:4x4")
    each = 2 * 40 * 128 * 40 * 2
    free = 16 * at.memory_bytes - 2 * num_params(at.model)
    assert found["pages of 16"]["largest_batch"] == free // ((8192 + 256 + 8) * each)
    assert found["none of these"]["largest_batch"] == free // (8704 * each)


def test_models_that_have_their_own():
    """Latent caches have no heads; Gemma 3 has its own windows; of an expert model both still hold."""
    assert not any("kv head" in name for name in rows_of("deepseek-v3", "h200:8x2"))
    assert "window 1,024, 52 layers" in rows_of("gemma3-27b", "h100:8x1")
    assert "8 kv heads" in rows_of("mixtral-8x7b", "h100:8x1")


def test_what_does_not_fit_has_no_rate():
    """A chip of 16 GB holds 7 B parameters in 8 bits or less, not in 16."""
    found = rows_of("llama2-7b", "v5e:1x1")
    assert found["none of these"]["tokens_per_s_per_chip"] is None
    assert found["none of these"]["times"] is None
    assert found["int4 weights"]["largest_batch"] > 0
    assert found["int4 weights"]["times"] is None


def test_bare_numbers_have_no_tricks():
    with pytest.raises(InputError, match="Name a model"):
        tricks(replica("llama3-8b", "v5e:1x4", kv_token_bytes=1e5), **ASKED)
