"""What `meshwright explain` says before the algorithm, and the algorithm of pipelines, experts and rings."""

import re

import pytest

PLANS = {
    "stages": ("llama3-8b", "h100:8x4", "256seq", "pipeline=4,data=8"),
    "mixed layers": ("deepseek-v2-lite", "h100:8x4", "256seq", "expert=8,pipeline=1"),
    "ring": ("llama3-8b", "h100:8x2", "16seq", "context=8"),
    "one chip": ("tiny", "v5e:1x1", "32seq", "fsdp=1"),
}


@pytest.fixture
def explained(call):
    """Text and JSON of a plan by its name in PLANS."""

    def explain(name, *more, width=80):
        model, cluster, batch, axes = PLANS[name]
        seq = "256" if model == "tiny" else "4096"
        made = call("plan", model, "--on", cluster, "--batch", batch, "--seq", seq, "--axes", axes, *more,
                    "-o", "plan.toml")  # fmt: skip
        assert made.code == 0
        return call("explain", "plan.toml", width=width), call("explain", "plan.toml", "--json").json

    return explain


def lead_of(said):
    """The labelled facts before the algorithm."""
    return said.out[said.out.index("what matters") : said.out.index("\nForward pass")]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["stages", "one chip"])
def test_the_lead(explained, name, width):
    said, found = explained(name, width=width)
    lead = lead_of(said)
    labels = [line[:18].strip() for line in lead.splitlines() if line[:18].strip()]
    assert labels[0] == "what matters"
    assert "what would help" in labels
    assert ("data parallelism" in labels) == (name != "one chip")
    terms = [term for term in found["terms"] if term["share"] > 0]
    assert f"{terms[0]['share']:.0%} of the step" in lead
    assert sum(term["added_s"] for term in found["terms"]) == pytest.approx(found["estimate"]["step_s"])
    assert max(map(len, lead.splitlines())) <= width


def test_the_best_single_change_is_told(explained):
    said, found = explained("stages", "--set", "strategy.remat=full", "--set", "strategy.schedule=gpipe")
    changes = found["changes"]
    assert changes["best"] is not None
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
    assert f"{between['bubble_s'] / found['estimate']['step_s']:.1%} of it (the bubble)" in said.words
    assert any(limit["name"] == "microbatches, bubble < 10%" for limit in found["limits"])


def test_every_kind_of_layer_is_listed(explained):
    said, found = explained("mixed layers")
    assert [(block["name"], block["repeat"]) for block in found["blocks"]] == [("layer", 1), ("layer_moe", 26)]
    assert found["forward"] == found["blocks"][-1]["forward"]
    assert "Forward pass of one layer (layer, 1 of 27)" in said.out
    assert "Forward pass of one layer (layer_moe, 26 of 27)" in said.out
    moved = [line["text"] for line in found["forward"]["lines"] if line["op"] == "all_to_all"]
    assert len(moved) == 2
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
