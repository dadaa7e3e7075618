import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.spec import catalogue
from meshwright.spec.strategy import Strategy, make_mesh

MODEL = catalogue.load_model("llama3-8b")


def head(axes, remat, *, fused):
    derived = derive(transformer(MODEL), Strategy(mesh=make_mesh(axes), remat=remat), fused_head=fused)
    return next(block for block in derived.blocks if block.block.name == "head")


def ops(steps):
    return [step.op for step in steps]


@pytest.mark.parametrize("axes", [{}, {"data": 2}, {"fsdp": 4}, {"data": 2, "context": 2}])
def test_a_whole_vocabulary_makes_loss_and_slopes_in_one_step(axes):
    block = head(axes, "full", fused=True)
    assert ops(block.forward)[-1] == "fused_head"
    assert ops(block.backward).count("scale") == 2
    assert not {"chunked_logits_statistics", "sum_loss", "chunked_logits_backward"} & set(
        ops((*block.forward, *block.backward))
    )


@pytest.mark.parametrize(("axes", "remat"), [({"tensor": 2}, "full"), ({}, "block"), ({"fsdp": 2}, "none")])
def test_split_vocabularies_and_kept_logits_stay_as_derived(axes, remat):
    assert head(axes, remat, fused=True) == head(axes, remat, fused=False)


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"data": 2, "fsdp": 2}])
def test_collectives_and_results_stay_as_derived(axes):
    plain, fused = (head(axes, "full", fused=f) for f in (False, True))
    for before, after in ((plain.forward, fused.forward), (plain.backward, fused.backward)):
        assert [s for s in before if s.is_collective] == [s for s in after if s.is_collective]
    assert fused.forward[-1].result == plain.forward[-1].result
    made = {
        array for step in plain.backward for array in (step.result, *step.more) if array.name in ("dhf", "dunembed")
    }
    assert made <= {array for step in fused.backward for array in (step.result, *step.more)}


def test_the_backward_pass_is_given_what_it_uses():
    block = head({"fsdp": 2}, "full", fused=True)
    there = {array for step in block.forward for array in (step.result, *step.more)}
    made = set(block.kept)
    for step in block.backward:
        for array in step.inputs:
            assert array in made or array not in there
        made |= {step.result, *step.more}
    used = {array for step in block.backward for array in step.inputs}
    assert set(block.kept) <= used
