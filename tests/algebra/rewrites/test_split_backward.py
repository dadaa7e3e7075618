"""A layer's backward pass in two parts: every step in one of them, and the second given what it needs."""

import itertools

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.spec.catalogue import load_model
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

MESH = {"data": 2, "fsdp": 2, "pipeline": 2, "tensor": 2, "context": 2}


def layers(name, **choices):
    one = load_model(name)
    axes = {**MESH, "expert": 2} if one.num_experts else MESH
    derived = derive(transformer(one), Strategy(mesh=make_mesh(axes), **choices))
    return [block for block in derived.blocks if block.block.carry], derived


@pytest.mark.parametrize("name", ["llama3-8b", "gemma2-9b", "mixtral-8x7b", "gpt3-175b"])
@pytest.mark.parametrize("remat", ["none", "block", "full", "every-2"])
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_every_step_runs_in_one_of_the_two_passes(name, remat, way):
    for zero, collective in itertools.product((0, 2, 3), ("none", "two-way")):
        found, derived = layers(
            name,
            remat=remat,
            context_attention=way,
            collective_matmul=collective,
            assignment=standard_assignment(zero=zero),
        )
        for block in found:
            once = [place for place, step in enumerate(block.backward) if step.scope != "step"]
            assert sorted((*block.split.inputs, *block.split.weights)) == once
            there = {derived.declared[variable] for variable in derived.program.variables}
            # the second pass needs nothing that is neither given nor its own
            there |= set(block.split.handed)
            for place in block.split.weights:
                step = block.backward[place]
                assert set(step.inputs) <= there, step
                there |= {step.result, *step.more}


def test_the_second_pass_makes_the_gradients_of_matrices_and_no_more():
    (layer,), _ = layers("llama3-8b", remat="none")
    made = {layer.backward[place].result.name for place in layer.split.weights}
    assert made - {"a"} == {"dwq", "dwk", "dwv", "dwo", "dw_gate", "dw_up", "dw_down"}
    first = {layer.backward[place].result.name for place in layer.split.inputs}
    assert "dx" in first
    assert not first & {"dwq", "dw_up"}
