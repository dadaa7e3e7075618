import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.algebra.transformer import weight_variables
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.model import Model
from meshwright.train.record import health
from meshwright.train.record.health import non_finite
from tests.train.small import MODEL

MIXED = Model(
    name="mixed",
    family="mixtral",
    num_layers=4,
    d_model=8,
    d_ff=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=32,
    num_experts=2,
    experts_per_token=1,
    d_ff_expert=8,
    dense_layers=(0,),
    sliding_window=4,
    sliding_layers=(2,),
)


def tree_of(model):
    return {
        name: np.zeros((repeat, *weight.shape) if weight.layers else weight.shape, np.float32)
        for name, (weight, repeat) in weight_variables(model).items()
    }


def test_finite_trees_have_nothing_to_say():
    assert non_finite(tree_of(MODEL), MODEL) is None
    assert non_finite({"count": np.int32(3)}, MODEL) is None


def test_the_first_in_the_order_of_the_program_is_named_with_its_layer():
    tree = tree_of(MODEL)
    tree["final_norm"][3] = np.nan
    tree["w_down"][0, 5, 5] = np.nan
    tree["wq"][1, 2, 3, 4] = -np.inf
    assert sorted(tree).index("w_down") < sorted(tree).index("wq")  # the order of JAX's trees is another
    assert non_finite(tree, MODEL) == "layers.wq of layer 1 holds infinity"
    tree["wq"][1, 2, 3, 4] = 0
    assert non_finite(tree, MODEL) == "layers.w_down of layer 0 holds NaN"


@pytest.mark.parametrize(
    ("name", "index", "words"),
    [
        ("wq_moe", 1, "layers.wq of layer 3"),
        ("wq", 0, "layers.wq of layer 0"),
        ("experts_w_up_moe_local", 0, "layers.experts.w_up of layer 2"),
        ("embed", 7, "embed"),
    ],
)
def test_layers_of_a_kind_keep_their_number_in_the_model(name, index, words):
    tree = tree_of(MIXED)
    tree[name][index] = np.nan
    assert non_finite(tree, MIXED) == f"{words} holds NaN"


def test_other_trees_and_what_stands_before_a_weight_are_named():
    tree = tree_of(MODEL)
    tree["wk"][1] = np.nan
    assert non_finite([{"mu": tree}, {"loss": np.float32(0)}], MODEL) == "0.mu: layers.wk of layer 1 holds NaN"
    assert non_finite({"loss": np.float32(np.inf)}, MODEL) == "loss holds infinity"


def test_sharded_arrays_are_looked_at_where_they_are_and_compiled_once():
    mesh = device_mesh({"fsdp": 4, "tensor": 2})
    where, whole = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor")), NamedSharding(mesh, PartitionSpec())
    tree = {name: jax.device_put(a, where if a.ndim > 2 else whole) for name, a in tree_of(MODEL).items()}
    assert non_finite(tree, MODEL) is None
    compiled = health._flags_on(mesh)._cache_size()
    tree["w_up"] = jax.device_put(tree["w_up"].at[1, 31, 63].set(jnp.nan), where)
    assert non_finite(tree, MODEL) == "layers.w_up of layer 1 holds NaN"
    assert health._flags_on(mesh)._cache_size() == compiled == 1
