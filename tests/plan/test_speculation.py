"""Services with drafts: the step that checks them, tokens in the mean and the best number, by hand."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.plan.serving.engines import price_fleet
from meshwright.plan.serving.fleet import fleet_of
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service, Speculation
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.plan.why.explain_service import explain_service
from meshwright.plan.why.why_not_service import why_not_service
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster

INT8 = StoredDtypes("int8", "int8")


def chat(**speculation):
    given = Speculation(**speculation) if speculation else None
    return Service(prompt_len=2048, output_len=512, speculation=given)


def decode(model="llama3-8b", cluster="v5e:2x2", axes=None, **speculation):
    setting = service_setting(load_model(model), parse_cluster(cluster))
    fleet = fleet_of(setting.model, setting.cluster, axes or {"tensor": 4})
    return price_fleet(setting, chat(**speculation), fleet, (INT8,)).decode


def row(steps, batch):
    return int(np.flatnonzero(steps.batch == batch)[0])


def test_a_step_that_checks_four_drafts():
    """Five positions a sequence: five times the FLOPs, the caches read once; 1 + .8 + .64 + .512 + .4096 tokens."""
    plain, drafted = decode(), decode(acceptance=0.8, num_drafts=4)
    one, other = row(plain, 16), row(drafted, 16)
    assert drafted.tokens[other] == pytest.approx(3.3616)
    assert (plain.tokens[one], plain.drafts[one], drafted.drafts[other]) == (1, 0, 4)
    alone, checks = plain.bounds_s, drafted.bounds_s
    assert checks["drafts"][other] == pytest.approx(4 * 0.05 * plain.step_s[one])
    assert checks["FLOPs"][other] == pytest.approx(5 * alone["FLOPs"][one], rel=1e-3)
    # beside weights and caches there are 64 more rows: inputs of q, k, v, gate and up, and what they make
    assert alone["KV"][one] < checks["KV"][other] < 1.02 * alone["KV"][one]
    layer = 5 * 4096 + (4096 + 2 * 1024) / 4 + (4096 / 4 + 4096) + 2 * 14336 / 4 + (14336 / 4 + 4096)
    head = 4096 + 128_256 / 4
    more = 64 * 2 * (32 * layer + head) / parse_cluster("v5e:2x2").chip.hbm_bytes_per_s
    assert checks["parameters"][other] - alone["parameters"][one] == pytest.approx(more, rel=0.03)
    assert drafted.step_s[other] > plain.step_s[one] + checks["drafts"][other]
    assert drafted.token_s[other] == pytest.approx(drafted.step_s[other] / 3.3616)
    assert drafted.token_s[other] < plain.token_s[one] / 2  # a small batch is bound by memory


def test_experts_get_the_tokens_of_all_checked_positions():
    """32 sequences with 3 drafts fill as many slots of experts as 128 sequences without."""
    axes = {"tensor": 8}
    plain, drafted = (
        decode("mixtral-8x7b", "v5e:2x4", axes, **given) for given in ({}, {"acceptance": 0.5, "num_drafts": 3})
    )
    few, many = row(drafted, 32), row(plain, 128)
    caches = plain.bounds_s["KV"][many] - plain.bounds_s["KV"][row(plain, 32)]
    assert caches > 0
    assert drafted.bounds_s["parameters"][few] == pytest.approx(plain.bounds_s["parameters"][many])
    assert drafted.bounds_s["KV"][few] < plain.bounds_s["KV"][many] - 0.9 * caches


def test_the_best_number_of_drafts_is_that_of_the_shortest_time_per_token():
    best = decode(acceptance=0.7, draft_cost=0.1)
    fixed = [decode(acceptance=0.7, draft_cost=0.1, num_drafts=count) for count in range(17)]
    for batch in (1, 16, 128):
        seconds = [steps.token_s[row(steps, batch)] for steps in fixed]
        here = row(best, batch)
        assert best.drafts[here] == int(np.argmin(seconds))
        assert best.token_s[here] == min(seconds)
    # large batches are bound by FLOPs, which drafts waste
    assert best.drafts[row(best, 1)] > best.drafts[row(best, 128)]


def test_without_drafts_nothing_changes():
    plain, none = decode(), decode(acceptance=0.8, num_drafts=0)
    assert np.array_equal(plain.step_s, none.step_s)
    assert np.array_equal(plain.need, none.need)


def test_the_figures_of_a_service_with_drafts():
    setting = service_setting(load_model("llama3-8b"), parse_cluster("v5e:2x2"))
    found = plan_service(setting, chat(acceptance=0.8, num_drafts=4), stored=(INT8,), axes={"tensor": 4})
    plan = found.plans[-1]
    assert not plan.has_pools
    batch, token_s = plan.generate.batch_seqs, plan.generate.step_s / 3.3616
    assert plan.predicted.tpot_s == pytest.approx(
        token_s + (batch - 1) / 512 * plan.prefill.step_s / plan.prefill.batch_seqs
    )
    assert plan.to_json()["num_drafts"] == 4
    told = why_not_service(found, {"batch": 1}).chip_s
    assert told["drafts"][0] == pytest.approx(
        found.plans[0].generate.bounds_s["drafts"] * 4 / (found.plans[0].generate.batch_seqs * 3.3616)
    )
    told = explain_service(plan)
    assert told.value("TPOT") == pytest.approx(plan.predicted.tpot_s)
    assert told.value("requests/s") == pytest.approx(plan.predicted.requests_per_s)
    assert told.value("memory left") == pytest.approx(plan.predicted.free_bytes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"acceptance": 0.0}, "acceptance=0 must be above 0"),
        ({"acceptance": 0.5, "num_drafts": 17}, "num_drafts=17 must be from 0 to 16"),
        ({"acceptance": 0.5, "draft_cost": -1.0}, "draft_cost=-1 must be at least 0"),
    ],
)
def test_bad_speculation(given, message):
    with pytest.raises(InputError, match=message):
        Speculation(**given)
