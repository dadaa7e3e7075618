"""`meshwright service `: the table, what the best consists of, JSON, pictures, and what it refuses."""

import csv
import re
from io import StringIO
from pathlib import Path

import jax
import pytest

from meshwright.core.units import format_seconds
from meshwright.serve.layout import engine_layout
from meshwright.serve.model_folder import open_model
from meshwright.serve.options import EngineOptions
from tests.nn.hf.test_published import folder_of

SERVE = ("service", "llama3-70b", "--on", "v5e:16x16", "--prompt", "8192", "--output", "512")
QUICK = ("service", "llama3-8b", "--on", "v5e:2x2", *SERVE[4:], "--axes", "tensor=4")
TRAIN = ("plan", "tiny", "--on", "v5e:2x2", "--batch", "64seq", "--seq", "512")


def test_targets(call):
    said = call(*SERVE, "--ttft", "2s", "--tpot", "50ms", "--top", "3")
    found = said.printed("json").json
    best = found["plans"][0]
    assert said.words.startswith(
        "serving llama3-70b on v5e:16x16 (256 chips): 8,192 tokens of prompt, 512 of output; TTFT at most 2 s, "
        "TPOT at most 50 ms"
    )
    assert "engines, best first TTFT TPOT tok/s/chip input output bound by" in said.words
    assert all(len(line) <= 80 for line in said.out.splitlines())
    engine = best["generate"]
    assert f"{best['requests_per_s']:.3g} requests/s on 256 chips" in said.words
    assert f"{found['num_services']:,} services that fit in memory, {found['num_meeting']:,} of them meet" in said.words
    assert "all in bf16 the best makes" in said.words
    assert "a chip-hour costs $1.20" in said.words
    assert (found["service"]["ttft_s"], found["service"]["tpot_s"], found["is_frontier"]) == (2.0, 0.05, False)
    rows = list(csv.DictReader(StringIO(said.printed("csv").out)))
    assert [float(row["tpot_s"]) for row in rows] == [one["tpot_s"] for one in found["plans"][:3]]
    assert rows[0]["engines"].startswith(f"{engine['num_engines']} x ")
    assert f"{rows[0]['engines']}, batch {engine['batch_seqs']:,}" in said.out
    assert (rows[0]["batch"], rows[0]["bound_by"]) == (f"{engine['batch_seqs']}", engine["bound_by"])


def test_a_frontier_and_its_picture(call, tmp_path):
    said = call(*SERVE, "--weights", "int8", "--kv", "int8,bf16", "--png", "front.svg")
    assert "most tokens" in said.out
    assert "on their frontier of TPOT and tok/s" in said.words
    found = said.printed("json").json
    assert found["is_frontier"]
    assert set(found["frontiers"]) == {"int8", "int8, KV bf16"}
    assert found["as_written"] is None
    assert "all in bf16" not in said.out
    assert "services that nothing beats" in (tmp_path / "front.svg").read_text()


def test_a_load_and_a_price(call):
    said = call(*SERVE, "--tpot", "50ms", "--rate", "180/min", "--price", "2", "--axes", "tensor=8")
    best = said.printed("json").json["plans"][0]
    assert f"3 requests/s need {best['num_chips']} chips of 256" in said.words
    assert "engines, best first TTFT TPOT chips" in said.words
    spent = best["usd_per_m_input"] * 8192e-6 + best["usd_per_m_output"] * 512e-6
    assert spent == pytest.approx(2 * best["num_chips"] / 3600 / 3)
    assert best["generate"]["axes"]["tensor"] == 8


def test_experts(call):
    said = call("service", "qwen3-30b-a3b", "--on", "h100:8x1", "--prompt", "2000", "--output", "200")
    assert "ep expert parallelism, which also splits the sequences" in said.words
    assert any("expert" in one["generate"]["axes"] for one in said.printed("json").json["plans"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--ttft", "1ms"), "fit the memory of v5e:16x16, but none meets TTFT 1 ms (the shortest is"),
        (("--rate", "1e6/s"), "1,000,000 requests/s need at least"),
        (("--axes", "tensor=5"), "no engine of llama3-70b on v5e:16x16 has tensor=5"),
    ],
)
def test_what_no_engine_does(call, more, message):
    call(*SERVE, *more).assert_refused(3, message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--axes", "data=2"), "mesh axis 'data' splits no engine of a service"),
        (("--weights", "int7"), "'int7' is no dtype in which weights are served. Did you mean 'int8'?"),
        (("--kv", "fp32"), "'fp32' is no dtype in which KV caches are served."),
        (("--ttft", "2 parsecs"), "--ttft '2 parsecs' has the unknown unit 'parsecs'. Write for example 1s"),
        (("--tpot", "0ms"), "--tpot '0ms' must be above 0."),
        (("--rate", "20/day"), "--rate '20/day' is not a rate of requests. Write for example 20/s"),
        (("--prefix-hits", "1"), "Invalid value for '--prefix-hits': 1.0 is not in the range 0<=x<1"),
        (("--batch", "4Mi"), "No such option '--batch'"),
        (("--why-not", "data=4"), "data is not a choice of a service. Known: batch, context, expert"),
        (("--why-not", "batch=many"), "--why-not batch=many: give a size, such as tensor=4."),
        (("--why-not", "pools=1"), "--why-not pools=1: give true or false."),
        (("--why-not", "tensor"), "'tensor' is not name=value. Write for example tensor=16,batch=64."),
        (("--what-if", "chip.speed=2x"), "'chip.speed' cannot be changed."),
        (("--what-if", "foo=2x"), "links, model.FIELD, network, nic, nvlink, service.FIELD, slowest."),
        (("--what-if", "chip.hbm=2"), "is not a factor from 0.001x to 1000x."),
        (("--what-if", "batch=2x"), "--what-if batch: services have none."),
        (("--what-if", "service.length=4"), "service.length is not a field."),
        (("--what-if", "service.tpot_s=soon"), "--what-if service.tpot_s 'soon'"),
        (("-o", "."), "cannot write the plan to .: "),
        (("--set", "model.max_positions=4096"), "a prompt of 8,192 tokens is longer than the 4,096 positions"),
        (("--set", "strategy.remat=full"), "there is no section 'strategy' here."),
        (("--top", "0"), "--top '0' is below 1."),
    ],
)
def test_bad_options(call, more, message):
    call(*QUICK, *more).assert_refused(2, message)


def test_what_does_not_fit(call):
    said = call(*("v5e:2x2" if one == "v5e:16x16" else one for one in SERVE), "--weights", "bf16", "--tpot", "1us")
    said.assert_refused(3, "does not fit v5e:2x2: with one sequence the leanest engine (4 chips, weights bf16) needs")


def test_options_that_need_each_other(call):
    call(*SERVE[:2], "--on", "cpu:8", *SERVE[4:]).assert_refused(3, "services on cpu:8 are not planned in this version")
    call(*SERVE, "--weights", "").assert_refused(2, "'' is no dtype in which weights are served")
    call(*TRAIN, "--serve", "--prompt", "512").assert_refused(2, "--serve: services have a verb of their own.")
    call(*SERVE[:4], "--output", "512").assert_refused(2, "Missing option '--prompt'")
    call(*TRAIN[:4], "--batch", "64seq").assert_refused(2, "Missing option '--seq'")


def test_the_first_plan_under_load(call):
    """Requests arrive at random: percentiles, in the text and in --json; a rate is needed."""
    asked = ("service", "llama3-8b", "--on", "h100:8x1", "--prompt", "512", "--output", "64", "--ttft", "1s")
    said = call(*asked, "--rate", "5/s", "--simulate", "20s")
    assert "the first under load" in said.words
    assert "20 s of Poisson arrivals at" in said.words
    found = call(*asked, "--rate", "5/s", "--simulate", "20s", "--json").json["simulated"]
    assert 0 < found["ttft"]["p50"] <= found["ttft"]["p90"] <= found["ttft"]["p99"]
    assert 0 < found["tpot"]["mean"] < 0.1
    call(*asked, "--simulate", "20s").assert_refused(2, "--simulate needs --rate 10/s, the requests that arrive, or")
    said = call(*asked, "--simulate", "5s", "--concurrency", "4")
    assert "a client with at most 4 requests on their way" in said.words
    alone = call(*asked, "--simulate", "5s", "--concurrency", "1", "--json").json["simulated"]
    assert alone["queue"]["p99"] == 0
    assert alone["requests_per_s"] == pytest.approx(1 / alone["latency"]["mean"], rel=0.05)


def test_requests_of_other_lengths_and_policies(call):
    """Lengths that vary, a trace, and a policy, which is for engines that do both phases; the slots are drawn."""
    asked = (
        "service",
        "llama3-8b",
        "--on",
        "v5e:1x1",
        "--prompt",
        "512",
        "--output",
        "64",
        "--weights",
        "int8",
    )
    loaded = (*asked, "--rate", "6/s", "--simulate", "20s")
    said = call(*loaded, "--outputs", "1..127", "--policy", "static", "--slots", "slots.png", "--json")
    assert said.err == "wrote slots.png\n"
    assert Path("slots.png").read_bytes()[:4] == b"\x89PNG"
    assert said.json["simulated"]["latency"]["p99"] > 2 * said.json["simulated"]["latency"]["p50"] / 3
    assert "policy static, on 1 x 1 chip, batch" in call(*loaded, "--policy", "static").words
    Path("trace.csv").write_text("arrival_s,prompt,output\n0,100,5\n0.5,300,50\n")
    found = call(*asked, "--trace", "trace.csv", "--json").json["simulated"]
    assert found["num_requests"] == 2
    # all of both: 55 tokens until the last has ended
    assert found["output_tokens_per_s"] == pytest.approx(55 / found["end_s"])
    call(*asked, "--slots", "slots.png").assert_refused(
        2, "--slots changes nothing here: it is for --simulate or --trace"
    )
    call(*loaded, "--trace", "trace.csv").assert_refused(2, "--trace has the requests")
    call(*asked, "--rate", "5/s", "--simulate", "1e9s").assert_refused(2, "at most 10,000,000 are simulated")
    call(*loaded, "--outputs", "9..1").assert_refused(2, "lengths from 9 to 1 tokens")
    call(*loaded, "--prompts", "600000").assert_refused(
        2, "the longest request has 600,064 tokens, but the caches of an"
    )
    call(*loaded, "--prompts", "").assert_refused(2, "lengths '' are not understood")
    call(*loaded, "--chunk", "128", "--policy", "static").assert_refused(2, "static prefills whole prompts. Leave out")
    assert "fewer end than arrive" in call(*loaded, "--outputs", "6000").words
    said = call(*asked[:-4], "--output", "1", *asked[-2:], "--rate", "2/s", "--simulate", "5s").words
    assert "TPOT - - - -" in said
    assert "nan" not in said


@pytest.fixture
def written(call):
    """The name of a service file with both phases on the same chips."""
    said = call(*SERVE[:2], "--on", "h100:8x1", *SERVE[4:], "--tpot", "100ms", "-o", "service.toml")
    assert (said.code, said.err) == (0, "wrote service.toml\n")
    return "service.toml"


def test_a_service_is_explained(call, written):
    assert len(call("explain", written).out.splitlines()) <= 40
    said = call("explain", written, "--all")
    assert (said.code, said.err) == (0, "")
    assert all(len(line) <= 80 for line in said.out.splitlines())
    assert "o[B, T, N_tensor, H] = cached_attention(" in said.words
    assert re.search(r"AllReduce_tensor\(.*?\) array of [\d.]+ [kM]B, ", said.words)
    assert "requests/s G x B / (output x TPOT + t_prompt) = " in said.words
    found = said.printed("json").json
    assert found["decode"]["pool"]["step_s"] == pytest.approx(found["decode"]["step_s"])
    figures = {one["name"]: one["value"] for one in found["formulas"]}
    assert figures["TPOT"] == pytest.approx(found["plan"]["tpot_s"])
    assert "AllReduce_tensor" in said.printed("csv").out


def test_an_edited_service_says_what_it_now_predicts(call, written, tmp_path):
    path = tmp_path / written
    text = path.read_text()
    assert text.count("\nbatch_seqs = ") == 2
    path.write_text(text.replace("\nbatch_seqs = ", "\nbatch_seqs = 1\n# was ", 1))
    said = call("explain", written)
    assert said.code == 0
    assert "is not as meshwright wrote it" in said.err
    assert re.search(r"predicts TPOT .*, now .*: it was changed by hand", said.err)
    path.write_text(text)
    call("explain", written, "--batch", "8seq").assert_refused(2, "says all of a service; leave --batch out")
    path.write_text(text.partition("\n")[2].replace("version = 2", "version = 3"))
    call("explain", written).assert_refused(2, "plan version 3 is not known; this meshwright reads version 2.")


@pytest.mark.parametrize("verb", ["train", "profile"])
def test_services_are_not_trained(call, written, verb):
    call(verb, written).assert_refused(2, "this is the plan of a service, but a plan of training is needed here.")


def test_why_not(call):
    questions = (
        "tensor=16",
        "batch=1024,tensor=8,context=1",
        "weights=bf16",
        "batch=33,tensor=8,context=1",
        "tensor=5",
    )
    said = call(*SERVE, "--tpot", "30ms", *(part for one in questions for part in ("--why-not", one)), "--top", "1")
    found = said.printed("json").json["why_not"]
    assert [bool(one["refusal"]) for one in found] == [False, True, False, True, True]
    assert all(len(line) <= 80 for line in said.out.splitlines())
    assert (
        "Why not batch 1024, tensor 8, context 1 refused with batch 1,024 the leanest such engine (8 chips) needs"
        in said.words
    )
    assert "it fits, but batches are powers of two and the largest that fits. Ask for batch=" in said.words
    assert "chip-time of a token first here" in said.words
    assert "fewer than the first" in said.words


def test_what_if(call):
    asked = ("chip.hbm=2x", "service.prompt_len=16Ki,model.num_kv_heads=4", "service.tpot_s=1ms", "chips=0.5x")
    said = call(*SERVE, "--tpot", "30ms", "--set", "model.max_positions=32768", "--top", "1",
                *(part for one in asked for part in ("--what-if", one)))  # fmt: skip
    faster, longer, none, half = said.printed("json").json["what_if"]
    assert faster["changed"] == ["chip.hbm 2x: 819 GB/s -> 1.64 TB/s"]
    assert faster["then"]["tokens_per_s_per_chip"] > 1.1 * faster["now"]["tokens_per_s_per_chip"]
    assert longer["changed"] == ["model.num_kv_heads: 8 -> 4", "service.prompt_len: 8192 -> 16384"]
    assert longer["then"]["tokens_per_s_per_chip"] < longer["now"]["tokens_per_s_per_chip"]
    assert none["then"] is None
    assert "nothing serves" in said.words
    assert "none meets TPOT 1 ms" in none["note"]
    assert half["then"]["num_chips"] == 128
    now, then = (faster[name]["tokens_per_s_per_chip"] for name in ("now", "then"))
    assert f"in all {then / now:.3g} times the output tokens per second and chip" in said.words


def test_drafts(call):
    said = call(*SERVE, "--tpot", "50ms", "--accept", "0.8", "--drafts", "4", "--axes", "tensor=8")
    best = said.printed("json").json["plans"][0]
    assert (best["num_drafts"], best["step_tokens"]) == (4, pytest.approx(3.3616))
    assert "its drafts 4 a step, which makes 3.36 tokens of a sequence in the mean" in said.words
    text = said.printed("text").words
    assert "a draft is right with probability 0.8 and takes 0.05 of a step without drafts" in text
    call(*SERVE, "--drafts", "4").assert_refused(2, "--drafts changes nothing here: it is for --accept.")


def test_chunks(call):
    asked = ("service", "llama3-8b", "--on", "h100:4x1", "--prompt", "4096", "--output", "256", "--top", "1",
             "--axes", "tensor=4")  # fmt: skip
    said = call(*asked, "--chunk", "512", "--tpot", "1s")
    best = said.printed("json").json["plans"][0]
    assert best["chunk_len"] == 512
    words = f"between tokens at most {format_seconds(best['itl_s'])} with chunks of 512 tokens; "
    assert words in said.words
    said = call(*asked, "--itl", "60ms")
    assert "ITL at most 60 ms" in said.words
    assert all(plan["itl_s"] <= 0.06 for plan in said.printed("json").json["plans"])


@pytest.mark.parametrize(("form", "on"), [("fp8", "h100:2x1"), ("int4", "a100:2x1"), ("fp8", "a100:2x1")])
def test_the_dtype_of_weights_is_that_of_the_folder(form, on, call, tmp_path):
    given = ("service", str(folder_of(form, tmp_path)), "--on", on, "--prompt", "16", "--output", "16")
    found = call(*given, "--axes", "tensor=1", "--json").json
    assert {plan["weights"] for plan in found["plans"]} == {"stored"}
    # what is quantised is narrow, the rest is not: as `show` counts it, but V=8 tokens and three norms in bf16
    shown = call("show", str(tmp_path), "--json").json["folder"]
    memory = found["plans"][0]["generate"]["memory"]["weights"]
    assert memory == pytest.approx(shown["served_bytes"] - 2 * 11 * 32 if on.startswith("h100") else memory)
    assert f"stores them: {form} with products in bf16" in call(*given, "--axes", "tensor=1").words
    other = call(*given, "--axes", "tensor=1", "--weights", "bf16", "--json").json
    assert {plan["weights"] for plan in other["plans"]} == {"bf16"}
    assert other["plans"][0]["generate"]["memory"]["weights"] > 1.2 * memory


def test_a_plan_in_the_dtype_of_the_folder_serves_it_as_it_is(call, tmp_path):
    folder_of("fp8", tmp_path)
    given = ("--on", "h100:1x1", "--prompt", "16", "--output", "16", "--axes", "tensor=1", "-o")
    assert call("service", str(tmp_path), *given, str(tmp_path / "plan.toml")).code == 0
    source = open_model(tmp_path)
    options = EngineOptions(plan=tmp_path / "plan.toml")
    assert engine_layout(source, options, jax.devices()[:1]).options.weights == ""
