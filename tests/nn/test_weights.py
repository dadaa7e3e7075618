from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.algebra.transformer import rows, weight_variables
from meshwright.nn.weights import init_params, param_shapes
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.strategy import make_mesh
from meshwright.spec.weights import num_params
from tests.nn.families import FAMILIES, LLAMA


@pytest.mark.parametrize("family", FAMILIES)
def test_arrays_are_those_of_the_program(family):
    model = FAMILIES[family]
    shapes = param_shapes(model)
    assert list(shapes) == list(weight_variables(model))
    counted = [shape for name, shape in shapes.items() if rows(model)[name].part != "buffer"]
    assert sum(np.prod(shape.shape) for shape in counted) == num_params(model)
    for name, (weight, repeat) in weight_variables(model).items():
        assert shapes[name].shape == ((repeat,) * bool(weight.layers) + weight.shape)


def test_layers_of_two_kinds_are_dealt_out_in_order():
    table = rows(FAMILIES["qwen2_moe"])
    assert table["wq"].layers == (1,)
    assert table["wq_moe"].layers == (0, 2)
    assert table["router_moe"].layers == (0, 2)
    assert "router" not in table


@pytest.fixture(scope="module")
def first():
    return {
        family: jax.jit(partial(init_params, FAMILIES[family], 0))()
        for family in ("llama", "gemma3", "gemma4-moe", "gpt_oss")
    }


def test_the_first_weights_of_llama_stay_what_they_are(first):
    """Golden losses rest on these numbers."""
    params = first["llama"]
    found = [float(params[name].ravel()[0]) for name in ("embed", "wq", "wo", "unembed")]
    np.testing.assert_allclose(found, [0.020080285, 0.025912719, 0.0052041621, 0.0019025310], rtol=1e-6)


def test_spread_of_matrices_and_start_of_vectors(first):
    llama = first["llama"]
    layers = LLAMA.num_layers
    assert float(jnp.std(llama["w_up"])) == pytest.approx(0.02, rel=0.1)
    assert float(jnp.std(llama["w_down"])) == pytest.approx(0.02 / np.sqrt(2 * layers), rel=0.1)
    assert (np.asarray(llama["attn_norm"]) == 1).all()
    assert not np.asarray(first["gemma3"]["q_norm_local"]).any()
    for name in ("layer_scale_moe", "expert_scale_moe", "router_norm_moe"):
        assert (np.asarray(first["gemma4-moe"][name]) == 1).all()
    oss = first["gpt_oss"]
    for name in ("bq_moe", "sinks_moe", "router_bias_moe", "experts_b_down_moe_local"):
        assert not np.asarray(oss[name]).any()
    assert float(jnp.std(oss["experts_w_gate_moe"])) == pytest.approx(0.02, rel=0.1)


def test_a_mesh_makes_the_same_numbers(first):
    mesh = device_mesh(make_mesh({"fsdp": 4, "tensor": 2}))
    specs = {"wq": PartitionSpec(None, "fsdp", "tensor"), "embed": PartitionSpec("tensor", "fsdp")}
    shardings = {n: NamedSharding(mesh, specs.get(n, PartitionSpec())) for n in rows(LLAMA)}
    made = jax.jit(partial(init_params, LLAMA), out_shardings=shardings)(0)
    assert made["wq"].addressable_data(0).size == made["wq"].size // 8
    for name, array in made.items():
        np.testing.assert_array_equal(array, first["llama"][name])
