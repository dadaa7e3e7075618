"""`meshwright plan` with --why-not, --what-if and --recipe, as text and as JSON."""

import pytest

from tests.tier import sampled

BASE = ("plan", "llama3-8b", "--on", "h100:8x4", "--batch", "256seq", "--seq", "4096", "--top", "1",
        "--calibration", "datasheet")  # fmt: skip


@pytest.mark.parametrize("width", sampled([80, 120], 80))
def test_every_question_at_once(call, width):
    said = call(
        *BASE, "--why-not", "tensor=64,pipeline=2", "--why-not", "tensor=8", "--what-if", "chip.flops=8x,links=0.1x",
        "--what-if", "chips=2x", "--recipe", width=width,
    )  # fmt: skip
    assert (said.code, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= width
    for text in (
        "Why not tensor 64, pipeline 2",
        "(tensor | N) tensor=64 does not divide N=32 query heads of llama3-8b. Use tensor in {1, 2, 4, 8, 16, 32}.",
        "Why not tensor 8 best completion",
        "longer than the best's",
        "what makes it slower",
        "collectives over tensor",
        "What if chip.flops 8x: 989 TFLOP/s -> 7.92 PFLOP/s in bf16 and links 0.1x: nvlink 450 GB/s -> 45 GB/s, nic",
        "What if chips 2x: h100:8x4 -> h100:8x8, 32 -> 64 chips",
        "times the tokens per second",
        "The recipe: data parallelism",
        "FSDP yes beyond that: fsdp 32",
    ):
        assert text in said.words


def test_as_json(call):
    found = call(
        *BASE, "--why-not", "tensor=8", "--why-not", "tensor=3", "--what-if", "batch=0.5x", "--recipe", "--json"
    ).json
    runs, refused = found["why_not"]
    best = found["strategies"][0]
    assert runs["runs"] is True
    assert runs["slower_s"] == pytest.approx(runs["estimate"]["step_s"] - runs["winner_estimate"]["step_s"])
    assert sum(term["share"] for term in runs["terms"]) == pytest.approx(1)
    assert refused["runs"] is False
    assert refused["estimate"] is None
    assert refused["refusal"]["rule"].startswith("tensor | ")
    (half,) = found["what_if"]
    assert half["asked"] == {"batch": 0.5}
    assert half["now"]["step_s"] == best["step_s"]
    assert half["speedup"] == pytest.approx(best["step_s"] / half["then"]["step_s"] / 2)
    assert found["recipe"]["best_step_s"] == best["step_s"]
    assert {step["name"] for step in found["recipe"]["steps"]} >= {"FSDP", "hybrid sharding", "pipeline"}
    assert found["recipe"]["estimate"]["step_s"] >= best["step_s"]


def test_assumptions_stand_with_the_strategies_as_before(call):
    asked = (*BASE, "--set", "strategy.software=eager", "--why-not", "software=eager-2021,tensor=8", "--recipe")
    found = call(*asked, "--json").json
    (told,) = found["why_not"]
    assert told["winner"]["software"] == found["recipe"]["strategy"]["software"] == "eager"
    assert told["strategy"]["software"] == "eager-2021"
    assert found == call(*(text.replace("strategy.software", "assumptions.software") for text in asked), "--json").json
    assert found["strategies"] != call(*BASE, "--json").json["strategies"]
    # the same strategy under other software is another answer
    same = call(*BASE, "--axes", "fsdp=32", "--set", "strategy.remat=block", "--why-not", "software=eager-2021")
    assert "Why not software eager-2021 best completion" in same.words
    assert "longer than the best's" in same.words


def test_a_question_without_an_answer_is_absent(call):
    found = call(*BASE, "--json").json
    assert not {"why_not", "what_if", "recipe"} & found.keys()


def test_memory_is_the_reason(call):
    said = call(*BASE, "--why-not", "data=32,remat=none,microbatches=1")
    assert "refused (memory) llama3-8b on mesh data=32 needs" in said.words
    assert "least memory data 32" in said.words
    assert "if it fitted" in said.words


def test_where_nothing_runs_then(call):
    said = call(*BASE, "--what-if", "chip.memory=0.01x")
    assert said.code == 0
    assert "nothing runs llama3-8b with 256 sequences of 4096 does not fit h100:8x4" in said.words


def test_the_plan_itself_is_not_a_question(call):
    plain = call(*BASE, "--axes", "fsdp=32")
    asked = call(*BASE, "--axes", "fsdp=32", "--why-not", "fsdp=32")
    assert asked.out.startswith(plain.out.partition("times rest on")[0])
    assert "that is the best of the list itself" in asked.words
