"""Where a step goes: parts and terms that add up, collectives that share what is exposed; what hides adds nothing."""

import pytest

from meshwright.cost.breakdown import Breakdown, term_words
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.cost.work.ops import LOCAL_TERMS
from meshwright.plan.planner import rank_plans
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
from meshwright.spec.weights import num_params, weight_table

LLAMA = load_model("llama3-8b")
JOB = Job(batch_seqs=64, seq_len=4096)

STRATEGIES = {
    "fsdp": Strategy(mesh=make_mesh({"fsdp": 16})),
    "fsdp x tensor": Strategy(mesh=make_mesh({"fsdp": 2, "tensor": 8})),
    "pipeline": Strategy(mesh=make_mesh({"pipeline": 4, "tensor": 4}), num_microbatches=16),
    "zero 1": Strategy(mesh=make_mesh({"fsdp": 16}), assignment=standard_assignment(zero=1), num_microbatches=2),
    "offloaded": Strategy(mesh=make_mesh({"fsdp": 16}), offload=("optimizer",)),
    **dict.fromkeys(("eager", "in turn", "2021"), Strategy(mesh=make_mesh({"fsdp": 2, "tensor": 8}))),
}
SOFTWARE = {"eager": "eager", "in turn": "eager-in-turn", "2021": "eager-2021"}
RATES = {"datasheet": None, "fitted": fitted_calibration(parse_cluster("h100:8x2").chip)}


def priced(name, rates=None):
    assumed = Assumptions(software=SOFTWARE.get(name, "compiled"))
    setting = Setting(LLAMA, parse_cluster("h100:8x2"), JOB, RATES[rates or "datasheet"], assumptions=assumed)
    return price_strategy(setting, STRATEGIES[name])


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_parts_add_up_to_the_step(name, rates):
    found = Breakdown(priced(name, rates))
    whole = sum(found.local.values()) + found.exposed_s + found.bubble_s + found.other_s
    assert whole == pytest.approx(found.step_s, rel=1e-6)
    assert found.step_s == pytest.approx(priced(name, rates).estimate.step_s)
    assert set(found.local) == set(LOCAL_TERMS)
    assert min(found.exposed_s, found.bubble_s, found.other_s) >= 0


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", ["fsdp x tensor", "pipeline", "zero 1", "in turn"])
def test_collectives_share_what_is_exposed(name, rates):
    parts = Breakdown(priced(name, rates))
    rows = parts.traffic
    assert sum(row.exposed_s for row in rows) == pytest.approx(parts.exposed_s)
    assert [row.exposed_s for row in rows] == sorted((row.exposed_s for row in rows), reverse=True)
    assert sum(row.alone_s for row in rows) == pytest.approx(sum(parts.alone.values()))


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_step_without_overlap(name, rates):
    """All that is hidden comes back; stages wait for it too, so that their bubble grows. Steps in turn hide nothing."""
    parts = Breakdown(priced(name, rates))
    longer = parts.overlap().exposed_step_s
    assert parts.overlap(lambda cost: 0.0).exposed_step_s == pytest.approx(parts.step_s)
    half, rounding = parts.overlap(lambda cost: 0.5).exposed_step_s, 1e-9 * parts.step_s
    assert parts.step_s - rounding <= half <= longer + rounding
    slowdown = float(parts.priced.times.slowdown)
    without_links = parts.step_s - parts.exposed_s
    if name == "pipeline":
        assert longer > without_links + sum(parts.alone.values())
    else:
        assert longer == pytest.approx(without_links + slowdown * sum(parts.alone.values()))


def test_an_exponent_leaves_something_of_every_collective_standing():
    """By the data sheet gathers of weights hide, but for the last sums; fitted numbers leave more, and never all."""
    sheet, fitted = (Breakdown(priced("fsdp", rates)) for rates in ("datasheet", "fitted"))
    assert sheet.exposed_s < 0.05 * sum(sheet.alone.values())
    assert 0.05 * sum(fitted.alone.values()) < fitted.exposed_s < sum(fitted.alone.values())


@pytest.mark.parametrize("name", ["in turn", "2021"])
def test_communication_in_turn_is_exposed_whole(name):
    """Software that waits for every collective: what is exposed is what the links take."""
    parts = Breakdown(priced(name))
    assert parts.exposed_s == pytest.approx(sum(parts.alone.values()))
    assert parts.hidden_s == pytest.approx(0.0, abs=1e-9)


def test_a_bubble_is_told_from_the_links():
    """Four stages of 16 microbatches idle for 3 / 19 of a step whose passes are all that it does."""
    parts = Breakdown(priced("pipeline"))
    free = parts.step_s - parts.exposed_s
    assert 0 < parts.bubble_s < 3 / 19 * free
    assert parts.named()["bubble"] == parts.bubble_s
    assert "bubble" not in Breakdown(priced("fsdp")).named()


def test_one_chip_waits_for_nothing():
    one = load_model("tiny")
    job, cluster, strategy = Job(batch_seqs=8, seq_len=64), parse_cluster("h100:1x1"), Strategy(mesh=make_mesh({}))
    parts = Breakdown(price_strategy(Setting(one, cluster, job), strategy))
    assert (parts.exposed_s, parts.alone, parts.exposed_share) == (0.0, {}, 0.0)
    assert parts.traffic == ()


def test_only_what_is_named_becomes_free():
    found = Breakdown(priced("fsdp x tensor"))
    named = [(row.op, frozenset(row.axes)) for row in found.traffic]
    assert found._without(()) == found.step_s
    assert found.step_s - found.exposed_s < found._without(named[:1]) < found.step_s
    assert found._without(named) == found.step_s - found.exposed_s


# -- terms ------------------------------------------------------------------------------------------------


def planned(name, cluster, batch_seqs, *, overrides=None, **axes):
    job = Job(batch_seqs=batch_seqs, seq_len=4096)
    one = rank_plans(
        Setting(load_model(name), parse_cluster(cluster), job), axes=axes, overrides=overrides, top=1
    ).plans[0]
    return price_strategy(Setting(one.model, one.cluster, one.job), one.strategy)


CASES = {
    "fsdp": ("llama3-8b", "h100:8x4", 256, {"fsdp": 32}),
    "fsdp and tensor": ("llama3-8b", "v5e:4x4", 128, {"fsdp": 4, "tensor": 4}),
    "experts": ("mixtral-8x7b", "h100:8x8", 256, {"expert": 8, "pipeline": 1}),
    "stages": ("llama3-8b", "h100:8x4", 256, {"pipeline": 4, "data": 8}),
    "one chip": ("tiny", "v5e:1x1", 8, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_terms_add_up_to_the_step(name):
    which, cluster, batch, axes = CASES[name]
    one = planned(which, cluster, batch, **axes)
    terms = Breakdown(one).terms
    assert sum(term.added_s for term in terms) == pytest.approx(one.estimate.step_s, rel=1e-9)
    assert sum(term.share for term in terms) == pytest.approx(1)
    assert all(term.added_s >= -1e-9 * one.estimate.step_s for term in terms)
    assert [term.added_s for term in terms] == sorted((term.added_s for term in terms), reverse=True)


def test_weights_that_hide_add_less_than_they_take():
    one = planned("llama3-8b", "h100:8x4", 256, fsdp=32)
    terms = {term.name: term for term in Breakdown(one).terms}
    assert terms["fsdp"].alone_s > 10 * terms["fsdp"].added_s
    assert terms["matmul"].added_s == pytest.approx(one.estimate.terms["matmul"])


def test_what_is_waited_for_adds_what_it_takes():
    one = planned("llama3-8b", "v5e:4x4", 128, fsdp=4, tensor=4)
    terms = {term.name: term for term in Breakdown(one).terms}
    assert terms["tensor"].added_s == pytest.approx(terms["tensor"].alone_s, rel=0.05)


def test_the_bubble_and_the_host_link():
    one = planned("llama3-8b", "h100:8x4", 256, pipeline=4, data=8, overrides={"offload": ("optimizer",)})
    terms = {term.name: term for term in Breakdown(one).terms}
    assert terms["bubble"].added_s == pytest.approx(one.estimate.terms["bubble"])
    assert terms["pcie"].added_s == pytest.approx(one.estimate.terms["pcie"])


def test_words():
    assert term_words("fsdp,context") == "collectives over fsdp and context"
    assert term_words("bubble") == "pipeline bubble"


def test_bytes_are_those_that_one_device_sends():
    """ZeRO-3 of all weights over 16 chips gathers them twice and scatters their gradients: 15/16 of 2 bytes each."""
    rows = {row.op: row for row in Breakdown(priced("fsdp")).traffic if row.axes == ("fsdp",)}
    small = sum(row.num_params for row in weight_table(LLAMA) if row.kind != "matrix")
    once = 15 / 16 * 2 * (num_params(LLAMA) - small)
    assert rows["reduce_scatter"].num_bytes == pytest.approx(once, rel=1e-6)
    table = 15 / 16 * 2 * LLAMA.vocab_size * LLAMA.d_model
    assert once < rows["all_gather"].num_bytes <= 2 * once
    assert (2 * once - rows["all_gather"].num_bytes) % table == pytest.approx(0.0, abs=1)
