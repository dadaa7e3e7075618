"""`meshwright serve` and `compile` as a user calls them: a folder, a request, a signal."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage
from meshwright.algebra.generation.stored import weight_bytes
from meshwright.api.planning import plan_of
from meshwright.cli.engine import engine_options
from meshwright.cli.verb import Options
from meshwright.cli.verbs.bench_serve import command as bench_serve
from meshwright.cli.verbs.compile import command as compile_verb
from meshwright.cli.verbs.serve import command as serve
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes
from meshwright.cost.setting import Setting
from meshwright.nn.hf.weights import save_adapter, save_hf, source_of
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.plan.plan_file import ServicePlan, load_plan, save_plan
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.serve import layout, opening
from meshwright.serve.layout import usual_mesh
from meshwright.serve.opening import open_engine
from meshwright.serve.options import EngineOptions
from meshwright.serve.request import TokenRequest
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Lora
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh
from tests.parallel.generate_cases import FAMILIES, LLAMA, float_params, likeliest

ONE = {"tensor": 1}
LIMITS = ["--max-len", "32", "--max-requests", "2", "--token-budget", "16", "--host-cache-bytes", "1MB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tiny"
    save_hf(LLAMA, float_params(LLAMA), path)
    return path


@pytest.mark.slow
def test_a_folder_is_opened_with_what_its_pages_hold(folder):
    sizes = {"max_requests": 2, "token_budget": 16, "cache_bytes": 200_000, "page_len": 8}
    opened = open_engine(folder, EngineOptions(mesh=ONE, **sizes))
    assert "limited by cache_bytes" in opened.lines[1]
    prompt = [5, 9, 60]
    (outputs,) = opened.engine.run([TokenRequest(prompt=tuple(prompt), max_tokens=4)])
    assert [one.token for one in outputs] == likeliest(LLAMA, float_params(LLAMA), prompt, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_len": 32, "host_cache_bytes": 10.0}, "host_cache_bytes=10 is for pages of shared prompts"),
        ({"max_len": 4096}, "has 2,048 positions"),
        ({"max_len": 64, "cache_bytes": 1000.0}, "one request of 64 positions needs"),
        ({"max_requests": 40, "token_budget": 16}, "token_budget=16 is less than max_requests=40"),
        ({"batch_invariant": True, "token_budget": 64}, "steps of at most 32 tokens"),
        ({"cache_dtype": "fp9"}, "fp9"),
        ({"weights": "int5"}, "weight dtype 'int5' is not known. Did you mean 'int8'"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(folder, options, words):
    with pytest.raises(InputError, match=words):
        open_engine(folder, EngineOptions(mesh=ONE, **options))


def planned(path, model, on, **axes) -> Path:
    """The file of a service of requests of 16 tokens and 16 more."""
    setting, service = service_setting(model, parse_cluster(on)), Service(prompt_len=16, output_len=16)
    result = plan_service(setting, service, stored=[StoredDtypes("bf16", "bf16")], axes=axes)
    save_plan(next(plan for plan in result.plans if not plan.has_pools), path)
    return path


SMALL = {"max_requests": 2, "token_budget": 16, "page_len": 4, "num_devices": 8}


@pytest.mark.slow
def test_a_plan_says_how_devices_share_a_model(folder, tmp_path):
    plan = planned(tmp_path / "plan.toml", LLAMA, "v5e:2x4", context=2, tensor=4)
    opened = open_engine(folder, EngineOptions(plan=plan, **SMALL), in_background=False)
    assert opened.lines[0].startswith("tiny: context 2, tensor 4, ")
    assert opened.lines[1].startswith("cache: 16 pages of 4 positions, 4.1 kB of fp32 keys and values on each device")
    assert "of 32 positions" in opened.lines[2]
    assert opened.lines[3].startswith(
        "unlike the plan: on cpu (planned v5e), weights fp32 (planned bf16), keys and val"
    )
    prompts = [[5, 9, 60], [3, 4, 5, 6, 7]]
    found = opened.engine.run([TokenRequest(prompt=tuple(prompt), max_tokens=4) for prompt in prompts])
    wanted = [likeliest(LLAMA, float_params(LLAMA), prompt, 4) for prompt in prompts]
    assert [[one.token for one in outputs] for outputs in found] == wanted


def test_what_is_served_unlike_the_plan_is_said(folder, tmp_path):
    plan = load_plan(planned(tmp_path / "plan.toml", LLAMA, "h100:1x1"), ServicePlan)
    options = EngineOptions(max_requests=plan.generate.batch_seqs, cache_dtype="bf16")
    planned_layout = layout.EngineLayout(plan.generate.strategy, 1, options, plan)
    assert planned_layout.unplanned_words("NVIDIA H100 80GB HBM3", "bf16") == ""
    fewer = planned_layout._replace(options=replace(options, max_requests=2, cache_dtype="int8"))
    assert fewer.unplanned_words("a toaster", "fp32") == (
        "on a toaster (planned h100), weights fp32 (planned bf16), keys and values int8 (planned bf16), requests 2 "
        f"(planned {plan.generate.batch_seqs:,})"
    )


def test_a_plan_that_does_not_fit_is_one_line(folder, tmp_path):
    other = replace(LLAMA, num_layers=3, name="other")
    plan = planned(tmp_path / "other.toml", other, "h100:2x1")
    with pytest.raises(InputError, match="is for other, whose L is 3; tiny has L=2"):
        open_engine(folder, EngineOptions(plan=plan, **SMALL))
    large = planned(tmp_path / "large.toml", LLAMA, "h100:8x1", tensor=8)
    with pytest.raises(CannotRunError, match="tensor 8: 8 devices are needed, and there are 4"):
        open_engine(folder, EngineOptions(plan=large, **{**SMALL, "num_devices": 4}))
    setting = Setting(LLAMA, parse_cluster("h100:8x1"), Job(batch_seqs=8, seq_len=16))
    trains = tmp_path / "trains.toml"
    save_plan(plan_of(setting, Strategy(mesh=make_mesh({"data": 8}))), trains)
    with pytest.raises(InputError, match="a plan of training, but the plan of a service is needed"):
        open_engine(folder, EngineOptions(plan=trains, **SMALL))


def test_devices_without_a_plan_share_heads_and_then_requests():
    assert usual_mesh(LLAMA, 8) == {"data": 2, "tensor": 4}
    assert usual_mesh(FAMILIES["mixtral"], 1) == {"data": 1, "tensor": 1}

    class Device:
        platform, device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    found = layout._planned(load_model("llama3.1-70b"), EngineOptions(), [Device()] * 8)
    assert (found.words, found.strategy.assignment) == ("2 engines of tensor 4", LAYOUTS["prompts"])
    Device.device_kind = "an unknown chip"
    assert layout._planned(load_model("llama3.1-70b"), EngineOptions(), [Device()] * 8) is None


def test_a_server_listens_in_one_place(call):
    call("serve", "tiny", "--uds", "here", "--port", "0").assert_refused(2, "--port and --uds each say where")


@pytest.mark.parametrize("verb", [serve, compile_verb, bench_serve])
def test_adapters_are_given_as_vllm_takes_them(verb):
    """Several after one option, in any place; what has no = is the folder."""
    line = ["--lora-modules", "a=x", "b=y", "tiny", "--adapters=c=z", "d=~/w", "--max-len", "32", "--lora-modules=e=v"]
    given = verb.make_context("serve", line).params
    assert given["adapters"] == ("a=x", "b=y", "c=z", "d=~/w", "e=v")
    assert (given["what"], given["max_len"]) == (Path("tiny"), 32)
    found = engine_options(Options(**given), None).adapters
    assert found == {"a": Path("x"), "b": Path("y"), "c": Path("z"), "d": Path.home() / "w", "e": Path("v")}


@pytest.mark.parametrize(
    ("pairs", "words"),
    [(["a"], "a is not NAME=FOLDER"), (["=x"], "=x is not NAME"), (["a=x", "a=y"], "a=y is there twice")],
)
def test_an_adapter_without_a_name_of_its_own_is_one_line(pairs, words, call):
    flags = [word for pair in pairs for word in ("--adapters", pair)]
    call("serve", "tiny", "--port", "0", *flags).assert_refused(2, words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--max-model-len", "4096"], "--max-len 4,096, but tiny has 2,048 positions"),
        (["--max-requests", "40", "--token-budget", "16"], "--token-budget 16 is less than --max-requests 40"),
        (["--max-len", "64", "--cache-bytes", "1kB"], "Give a smaller --max-len, more --cache-bytes, or a cache"),
        (["--adapters", "tiny=x"], "x has no adapter_config.json"),
        (["--max-requests", "100Mi"], "--max-requests 104,857,600 need a page each, and"),
        (["--host-cache-bytes", "100TB"], "--host-cache-bytes 100 TB is more than this machine's memory"),
        (["--draft", "ngram", "--policy", "static"], "drafts need the policy chunked, not static"),
        (["--draft", "nope"], "the draft folder nope does not exist"),
        (["--api-key", ""], "--api-key is empty"),
        (["--deadline", "0"], "--deadline 0 leaves no time"),
    ],
)
def test_a_verb_speaks_of_its_own_options(folder, given, words, call):
    call("serve", str(folder), "--port", "0", "--axes", "tensor=1", *given).assert_refused(2, words)


def test_names_are_compared_before_anything_compiles(folder, call, monkeypatch):
    model = replace(LLAMA, lora=Lora(rank=2))
    save_adapter(model, *source_of(float_params(model)), folder.parent / "own", base="not there")
    monkeypatch.setattr("meshwright.cli.verbs.serve.open_given", None)
    call("serve", str(folder), "--port", "0", "--adapters", f"tiny={folder.parent / 'own'}").assert_refused(
        2, "the base and an adapter are both called 'tiny'"
    )


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_folder_is_opened_with_quantised_weights(folder, weights):
    """The line says the bytes that lie there, of which pages leave room."""
    sizes = {"max_requests": 1, "token_budget": 8, "cache_bytes": 100_000, "page_len": 8}
    opened = open_engine(folder, EngineOptions(mesh=ONE, weights=weights, **sizes))
    assert f"{format_bytes(weight_bytes(LLAMA, weights, 4))} of weights" in opened.lines[0]
    with pytest.raises(CannotRunError, match="weights in fp4 are planned, not executed"):
        EngineOptions(weights="fp4")


def test_pages_get_what_the_weights_leave_of_an_accelerator(monkeypatch):
    model = FAMILIES["deepseek_v3"]
    strategy = Strategy(mesh=make_mesh({"expert": 2, "tensor": 2}), assignment=LAYOUTS["prompts"], state="fp32")
    step = PackedStep(model, strategy, max_len=32, max_seqs=2, storage=Storage(page_len=4))
    held = sum(4 * math.prod(step.param_shardings[n].shard_shape(s.shape)) for n, s in step.param_shapes.items())
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 1e6})
    monkeypatch.setattr(opening.jax, "devices", lambda: [device])
    own = layout.EngineLayout(strategy, 1, EngineOptions())
    assert opening._free_bytes(model, own, step.declared, step.storage)[0] == 0.9e6 - held


def test_the_verbs_compile_serve_and_drain(folder, tmp_path):
    """Without JAX's own cache, as a user has it: the second verb reads what the first has written."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "XLA_FLAGS"))}
    environment |= {"MESHWRIGHT_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "meshwright"]
    done = subprocess.run(
        [*command, "compile", str(folder), *LIMITS], env=environment, capture_output=True, text=True, check=True
    )
    assert "programs of steps and samplers compiled, 0 were in" in done.stderr
    names = {path.relative_to(tmp_path): path.stat().st_mtime_ns for path in tmp_path.rglob("*.program")}
    assert names
    with (tmp_path / "said").open("w+") as said:
        server = subprocess.Popen(
            [*command, "serve", str(folder), *LIMITS, "--port", "0"], env=environment, stdout=said, stderr=said
        )
        try:
            until = time.monotonic() + 60
            while "serving tiny at " not in (text := (tmp_path / "said").read_text()):
                assert server.poll() is None, text
                assert time.monotonic() < until, text
                time.sleep(0.1)
            url = text.split("serving tiny at ")[1].split()[0]
            body = {"prompt": [5, 9, 60], "max_tokens": 4, "temperature": 0}
            asked = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            answer = json.loads(urllib.request.urlopen(asked, timeout=60).read())
            expected = likeliest(LLAMA, float_params(LLAMA), [5, 9, 60], 4)
            assert answer["choices"][0]["text"] == "".join(f" {token}" for token in expected)
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
    after = {path.relative_to(tmp_path): path.stat().st_mtime_ns for path in tmp_path.rglob("*.program")}
    assert after == names  # nothing was compiled again
