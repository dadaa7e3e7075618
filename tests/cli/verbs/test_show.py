"""`meshwright show`: catalogues, models, chips and clusters, with what follows from their figures."""

import json

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from meshwright.core.units import format_bytes
from meshwright.cost.formulas.accounting import forward_flops
from meshwright.cost.work.ops import model_flops
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.chip import chips
from meshwright.spec.hf.published import folder_weights
from meshwright.spec.hf.write import config_from_model
from meshwright.spec.job import Job
from tests.nn.families import FAMILIES
from tests.nn.hf.gguf_files import write_gguf
from tests.nn.hf.test_gguf import MODELS, published, random_params
from tests.nn.hf.test_published import folder_of


def test_models(call):
    said = call("show", "models")
    assert (said.code, said.err) == (0, "")
    assert len(models()) >= 25
    assert [row["name"] for row in call("show", "models", "--json").json["models"]] == list(models())
    for name in models():
        assert name in said.printed("text").out
    assert "llama3-70b llama 70.6 B 70.6 B 80 8,192 yes" in said.printed("text").words


def test_chips(call):
    rows = call("show", "chips", "--json").json["chips"]
    assert [row["name"] for row in rows] == list(chips())
    by_name = {row["name"]: row for row in rows}
    assert by_name["v5p"]["ici_intensity"] == pytest.approx(2550)
    assert by_name["v100"]["compute_dtype"] == "fp16"
    assert by_name["cpu"]["critical_intensity"] is None
    assert "v5e 197 - 394 - 16 GB 819 GB/s 45 GB/s" in call("show", "chips").printed("text").words


def test_a_model(call):
    found = call("show", "llama3-8b", "--json").json
    assert found["params"] == 8030261248
    assert sum(found["params_by_part"].values()) == found["params"]
    assert found["train_flops_per_token"] == 6 * 7504658432  # no look-up table, no norms
    assert found["kv_cache_bytes_per_token"] == 2 * 2 * 8 * 128 * 32
    # projections 2 D (N + K) H against 2 N H positions
    assert found["projection_equal_len"] == 4096 * (32 + 8) / 32
    assert found["attention_equal_len"] == 4096 * (32 + 8) / 32 + 3 * 4096 * 14336 / (2 * 4096)
    intensity = found["attention_intensity"]
    assert intensity["prefill"] == pytest.approx(4096 * 4 / 5)
    assert intensity["generation"] == pytest.approx(4 * 4096 / (4 + 4096))
    zero = found["zero_bytes"]
    assert zero["num_devices"] == [8, 64, 1024]
    assert zero["stages"]["0"] == [12 * found["params"]] * 3
    assert zero["stages"]["3"] == [12 * found["params"] / n for n in (8, 64, 1024)]
    assert found["saved_bytes_per_token"]["block"]["bytes"] == 2 * 4096 * 32
    assert found["saved_bytes_per_token"]["block"]["results"] == ["x"]
    text = call("show", "llama3-8b").printed("text").words
    for fact in ("8,030,261,248 (8.03 B", "45 GFLOP a token", "26,624 positions", "projections at 5,120",
                 "131 kB a token", "ZeRO-3 (FSDP) optimizer, gradients, weights 12 GB 1.51 GB 94.1 MB",
                 "block 4,096 262 kB x", "bf16-adam 80.3 GB"):  # fmt: skip
        assert fact in text


def test_shares_and_designs_of_the_cache(call):
    found = call("show", "llama2-7b", "--json").json
    own, one, shared = found["kv_cache"]
    assert own["own"]
    assert own["bytes_per_token"] == {"bf16": 524288, "int8": 262144, "int4": 131072}
    assert own["sequence"]["bytes"] == 524288 * own["sequence"]["positions"]
    assert one["bytes_per_token"]["bf16"] * 32 == shared["bytes_per_token"]["bf16"] * 2 == 524288
    text = call("show", "llama2-7b").printed("text").words
    assert "embedding 1.9%, attention 31.9%, mlp 64.2%, unembedding 1.9%" in text
    assert "MHA, 32 heads * 8,192 524 kB 262 kB 131 kB" in text
    for name in ("gemma3-27b", "deepseek-v3"):
        assert max(map(len, call("show", name).out.splitlines())) <= 80


def test_a_model_with_latent_attention(call):
    found = call("show", "deepseek-v3", "--json").json
    assert found["saved_bytes_per_token"]["block"] == {
        "results": ["x"], "elements_per_layer": 7168, "bytes": 2 * 7168 * 61
    }  # fmt: skip
    assert found["attention_intensity"] is None
    assert "not run" not in call("show", "deepseek-v3").out


def test_a_model_of_a_config_file(call, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    counted = 2 * 100 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    for path in (".", "./config.json", str(tmp_path)):
        assert call("show", path, "--json").json["params"] == counted
    # a folder that is called as a published model, and is another
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    found = call("show", "./gpt2", "--json").json
    assert (found["params"], found["published_params"]) == (counted, None)


def test_a_chip(call):
    found = call("show", "v5e", "--json").json
    assert found["critical_intensity"] == pytest.approx(197e12 / 819e9)
    assert found["critical_batch"] == pytest.approx(
        {"bf16 x bf16": 197e12 / 819e9, "bf16 x int8": 197e12 / 819e9 / 2, "int8 x int8": 394e12 / 819e9 / 2}
    )
    assert found["critical_batch_pcie"] == pytest.approx(197e12 / 15e9)
    assert found["critical_split_dim"] == pytest.approx(2 * 197e12 / 45e9)
    assert found["reduce_after_min_dim"] == pytest.approx(2 * 197e12 / 90e9)
    assert found["latency_bound_bytes"] == pytest.approx(45e3)
    assert (found["int8_over_bf16"], found["memory_over_link"]) == (2, pytest.approx(819 / 45))
    # what the compiler offers of the 16 GB class: 15.75 GiB
    assert found["max_params"]["bf16-adam"] == pytest.approx(15.75 * 2**30 / 10)
    text = call("show", "v5e").printed("text").words
    for fact in ("bf16, dense 197 TFLOP/s", "critical intensity 240.5 FLOPs/byte", "D = 8,756 2 peak / link",
                 "FSDP on one ICI axis, from 2,189 tokens a chip", "bound by latency transfers < 45 kB",
                 "bf16-adam 1.69 B", "How to Scale Your Model, section 2.3"):  # fmt: skip
        assert fact in text


@pytest.mark.parametrize("name", chips())
def test_every_chip_can_be_shown(call, name):
    said = call("show", name)
    assert (said.code, said.err) == (0, "")
    assert call("show", name.upper(), "--json").json["name"] == name


def test_what_no_source_gives_is_null(call):
    found = call("show", "m3", "--json").json
    assert found["hbm_bytes"] is None
    assert found["critical_batch"] == {}
    assert found["max_params"] == {}


def test_windows_enter_the_lengths(call):
    """gemma3-27b: 62 layers whose matrices are worth 62 x 50,400 keys; 52 of them meet 1,024, 10 the rest: 307,155."""
    found = call("show", "gemma3-27b", "--json").json
    assert found["attention_equal_len"] == pytest.approx((62 * 50_400 - 52 * 1024) / 10)
    text = call("show", "gemma3-27b").printed("text").words
    assert "at 307,155 positions" in text
    assert "(52 of 62 layers see 1,024 positions)" in text
    # all 32 layers of mistral-7b have a window of 4,096: never
    assert call("show", "mistral-7b", "--json").json["attention_equal_len"] is None
    assert "matmuls at no length" in call("show", "mistral-7b").printed("text").words


def test_what_runs_is_asked_of_the_model(call):
    for name in ("tiny", "llama3-8b", "deepseek-v3"):
        model = load_model(name)
        words = call("show", name).printed("text").words
        assert ("here trains" in words) == model.runs_here
        assert (f"counted and planned, not run: {model.missing_to_run}" in words) != model.runs_here


def test_peaks_are_dense(call):
    """MI355X: 10.1 PFLOP/s in fp4, twice its 5.0 in fp8; 20.1 counts sparsity."""
    found = call("show", "mi355x", "--json").json["peak_flops"]
    assert (found["fp8"], found["fp4"]) == (pytest.approx(5.03e15, rel=1e-3), pytest.approx(10.07e15, rel=1e-3))
    for unit in chips().values():
        peaks = unit.peak_flops
        for wide, narrow in (("bf16", "fp8"), ("fp8", "fp4")):
            if wide in peaks and narrow in peaks:
                assert peaks[narrow] / peaks[wide] <= 4, (unit.name, narrow)  # 4: fp8 with float32 sums on RTX


def test_words_of_a_chip(call):
    text = call("show", "h100").printed("text").words
    assert "critical intensity 295.3 FLOPs/byte" in text
    # 450 GB/s x 1 us
    assert "bound by latency transfers < 450 kB" in text


def test_clusters(call):
    found = call("show", "v5p:16x20x28", "--json").json
    assert (found["num_chips"], found["num_hosts"]) == (8960, 2240)
    assert found["wraps"] == [True, True, True]
    assert found["fsdp_min_batch_tokens"] == pytest.approx(2550 / 3 * 8960)
    assert found["dcn_min_batch_tokens_per_slice"] == pytest.approx(459e12 * 4 / 25e9)
    assert found["power_w"] is None
    assert found["energy_kwh_per_day"] is None
    assert "16 ring, 20 ring, 28 ring" in call("show", "v5p:16x20x28").printed("text").words
    node = call("show", "h100:8x256", "--json").json
    assert node["power_w"] == 2048 * 700
    assert node["energy_kwh_per_day"] == pytest.approx(2048 * 0.7 * 24)
    assert node["fsdp_min_batch_tokens"] is None
    # 32 v6e as 4x8 lines: 918e12 / 90e9 / 2 tokens of each = 163 k in all
    lines = call("show", "v6e:4x8", "--json").json
    assert lines["fsdp_min_batch_tokens"] == pytest.approx(918e12 / 90e9 / 2 * 32)
    assert "alpha / axes x chips, W one way" in call("show", "v6e:4x8").printed("text").words
    assert "1.43 MW the chips alone" in call("show", "h100:8x256").printed("text").words


@pytest.mark.parametrize("cluster", ["v5e:1x1", "h100:1", "cpu:8", "4*v5e:16x16", "gb200:72x8", "trn2:4x4"])
def test_clusters_of_every_kind(call, cluster):
    assert call("show", cluster).code == 0
    assert call("show", cluster, "--json").json["kind"] in ("torus", "switched", "host")


def test_a_plan_file_is_sent_to_its_reader(call):
    call("plan", "tiny", "--on", "v5e:1x1", "--batch", "8seq", "--seq", "64", "-o", "p.toml")
    call("show", "p.toml").assert_refused(2, "p.toml is a plan. Use meshwright explain p.toml")


def test_flops_by_part_at_a_length(call):
    """llama3-8b at 8,192: P T, T^2 N H L and V D T by hand; three times their sum is what MFU counts."""
    found = call("show", "llama3-8b", "--seq", "8192", "--json").json["flops"]
    by_part = {row["part"]: row for row in found["parts"]}
    length, layers = 8192, 32
    assert by_part["projections"]["forward_flops"] == 2 * length * layers * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert by_part["scores"]["forward_flops"] == 4 * length**2 * 4096 * layers
    assert by_part["feed-forward"]["forward_flops"] == 2 * length * layers * 3 * 4096 * 14336
    assert by_part["vocabulary"]["forward_flops"] == 2 * length * 4096 * 128256
    assert by_part["scores"]["backward_flops"] == 2 * by_part["scores"]["forward_flops"]
    assert by_part["scores"]["total_causal_flops"] == pytest.approx(by_part["scores"]["total_flops"] / 2, rel=1e-3)
    assert found["total_flops"] == pytest.approx(
        model_flops(load_model("llama3-8b"), Job(batch_seqs=1, seq_len=length))
    )
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1)
    text = call("show", "llama3-8b", "--seq", "8192").printed("text").words
    assert "scores 35.2 TFLOP 70.4 TFLOP 106 TFLOP 22.2% 52.8 TFLOP 12.5%" in text
    assert "embedding 6.5%, attention 16.7%, mlp 70.2%, unembedding 6.5%; vocabulary 13.1%" in text


@pytest.mark.parametrize("name", ["gemma3-27b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x7b", "gemma2-9b"])
def test_parts_add_up_to_what_mfu_counts(name):
    """Windows, latent attention, chosen experts, a tied unembedding."""
    model = load_model(name)
    for causal in (False, True):
        needed = model_flops(model, Job(batch_seqs=1, seq_len=4096), causal=causal)
        assert 3 * sum(forward_flops(model, 4096, causal=causal).values()) == pytest.approx(needed)


def test_what_a_layer_sends(call):
    """P = 218,112,000 weights and norms of a layer; B D = 1024 x 4096; K H = 1024."""
    rows = call("show", "llama3-8b", "--seq", "1024", "--json").json["layer_traffic"]
    sent = {row["strategy"]: (row["forward_bytes"], row["backward_bytes"]) for row in rows}
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert sent["data"] == (0, 4 * weights)
    assert sent["fsdp"] == (2 * weights, 4 * weights)
    assert sent["tensor"] == (8 * 1024 * 4096, 8 * 1024 * 4096)
    assert sent["context ring"] == (4 * 1024 * 1024, 8 * 1024 * 1024)
    assert "expert" not in sent


def test_a_layer_of_two_matrices(call):
    """Two of 8192 x 32768 = 268M parameters; 2 FLOPs of a parameter and token forward, 6 in training."""
    found = call("show", "mlp:8192x32768", "--json").json
    assert (found["d_model"], found["d_ff"], found["params"]) == (8192, 32768, 2 * 2**28)
    assert found["token_flops"] == {"forward": 4 * 2**28, "training": 12 * 2**28}
    assert (
        "537 M parameters FLOPs 1.07 GFLOP a token forward, 3.22 GFLOP in training"
        in call("show", "mlp:8192x32768").printed("text").words
    )


def test_rows_of_the_book_are_explained(call):
    assert (
        "rows that end in -book, such as v5e-book, have the rounded figures of How to Scale Your Model"
        in call("show", "chips").printed("text").words
    )


def test_vector_units_in_the_text(call):
    words = call("show", "v5e").printed("text").words
    assert "VPU lanes of a core 1,024" in words
    assert "ALUs of a VPU lane 4" in words
    assert "chips of a pod 256" in words
    assert "1 core x 4 MXUs" in words


def test_a_folder_of_quantised_weights(call, tmp_path):
    folder_of("int4", tmp_path)
    folder = call("show", str(tmp_path), "--json").json["folder"]
    assert sum(folder["stored_bytes"].values()) == pytest.approx(
        (tmp_path / "model.safetensors").stat().st_size, abs=3000
    )
    assert folder["stored_bytes"]["int32"] == 4608 // 2  # of D=32, F=16, N=2, K=1, H=16
    # values, a scale for 16 inputs, and V=8 tokens and three norms in float32, as they are stored
    assert folder["served_bytes"] == 4608 // 2 + 4608 // 16 * 4 + 4 * (8 * 32 + 3 * 32)
    assert (folder["method"], folder["notes"]) == ("compressed-tensors", [])
    assert "quantised by compressed-tensors" in call("show", str(tmp_path)).words
    folder_of("nvfp4", tmp_path)
    wide = call("show", str(tmp_path), "--json").json["folder"]
    assert wide["served_bytes"] == 4 * (4608 + 8 * 32 + 3 * 32)
    assert wide["notes"] == ["the fp4 weights have 4-bit floats, for which there is no kernel: served in fp32, 18.4 kB"]
    assert wide["served_dtype"] == "fp32"
    assert "folder" not in call("show", "llama3-8b", "--json").json


def test_experts_of_gpt_oss_are_widened_with_a_line(tmp_path):
    model = msgspec.structs.replace(FAMILIES["gpt_oss"], d_model=32, d_ff_expert=32)
    (tmp_path / "config.json").write_text(
        json.dumps(config_from_model(model) | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    names = [f"model.layers.{at}.mlp.experts.{w}_proj" for at in range(model.num_layers) for w in ("gate_up", "down")]
    tensors = {f"{name}{end}": np.zeros(1, np.uint8) for name in names for end in ("_blocks", "_scales")}
    (note,) = folder_weights(model, tmp_path, tensors | {"norm": np.zeros(1, np.float32)}).notes
    size = format_bytes(4 * model.num_layers * model.num_experts * 3 * 32 * 32)
    assert note == f"the fp4 weights have 4-bit floats, for which there is no kernel: served in fp32, {size}"


def test_what_no_verb_would_read_is_shown(call, tmp_path):
    """Parts that are missing, misshapen or not described; the figures are shown all the same."""
    torch_files = pytest.importorskip("safetensors.torch", reason="torch is not installed: make torch installs it")
    folder_of("fp8", tmp_path)
    assert call("show", str(tmp_path), "--json").json["folder"]["refused"] == ""
    file = tmp_path / "model.safetensors"
    whole = torch_files.load_file(file)
    name = next(one for one in whole if one.endswith("up_proj.weight"))
    stem = name.removesuffix(".weight")
    for changed, words in (
        ({name: whole[name][:-1]}, f"{name}: scales of shape"),
        ({name: None, f"{stem}.weight_scale": None}, f"the checkpoint lacks {name}"),
        ({f"{stem}.weight_scale": None}, f"{name} is stored in float8_e4m3fn without scales"),
        ({"other": whole[name].clone()}, "the checkpoint has other, which"),
    ):
        torch_files.save_file({key: value for key, value in (whole | changed).items() if value is not None}, file)
        said = call("show", str(tmp_path))
        assert f"refused by generate, serve and train: {words}" in said.printed("text").words
        assert "serving " in said.printed("text").words
        planned = call("service", str(tmp_path), "--on", "h100:1x1", "--prompt", "32", "--output", "16")
        assert f"serve would refuse the folder: {words}" in planned.words


def test_a_gguf_file(call, tmp_path):
    """A planned service reads it as it reads a folder; serving holds float32 only of float32."""
    model, path = MODELS["llama"], tmp_path / "llama.gguf"
    params = random_params(model)
    count = sum(value.size for value in params.values())
    for kind, dtype, width in ((Kind.F32, "fp32", 4), (Kind.Q8_0, "bf16", 2)):
        write_gguf(path, model, published(model, params), kind)
        found = call("show", str(path), "--json").json["folder"]
        assert (found["served_dtype"], found["served_bytes"]) == (dtype, width * count)
        assert (found["method"], found["refused"]) == ("GGUF" if kind == Kind.Q8_0 else None, "")
        widened = "the Q8_0 weights have blocks of GGUF, for which there is no kernel: served in bf16"
        assert [note.rpartition(",")[0] for note in found["notes"]] == [widened] * (kind == Kind.Q8_0)
    assert call("service", str(path), "--on", "v5e:1x1", "--prompt", "32", "--output", "16").code == 0
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    call("show", str(path)).assert_refused(2, "is cut short")
