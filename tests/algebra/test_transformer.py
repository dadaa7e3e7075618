"""Programs of every model in the catalogue: their blocks, and the weights that they use."""

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.ops import op_names
from meshwright.algebra.program import WEIGHTS
from meshwright.algebra.transformer import layer_kinds, local_name, transformer, weight_variables
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import weight_table

MESH = {"data": 2, "fsdp": 2, "expert": 2, "context": 2, "tensor": 2}


@pytest.mark.parametrize("name", models())
def test_a_program_uses_every_weight_of_the_table_in_its_layers(name):
    program = transformer(load_model(name))
    used = {}
    for block in program.blocks:
        for weight in {n for op in block.ops for n in op.inputs if program.variables[n].role in WEIGHTS}:
            used.setdefault(weight, block.repeat)
    assert {v.name for v in program.of_role(*WEIGHTS)} == set(used)
    rows = weight_variables(load_model(name))
    assert {n: (w.dims, repeat) for n, (w, repeat) in rows.items()} == {
        n: (program.variables[n].dims, repeat) for n, repeat in used.items()
    }
    layers = {}
    for weight, repeat in rows.values():
        layers[weight.name] = layers.get(weight.name, 0) + repeat
    stored = {}
    for weight in (w for w in weight_table(load_model(name)) if not w.tied_to):
        stored[weight.name] = stored.get(weight.name, 0) + weight.repeat
    assert layers == stored


@pytest.mark.parametrize("name", [name for name in models() if not load_model(name).encoder])
def test_a_program_is_a_chain_of_blocks(name):
    program = transformer(load_model(name))
    embed, *layers, head = program.blocks
    carry = "streams" if load_model(name).num_streams else "x"
    assert (embed.ops[-1].out, head.ops[0].inputs[0], head.ops[-1].out) == (carry, carry, "loss")
    assert sum(layer.repeat for layer in layers) == load_model(name).num_layers
    for layer in layers:
        assert (layer.carry, layer.result, layer.ops[-1].out) == (carry, f"{carry}2", f"{carry}2")
        shared = program.shared_inputs(layer.name)
        made = [*shared, carry, *(op.out for op in layer.ops)]
        # attention and the feed-forward of a parallel block end in one sum
        assert len(made) - len(set(made)) == load_model(name).parallel_block
        for number, op in enumerate(layer.ops):
            own = [n for n in op.inputs if program.variables[n].role == "activation"]
            assert set(own) <= set(made[: len(shared) + number + 1])
    assert {op.kind for block in program.blocks for op in block.ops} <= set(op_names())


@pytest.mark.parametrize("name", models())
def test_every_program_is_derived_with_every_axis(name):
    derived = derive(transformer(load_model(name)), Strategy(mesh=make_mesh(MESH)), symbolic=True)
    updated = {step.result.name for step in derived.update if step.op == "adamw"}
    assert updated == {v.name for v in derived.program.of_role(*WEIGHTS) if not v.frozen}


def test_layers_of_one_kind_are_one_block():
    kinds = {name: {k.block: len(k.layers) for k in layer_kinds(load_model(name))} for name in models()}
    assert kinds["llama3-8b"] == {"layer": 32}
    assert kinds["mixtral-8x7b"] == {"layer_moe": 32}
    assert kinds["deepseek-v3"] == {"layer": 3, "layer_moe": 58}
    assert kinds["gemma3-27b"] == {"layer_local": 52, "layer": 10}
    assert kinds["gpt-oss-120b"] == {"layer_moe_local": 18, "layer_moe": 18}


def test_weights_of_two_kinds_of_layers_are_two_variables():
    rows = weight_variables(load_model("deepseek-v3"))
    assert (rows["wo"][1], rows["wo_moe"][1]) == (3, 58)
    assert rows["wo"][0] == rows["wo_moe"][0]
    assert "w_up_moe" not in rows
    assert local_name(rows["experts_w_up_moe"][0]) == "experts_w_up"


def test_tied_embeddings_are_one_weight_used_twice():
    tied, untied = (transformer(load_model(name)) for name in ("llama3.2-1b", "tiny"))
    assert tied.blocks[-1].ops[-1].inputs[1] == tied.blocks[0].ops[0].inputs[1] == "embed"
    assert "unembed" not in tied.variables
    assert untied.blocks[-1].ops[-1].inputs[1] == "unembed"


def test_what_enters_attention_has_the_names_that_policies_keep():
    for name in models():
        program = transformer(load_model(name))
        for block in program.blocks:
            for op in (op for op in block.ops if op.kind == "attention"):
                names = ("cross_q", "cross_k", "cross_v") if op.inputs[0].startswith("cross_") else ("qr", "kr", "v")
                found = tuple(name.removeprefix("encoder_").removesuffix("_full") for name in op.inputs[:3])
                kind = "_local" * block.name.endswith("_local")
                shared = ("qr", f"shared_k{kind}", f"shared_v{kind}")
                assert found == (shared if "shared_k" in op.inputs[1] else names)
