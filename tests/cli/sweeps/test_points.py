"""Best plans and given strategies, one setting after another."""

from itertools import pairwise

import pytest

from meshwright.cli.sweeps.fields import read_fields
from meshwright.cli.sweeps.points import records, sweep_points
from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step, price_strategy
from meshwright.plan.planner import rank_plans
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.chip import chip
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.strategy import REMAT_POLICIES

EAGER = Assumptions(software="eager")


def sweep(*texts, model="llama3-8b", on="h100:8x1", **more):
    fields = read_fields(model, on, texts)
    varied = [name for name, values in fields.items() if len(values) > 1] or ["on"]
    return sweep_points(fields, varied, **more)


def given(*texts, **more):
    return sweep("micro=1", *texts, **more)


def test_every_point_is_priced_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        f"{sweep_points.__module__}.price_strategy", lambda *given: seen.append(given) or price_strategy(*given)
    )
    assert len(records(given("remat=none,block", model="tiny"))) == len(seen) == 2


def test_every_point_is_the_planners_own_answer():
    rates = {"h100": fitted_calibration(chip("h100"))}
    points = sweep("batch=64seq", on="h100:8x1..8x2", rates=rates)
    for point in points:
        best = rank_plans(point.setting).plans[0]
        assert point.best.predicted.step_s == pytest.approx(best.predicted.step_s, rel=1e-9)
        assert point.best.strategy.mesh == best.strategy.mesh
        assert point.tokens_per_s == pytest.approx(64 * 4096 / best.predicted.step_s)
    assert points[1].best.predicted.step_s < points[0].best.predicted.step_s
    first, second = records(points)
    assert (first["values"], second["values"]) == ({"on": "8"}, {"on": "16"})
    assert first["scaling"] == 1.0
    assert second["scaling"] == pytest.approx(second["tokens_per_s"] / first["tokens_per_s"] / 2)


def test_weak_scaling_keeps_the_batch_per_chip():
    points = sweep("batch=64seq", on="h100:8x2..8x4", weak=True)
    assert [point.setting.job.batch_seqs for point in points] == [64, 128]
    steps = [point.best.predicted.step_s for point in points]
    assert steps[1] == pytest.approx(steps[0], rel=0.05)
    with pytest.raises(InputError, match="are no whole number on 12 chips"):
        sweep("batch=63seq", on="h100:8x1,h100:4x3", weak=True)


def test_where_nothing_runs_the_reason_is_said():
    small, large = sweep("batch=64seq", model="llama3-70b", on="h100:8x1,h100:8x4")
    assert small.best is None
    assert small.reason.startswith("does not fit: ")
    assert large.best is not None
    assert (small.to_json()["mfu"], small.to_json()["memory"]) == (None, None)
    (odd,) = sweep("batch=64seq", "tensor=7", on="h100:7x1")
    assert odd.reason.startswith("does not divide: tensor=7 does not divide T=4096")


def test_axes_and_fields_stay_as_given():
    (point,) = sweep("batch=64seq", "tensor=4", "remat=block", on="h100:8x2")
    assert (point.best.strategy.mesh["tensor"], point.best.strategy.remat) == (4, "block")
    points = sweep("batch=64seq", "tensor=2,4", "remat=block,full", on="h100:8x2")
    found = [(point.best.strategy.mesh["tensor"], point.best.strategy.remat) for point in points]
    assert found == [(2, "block"), (2, "full"), (4, "block"), (4, "full")]


def test_fields_of_the_job_the_model_and_the_assumptions():
    points = sweep("batch=64seq", "optimizer=adamw,lion", "model.num_layers=8", "software=eager")
    assert [point.setting.job.optimizer for point in points] == ["adamw", "lion"]
    assert {point.setting.model.num_layers for point in points} == {8}
    assert {point.setting.assumptions.software for point in points} == {"eager"}
    with pytest.raises(InputError, match="sweep takes jobs of kind train"):
        sweep("batch=64seq", "job.kind=decode")


def test_what_a_token_costs():
    (point,) = sweep("batch=64seq", on="v5p:2x2x2")
    hours = point.best.predicted.step_s / 3600
    assert point.to_json()["usd_per_token"] == pytest.approx(8 * hours * 4.2 / (64 * 4096))


def test_too_many_points():
    values = ",".join(str(size) for size in range(1, 32))
    with pytest.raises(InputError, match="961 points are too many for one sweep"):
        sweep(f"micro={values}", f"num_microbatches={values}")


# -- strategies as they are given -----------------------------------------------------------------------


def test_memory_is_what_the_estimate_says():
    for point in (*given("tensor"), *given("seq_len=1024,8192"), *given("remat", "tensor=2")):
        known = estimate_step(point.setting, point.best.strategy)
        assert point.to_json()["memory"] == pytest.approx(known.memory)
        assert sum(point.to_json()["memory"].values()) == pytest.approx(known.hbm_bytes_per_chip)


def test_memory_is_of_the_software_that_is_assumed():
    for point in given("remat=none,full", "software=eager"):
        asked = Setting(point.setting.model, point.setting.cluster, point.setting.job, assumptions=EAGER)
        assert point.best.predicted.memory == pytest.approx(estimate_step(asked, point.best.strategy).memory)


def test_tensor_takes_from_fsdp():
    """The state stays, what a sequence leaves behind is shared by more chips. All are fullest in the loss head."""
    points = given("tensor", "seq_len=32Ki")
    assert [point.values["tensor"] for point in points] == list("1248")
    assert [point.best.strategy.mesh["fsdp"] for point in points] == [8, 4, 2, 1]
    assert [point.setting.job.batch_seqs for point in points] == [8, 4, 2, 1]
    for before, after in pairwise(point.best.predicted.memory for point in points):
        assert after["optimizer"] == pytest.approx(before["optimizer"], rel=1e-3)
        # halved but for what every device of the tensor axis keeps whole
        assert 0.5 <= after["activations"] / before["activations"] < 0.6


def test_activations_grow_with_the_sequence():
    # both are fullest in the loss head
    short, long = (point.best.predicted.memory for point in given("seq_len=16Ki,32Ki"))
    assert long["activations"] == pytest.approx(2 * short["activations"])
    assert long["weights"] == short["weights"]
    assert [point.setting.job.seq_len for point in given("seq_len")] == [1024 << power for power in range(8)]


def test_recomputation_keeps_less():
    kept = {point.best.strategy.remat: point.best.predicted.memory["activations"] for point in given("remat")}
    assert tuple(kept) == REMAT_POLICIES
    assert kept["none"] > kept["selective"] > kept["matmuls"] > kept["sqrt"] > kept["block"] > kept["full"]
    assert kept["full"] >= kept["recompute-all"]


def test_microbatches_are_as_many_as_asked_for():
    one, four = sweep("micro=1,4", "remat=block", "seq_len=32Ki")
    assert four.setting.job.batch_seqs == 4 * one.setting.job.batch_seqs
    kept = [point.best.predicted.memory["activations"] for point in (one, four)]
    assert kept[1] == pytest.approx(4 * kept[0])


def test_data_takes_the_chips_that_a_given_fsdp_leaves():
    """bf16-adam without sharding: 2 + 2 + 8 bytes a parameter over tensor alone, so that memory halves with it."""
    points = given("fsdp=1", "tensor=1,2,4", "remat=block")
    assert [point.best.strategy.mesh["data"] for point in points] == [8, 4, 2]
    held = [point.best.predicted.memory["optimizer"] for point in points]
    assert held[0] == pytest.approx(8 * 8.03e9, rel=1e-3)
    assert held[1:] == pytest.approx([held[0] / 2, held[0] / 4], rel=1e-3)


def test_points_that_cannot_be_had():
    whole, splits_heads = given("tensor=8,64", on="h100:8x8")
    assert whole.best is not None
    assert "tensor=64 does not divide N=32 query heads" in splits_heads.reason
    with pytest.raises(InputError, match="do not make up the 8 chips"):
        given("seq_len", "tensor=3")
    with pytest.raises(InputError, match="axes fsdp=1, data=1 do not make up the 8 chips of "):
        given("seq_len", "fsdp=1", "data=1")
    fits, large = given("seq_len=4Ki,128Ki")
    assert (fits.to_json()["fits"], large.to_json()["fits"]) == (True, False)
    assert large.reason.startswith("does not fit: ")
