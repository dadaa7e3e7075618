"""`meshwright explain`: what matters, the algorithm in the book's notation and the limits, from a plan file."""

import re
from pathlib import Path

import pytest

from meshwright.cli.verbs.explain import limit_words
from meshwright.cost.formulas.limit_table import Limit
from meshwright.plan.plan_file import load_plan

PLANS = {
    "torus": ("plan", "llama3-70b", "--on", "v5p:16x16x32", "--batch", "4Mi", "--seq", "4096", "--tokens", "15T",
              "--axes", "fsdp=1024,context=2,tensor=4"),
    "switched": ("plan", "llama3-8b", "--on", "h100:8x4", "--batch", "1Mi", "--seq", "4096", "--tokens", "1T"),
    "one chip": ("plan", "tiny", "--on", "v5e:1x1", "--batch", "16Ki", "--seq", "512"),
    "stages": ("plan", "llama3-8b", "--on", "h100:8x4", "--batch", "256seq", "--seq", "4096", "--axes",
               "pipeline=4,data=8"),
    "mixed layers": ("plan", "deepseek-v2-lite", "--on", "h100:8x4", "--batch", "256seq", "--seq", "4096", "--axes",
                     "expert=8,pipeline=1"),
    "ring": ("plan", "llama3-8b", "--on", "h100:8x2", "--batch", "16seq", "--seq", "4096", "--axes", "context=8"),
}  # fmt: skip
FITTED = ("stages", "mixed layers", "ring")
"""Plans priced by fitted rates; the others take those of the data sheet, which the limits are worked out from."""


@pytest.fixture
def explained(call):
    """Text and JSON of a plan by its name in PLANS."""

    def explain(name, *more, width=80):
        rates = () if name in FITTED else ("--calibration", "datasheet")
        assert call(*PLANS[name], *rates, *more, "-o", "plan.toml").code == 0
        said = call("explain", "plan.toml", "--all", "--notes", width=width)
        return said, said.printed("json").json

    return explain


def test_layers_that_run_again_for_each_other_in_words(explained):
    """8 layers of tiny: 8 x 7 / 2 and, in segments of 3, 3 + 3 + 1 forward passes of one."""
    for remat, words in (
        ("recompute-all", "one in 8 is kept; each layer's backward pass runs the layers from there to it again: 28"),
        ("recompute-3", "one in 3 is kept; each layer's backward pass runs the layers from there to it again: 7"),
        ("full", ""),
    ):
        said, _ = explained("one chip", "--set", f"strategy.remat={remat}")
        assert words in said.words
        assert ("recomputation of 8 layers in sequence the input of" in said.words) == bool(words)


def test_the_header_names_the_stage_of_zero(call):
    """fsdp with stage 1 keeps whole weights, with 3 it shards them; data alone has no stage."""
    on = ("explain", "tiny", "--on", "h100:8x1", "--batch", "64seq", "--seq", "512", "--set", "remat=block")
    for choices, words in (
        (("--axes", "fsdp=8", "--set", "zero=3"), "fsdp 8, ZeRO-3, remat block"),
        (("--axes", "fsdp=8", "--set", "zero=1"), "fsdp 8, ZeRO-1, remat block"),
        (("--axes", "data=2,fsdp=4", "--set", "zero=2"), "data 2, fsdp 4, ZeRO-2, remat block"),
        (("--axes", "data=4,context=2", "--set", "zero=1"), "data 4, context 2, ZeRO-1 over context, "),
        (("--axes", "data=8"), "data 8, remat block"),
    ):
        assert call(*on, *choices).out.startswith(f"tiny on h100:8x1: {words}")


def test_the_algorithm(explained):
    said, found = explained("torus")
    assert (said.code, said.err) == (0, "")
    forward = {line["text"]: line for line in found["forward"]["lines"]}
    up = forward["w_up[D, F_tensor] = AllGather_{fsdp,context}(w_up[D_{fsdp,context}, F_tensor])"]
    assert up["num_bytes"] == 2 * 8192 * 28672 / 4
    assert up["critical"] is False
    stream = forward["h[B_fsdp, T_context, D] = AllGather_tensor(h[B_fsdp, T_{context,tensor}, D])"]
    assert stream["num_bytes"] == 2 * 2048 * 8192
    assert stream["critical"] is True
    product = forward["u[B_fsdp, T_context, F_tensor] = h1[B_fsdp, T_context, D] * w_up[D, F_tensor]"]
    assert product["flops"] == 2 * 2048 * 8192 * 28672 / 4
    assert [line["number"] for line in found["forward"]["lines"]] == list(range(1, len(forward) + 1))
    assert any("ReduceScatter_{fsdp,context}(dw_up" in line["text"] for line in found["backward"]["lines"])
    for text in ("Forward pass of one layer", "Backward pass of one layer", "Once per step", "us, on the critical path",
                 "can overlap, prefetched", "can overlap, once per step"):  # fmt: skip
        assert text in said.out
    numbers = re.findall(r"^ *(\d+)\. ", said.out.split("Backward")[0], flags=re.MULTILINE)
    assert [int(n) for n in numbers] == list(range(1, len(forward) + 1))


def test_it_is_the_plan_that_is_explained(explained):
    _, found = explained("torus")
    plan = load_plan(Path("plan.toml"))
    assert found["axes"] == plan.strategy.mesh
    assert found["estimate"]["step_s"] == pytest.approx(plan.predicted.step_s, rel=1e-12)
    assert found["training"]["days"] == pytest.approx(plan.predicted.train_days)
    assert found["batch"] == {
        "sequences_per_microbatch": 1024 / 1024 / plan.strategy.num_microbatches,
        "data_parallel": 1024,
        "num_microbatches": plan.strategy.num_microbatches,
        "sequences": 1024,
        "positions_per_device": 2048,
    }


def test_limits_on_a_torus(explained):
    said, found = explained("torus")
    limits = {limit["name"]: limit for limit in found["limits"]}
    assert limits["tokens/chip, FSDP alone"]["limit"] == pytest.approx(2550 / 3)
    assert limits["tokens/chip, FSDP alone"]["here"] == 512
    assert limits["tokens/chip, FSDP alone"]["holds"] is False
    assert limits["X_opt"]["limit"] == pytest.approx(1548, abs=1)
    assert limits["X_opt"]["note"] == "in powers of two: 2,048 x tensor 4"
    assert limits["discriminant"]["holds"] is True
    assert limits["X, lower root"]["limit"] < limits["X_opt"]["limit"] < limits["X, upper root"]["limit"]
    assert limits["chips, a sequence each"]["limit"] == 1024 * 2 * 4
    assert limits["memory of a chip"]["unit"] == "bytes"
    assert "would take" in limits["chips, by memory"]["note"]
    for text in ("Compute-bound, in closed form", "What fits", "alpha = C / W of a torus axis = 2,550"):
        assert text in said.words
    assert "> alpha / 3 850 512 broken" in said.words
    assert "by data sheet" not in said.words


def test_one_chip_has_no_communication(explained):
    said, found = explained("one chip")
    assert {limit["kind"] for limit in found["limits"]} == {"size"}
    assert not any(line["critical"] for line in found["forward"]["lines"])
    assert "Compute-bound" not in said.out
    assert "\nexposed" not in said.out


def lead_of(said):
    """The labelled facts before the largest steps."""
    return said.out[said.out.index("what matters") : said.out.index("largest step")]


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (1024.0, "here 1,024, 1.2 times above: near"),
        (512.0, "here 512, 1.66 times below: broken"),
        (1700.0, "here 1,700, 2 times above: holds"),
    ],
)
def test_a_limit_holds_or_is_near_or_broken(here, words):
    """A bound of 850 tokens a chip; of 512 nothing is hidden."""
    limit = Limit(name="tokens/chip", formula="> alpha / 3", limit=850.0, here=here, holds=here > 850)
    assert limit_words(limit) == f"tokens/chip: > 850, {words}"
    assert limit_words(limit, 700.0) == f"tokens/chip: > 850 (700 by the data sheet), {words}"


@pytest.mark.parametrize("name", ["torus", "mixed layers", "stages"])
def test_by_default_it_is_one_screen(explained, call, name):
    """Ten steps, a line each: what each adds is what the step would save, at most a little above what it takes."""
    _, found = explained(name)
    short = call("explain", "plan.toml")
    lines = short.out.splitlines()
    assert len(lines) <= 40
    assert [line[:4] for line in lines].count("what") == 3
    largest = found["largest"]
    assert len(largest) == 10
    assert largest == sorted(largest, key=lambda step: -step["added_s"])
    assert all(0 < step["added_s"] < 1.1 * step["alone_s"] for step in largest)
    for step in largest:
        result = step["text"].partition(" = ")[0]
        assert any(line.split("  ")[-1].strip().removeprefix("moe: ").startswith(f"{result} = ") for line in lines)
    assert "B sequences of the batch" in short.words
    listed = sum(len(part["lines"]) for block in found["blocks"] for part in (block["forward"], block["backward"]))
    assert int(re.search(r"--all \((\d+) steps", short.words)[1]) >= listed
    for text in ("free: weights", "of the bf16 peak", "MFU counts 6 FLOPs a parameter and token"):
        assert text in short.words


def test_fp8_names_its_peak(call):
    on = ("explain", "llama3-8b", "--on", "h100:8x1", "--batch", "64seq", "--seq", "4096")
    assert "% of the fp8 peak; HFU" in call(*on, "--set", "precision=fp8").words


def test_alpha_of_the_fit_stands_beside_that_of_the_data_sheet(call):
    """A v5p's 459e12 FLOP/s over 180 GB/s of an axis are 2,550; fitted rates give another number."""
    args = ("--on", "v5p:4x4x4", "--batch", "64seq", "--seq", "4096", "--axes", "fsdp=64")
    assert call("plan", "llama3-8b", *args, "-o", "plan.toml").code == 0
    words = call("explain", "plan.toml", "--all", "--notes").words
    assert re.search(r"alpha = C / W of a torus axis = [\d,]+ FLOPs/byte, 2,550 by the data sheet", words)
    assert re.search(
        r"C/W [\d,]+ FLOPs/byte \(2,550 by the data sheet\); FSDP alone needs [\d,]+ tokens a chip \(850\)", words
    )
    assert re.search(r"> alpha / 3 1,0[\d,]+ 850 4,096 holds", words)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["stages", "one chip"])
def test_the_lead(explained, name, width):
    said, found = explained(name, width=width)
    lead = lead_of(said)
    labels = [line[:18].strip() for line in lead.splitlines() if line[:18].strip()]
    assert labels[0] == "what matters"
    assert "what would help" in labels
    assert ("data parallelism  case" in said.out) == (name != "one chip")
    terms = [term for term in found["terms"] if term["share"] > 0]
    assert f"({terms[0]['share']:.0%})" in lead
    assert sum(term["added_s"] for term in found["terms"]) == pytest.approx(found["estimate"]["step_s"])
    assert max(map(len, lead.splitlines())) <= width


def test_the_best_single_change_is_told(explained):
    said, found = explained("stages", "--set", "strategy.remat=full", "--set", "strategy.schedule=gpipe")
    changes = found["changes"]
    assert changes["best"]["words"] in " ".join(lead_of(said).split())
    assert changes["gain_s"] == pytest.approx(found["estimate"]["step_s"] - changes["best"]["estimate"]["step_s"])
    assert f"the best of {changes['num_tried']} single changes" in " ".join(lead_of(said).split())


def test_stages_have_sends_and_a_bubble(explained):
    said, found = explained("stages")
    between = found["between_stages"]
    assert [line["op"] for line in between["sends"]["lines"]] == ["permute", "permute"]
    assert [line["phase"] for line in between["sends"]["lines"]] == ["forward", "backward"]
    assert between["bubble_s"] == found["estimate"]["terms"]["bubble"] > 0
    assert between["stages"] == 4
    assert "Between stages, one microbatch" in said.out
    assert f"{between['bubble_s'] / found['estimate']['step_s']:.1%} of the step (the bubble)" in said.words
    assert any(limit["name"] == "microbatches, bubble < 10%" for limit in found["limits"])


def test_every_kind_of_layer_is_listed(explained):
    said, found = explained("mixed layers")
    assert [(block["name"], block["repeat"]) for block in found["blocks"]] == [("layer", 1), ("layer_moe", 26)]
    assert found["forward"] == found["blocks"][-1]["forward"]
    assert "Forward pass of one layer (layer, 1 of 27)" in said.out
    assert "Forward pass of one layer (layer_moe, 26 of 27)" in said.out
    moved = [line["text"] for line in found["forward"]["lines"] if line["op"] == "all_to_all"]
    assert [text.split("[")[0] for text in moved] == ["we", "xe", "ye"]
    assert all("AllToAll_expert" in text for text in moved)
    names = {limit["name"] for limit in found["limits"]}
    assert {"expert width, AllToAll shorter", "tokens/copy of the experts"} <= names


def test_a_ring_is_listed(explained):
    _, found = explained("ring", "--set", "strategy.context_attention=ring")
    assert any(line["op"] == "permute" for line in found["forward"]["lines"])
    assert any(limit["name"] == "positions/device, ring hides" for limit in found["limits"])
    assert found["fsdp_case"]["other_axes"] == ["context"]


def test_numbered_from_one_in_every_part(explained):
    said, _ = explained("mixed layers")
    parts = re.split(r"\n\n", said.out)
    numbered = [[int(n) for n in re.findall(r"^ *(\d+)\. ", part, flags=re.MULTILINE)] for part in parts]
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in numbered)
    assert sum(map(bool, numbered)) == 5


def edited(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    # as a person who says that the change is theirs, without the checksum of the first line
    path.write_text(text.replace(old, new, 1).partition("\n")[2], encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        ("fsdp = 1024", "fsdp = 512", 3, "needs 4,096 devices, but v5p:16x16x32 has 8,192"),
        ("batch_seqs = 1024", "batch_seqs = 1000", 3, "does not divide the batch of 1000 sequences"),
        ("batch_seqs = 1024", "batch_seqs = '1024'", 2, "job.batch_seqs is '1024'. Give a whole number."),
        ("[strategy]", "[strategy]\nremot = 1", 2, "strategy.remot is not a field. Did you mean 'remat'?"),
        ("num_layers = 80", "num_layers = 0", 2, "num_layers=0 must be at least 1"),
        ("train_tokens = 15000000000000", "train_tokens = 0", 2, "job.train_tokens=0 must be between 1 and 1e+24"),
    ],
)
def test_an_edited_plan_is_refused_in_one_line(call, tmp_path, old, new, code, message):
    call(*PLANS["torus"], "-o", "plan.toml")
    edited(tmp_path / "plan.toml", old, new)
    call("explain", "plan.toml").assert_refused(code, message)


def test_an_edited_plan_that_runs_is_priced_anew(call, tmp_path):
    call(*PLANS["switched"], "-o", "plan.toml")
    before = load_plan(Path("plan.toml")).predicted.step_s
    edited(tmp_path / "plan.toml", "seq_len = 4096", "seq_len = 2048")
    said = call("explain", "plan.toml", "--json")
    assert said.code == 0
    assert "it was changed by hand, or written by another version" in said.err
    assert said.json["estimate"]["step_s"] < 0.6 * before


def test_a_plan_that_needs_too_much_memory_is_explained_with_that_limit_broken(call, tmp_path):
    call("plan", "llama3-8b", "--on", "v5e:4x4", "--batch", "128seq", "--seq", "4096", "--axes", "pipeline=1",
         "-o", "plan.toml")  # fmt: skip
    count = load_plan(Path("plan.toml")).strategy.num_microbatches
    assert count > 1
    edited(tmp_path / "plan.toml", f"num_microbatches = {count}", "num_microbatches = 1")
    limits = {limit["name"]: limit for limit in call("explain", "plan.toml", "--json").json["limits"]}
    assert limits["memory of a chip"]["holds"] is False


def test_a_model_with_options_is_explained_as_its_plan_file_is(call):
    model = ("llama3-8b", "--on", "h100:8x1", "--batch", "1Mi", "--seq", "8192")
    call("plan", *model, "-o", "plan.toml")
    assert call("explain", *model).out == call("explain", "plan.toml").out
    changed = call("explain", "plan.toml", "--set", "strategy.remat=full")
    assert (changed.err, "remat full" in changed.out) == ("", True)
    call("explain", "llama3-8b").assert_refused(2, "explain llama3-8b needs --on, or name a plan file")
    call("plan", "plan.toml", *model[1:]).assert_refused(
        2, "plan.toml is no model. Name one, or its config.json; explain, verify"
    )
