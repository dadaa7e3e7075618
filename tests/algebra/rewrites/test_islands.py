"""The steps between islands: each trained weight once, whole, and nothing of an island's own program changed."""

import math

import msgspec
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.notation import local_elements
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.spec.catalogue import load_model
from meshwright.spec.strategy import Strategy, held_dims, make_mesh, standard_assignment
from meshwright.spec.weights import num_params

MODELS = ("llama3-8b", "gpt2", "deepseek-v2-lite")
DILOCO = {"islands_sync": "diloco", "outer_every": 30, "outer_bits": 4}


def strategy(axes, **fields):
    return Strategy(mesh=make_mesh(axes), **fields)


@pytest.mark.parametrize("zero", [3, 1, 0])
@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_crosses_once_in_a_period(name, fragments, zero):
    """The bytes of all shards add up to those of all weights, whatever the mesh of an island and the fragments."""
    model, mesh = load_model(name), {"islands": 3, "fsdp": 2, "tensor": 2, "data": 2}
    assignment = standard_assignment(zero=zero)
    made = strategy(mesh, assignment=assignment, outer_fragments=fragments, **DILOCO)
    dims, num_elements = held_dims(model.dims, made.mesh), 0.0
    derived = derive(transformer(model), made)
    for step in derived.outer:
        shards = math.prod(made.mesh[axis] for axis in step.result.spread)
        num_elements += local_elements(step.result, dims, made.mesh) * shards * (step.details.num_layers or 1)
    padded = (dims["V"] - model.vocab_size) * model.d_model * (1 if model.tied_embeddings else 2)
    assert num_elements == num_params(model) + padded


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axes", [{}, {"fsdp": 4, "tensor": 2}, {"pipeline": 2, "data": 2}])
def test_the_program_of_an_island_is_that_of_its_strategy(name, axes):
    program = transformer(load_model(name))
    if "pipeline" in axes and name == "deepseek-v2-lite":
        axes = {"expert": 2}
    alone = derive(program, strategy(axes))
    for fields in ({}, DILOCO):
        together = derive(program, strategy({"islands": 4, **axes}, **fields))
        assert together.outer
        assert msgspec.structs.replace(together, outer=()) == alone
    assert alone.outer == ()
    assert derive(program, strategy({**axes, "islands": 1})) == alone


def test_what_crosses_is_partial_over_islands_and_wanted_whole():
    program = transformer(load_model("llama3-8b"))
    outer = derive(program, strategy({"islands": 2, "fsdp": 8, "tensor": 2})).outer
    words = [f"{step}: {step.details.words}" for step in outer]
    assert (
        "dw_up[D_fsdp, F_tensor] = AllReduce_islands(dw_up[D_fsdp, F_tensor]{U_islands}): every step, 32 bits" in words
    )
    assert {(step.op, step.axes, step.scope, step.result.dtype) for step in outer} == {
        ("all_reduce", ("islands",), "outer", "fp32")
    }
    later = derive(program, strategy({"islands": 2, "data": 8}, outer_fragments=2, **DILOCO)).outer
    assert f"{later[0]}: {later[0].details.words}" == (
        "outer_embed[V, D] = AllReduce_islands(outer_embed[V, D]{U_islands}): every 30 steps, 4 bits, fragment 1 of 2"
    )
    assert {step.result.dtype for step in later} == {"int4"}


def test_fragments_are_of_every_so_manieth_layer():
    program = transformer(load_model("llama3-8b"))
    outer = derive(program, strategy({"islands": 2}, outer_fragments=5, **DILOCO)).outer
    layers = [step.details.num_layers for step in outer if step.result.name == "outer_wq"]
    assert layers == [len(range(fragment, 32, 5)) for fragment in range(5)]
    assert [step.details.fragment for step in outer if step.result.name == "outer_wq"] == list(range(5))
    assert [step.details.num_layers for step in outer if step.result.name == "outer_embed"] == [0]


def test_what_is_no_layer_follows_as_further_layers():
    """Matrices, then vectors: of 32 layers in 5 fragments the last is of fragment 1."""
    outer = derive(transformer(load_model("llama3-8b")), strategy({"islands": 2}, outer_fragments=5, **DILOCO)).outer
    others = {step.result.name: step.details.fragment for step in outer if not step.details.num_layers}
    assert others == {"outer_embed": 2, "outer_unembed": 3, "outer_final_norm": 4}


def test_frozen_weights_stay_at_home_and_fragments_have_layers():
    model = load_model("llama3-8b")
    with pytest.raises(InputError, match=r"outer_fragments=36: this model's layers and other weights fill 35"):
        derive(transformer(model), strategy({"islands": 2}, outer_fragments=36, **(DILOCO | {"outer_every": 40})))
    adapted = msgspec.convert(msgspec.to_builtins(model) | {"lora": {"rank": 8}}, type(model))
    derived = derive(transformer(adapted), strategy({"islands": 2}))
    assert {step.result.name[1:] for step in derived.outer} == derived.weights.keys()
    assert "w_up" not in derived.weights
