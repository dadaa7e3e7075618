"""`meshwright verify`: a step compiled for emulated devices, lowered for large plans, and what is refused."""

import json
import re

import msgspec
import pytest

from meshwright.api.proving import ProofOptions, request_of
from meshwright.cli.verbs import verify
from meshwright.core.units import format_bytes
from meshwright.cost.setting import Setting
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.hf.write import config_from_model
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import num_params
from meshwright.verify import proof, targets
from meshwright.verify.request import Memory
from meshwright.verify.running import CompileOutcome
from tests.cli.made_rates import write_rates
from tests.verify.test_proof import HLO

TINY = ("verify", "tiny", "--on", "cpu:4", "--seq", "64")
LARGE = ("verify", "llama3-70b", "--on", "v5p:16x16x32", "--seq", "4096", "--calibration", "datasheet")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    monkeypatch.setattr(targets, "is_installed", lambda platform: platform == "cpu")


@pytest.fixture
def rates(tmp_path):
    return ("--calibration", str(write_rates(tmp_path)))


def test_a_step_on_emulated_devices(call, rates, tmp_path):
    """The plan's own step, its collectives as derived; memory only where a compiler knows the chip."""
    keep = tmp_path / "kept"
    asked = (*TINY, "--batch", "8seq", "--axes", "fsdp=2,tensor=2", "--keep", str(keep), *rates)
    said = call(*asked)
    assert (said.code, said.err) == (0, "")
    assert "partitioned and its buffers assigned, for 4 emulated CPU devices" in said.words
    assert "without a name 0.00% of all bytes that a device sends" in said.words
    assert "bytes bytes sent, sent," in said.words
    assert "matrix products 5.34 GFLOP on a device, derived 5.34 GFLOP (+0.00%)" in said.words
    assert max(map(len, said.out.splitlines())) <= 80
    assert (keep / "module.hlo").stat().st_size > 10_000


@pytest.mark.slow
def test_a_step_that_generates(call, monkeypatch):
    """Decode is asked for by either word, or by the kind of the job: the same request, so it is compiled once."""
    compiled, run_request = {}, proof.run_request

    def run_once(request, **options):
        key = msgspec.json.encode(msgspec.structs.replace(request, step="train"))  # the name is only printed
        compiled[key] = compiled.get(key) or run_request(request, **options)
        return compiled[key]

    monkeypatch.setattr(proof, "run_request", run_once)
    for asked, step in (
        (("--step", "decode"), "decode"),
        (("--step", "generate"), "generate"),
        (("--set", "job.kind=decode"), "decode"),
        (("--step", "prefill"), "prefill"),
    ):
        said = call(*TINY, "--batch", "8seq", "--axes", "fsdp=2,tensor=2", *asked, "--json")
        assert said.code == 0, said.err
        assert said.json["step"] == step
        assert said.json["collectives"]["remainder"] == 0
        assert said.json["products"]["compiled"] == pytest.approx(said.json["products"]["derived"])
    assert len(compiled) == 2


@pytest.mark.slow
def test_a_stand_in_as_json(call):
    """Nothing of the TPU is here: what stands in for it is named, and its float32 is a difference with a name."""
    said = call(
        *("verify", "tiny", "--on", "v5e:2x2", "--seq", "64", "--batch", "8seq", "--axes", "data=2,tensor=2"),
        *("--calibration", "datasheet", "--json"),
    )
    assert said.code == 0, said.err
    found = said.json
    assert (found["target"], found["runs"], found["refusal"]) == ("cpu", True, "")
    assert 'pip install "meshwright[tpu]"' in found["note"]
    assert "memory" not in found
    assert found["collectives"]["remainder"] < 0.02
    assert {one["name"] for one in found["collectives"]["differences"]} == {"float32"}
    rows = {(row["kind"], *row["axes"]): row for row in found["collectives"]["rows"]}
    assert rows["all_gather", "tensor"]["derived_arrays"] == rows["all_gather", "tensor"]["compiled_arrays"] > 0
    assert found["products"]["compiled"] == found["products"]["derived"]


@pytest.mark.slow
def test_experts_on_emulated_devices(call, tmp_path):
    """CPUs gather what other platforms exchange: the difference has its name."""
    model = msgspec.structs.replace(load_model("mixtral-8x7b"), num_layers=2, d_model=64, d_ff=96, d_ff_expert=96)
    model = msgspec.structs.replace(model, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=96)
    (tmp_path / "config.json").write_text(json.dumps(config_from_model(model)))
    asked = ("service", str(tmp_path), "--on", "v5e:2x2", "--prompt", "64", "--output", "64", "--axes", "expert=4")
    assert call(*asked, "-o", "service.toml").code == 0
    said = call("verify", "service.toml", "--step", "decode", "--json")
    assert said.code == 0, said.err
    assert {one["name"] for one in said.json["decode"]["collectives"]["differences"]} == {
        "gathered exchange",
        "float32",
    }


def test_what_is_not_sent_as_derived_has_an_exit_code(call, monkeypatch):
    """A program without the derived collectives."""
    memory = Memory(arguments=1, temporaries=1, outputs=0)
    played = {"ended": "stopped", "lowered": True, "wall_s": 1.0, "cpu_s": 1.0, "max_rss_bytes": 1}
    outcome = CompileOutcome(**played, hlo=HLO, memory=memory)
    monkeypatch.setattr(proof, "run_request", lambda *_, **__: outcome)
    asked = ("verify", "tiny", "--on", "v5e:2x2", "--seq", "64", "--batch", "8seq", "--axes", "tensor=4")
    said = call(*asked, "--step", "decode", "--calibration", "datasheet")
    assert said.code == 3
    assert "without a name 100.00% of all bytes" in said.words
    assert "the decode step of tiny does not send what is derived: 100.0% of all bytes differ without" in said.err


def test_a_large_plan_is_lowered_without_any_compiler(call):
    said = call(*LARGE, "--depth", "lower", "--batch", "2048seq", "--axes", "fsdp=2048,tensor=4", "--json")
    assert said.code == 0, said.err
    assert (said.json["target"], said.json["depth"], said.json["runs"]) == ("tpu", "lower", True)
    assert said.json["cpu_s"] < 60
    assert "collectives" not in said.json


def test_a_slice_without_a_topology_is_lowered(call):
    asked = ("verify", "tiny", "--on", "v5p:3x5x1", "--batch", "15seq", "--seq", "64", "--axes", "data=15")
    said = call(*asked, "--depth", "lower", "--calibration", "datasheet", "--json")
    assert (said.code, said.json["target"], said.json["runs"]) == (0, "tpu", True)
    assert "no program can be compiled" in said.json["note"]


def test_the_gspmd_form_is_not_of_tpus(call):
    """One line that says what to do, in place of JAX's about kernels."""
    asked = ("verify", "tiny", "--on", "v5e:2x2", "--batch", "8seq", "--seq", "512", "--axes", "fsdp=4", "--gspmd")
    said = call(*asked, "--depth", "lower", "--calibration", "datasheet")
    assert said.code == 3
    assert "XLA cannot partition TPU kernels by itself. Omit --gspmd, or use it with --for cpu" in said.err
    assert "shard_map" not in said.err


def test_a_chip_without_a_compiler(call):
    """Lowered without one; else refused in one line, which says what can be asked for instead: taken at every depth."""
    asked = ("verify", "tiny", "--on", "mi300x:8x1", "--batch", "8seq", "--seq", "64", "--step", "generate")
    for depth in ("lower", "partition"):
        said = call(*asked, "--axes", "data=2,tensor=4", "--depth", depth)
        assert said.code == (0 if depth == "lower" else 3)
        refusal = "no compiler is known for Instinct MI300X" in said.err and "use verify --for cpu" in said.err
        assert refusal == (depth != "lower")
        job = Job(kind="decode", batch_seqs=8, seq_len=64)
        setting = Setting(load_model("tiny"), parse_cluster("mi300x:8x1"), job)
        strategy = Strategy(mesh=make_mesh({"data": 2, "tensor": 4}), state="bf16-adam")
        request = request_of(setting, strategy, ProofOptions(depth=depth, platform="cpu"))
        assert (request.target.platform, request.target.num_devices) == ("cpu", 8)


def test_a_batch_that_does_not_divide(call, rates):
    said = call(*TINY, "--batch", "6seq", "--axes", "fsdp=4", "--depth", "lower", *rates)
    assert said.code == 3
    assert said.err.count("\n") == 1
    assert "fsdp=4 does not divide the batch of 6 sequences. Use fsdp in {1, 2, 3, 6}" in said.err


def test_no_time(call, rates):
    said = call(*TINY, "--batch", "8seq", "--axes", "fsdp=4", "--timeout", "0.1", *rates)
    assert said.code == 3
    assert "time limit reached" in said.err
    assert "--timeout" in said.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--step", "generate", "--axes", "tensor=2"), "the mesh has 2 devices, but cpu:4 has 4 chips"),
        (("--axes", "fsdp=4", "--timeout", "0"), "--timeout 0 leaves the compiler no time"),
        (("--axes", "fsdp=4", "--timeout", "nan"), "--timeout nan: give a finite number"),
        (("--axes", "fsdp=4", "--weights", "int8"), "Take --step generate"),
        (("--axes", "fsdp=4", "--cache-dtype", "int8"), "Take --step generate"),
        (("--axes", "fsdp=4", "--cache-dtype", "int4"), "'int4' is not one of"),
        (("--axes", "fsdp=4", "--set", "train.learning_rat=1"), "train.learning_rat is not a field"),
        (("--step", "prefill", "--axes", "fsdp=4", "--set", "train.seed=1"), "train.seed is a setting of training"),
        (("--axes", "fsdp=4", "--set", "strategy.remta=full"), "strategy.remta is not a field. Did you mean"),
        (("--axes", "fsdp=4", "--depth", "deep"), "'deep' is not one of"),
    ],
)
def test_wrong_words_are_told_before_anything_is_compiled(call, rates, more, words):
    more = more if "--step" in more else (*more, *rates)
    call(*TINY, "--batch", "8seq", *more).assert_refused(2, words)


@pytest.mark.parametrize("missing", ["--on", "--batch", "--seq"])
def test_a_model_needs_a_cluster_and_a_job(call, missing):
    given = {"--on": "cpu:4", "--batch": "8seq", "--seq": "64"}
    del given[missing]
    said = call("verify", "tiny", *(word for pair in given.items() for word in pair))
    said.assert_refused(2, f"needs {missing}")


@pytest.mark.parametrize("option", [("--on", "cpu:4"), ("--axes", "fsdp=4"), ("--calibration", "datasheet")])
def test_a_plan_file_says_it_all(call, tmp_path, option):
    call("verify", str(tmp_path / "plan.toml"), *option).assert_refused(2, f"leave {option[0]} out")


def test_bad_files(call, tmp_path):
    call("verify", str(tmp_path / "none.toml")).assert_refused(2, "none.toml")
    (tmp_path / "bad.toml").write_text("version = 1\n[model\n")
    call("verify", str(tmp_path / "bad.toml")).assert_refused(2, "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(bytes(range(256)))
    assert call("verify", str(tmp_path / "bytes.toml")).code == 2


def test_a_plan_file_of_another_size(call, tmp_path, rates):
    """A mesh that was changed by hand no longer covers the chips."""
    plan = tmp_path / "plan.toml"
    asked = ("plan", "tiny", "--on", "cpu:4", "--batch", "8seq", "--seq", "64", "--axes", "fsdp=4", "--out", str(plan))
    assert call(*asked, *rates).code == 0
    said = call("verify", str(plan), "--depth", "lower", "--set", "strategy.fsdp=2")
    said.assert_refused(2, "the mesh has 2 devices, but cpu:4 has 4 chips")


def test_a_folder_of_other_files(call, rates, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    said = call(*TINY, "--batch", "8seq", "--axes", "fsdp=4", "--keep", str(tmp_path / "mine"), *rates)
    said.assert_refused(2, "has other files")


@pytest.mark.slow
def test_what_the_compiler_makes_of_the_same_shardings(call):
    """It sends more than what is derived, and by other collectives."""
    asked = ("verify", "tiny", "--on", "v5e:1x2", "--batch", "8seq", "--seq", "64", "--axes", "fsdp=2", "--for", "cpu")
    derived, gspmd = (call(*asked, *more, "--json").json for more in ((), ("--gspmd",)))
    sums = [sum(row["compiled_bytes"] for row in found["collectives"]["rows"]) for found in (derived, gspmd)]
    assert sums[0] < sums[1]
    (scattered,) = (row for row in gspmd["collectives"]["rows"] if row["kind"] == "reduce_scatter")
    assert (derived["form"], gspmd["form"]) == ("shard_map", "gspmd")
    assert scattered["derived_arrays"] > scattered["compiled_arrays"] == 0
    call(*asked, "--gspmd", "--step", "decode").assert_refused(2, "this is a decode step. Leave the form out.")


def test_both_steps_of_a_service(call, monkeypatch):
    """Each phase on its engine's part; weights in fp4 are refused."""
    asked = ("service", "tiny", "--on", "tpu7x:2x2x1", "--prompt", "512", "--output", "64", "--tpot", "1s")
    fp8 = ("--weights", "fp8", "--kv", "fp8")
    assert call(*asked, "--axes", "tensor=2", *fp8, "-o", "service.toml").code == 0
    said = call("verify", "service.toml", "--depth", "lower")
    assert said.code == 0
    assert re.findall(r"tiny on (\S+), (\w+): (.*?);", said.out) == [
        ("tpu7x:1x2x1", "decode", "tensor 2"), ("tpu7x:1x2x1", "prefill", "tensor 2")
    ]  # fmt: skip
    assert set(said.printed("json").json) == {"decode", "prefill"}
    phases = []
    with monkeypatch.context() as patched:
        patched.setattr(verify, "prove_service", lambda file, asked, options: phases.append(asked) or {})
        for step in ("generate", "decode", "prefill"):
            assert call("verify", "service.toml", "--step", step).code == 0
    assert phases == [("decode",), ("decode",), ("prefill",)]
    for more in (("--step", "train"), ("--weights", "int8")):
        call("verify", "service.toml", *more).assert_refused(2, "service.toml says how a service is stored")
    call("verify", "service.toml", "--axes", "tensor=4").assert_refused(2, "says all of a service; leave --axes out")
    assert call(*asked, "--axes", "tensor=1", "--weights", "int4", "--kv", "bf16", "-o", "int4.toml").code == 0
    assert call("verify", "int4.toml", "--depth", "lower").code == 0
    asked = (*asked[:3], "b200:2x1", *asked[4:])
    assert call(*asked, "--weights", "fp4", "-o", "narrow.toml").code == 0
    call("verify", "narrow.toml").assert_refused(3, "weights in fp4 are planned but not executed in this version.")


def test_an_island_is_proved_and_what_it_exchanges_is_listed(call, rates):
    """The program of one of two islands on two emulated devices; between them each number twice, in 4 bits by 1/2."""
    pairs = (
        "--set",
        "strategy.islands_sync=diloco",
        "--set",
        "strategy.outer_every=30",
        "--set",
        "strategy.outer_bits=4",
    )
    asked = ("verify", "tiny", "--on", "2*cpu:2@10Mbit/s", "--seq", "64", "--batch", "8seq", "--axes", "tensor=2")
    said = call(*asked, *rates, *pairs)
    assert (said.code, said.err) == (0, "")
    assert "partitioned and its buffers assigned, for 2 emulated CPU devices" in said.words
    assert "without a name 0.00% of all bytes" in said.words
    assert "islands each of 2 runs this program on its 2 devices, and no collective leaves it" in said.words
    assert "outer_embed[V_tensor, D]{U_islands} every 30 steps, 4 bits" in said.words
    num_bytes = num_params(load_model("tiny")) * (0.5 + 2 / 64)
    assert (
        f"outside of the compiled program: {format_bytes(num_bytes)} leave each of R islands every 30 steps"
        in said.words
    )
    exchange = call(*asked, *rates, *pairs, "--json").json["exchange"]
    assert exchange["sent_bytes"] == sum(row["sent_bytes"] for row in exchange["rows"]) == num_bytes
    assert exchange["leaving"] == []
