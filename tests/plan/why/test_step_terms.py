"""What each kind of work adds to a step: the terms add up to it, and what hides adds nothing."""

import pytest

from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import plan
from meshwright.plan.why.step_terms import step_terms, term_words
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job


def priced(model, cluster, batch_seqs, *, overrides=None, **axes):
    job = Job(batch_seqs=batch_seqs, seq_len=4096)
    one = plan(catalogue.model(model), parse_cluster(cluster), job, axes=axes, overrides=overrides, top=1).plan()
    return price_strategy(one.model, one.cluster, one.job, one.strategy), one.strategy


CASES = {
    "fsdp": ("llama3-8b", "h100:8x4", 256, {"fsdp": 32}),
    "fsdp and tensor": ("llama3-8b", "v5e:4x4", 128, {"fsdp": 4, "tensor": 4}),
    "experts": ("mixtral-8x7b", "h100:8x8", 256, {"expert": 8, "pipeline": 1}),
    "stages": ("llama3-8b", "h100:8x4", 256, {"pipeline": 4, "data": 8}),
    "one chip": ("tiny", "v5e:1x1", 8, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_terms_add_up_to_the_step(name):
    model, cluster, batch, axes = CASES[name]
    one, strategy = priced(model, cluster, batch, **axes)
    terms = step_terms(one, strategy)
    assert sum(term.added_s for term in terms) == pytest.approx(one.estimate.step_s, rel=1e-9)
    assert sum(term.share for term in terms) == pytest.approx(1)
    assert all(term.added_s >= -1e-9 * one.estimate.step_s for term in terms)
    assert [term.added_s for term in terms] == sorted((term.added_s for term in terms), reverse=True)


def test_weights_that_hide_add_less_than_they_take():
    one, strategy = priced("llama3-8b", "h100:8x4", 256, fsdp=32)
    terms = {term.name: term for term in step_terms(one, strategy)}
    assert terms["fsdp"].alone_s > 10 * terms["fsdp"].added_s
    assert terms["matmul"].added_s == pytest.approx(one.estimate.terms["matmul"])


def test_what_is_waited_for_adds_what_it_takes():
    one, strategy = priced("llama3-8b", "v5e:4x4", 128, fsdp=4, tensor=4)
    terms = {term.name: term for term in step_terms(one, strategy)}
    assert terms["tensor"].added_s == pytest.approx(terms["tensor"].alone_s, rel=0.05)


def test_the_bubble_and_the_host_link():
    one, strategy = priced("llama3-8b", "h100:8x4", 256, pipeline=4, data=8, overrides={"offload": ("optimizer",)})
    terms = {term.name: term for term in step_terms(one, strategy)}
    assert terms["bubble"].added_s == pytest.approx(one.estimate.terms["bubble"])
    assert terms["pcie"].added_s == pytest.approx(one.estimate.terms["pcie"])


def test_words():
    assert term_words("fsdp,context") == "collectives over fsdp and context"
    assert term_words("bubble") == "pipeline bubble"
