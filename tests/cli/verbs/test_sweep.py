"""`meshwright sweep`: every sweep's figures, text and picture, and what it refuses."""

import csv
import json

import pytest

from meshwright.spec.strategy import REMAT_POLICIES
from tests.tier import sampled

CHIPS = ("sweep", "llama3-8b", "--on", "h100:8x1..8x2", "batch=64seq")
GRID = ("sweep", "1B,70B", "--on", "h100:8x1,8x2", "batch=64seq")
REMATS = ("sweep", "plans", "llama3-8b", "--on", "h100:8x2", "batch=64seq", "remat")
BATCH = ("sweep", "batch", "mlp:8192x32768", "--on", "v5p:4096chips", "--whole-axes", "--calibration", "datasheet")
MEMORY = ("sweep", "llama3-8b", "--on", "h100:8x1", "micro=1", "--figure", "memory")
BANDWIDTH = ("sweep", "bandwidth", "--on", "h100:8x4")
SERVICES = ("sweep", "services", "llama3-8b", "--on", "v5e:2x2", "output=256", "tpot=50ms", "prompt=1Ki..4Ki")
SERVED_GRID = ("sweep", "services", "llama3-8b", "--on", "v5e:1x1..2x2", "prompt=2Ki", "output=256", "tpot=15ms,50ms")
STREAMS = ("sweep", "streams", "llama3-8b", "--on", "h100:8x1", "--batch", "8seq")


@pytest.mark.parametrize(
    "args",
    sampled(
        [
            *((CHIPS,), (GRID,), (REMATS,), (BATCH,), ((*BATCH[:5], "--axes", "tensor=8"),), ((*MEMORY, "seq_len"),)),
            *(((*MEMORY, "tensor"),), (BANDWIDTH,), (STREAMS,), (SERVICES,), (SERVED_GRID,)),
        ],
        *((CHIPS,), (BATCH,), ((*MEMORY, "seq_len"),), (BANDWIDTH,), (STREAMS,)),
    ),
    ids=lambda args: args[1],
)
def test_the_picture_and_the_text(call, args, tmp_path):
    said = call(*args, "--png", "out.svg", "--json", width=120)
    assert said.code == 0, said.err
    assert said.err == "wrote out.svg\n"
    assert (tmp_path / "out.svg").stat().st_size > 3000
    for wide, width in ((said.printed("text"), 120), (call(*args), 80)):
        assert max(map(len, wide.out.splitlines())) <= width


def test_memory_of_every_remat_policy_is_drawn(call, tmp_path):
    """And of segments: an input of 1.07 GB for each of 32 layers, 16, 8 or 1, and for the one computed again."""
    remats = ",".join((*REMAT_POLICIES, "recompute-2", "recompute-4"))
    found = call(*MEMORY, "seq_len=128Ki", f"remat={remats}", "--png", "out.svg", "--json").json["points"]
    drawn = (tmp_path / "out.svg").read_text()
    assert all(f"remat {remat}" in drawn for remat in remats.split(","))
    kept = {point["remat"]: point["memory"]["activations"] for point in found}
    one = 128 * 2**10 * 4096 * 2
    inputs = {"full": 32, "recompute-2": 16 + 1, "recompute-4": 8 + 1, "recompute-all": 1 + 1}
    for remat, count in inputs.items():
        assert kept["full"] - kept[remat] == pytest.approx((32 - count) * one), remat


def test_chips(call):
    found = call(*CHIPS, "--json").json
    assert (found["model"], found["scaling"], found["seq_len"]) == ("llama3-8b", "strong", 4096)
    small, large = found["points"]
    assert (small["num_chips"], large["num_chips"]) == (8, 16)
    assert small["tokens_per_s"] == pytest.approx(64 * 4096 / small["step_s"])
    assert 0 <= small["exposed_share"] < 1
    weak = call(*CHIPS, "--weak", "--json").json
    assert [point["batch_seqs"] for point in weak["points"]] == [64, 128]


def test_it_says_where_nothing_fits(call):
    said = call("sweep", "llama3-70b", "--on", "h100:8x1,h100:8x4", "batch=64seq")
    assert "chips 8: does not fit: " in said.words
    none = call("sweep", "llama3-405b", "--on", "h100:8x1..8x2", "batch=64seq")
    assert (none.code, none.out) == (3, "")
    assert "llama3-405b: 2 of 2 points do not run: does not fit (2, nearest on 16: " in none.err


def test_every_reason_is_said_with_the_nearest(call):
    said = call(
        "sweep", "llama3-70b", "--on", "h100:8x1", "--batch", "64seq", "--seq", "4Ki", "remat=none,full", "tensor=4,3"
    )
    assert said.code == 3
    assert "4 of 4 points do not run: does not fit (2, nearest remat full, tensor 4: " in said.err
    assert "does not divide (2, such as remat none, tensor 3: tensor=3 does not divide the 8 chips" in said.err
    grid = call("sweep", "llama3-70b", "--on", "h100:8x1,h100:8x4", "--batch", "64seq", "tensor=4,8")
    assert "2 of 4 points do not run: does not fit (2, nearest on 8, tensor " in grid.words


def test_experts_without_a_bound_have_a_note(call):
    asked = ("sweep", "mixtral-8x7b", "--on", "h100:8x4", "--batch", "64seq", "remat=full")
    assert "further rounds" in call(*asked, "--notes").words
    assert "further rounds" not in call(*asked, "capacity_factor=1.25", "--notes").words


def test_fixed_choices_are_kept(call):
    found = call(*CHIPS, "tensor=8", "strategy.remat=full", "--json").json
    assert {(point["axes"]["tensor"], point["remat"]) for point in found["points"]} == {(8, "full")}


def test_any_field(call):
    found = call("sweep", "llama3-8b", "--on", "h100:8x1", "batch=64seq,128seq", "--json").json
    assert found["fields"] == {"batch": ["64seq", "128seq"]}
    assert (found["axis"], found["model"], found["cluster"]) == ("batch", "llama3-8b", "h100:8x1")
    assert (found["seq_len"], found["tokens_per_step"]) == (4096, None)
    assert [point["batch_seqs"] for point in found["points"]] == [64, 128]
    said = call(*REMATS, width=120)
    assert "llama3-8b on h100:8x2: plans by remat; 256 Ki tokens a step, sequences of 4 Ki" in said.words
    assert "$/Mtoken" in said.out


def test_grid(call):
    said = call(*GRID)
    found = said.printed("json").json
    assert [model["name"] for model in found["models"]] == ["llama-1B", "llama-70B"]
    assert found["clusters"] == ["h100:8x1", "h100:8x2"]
    cells = {(cell["model"], cell["cluster"]): cell for cell in found["cells"]}
    assert cells["llama-1B", "h100:8x1"]["mfu"] > 0.2
    assert cells["llama-70B", "h100:8x1"]["reason"].startswith("does not fit")
    assert "h100: MFU by model and chips; 256 Ki tokens a step" in said.words
    assert "no fit" in said.words
    assert "llama-70B: 70.6 B parameters, 80 layers of width 8,192" in said.words
    assert "chips llama-1B llama-70B" in said.words
    first, *others = csv.DictReader(said.printed("csv").out.splitlines())
    assert len(others) == 3
    assert (first["model"], first["cluster"], first["axes.fsdp"]) == ("llama-1B", "h100:8x1", "8")
    assert float(first["memory_bytes.optimizer"]) > 1e8
    small = ("sweep", "1B,3B", "--on", "h100:8x1,8x2", "batch=64seq")
    rate = call(*small, "--figure", "tokens_per_s").words
    assert "h100: tokens per second by model and chips" in rate
    held = call(*small, "--figure", "memory").words
    assert "h100: memory of a chip by model and chips" in held


def test_clusters_of_several_chips(call):
    said = call("sweep", "llama3-8b", "--on", "h100:8x1,v5p:2x2x2", "batch=64seq")
    assert "cluster step" in said.words
    assert "v5p:2x2x2" in said.words


def test_what_else_of_the_plan_changes_is_said(call):
    """The best plans of two sizes of tensor differ in more than tensor; with micro only the mesh differs."""
    searched = call("sweep", "llama3-8b", "--on", "h100:8x2", "batch=64seq", "tensor=1,8")
    assert "each value has its own best plan, with other axes" in searched.words
    assert "micro=1 in place of a batch holds them" in searched.words
    held = call(*MEMORY, "tensor=1,8")
    assert "fsdp takes the chips that are left; with fsdp=1 data takes them" in held.words
    assert "takes the chips" not in call(*MEMORY, "fsdp=1", "tensor=1,8").words
    assert "best plan" not in call(*CHIPS).words


def test_memory_is_of_the_fullest_moment(call):
    said = call(*MEMORY, "seq_len=4Ki,8Ki")
    assert "items are of the fullest moment, while the loss head, the layers or the embedding run" in said.words


def test_a_grid_marks_what_does_not_fit(call, tmp_path):
    said = call(*MEMORY, "seq_len=4Ki,128Ki", "remat=none,full", "--png", "grid.json")
    assert "699 GB (!)" in said.words
    assert "(!) does not fit" in said.words
    assert "16.3 GB (!)" not in said.words
    rows = json.loads((tmp_path / "grid.json").read_text())["datasets"].values()
    edged = {(row["row"], row["column"]) for found in rows for row in found if row.get("edge")}
    assert edged == {("128Ki", "none")}


def test_batch(call):
    said = call(*BATCH)
    found = said.printed("json").json
    crossings = {one["name"]: one for one in found["crossings"]}
    assert crossings["FSDP alone"]["tokens"] == pytest.approx(3481600, rel=1e-3)
    assert crossings["best mesh"]["closed_form"] == pytest.approx(1.6256e6, rel=1e-3)
    assert crossings["FSDP x tensor 64"]["tokens"] is None
    assert "best mesh from 1.73 M tokens 4 N alpha^2 / (2 F) = 1.63 M" in said.words


def test_batch_on_one_mesh(call):
    found = call("sweep", "batch", "llama3-8b", "--on", "h100:8x8", "--axes", "tensor=8", "--json").json
    (curve,) = found["curves"]
    assert set(curve["comms_s"]) == {"fsdp", "tensor"}
    assert curve["axes"]["fsdp"] == 8
    ranged = call("sweep", "batch", "llama3-8b", "--on", "h100:8x8", "--batches", "1Mi..4Mi", "--json").json
    assert (ranged["tokens"][0], ranged["tokens"][-1]) == pytest.approx((2**20, 2**22))


def test_memory(call):
    found = call(*MEMORY, "remat=none,block", "--json").json
    none, block = found["points"]
    assert found["limit_bytes"] == 80e9
    assert none["memory"]["activations"] > block["memory"]["activations"]
    assert block["hbm_bytes_per_chip"] == pytest.approx(sum(block["memory"].values()))
    said = call(*MEMORY, "seq_len=4Ki,128Ki")
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[-1] for row in rows if row and row[0].endswith("Ki")] == ["yes", "no"]


def test_bandwidth(call):
    found = call(*BANDWIDTH, "--calibration", "datasheet", "--json").json
    gathers = [point["bytes_per_s"] for point in found["points"] if point["collective"] == "all_gather"]
    assert len(gathers) == 5
    assert gathers[0] == pytest.approx(450e9, rel=0.01)
    # without a word, at the rates of plans
    fitted = call(*BANDWIDTH)
    assert "rates: numbers fitted on published training steps" in fitted.words


def test_streams(call):
    found = call(*STREAMS, "--json").json
    assert [way["name"] for way in found["ways"]] == [
        "data parallel, naive", "overlapped", "bucketed", "ZeRO-1", "ZeRO-3",
    ]  # fmt: skip
    (only,) = call(*STREAMS, "--zero", "3", "--layers", "2", "--json").json["ways"]
    assert only["name"] == "ZeRO-3"
    assert {box["layer"] for box in only["boxes"]} == {0, 1}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sweep", "llama3", "--on", "h100:8x1", "batch=64seq"), "model 'llama3' is neither in the catalogue"),
        (CHIPS[:4], "give --batch 4Mi for the best plans, or micro=1"),
        ((*CHIPS, "remat", "zero"), "on, remat, zero are 3 fields. Sweep at most two at a time"),
        ((*CHIPS, "some"), "'some' is not FIELD=VALUES"),
        ((*CHIPS, "remats=block"), "sweep has no field 'remats'. Did you mean 'remat'?"),
        (("sweep", "batch", "mlp:8192x32768", "--on", "v5p:4x4x4", "--step"), "it has a forward pass only"),
        (("sweep", "batch", "llama3-8b", "--on", "v5p:4x4x4", "--batches", "4Mi..1Mi"), "is not a range"),
        ((*MEMORY, "remat=some"), "remat 'some' is not a policy"),
        ((*MEMORY, "seq_len", "strategy.state=1"), "strategy.state"),
        (("sweep", "bandwidth", "--on", "h100:1x1"), "there is nothing to send"),
        (("sweep", "batch", "llama3-8b", "--on", "h100:1x1"), "there is nothing to send"),
        (("sweep", "batch", "mlp:0x8", "--on", "h100:8x1"), "no layer has such widths"),
        ((*STREAMS[:-1], "9seq"), "9 sequences cannot be divided over 8 chips. Use --batch 8seq"),
        ((*STREAMS, "--layers", "0"), "--layers 0 must be between 1 and 32"),
        ((*CHIPS, "--png", "out.gif"), "cannot write a picture as 'out.gif'"),
    ],
)
def test_what_is_refused(call, args, message):
    call(*args).assert_refused(2, message)


def test_services(call):
    """A row is the best service of `service` at these values, with the same figures."""
    said = call(*SERVICES)
    assert said.out.startswith("llama3-8b on v5e:2x2: services by prompt; output 256, tpot 50ms")
    points = said.printed("json").json["points"]
    assert [one["values"]["prompt"] for one in points] == ["1 Ki", "2 Ki", "4 Ki"]
    asked = ("service", "llama3-8b", "--on", "v5e:2x2", "--prompt", "2048", "--output", "256", "--tpot", "50ms")
    plan = call(*asked, "--json").json["plans"][0]
    for name in ("ttft_s", "tpot_s", "tokens_per_s_per_chip", "usd_per_m_output", "weights"):
        assert points[1][name] == plan[name]
    made = [one["tokens_per_s_per_chip"] for one in points]
    assert made == sorted(made, reverse=True)


def test_services_that_no_cluster_serves(call):
    said = call(*SERVED_GRID, "weights=bf16", "--figure", "tpot_s")
    cells = {tuple(one["values"].values()): one for one in said.printed("json").json["cells"]}
    assert len(cells) == 6
    assert cells["1", "50ms"]["reason"].startswith("does not fit: llama3-8b with 2,048 tokens of prompt")
    assert cells["4", "15ms"]["reason"] is None
    assert cells["4", "15ms"]["tpot_s"] <= 15e-3 < cells["4", "50ms"]["tpot_s"]
    assert "points do not run: does not fit (2," in said.words
    said = call(*SERVICES[:-1], "prompt=4Ki,64Ki")
    assert "prompt 64Ki: too long: a prompt of 65,536 tokens is longer than the 8,192 positions" in said.words


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "a sweep of services needs prompt. Write prompt=512"),
        (("prompt=1Ki,2Ki", "weights=bf16,int8", "kv=bf16,int8"), "prompt, weights, kv are 3 fields."),
        (("prompt=1Ki", "remat=full"), "remat is no field of a service."),
        (("prompt=1Ki", "batch=8"), "sweep has no field 'batch'."),
        (("prompt=many",), "prompt 'many' is not a number"),
        (("prompt=1Ki", "rate=9/day"), "rate '9/day' is not a rate of requests."),
        (("prompt=1Ki", "prefix_hits=half"), "Service.prefix_share is 'half'. Give a finite number."),
    ],
)
def test_what_is_no_sweep_of_services(call, more, message):
    call(*SERVICES[:6], "tpot=50ms", *more).assert_refused(2, message)
