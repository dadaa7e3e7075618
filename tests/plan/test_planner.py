"""The one call behind the plan verb: what it returns, what it notes, and what it refuses."""

import json

import msgspec
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_seconds
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.legal import legal
from meshwright.plan.plan_file import load_plan, save_plan
from meshwright.plan.planner import UNEVEN, imbalance_notes, rank_plans, slots_note
from meshwright.plan.space import EMULATED
from meshwright.spec import catalogue
from meshwright.spec.assumptions import Assumptions, require_runnable_strategy
from meshwright.spec.calibration import Calibration, CollectiveRate
from meshwright.spec.cluster import parse_cluster, slice_note
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

LLAMA70B, LLAMA8B, TINY = (catalogue.load_model(name) for name in ("llama3-70b", "llama3-8b", "tiny"))
BIG = Job(batch_seqs=1024, seq_len=4096, train_tokens=15 * 10**12)
KEYS = {
    "axes", "placement", "assignment", "num_microbatches", "remat", "step_s", "step_s_lower", "step_s_upper",
    "mfu", "hfu", "hbm_bytes_per_chip", "memory", "bound_by", "train_days", "cost_usd", "num_chips",
}  # fmt: skip


def planned(model, cluster, batch_seqs, seq_len=4096, calibration=None, **given):
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    return rank_plans(Setting(model, parse_cluster(cluster), job, calibration), **given)


def test_json_of_a_plan():
    result = rank_plans(Setting(LLAMA70B, parse_cluster("v5p:16x16x32"), BIG))
    found = json.loads(json.dumps(result.to_json()))
    assert (found["model"], found["cluster"]) == ("llama3-70b", "v5p:16x16x32")
    assert found["job"] == {
        "kind": "train",
        "batch_seqs": 1024,
        "seq_len": 4096,
        "train_tokens": 15 * 10**12,
        "optimizer": "adamw",
        "weights": "",
    }
    assert found["nearest_batch"] is None
    assert any("datasheet peaks" in note for note in found["notes"])
    assert len(found["strategies"]) == 5
    for one in found["strategies"]:
        assert set(one) >= KEYS
        assert one["num_chips"] == 8192
        assert one["step_s_lower"] <= one["step_s"] * (1 + 1e-9)
        assert one["step_s"] <= one["step_s_upper"] * (1 + 1e-9)
        assert one["hbm_bytes_per_chip"] == pytest.approx(sum(one["memory"].values()))
        assert one["train_days"] == pytest.approx(one["step_s"] * 15e12 / 2**22 / 86400)
        assert set(one["placement"]) == set(one["axes"])
    times = [one["step_s"] for one in found["strategies"]]
    assert times == sorted(times)


def test_what_is_not_known_is_null():
    """No tokens: no days and no cost; no price of the chip: no cost."""
    given = {"axes": {"fsdp": 16}, "top": 1}
    one = planned(LLAMA8B, "v5e:4x4", 16, **given).to_json()["strategies"][0]
    assert one["train_days"] is None
    assert one["cost_usd"] is None
    unpriced = parse_cluster("v5e:4x4")
    unpriced = msgspec.structs.replace(unpriced, chip=msgspec.structs.replace(unpriced.chip, price_usd_per_hour=None))
    job = Job(batch_seqs=16, seq_len=4096, train_tokens=10**9)
    free = rank_plans(Setting(LLAMA8B, unpriced, job), **given).to_json()["strategies"][0]
    assert free["train_days"] > 0
    assert free["cost_usd"] is None
    priced = rank_plans(Setting(LLAMA8B, parse_cluster("v5e:4x4"), job), **given).plans[0]
    assert priced.predicted.cost_usd == pytest.approx(
        priced.predicted.train_days * 24 * 16 * priced.cluster.chip.price_usd_per_hour
    )


@pytest.mark.slow
def test_chips_that_do_not_divide_the_work():
    """1024 sequences run on a part: 7168 chips in seven stages, or 4096 without if faster. 1120 use them all."""
    uneven = rank_plans(Setting(LLAMA70B, parse_cluster("v5p:16x20x28"), BIG))
    best = uneven.plans[0]
    stages = rank_plans(Setting(LLAMA70B, parse_cluster("v5p:16x20x28"), BIG), axes={"pipeline": 7}, top=1).plans[0]
    alone = rank_plans(Setting(LLAMA70B, parse_cluster("v5p:16x20x28"), BIG), axes={"pipeline": 1}, top=1).plans[0]
    assert (stages.cluster.short_name, alone.cluster.short_name) == ("v5p:16x16x28", "v5p:16x16x16")
    assert best.predicted.step_s <= 1.001 * min(stages.predicted.step_s, alone.predicted.step_s)
    assert best.cluster in (stages.cluster, alone.cluster)
    assert {one.job.batch_seqs for one in uneven.plans} == {1024}
    near = uneven.nearest_batch
    assert near.num_chips == 8960
    assert near.job.batch_seqs == 1120
    assert near.strategy.mesh == make_mesh({"data": 35, "fsdp": 32, "context": 2, "tensor": 4})
    found = uneven.to_json()["nearest_batch"]
    assert found["batch_seqs"] == 1120
    assert found["strategy"]["num_chips"] == 8960
    part, whole = uneven.shortfall
    assert f"the plan uses {best.cluster.short_name}, {best.num_chips:,} chips" in part
    assert "1,120 sequences" in whole
    assert "--batch 1120seq: data 35 x fsdp 32 x context 2 x tensor 4" in whole


def test_without_stages_the_part_is_smaller():
    result = rank_plans(Setting(LLAMA70B, parse_cluster("v5p:16x20x28"), BIG), axes={"pipeline": 1}, choices=EMULATED)
    assert {one.cluster.short_name for one in result.plans} == {"v5p:16x16x16"}
    assert "the plan uses v5p:16x16x16, 4,096 chips" in result.shortfall[0]


@pytest.mark.parametrize(
    ("cluster", "batch_seqs", "part", "stages"),
    [
        pytest.param("h100:8x3", 16, "h100:8x2", 3, marks=pytest.mark.slow),
        pytest.param("h100:7", 7, "h100:4x1", 7, marks=pytest.mark.slow),
        pytest.param("3*v5e:16x16", 64, "2*v5e:16x16", 3, marks=pytest.mark.slow),
    ],
)
def test_an_odd_number_of_chips_is_used_in_stages_unless_fewer_are_faster(cluster, batch_seqs, part, stages):
    result = planned(LLAMA8B, cluster, batch_seqs)
    whole, alone = (planned(LLAMA8B, cluster, batch_seqs, axes={"pipeline": n}, top=1).plans[0] for n in (stages, 1))
    assert (whole.num_chips, alone.cluster.short_name) == (parse_cluster(cluster).num_chips, part)
    best = result.plans[0]
    assert best.predicted.step_s <= 1.001 * min(whole.predicted.step_s, alone.predicted.step_s)
    # also in stages on the part itself
    there = planned(LLAMA8B, best.cluster.short_name, batch_seqs, top=1).plans[0]
    assert best.predicted.step_s <= 1.001 * there.predicted.step_s
    if best.num_chips == whole.num_chips:
        assert result.shortfall == ()
    else:
        assert best.cluster.short_name == part
        assert f" only in pipeline stages (pipeline {stages}" in result.shortfall[0]
        assert f"the plan uses {part}" in result.shortfall[0]


@pytest.mark.parametrize(
    ("model", "cluster", "axes"), [("olmo2-7b", "v6e:4x4", {"fsdp": 16}), ("deepseek-v2-lite", "h200:8x1", {"fsdp": 8})]
)
def test_what_is_listed_has_the_price_of_the_steps_that_run(model, cluster, axes):
    """The search prices all meshes with steps in one order, in which a ring of `context` computes keys first."""
    laid = parse_cluster(cluster)
    setting = Setting(
        catalogue.load_model(model), laid, Job(batch_seqs=64, seq_len=4096), fitted_calibration(laid.chip)
    )
    for one in rank_plans(setting, axes=axes, overrides={"remat": "block"}).plans:
        assert price_strategy(one.setting, one.strategy).estimate == one.predicted


@pytest.mark.parametrize(
    ("model", "cluster", "batch_seqs"),
    [pytest.param(LLAMA70B, "v5p:16x20x28", 1024, marks=pytest.mark.slow), (LLAMA8B, "h100:8x3", 16)],
)
def test_every_strategy_offered_can_run(model, cluster, batch_seqs):
    result = planned(model, cluster, batch_seqs)
    near = () if result.nearest_batch is None else (result.nearest_batch,)
    for one in (*result.plans, *near):
        assert legal(one.setting, one.strategy) == ()


def test_given_axes_are_kept_or_refused_in_words():
    kept = planned(LLAMA70B, "v5p:16x16x32", 1024, axes={"fsdp": 1024, "tensor": 4})
    for one in kept.plans:
        assert (one.strategy.mesh["fsdp"], one.strategy.mesh["tensor"]) == (1024, 4)
        assert one.num_chips == 8192
    for axes, words in (
        ({"tensor": 128}, "tensor=128 does not divide N=64 query heads of llama3-70b. Use tensor in {1, 2, 4, 8, 16"),
        ({"fsdp": 2048}, "fsdp=2048 does not divide the batch of 1024 sequences."),
        ({"fsdp": 3}, "fsdp=3 does not divide the 8192 chips of v5p:16x16x32."),
        (make_mesh({"fsdp": 8, "tensor": 8}), "does not divide the 8192 chips"),
        ({"expert": 8}, "expert=8: llama3-70b has no experts. Leave the axis out, or use fsdp=8."),
        ({"pipeline": 128}, "pipeline=128 is more stages than the 80 layers of llama3-70b. Use at most 80."),
    ):
        with pytest.raises(CannotRunError) as raised:
            planned(LLAMA70B, "v5p:16x16x32", 1024, axes=axes)
        assert words in str(raised.value)
    for axes, words in (({"model": 4}, "mesh axis 'model' is not known"), ({"fsdp": 0}, "must be at least 1")):
        with pytest.raises(InputError, match=words):
            planned(LLAMA70B, "v5p:16x16x32", 1024, axes=axes)


def test_given_fields_of_the_strategy():
    result = planned(LLAMA8B, "v5p:4x4x4", 256, overrides={"strategy.remat": "block", "num_microbatches": 2})
    assert {(one.strategy.remat, one.strategy.num_microbatches) for one in result.plans} == {("block", 2)}
    names = planned(LLAMA8B, "v5p:4x4x4", 256, overrides={"remat": ["qr", "kr", "v"]}).plans[0]
    assert names.strategy.remat == ("qr", "kr", "v")
    assert names.to_json()["remat"] == ("qr", "kr", "v")
    for overrides, words in (
        ({"rematt": "block"}, "strategy.rematt cannot be set here. Did you mean 'remat'?"),
        ({"remat": "blok"}, "remat 'blok' is not a policy. Did you mean 'block'?"),
        ({"num_microbatches": "many"}, "num_microbatches"),
        ({"remat": ["qqq"]}, "remat keeps 'qqq', which is not a result of the program."),
    ):
        with pytest.raises(InputError) as raised:
            planned(LLAMA8B, "v5p:4x4x4", 256, overrides=overrides)
        assert words in str(raised.value)


def test_what_is_not_executed_is_planned_for_chips_and_refused_here():
    result = planned(LLAMA8B, "h100:8x8", 256, overrides={"state": "bf16-master", "precision": "fp8"}, top=1)
    assert (result.plans[0].strategy.state, result.plans[0].strategy.precision) == ("bf16-master", "fp8")
    assert any(note.endswith("no causal discount; it is a share of the fp8 peak") for note in result.notes)
    with pytest.raises(CannotRunError, match="precision 'fp8' is planned but not executed in this version"):
        planned(TINY, "cpu:8", 32, 512, overrides={"precision": "fp8"}, calibration=measured())


def test_emulated_devices_use_other_axes_only_where_they_are_asked_for():
    searched = planned(TINY, "cpu:8", 32, 512, calibration=measured())
    assert all(one.strategy.mesh["pipeline"] == 1 for one in searched.plans)
    asked = planned(TINY, "cpu:8", 32, 512, axes={"pipeline": 2}, calibration=measured())
    assert {one.strategy.mesh["pipeline"] for one in asked.plans} == {2}


def test_given_schedule_and_offload_are_kept():
    overrides = {"schedule": "interleaved", "chunks": 4, "offload": ["optimizer"]}
    result = planned(LLAMA8B, "v5p:4x4x4", 256, axes={"pipeline": 4}, overrides=overrides, top=2)
    for one in result.plans:
        assert (one.strategy.schedule, one.strategy.chunks, one.strategy.offload) == ("interleaved", 4, ("optimizer",))
        assert one.predicted.terms["pcie"] > 0


def test_nothing_fits():
    with pytest.raises(CannotRunError) as raised:
        planned(LLAMA70B, "v5e:4x4", 16)
    message = str(raised.value)
    assert message.startswith("llama3-70b with 16 sequences of 4096 does not fit v5e:4x4: the best mesh (16 chips, any")
    # 61.0 GB with the inputs of 80 layers (67 MB each) under remat full; remat recompute-all has two of them
    assert "needs 55.8" in message
    assert "a chip has 16.1 GB besides the 5% that stays free" in message
    chips = int(message.split("At least ")[1].split(" ")[0])
    assert planned(LLAMA70B, f"v5e:8x{chips // 8}", 16).plans
    with pytest.raises(CannotRunError, match="remat=none"):
        planned(LLAMA70B, "v5e:4x4", 16, overrides={"remat": "none"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"schedule": "interleaved", "chunks": 8},
            r"pipeline=4 x chunks=8 has 32 places for the 8 layers of tiny, more",
        ),
        (
            {"schedule": "dualpipe", "num_microbatches": 2},
            r"with schedule=dualpipe, num_microbatches=2\. Leave one of schedule=dualpipe, num_microbatches=2 open\.",
        ),
    ],
)
def test_a_schedule_that_no_mesh_runs(fields, message):
    with pytest.raises(CannotRunError, match=message):
        planned(TINY, "h100:8x1", 64, 256, axes={"pipeline": 4}, overrides=fields)


def test_given_microbatches_that_divide_nothing():
    with pytest.raises(CannotRunError, match="num_microbatches=3 does not divide the batch of 256 sequences"):
        planned(LLAMA8B, "v5p:4x4x4", 256, overrides={"num_microbatches": 3})


def test_experts_are_split_over_their_axis():
    """mixtral-8x7b is planned as any other; a given axis is kept."""
    model = catalogue.load_model("mixtral-8x7b")
    assert planned(model, "h100:8x8", 64).plans
    split = planned(model, "h100:8x8", 64, axes={"expert": 8}, top=2)
    assert {one.strategy.mesh["expert"] for one in split.plans} == {8}


def test_a_plan_says_what_an_uneven_load_of_experts_would_cost():
    """The step of the first plan at 1.25 times the mean, in words; nothing where a device has all experts."""
    setting = Setting(catalogue.load_model("mixtral-8x7b"), parse_cluster("h100:8x4"), Job(batch_seqs=64, seq_len=4096))
    first = rank_plans(setting, axes={"expert": 8}, top=1)
    assumed = msgspec.structs.replace(setting.assumptions, imbalance=UNEVEN)
    uneven = price_strategy(msgspec.structs.replace(setting, assumptions=assumed), first.plans[0].strategy)
    assert uneven.estimate.step_s > first.plans[0].predicted.step_s
    step_text = format_seconds(uneven.estimate.step_s)
    assert first.notes[-1].endswith(f"at 1.25 times the mean this plan takes {step_text} a step")
    alone = rank_plans(setting, axes={"expert": 1}, top=1)
    assert not any("busiest device" in note for note in alone.notes)


def test_the_line_of_the_load_says_which_strategy_is_then_the_fastest():
    setting = Setting(catalogue.load_model("mixtral-8x7b"), parse_cluster("h100:8x4"), Job(batch_seqs=64, seq_len=4096))
    mesh = make_mesh({"fsdp": 4, "expert": 8})
    slow, fast = (Strategy(mesh=mesh, remat=remat) for remat in ("full", "none"))
    uneven = msgspec.structs.replace(setting, assumptions=Assumptions(imbalance=UNEVEN))
    seconds = format_seconds(price_strategy(uneven, fast).estimate.step_s)
    assert imbalance_notes(setting, slow, fast)[0].endswith(f", and plan 2 becomes the fastest with {seconds}")
    assert imbalance_notes(setting, fast, slow)[0].endswith(f"this plan takes {seconds} a step")


def test_a_plan_names_assumptions_that_do_not_hold_here():
    """Other software, whose devices of experts have room for the load alone, and slices that nobody offers."""
    job = Job(batch_seqs=60, seq_len=512)
    plain, odd = (rank_plans(Setting(TINY, parse_cluster(on), job), top=1).notes for on in ("v5e:2x2", "v5e:3x5"))
    assert [note for note in odd if note not in plain] == slice_note(parse_cluster("v5e:3x5"))
    other = Assumptions(software="eager", dispatch="devices", imbalance=1.1)
    eager = rank_plans(Setting(TINY, parse_cluster("h100:4x1"), job, assumptions=other), top=1).notes
    said = "the price is that of other software, which train and verify refuse: software=eager, dispatch=devices"
    assert said in eager
    spread = Strategy(mesh=make_mesh({"expert": 8}))
    setting = Setting(catalogue.load_model("mixtral-8x7b"), parse_cluster("h100:8x1"), job, assumptions=other)
    assert slots_note(setting, spread)[0].endswith("1.1 times the mean number of rows (assumptions.imbalance)")


def test_the_load_of_experts_is_said_as_it_is_counted():
    """No device has more rows than all: 4 times the mean of mixtral, whose tokens go to 2 of 8 experts."""
    job, mesh = Job(batch_seqs=64, seq_len=4096), make_mesh({"fsdp": 4, "expert": 8})
    model = catalogue.load_model("mixtral-8x7b")
    for software in ("compiled", "eager"):
        assumed = Assumptions(software=software, imbalance=100)
        note = slots_note(Setting(model, parse_cluster("h100:8x4"), job, assumptions=assumed), Strategy(mesh=mesh))[0]
        assert "priced with 4 times the mean number of rows (assumptions.imbalance, capped at experts over" in note
    few = msgspec.structs.replace(model, experts_per_token=7)
    setting = Setting(few, parse_cluster("h100:8x4"), job)
    note = imbalance_notes(setting, Strategy(mesh=mesh))[0]
    assert "it has slots for 1.14286 times the mean" in note
    assert "at 1.14286 times the mean this plan takes" in note


def test_notes_are_of_the_slice_that_is_planned():
    """Another number of chips than were asked for."""
    found = planned(LLAMA8B, "v5e:3x5", 64, top=1)
    used = found.plans[0].cluster
    assert used.short_name != "v5e:3x5"
    assert not any("v5e:3x5 is not" in note for note in found.notes)
    assert set(slice_note(used)) <= set(found.notes)


@pytest.mark.parametrize(("software", "fused"), [("compiled", True), ("eager", True), ("eager-2021", False)])
def test_attention_is_fused_but_in_software_of_2021(software, fused):
    setting = Setting(TINY, parse_cluster("h100:8x1"), Job(batch_seqs=64, seq_len=512))
    assumed = msgspec.structs.replace(setting, assumptions=Assumptions(software=software))
    assert any("one fused kernel" in note for note in rank_plans(assumed, top=1).notes) == fused


def test_top_is_a_number_of_strategies():
    assert len(planned(LLAMA8B, "v5p:4x4x4", 256, top=1).plans) == 1
    with pytest.raises(InputError, match="top=0"):
        planned(LLAMA8B, "v5p:4x4x4", 256, top=0)


def measured():
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "permute")
    return Calibration(
        name="here",
        chip="cpu",
        matmul_flops_per_s={"fp32": 2e10},
        memory_bytes_per_s=3e9,
        collectives=tuple(CollectiveRate(kind=k, group_size=8, latency_s=1e-4, bytes_per_s=1e9) for k in kinds),
    )


def test_this_machine_with_measured_rates():
    result = planned(TINY, "cpu:8", 32, 512, axes={"fsdp": 4, "tensor": 2}, calibration=measured())
    best = result.plans[0]
    assert best.strategy.state == "fp32"
    assert best.strategy.mesh == make_mesh({"fsdp": 4, "tensor": 2})
    for one in planned(TINY, "cpu:8", 32, 512, calibration=measured()).plans:
        require_runnable_strategy(one.strategy)
    assert any("calibration 'here'" in note for note in result.notes)
    assert any("memory of cpu:8 is not known" in note for note in result.notes)
    with pytest.raises(InputError, match="give a calibration"):
        planned(TINY, "cpu:8", 32, 512)


def test_a_plan_file_of_what_was_planned(tmp_path):
    result = planned(TINY, "cpu:8", 32, 512, calibration=measured())
    path = tmp_path / "plan.toml"
    save_plan(result.plans[0], path)
    read = load_plan(path)
    assert read == result.plans[0]
    assert read.strategy == result.plans[0].strategy
    assert read.predicted.step_s == result.plans[0].predicted.step_s
    assert result.plans[1].strategy != result.plans[0].strategy


def test_a_word_that_is_not_known_is_refused_with_those_that_are():
    cluster, job = parse_cluster("h100:8x2"), Job(batch_seqs=64, seq_len=4096)
    with pytest.raises(InputError, match="Give bf16, fp16, fp8, fp4, int8 or fp32"):
        rank_plans(Setting(LLAMA8B, cluster, job), overrides={"precision": "nope"})
    with pytest.raises(InputError, match="Give gather, ring or ulysses"):
        rank_plans(Setting(LLAMA8B, cluster, job), overrides={"context_attention": "rng"})


def test_sequences_beyond_the_positions_of_the_config_are_noted():
    notes = [planned(LLAMA8B, "v5p:4x4x4", 64, seq_len=length, axes={"fsdp": 64}).notes for length in (8192, 16384)]
    said = "sequences are longer than the 8,192 positions of the model's config"
    assert [said in one for one in notes] == [False, True]
