"""Many cases at once against the same cases one by one."""

from functools import cache
from typing import get_args

import msgspec
import numpy as np
import pytest

from meshwright.accuracy.batches import batches, calibrations
from meshwright.accuracy.cases import Case, cases_of, training_case
from meshwright.cost.train_step import estimate_step
from meshwright.spec.assumptions import AttentionKernel, Dispatch, Software
from meshwright.spec.calibration import datasheet_calibration
from tests.accuracy.recorded import LLAMA, case, one_of_each, published
from tests.tier import sampled

MOE = LLAMA | {"moe": {"experts": 16, "top_k": 2, "d_ff_expert": 1024}}


@cache
def sample() -> tuple[Case, ...]:
    """A published step of every kind."""
    return cases_of(one_of_each(), training_case)[0]


@cache
def sample_batches():
    return batches(sample())


def rates(cases, *, fitted):
    return calibrations(cases, datasheet=not fitted)


def seconds(cases, parts, calibrations):
    found = np.full(len(cases), np.nan)
    for part in parts:
        found[part.numbers] = part.seconds(calibrations)[0]
    return found


def one_by_one(cases, calibrations):
    settings = [
        msgspec.structs.replace(c.setting, calibration=calibrations[c.setting.cluster.chip.name]) for c in cases
    ]
    return [estimate_step(at, c.strategy).step_s for at, c in zip(settings, cases, strict=True)]


def test_the_sample_has_every_source_and_kind_of_chip():
    cases = sample()
    unpredicted = {"korthikanti-fig1-mem"}
    assert {c.record.group for c in cases} == {one.group for one in published()} - unpredicted
    assert {c.record.hardware for c in cases} == {one.hardware for one in published()}
    assumed = [c.setting.assumptions for c in cases]
    assert {at.software for at in assumed} == set(get_args(Software)) - {"served"}
    assert {at.attention_kernel for at in assumed} == set(get_args(AttentionKernel))
    assert {at.dispatch for at in assumed} == set(get_args(Dispatch)) - {"nodes"}
    assert {at.exchange_overlap for at in assumed} == {at.narrow_gathers for at in assumed} == {True, False}


@pytest.mark.parametrize("fitted", sampled([True, False], True))
def test_all_at_once_is_one_by_one(fitted):
    cases = sample()
    calibrations = rates(cases, fitted=fitted)
    assert seconds(cases, sample_batches(), calibrations).tolist() == pytest.approx(
        one_by_one(cases, calibrations), rel=1e-6
    )


def test_a_batch_holds_cases_of_different_sizes_that_share_steps():
    other = LLAMA | {"layers": 48, "d_model": 5120, "d_ff": 17408, "n_heads": 40}
    cases = [
        case(),
        case(model=other, n_chips=64, parallelism={"dp": 32, "tp": 2, "sp": True, "zero_stage": 3}),
        case(parallelism={"dp": 4, "pp": 4, "zero_stage": 3}, precision="bf16"),
    ]
    (one,) = batches(cases)
    assert one.numbers.tolist() == [0, 1, 2]
    calibrations = rates(cases, fitted=True)
    assert one.seconds(calibrations)[0].tolist() == pytest.approx(one_by_one(cases, calibrations), rel=1e-9)


@pytest.mark.parametrize(
    "other",
    [
        {"model": MOE},
        {"recompute": "full"},
        {"parallelism": {"dp": 16, "zero_stage": 1}},
        {"precision": "fp16"},
        {"precision": "fp8"},
        {"parallelism": {"dp": 8, "pp": 2, "vpp": 2, "zero_stage": 3}},
        {"hardware": "TPU-v5e"},
    ],
)
def test_what_differs_in_its_steps_has_a_batch_of_its_own(other):
    cases = [case(), case(**other), case()]
    first, second = batches(cases)
    assert (first.numbers.tolist(), second.numbers.tolist()) == ([0, 2], [1])


def test_experts_of_different_models_in_one_batch():
    """The slots of an expert follow from each case's own tokens and experts."""
    many = LLAMA | {"moe": {"experts": 64, "top_k": 6, "d_ff_expert": 512}}
    split = {"dp": 16, "ep": 8, "zero_stage": 1}
    cases = [case(model=MOE, parallelism=split), case(model=many, parallelism=split, micro_batch=4)]
    (one,) = batches(cases)
    slots = [2 * 16 * 2048 * 2 / 16, 4 * 16 * 2048 * 6 / 64]
    assert one.sizes.dims["C"].tolist() == slots
    calibrations = rates(cases, fitted=True)
    assert one.seconds(calibrations)[0].tolist() == pytest.approx(one_by_one(cases, calibrations), rel=1e-6)


def test_chips_with_and_without_fitted_numbers_are_apart():
    """They overlap in different ways: by an exponent, and by the data sheet."""
    cases = [case(), case(hardware="MI300X"), case(hardware="A100-SXM-80GB")]
    calibrations = rates(cases, fitted=True)
    assert calibrations["mi300x"].efficiency.overlap is None
    parts = batches(cases)
    assert [one.numbers.tolist() for one in parts] == [[0, 2], [1]]
    assert seconds(cases, parts, calibrations).tolist() == pytest.approx(one_by_one(cases, calibrations), rel=1e-9)


def test_chips_with_and_without_measured_hops_in_one_batch():
    """A chip without keeps the latency of its links; the other has the measured one."""
    cases = [case(), case(hardware="A100-SXM-80GB")]
    calibrations = {
        name: msgspec.structs.replace(found, hop_s={"nvlink": 1e-2, "network": 2e-2} if name == "h100" else {})
        for name, found in rates(cases, fitted=True).items()
    }
    (one,) = batches(cases)
    assert one.seconds(calibrations)[0].tolist() == pytest.approx(one_by_one(cases, calibrations), rel=1e-9)


def test_the_level_that_binds_follows_the_calibration():
    """Slices apart and close together: which links a gradient sum keeps busy depends on the measured shares."""
    cases = [case(hardware="TPU-v4", n_chips=512, slices=8, global_batch_seqs=512)]
    for dcn, ici in ((1.0, 0.01), (0.01, 1.0)):
        own = datasheet_calibration(cases[0].setting.cluster.chip)
        shares = msgspec.structs.replace(own.efficiency, dcn=dcn, ici=ici)
        calibrations = {"v4p": msgspec.structs.replace(own, efficiency=shares)}
        found = seconds(cases, batches(cases), calibrations).tolist()
        assert found == pytest.approx(one_by_one(cases, calibrations), rel=1e-9)
