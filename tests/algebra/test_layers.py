"""Every family's layers: gradients are those of the function, and the same on one device as on many."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.blocks import join
from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import layer_kinds, transformer
from meshwright.spec import catalogue
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
from tests.algebra.numpy_ops import run_block
from tests.algebra.plain_layer import plain_layer

BATCH, LENGTH = 8, 8
SMALL = {"num_layers": 2, "d_model": 16, "d_ff": 8, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "vocab_size": 16}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "d_ff_expert": 8}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "head_dim": 6}

FAMILIES = {
    "gpt2": SMALL | {"num_kv_heads": 8, "max_positions": LENGTH},
    "command-r-plus": SMALL,
    "falcon-40b": SMALL,
    "qwen2-7b": SMALL,
    "qwen3-8b": SMALL,
    "gemma2-9b": SMALL | {"sliding_window": 3, "sliding_layers": (0,)},
    "mixtral-8x7b": SMALL | EXPERTS,
    "qwen1.5-moe-a2.7b": SMALL | EXPERTS | {"d_ff_shared": 8},
    "gpt-oss-20b": SMALL | EXPERTS | {"sliding_window": 3, "sliding_layers": (0,)},
    "deepseek-v2": SMALL
    | EXPERTS
    | LATENT
    | {"num_kv_heads": 8, "q_lora_rank": 8, "d_ff_shared": 8}
    | {"expert_groups": 2, "groups_per_token": 1},
}
"""Catalogue model -> sizes that divide by every mesh below."""

MESHES = [
    {"data": 2, "fsdp": 2, "expert": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "expert": 4},
    {"context": 2, "tensor": 2},
]


def small(name):
    return msgspec.structs.replace(catalogue.load_model(name), **FAMILIES[name])


def derived_on(model, axes, **choices):
    return derive(transformer(model), Strategy(mesh=make_mesh(axes), **choices))


def sizes_of(model):
    return model.dims | {"B": BATCH, "T": LENGTH}


def random_inputs(derived, block, model):
    """Every input of the block by name, and the cotangent of its result; the same for every mesh."""
    rng = np.random.default_rng(0)
    sizes = sizes_of(model)
    made = {op.out for op in block.block.ops}
    found = {}
    for name in sorted({name for op in block.block.ops for name in op.inputs} - made):
        shape = [sizes[dim] for dim in derived.declared[name].dims]
        found[name] = rng.standard_normal(shape) * 0.5
    if "positions" in found:
        found["positions"] = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    if "tokens" in found:
        found["tokens"] = rng.integers(0, model.vocab_size, (BATCH, LENGTH))
    found[f"d{block.block.ops[-1].out}"] = rng.standard_normal((BATCH, LENGTH, model.d_model))
    return found


def results(derived, block, given, mesh, model):
    """The block's result and the gradients of all its inputs, as whole arrays, by name."""
    made = run_block(derived, block, given, mesh, sizes_of(model))
    names = [block.block.ops[-1].out, *(f"d{name}" for name in given if not name.startswith("d") and name != "tokens")]
    found = {}
    for array, blocks in made.items():
        if array.name in names and _declared(derived, array):
            found[array.name] = join(blocks, array, mesh, rel_tol=1e-9)
    return found


def _declared(derived, array):
    declared = derived.declared[array.name.removeprefix("d")] if array.name.startswith("d") else None
    declared = declared or derived.declared[array.name]
    return array.axes == declared.axes and not array.unreduced


def layer_blocks(derived):
    return [block for block in derived.blocks if block.block.name != "head"]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_devices_compute_what_one_does(name, axes):
    model = small(name)
    same(derived_on(model, {}), derived_on(model, axes), make_mesh(axes), model)


def same(one, many, mesh, model):
    """Assert that results and gradients of every block agree."""
    for alone, together in zip(layer_blocks(one), layer_blocks(many), strict=True):
        given = random_inputs(one, alone, model)
        expected = results(one, alone, given, {}, model)
        found = results(many, together, given, mesh, model)
        weights = {f"d{v.name}" for v in one.program.of_role("weight", "vector") if v.name in given}
        assert weights <= set(found)
        assert set(found) == set(expected)
        for array, value in expected.items():
            np.testing.assert_allclose(
                found[array], value, rtol=1e-8, atol=1e-10, err_msg=f"{together.block.name} {array}"
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_function(name):
    """Along a random direction of each weight, against the slope between two points."""
    model, step = small(name), 1e-6
    derived = derived_on(model, {}, remat="none")
    for block in layer_blocks(derived):
        given = random_inputs(derived, block, model)
        out = block.block.ops[-1].out
        found = results(derived, block, given, {}, model)
        rng = np.random.default_rng(1)
        for name in (n for n in given if f"d{n}" in found):
            direction = rng.standard_normal(given[name].shape)
            ends = [
                (results(derived, block, given | {name: given[name] + sign * step * direction}, {}, model)[out]
                 * given[f"d{out}"]).sum()
                for sign in (1, -1)
            ]  # fmt: skip
            slope = (ends[0] - ends[1]) / (2 * step)
            assert (found[f"d{name}"] * direction).sum() == pytest.approx(slope, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", ["command-r-plus", "falcon-40b"])
def test_a_parallel_block_gathers_and_reduces_once_for_attention_and_feed_forward(name):
    layer = derived_on(small(name), {"tensor": 2}, remat="none").blocks[1]
    streams = [step for step in (*layer.forward, *layer.backward) if step.is_collective and "T" in step.result.dims]
    found = [(step.op, step.result.name) for step in streams]
    norms = ["h"] if name == "command-r-plus" else ["h", "h1"]
    assert found[: len(norms) + 1] == [*(("all_gather", norm) for norm in norms), ("reduce_scatter", "a")]
    assert sorted(found[len(norms) + 1 :]) == sorted(
        [("all_gather", "da"), *(("reduce_scatter", f"d{norm}") for norm in norms)]
    )


def expert_rules(**experts):
    """The product's assignment with expert rules written out: ``E`` and ``C`` of slots, ``Fe`` of an expert's width."""
    rules = {role: dict(found) for role, found in standard_assignment().items()}
    others = {dim: axes for dim, axes in rules["activation"].items() if dim not in ("E", "C", "Fe", "T")}
    # sequences come before experts: scores of all experts stay with their tokens
    rules["activation"] = {**others, **experts, "T": rules["activation"]["T"]}
    rules["weight"] = {"Fe": experts["Fe"], "E": experts["E"], **{d: a for d, a in rules["weight"].items() if d != "E"}}
    return rules


EXPERT_RULES = {
    "experts whole, widths on tensor": {
        "E": ("expert",),
        "C": ("data", "fsdp", "context", "tensor"),
        "Fe": ("tensor",),
    },
    "experts on expert and tensor": {"E": ("expert", "tensor"), "C": ("data", "fsdp", "context"), "Fe": ()},
    "experts everywhere alike": {"E": (), "C": ("data", "fsdp", "context", "tensor", "expert"), "Fe": ()},
}


@pytest.mark.parametrize("rules", EXPERT_RULES)
def test_experts_may_lie_on_any_axes(rules):
    model, axes = small("gpt-oss-20b"), {"fsdp": 2, "expert": 2, "context": 2, "tensor": 2}
    assignment = expert_rules(**EXPERT_RULES[rules])
    one, many = derived_on(model, {}), derived_on(model, axes, assignment=assignment)
    same(one, many, make_mesh(axes), model)


@pytest.mark.parametrize("way", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("name", ["gemma2-9b", "deepseek-v2"])
def test_keys_may_be_met_in_any_way(way, name):
    model, axes = small(name), {"context": 2, "tensor": 2, "fsdp": 2}
    one, many = derived_on(model, {}), derived_on(model, axes, context_attention=way, remat="none")
    same(one, many, make_mesh(axes), model)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_the_model_s_own(name):
    model = small(name)
    derived = derived_on(model, {})
    for kind, block in zip(layer_kinds(model), derived.blocks[1:-1], strict=True):
        given = random_inputs(derived, block, model)
        weights = {n.removesuffix(kind.suffix) if len(layer_kinds(model)) > 1 else n: v for n, v in given.items()}
        found = results(derived, block, given, {}, model)["x2"]
        np.testing.assert_allclose(found, plain_layer(model, kind, weights, given["x"]), rtol=1e-9, atol=1e-10)
