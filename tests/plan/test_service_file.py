"""The service file: whole, versioned, with a line for every fault; its phases are settings and strategies."""

import msgspec
import pytest

from meshwright.core.toml_file import dump_toml
from meshwright.core.units import parse_seconds
from meshwright.cost.train_step import price_strategy
from meshwright.plan.plan_file import PlanFile, ServicePlan, load_plan, save_plan
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service, parse_load
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration


def planned(model, cluster, **service):
    found = parse_cluster(cluster)
    setting = service_setting(load_model(model), found, fitted_calibration(found.chip))
    asked = Service(**{"prompt_len": 2048, "output_len": 256, **service})
    result = plan_service(setting, asked)
    return result, result.plans[0]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A small plan with pools: its file, and the data of its text."""
    _, found = planned("llama3-70b", "v5e:8x8", tpot_s=0.05, requests_per_s=2.0)
    path = tmp_path_factory.mktemp("plans") / "service.toml"
    save_plan(found, path)
    assert found.has_pools
    return found, path


@pytest.mark.parametrize(
    ("model", "cluster", "service"),
    [
        ("llama3-70b", "h100:8x2", {"tpot_s": 0.1}),
        ("llama3-8b", "v5e:4x4", {"requests_per_s": 5.0}),
        ("gpt-oss-20b", "2*v5e:4x4", {"prefix_share": 0.5}),
        ("qwen3-30b-a3b", "h200:8x1", {"ttft_s": 1.0}),
    ],
)
def test_a_file_reads_back_as_it_was(tmp_path, model, cluster, service):
    _, found = planned(model, cluster, **service)
    save_plan(found, tmp_path / "s.toml")
    again = load_plan(tmp_path / "s.toml", PlanFile)
    assert again == found
    # each phase alone is priced as the search priced it, and needs the same memory
    again.require_legal()
    for phase, length in (("decode", again.service.mean_len), ("prefill", None)):
        pool = again.pool(phase)
        alone = price_strategy(*again.phase(phase, length)).estimate.step_s
        if not (phase == "prefill" and "prefix_share" in service):
            assert float(alone) == pytest.approx(pool.step_s)
            needed = price_strategy(*again.phase(phase)).estimate.hbm_bytes_per_chip
            assert float(needed) == pytest.approx(sum(pool.memory.values()))


def changed(kept, change):
    """The text of the file after a change of its data."""
    found, _ = kept
    data = msgspec.to_builtins(found)
    change(data)
    return dump_toml(data)


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(data):
        for key in path:
            data = data[key]
        data[last] = value

    return change


def read(text, tmp_path):
    """The service of a file with this text."""
    (tmp_path / "s.toml").write_text(text)
    return load_plan(tmp_path / "s.toml", ServicePlan)


FAULTS = {
    "version": (put("version", 7), r"plan version 7 is not known; this meshwright reads version 2\. Make the plan"),
    "unknown": (put("generate", "engines", 2), r"s\.toml:\d+: generate\.engines is not a field\. Did you mean 'num_e"),
    "negative": (put("generate", "batch_seqs", -4), r"s\.toml:\d+: generate batch_seqs is -4, give a positive number"),
    "no engine": (put("prefill", "num_engines", 0), r"prefill num_engines is 0, give a positive number"),
    "time": (put("predicted", "ttft_s", -1.0), r"predicted ttft_s is -1, give a number of at least 0"),
    "not finite": (put("predicted", "tpot_s", float("inf")), r"predicted\.tpot_s is inf: give a finite number"),
    "lengths": (put("service", "prompt_len", 0), r"service\.prompt_len=0 must be from 1 to"),
    "dtype": (put("weights", "int7"), r"'int7' is no dtype in which weights are served. Did you mean 'int8'"),
    "drafts": (put("num_drafts", 2), r"num_drafts=2 must be 0: the service has no speculation"),
    "chip": (put("generate", "part", "chip", "hbm_bytes", 1e9), r"generate\.part has other chips than the cluster"),
    "mesh": (
        put("generate", "strategy", "mesh", "tensor", 3),
        r"the mesh has 3 devices, but generate\.part has 8 chips",
    ),
    "too many": (put("prefill", "num_engines", 90), r"the engines have [\d,]+ chips, v5e:8x8 has 64\."),
    "precision": (put("weights", "fp8"), r"fp8 is for chips with products in fp8, and v5e has none"),
    "products": (
        put("generate", "strategy", "precision", "fp8"),
        r"products in the dtype of activations\. Set generate",
    ),
    "rates": (
        put("calibration", "chip", "h100"),
        r"the rates are of h100, but the chips are v5e\. Give rates of v5e\.",
    ),
    "shape": (put("prefill", "part", "shape", []), r"every size must be at least 1"),
    "axis": (
        put("prefill", "strategy", "assignment", "weight", "N", ["tensr"]),
        r"s\.toml:\d+: 'tensr' is no mesh axis\. Did you mean 'tensor'\?",
    ),
    "no table": (
        put("model", [1]),
        r"s\.toml:\d+: model is \[1\]\. Give a table of name, family, (\w+, ){6}and \d+ others\.$",
    ),
    "model": (put("model", "num_heads", "many"), r"model\.num_heads is 'many'\. Give a whole number"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_line(kept, name, tmp_path):
    change, message = FAULTS[name]
    with pytest.raises(ValueError, match=message) as caught:
        read(changed(kept, change), tmp_path)
    assert "\n" not in str(caught.value)


def test_what_does_not_divide_or_fit_is_refused(kept, tmp_path):
    def broken(*change):
        return read(changed(kept, put(*change)), tmp_path)

    with pytest.raises(ValueError, match=r"\[generate\]: .* needs .* per chip .* Lower generate\.batch_seqs"):
        broken("generate", "batch_seqs", 100_000).require_legal()
    with pytest.raises(ValueError, match=r"\[generate\]: tensor=8 does not divide F=28676 feed-forward width"):
        broken("model", "d_ff", 28_676).require_legal()


def test_a_plan_of_the_other_kind_says_so_and_one_of_version_1_is_read(kept):
    found, path = kept
    with pytest.raises(ValueError, match=r"this is the plan of a service, but a plan of training is needed here"):
        load_plan(path)
    # version 1 had no length of chunks
    path.write_text(
        path.read_text().partition("\n")[2].replace("version = 2", "version = 1").replace("chunk_len = 0\n", "")
    )
    assert load_plan(path, ServicePlan) == msgspec.structs.replace(found, version=1)


def test_engines_that_do_both_phases_are_the_same(tmp_path):
    _, found = planned("llama3-8b", "v5e:4x4", requests_per_s=20.0)
    assert not found.has_pools
    data = msgspec.to_builtins(found)
    data["generate"]["num_engines"] += 1
    with pytest.raises(ValueError, match="Give both the same part and num_engines"):
        read(dump_toml(data), tmp_path)


def test_lengths():
    found = Service(prompt_len=8192, output_len=512, prefix_share=0.75)
    assert (found.max_len, found.mean_len, found.new_prompt_tokens) == (8704, 8448, 2048)
    assert Service(prompt_len=1, output_len=1, prefix_share=0.99).new_prompt_tokens == 1


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1.5 s", 1.5), ("800us", 8e-4), ("2", 2.0)])
def test_seconds(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["20m", "1h", "ms", "-1s", "nan"])
def test_no_seconds(text):
    with pytest.raises(ValueError, match=r"time '"):
        parse_seconds(text)


@pytest.mark.parametrize(("text", "rate"), [("20/s", 20.0), ("600/min", 10.0), ("7200/h", 2.0), ("3", 3.0)])
def test_loads(text, rate):
    assert parse_load(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["0/s", "20/day", "x", "inf/s", "nan"])
def test_no_loads(text):
    with pytest.raises(ValueError, match=r"Write for example 20/s, 600/min or 5000/h"):
        parse_load(text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_len", 0, r"service.prompt_len=0 must be from 1 to"),
        ("tpot_s", 0.0, r"service.tpot_s=0 must be above 0"),
        ("requests_per_s", -1.0, r"service.requests_per_s=-1 must be above 0"),
        ("prefix_share", 1.0, r"service.prefix_share=1 must be a share"),
        ("ttft_s", "soon", r"Service.ttft_s is 'soon'. Give a finite number"),
    ],
)
def test_what_no_service_has(field, value, message):
    with pytest.raises(ValueError, match=message):
        Service(**{"prompt_len": 8, "output_len": 8, field: value})
