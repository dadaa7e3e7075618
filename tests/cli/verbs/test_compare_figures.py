"""What models are compared by, and the chips that hold them: the book's figures."""

import pytest

from meshwright.cli.verbs.compare import attention_train_flops, model_row
from meshwright.cli.verbs.compare_memory import state_bytes_per_param, training_bytes
from meshwright.cost.work.ops import model_flops, token_flops
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.chip import chips
from meshwright.spec.job import Job


def test_the_books_table_of_llama3_70b():
    row = model_row(load_model("llama3-70b"), seq_len=4096)
    sizes = ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    assert [row[name] for name in sizes] == [80, 8192, 28672, 64, 8, 128, 128256]
    assert (row["ff_ratio"], row["aspect"]) == (3.5, 102.4)
    # section 6.2: 4.2e11 FLOPs a token
    assert row["train_flops_per_token"] == pytest.approx(4.2e11, rel=0.01)
    # exercise 8.1: 160 kB a token in int8
    assert row["kv_bytes_per_token"] == 2 * 2 * 8 * 128 * 80


def test_attention_is_half_at_eight_times_the_width():
    # section 4.3: T = 8 D where F = 4 D and heads are full; gpt3 has no gate, so 6 D, but for its embeddings
    gpt3 = load_model("gpt3-175b")
    assert attention_train_flops(gpt3, 2048) == 12 * 2048**2 * 12288 * 96
    assert model_row(gpt3, seq_len=6 * 12288)["attention_share"] == pytest.approx(0.5, abs=0.002)


def test_windows_bound_what_attention_does():
    gemma2 = load_model("gemma2-9b")
    window, layers = gemma2.sliding_window, gemma2.num_layers
    near, far = (attention_train_flops(gemma2, n) for n in (window, 2 * window))
    assert window is not None
    whole = layers - len(gemma2.sliding_layers)
    assert far / near == pytest.approx((4 * whole + 2 * len(gemma2.sliding_layers)) / layers)


@pytest.mark.parametrize("name", ["gemma4-31b", "llama4-scout", "deepseek-v3"])
def test_attention_is_what_mfu_counts_beside_matrices(name):
    """Heads of another width in layers without a window, chunks, latents."""
    model, job = load_model(name), Job(batch_seqs=1, seq_len=20480)
    beside = model_flops(model, job) - token_flops(model) * job.seq_len
    assert attention_train_flops(model, job.seq_len) == pytest.approx(beside, rel=1e-9)


def test_experts_count_by_what_a_token_uses():
    row = model_row(load_model("deepseek-v3"), seq_len=4096)
    assert (row["num_experts"], row["experts_per_token"]) == (256, 8)
    assert row["ff_ratio"] == (8 * 2048 + 2048) / 7168
    assert row["num_active_params"] < row["num_params"] / 10
    assert model_row(load_model("llama3-8b"), seq_len=4096)["num_experts"] is None


@pytest.mark.parametrize("name", models())
def test_every_model_has_a_row(name):
    row = model_row(load_model(name), seq_len=2048)
    assert 0 < row["attention_share"] < 1
    assert row["num_active_params"] <= row["num_params"]


def test_the_book_holds_llama3_70b_on_225_chips(call):
    # section 6.3: 21.6 TB at 4M tokens and four results a layer, 225 v5p of 96 GB; the model counts 70.6e9, not 70e9
    needed = training_bytes(load_model("llama3-70b"), state="bf16-adam", batch_tokens=4_000_000)
    assert needed == pytest.approx(21.6e12, rel=0.01)
    (held,) = call("compare", "llama3-70b", "--hold", "--batch", "4M", "--on", "v5p-book", "--json").json["chips"]
    assert held["min_chips"]["llama3-70b"] in (225, 226)


def test_largest_models_of_the_slides(call):
    # Scaling systems for LLMs: 10 bytes a parameter give 9B on a v5p and 8B on an H100
    found = call("compare", "tiny", "--hold", "--on", "v5p", "--on", "h100", "--json").json["chips"]
    assert [one["max_params_one_chip"] for one in found] == pytest.approx([9.5e9, 8e9])


def test_an_average_of_the_weights_adds_its_bytes():
    assert [state_bytes_per_param("bf16-master", average=a) for a in ("none", "bf16", "fp32")] == [16, 18, 20]
    assert training_bytes(load_model("llama3-8b"), state="fp32", average="fp32") == 20 * 8030261248


def test_a_chip_of_unknown_memory(call):
    (unknown,) = [c for c in chips().values() if c.memory_bytes is None][:1]
    (held,) = call("compare", "tiny", "--hold", "--on", unknown.name, "--json").json["chips"]
    assert (held["min_chips"], held["max_params_one_chip"]) == ({"tiny": None}, None)
