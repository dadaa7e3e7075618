import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.algebra.transformer import weight_variables
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.model import Model
from meshwright.train.data.batches import Batches, Source
from meshwright.train.record import health
from meshwright.train.record.health import non_finite, where_not_finite
from tests.train.small import MODEL, strategy
from tests.train.test_setup import source

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


@pytest.fixture(scope="module")
def step():
    return TrainStep(MODEL, strategy(fsdp=2))


@pytest.fixture(scope="module")
def state(step):
    return step.init(0)


@pytest.fixture(scope="module")
def batch(step):
    text: Source = source(4)
    return Batches((text,), batch_seqs=4, seq_len=32, seed=0).global_batch(0, step.batch_shardings)


def with_weight(state, name, change):
    changed = jax.device_put(change(state.params[name]), state.params[name].sharding)
    return state._replace(params={**state.params, name: changed})


def test_a_weight_is_named_with_its_layer(step, state, batch):
    broken = with_weight(state, "wq", lambda w: w.at[1, 0, 0, 0].set(jnp.nan))
    assert "after the step the weight layers.wq of layer 1 holds NaN" in where_not_finite(step, broken, batch)


def test_a_gradient_is_named_where_the_weights_are_finite(step, state, batch):
    huge = with_weight(state, "w_up", lambda w: jnp.full_like(w, 1e38))
    found = where_not_finite(step, huge, batch)
    assert found.startswith("all weights are finite; of the gradients computed again, ")
    assert "holds" in found


@pytest.fixture(scope="module")
def interleaved():
    """Four layers on two stages of two pieces: the first stage holds layers 0 and 2, the second 1 and 3."""
    choices = {"schedule": "interleaved", "chunks": 2, "num_microbatches": 2}
    split = msgspec.structs.replace(strategy(pipeline=2), **choices)
    return TrainStep(msgspec.structs.replace(MODEL, num_layers=4), split)


@pytest.mark.parametrize("layer", [1, 2])
def test_layers_have_the_model_s_numbers_whatever_stage_holds_them(interleaved, layer):
    state = interleaved.init(0)
    weights = interleaved.to_canonical(state.params)
    weights["wq"] = weights["wq"].at[layer, 0, 0, 0].set(jnp.nan)
    broken = state._replace(params=interleaved.from_canonical(weights))
    found = where_not_finite(interleaved, broken, None)
    assert found == f"after the step the weight layers.wq of layer {layer} holds NaN"


def test_gradients_of_interleaved_stages(interleaved, batch, monkeypatch):
    """What the step gives is in the order of the stages; here the gradients of layer 2 lie second."""
    state = interleaved.init(0)

    def broken(params, batch):
        return jnp.zeros(()), {**params, "wq": params["wq"].at[1].set(jnp.inf)}

    monkeypatch.setattr(interleaved, "gradients", broken)
    found = where_not_finite(interleaved, state, batch)
    assert found == "all weights are finite; of the gradients computed again, layers.wq of layer 2 holds infinity"


def test_nothing_is_named_where_nothing_is_found(step, state, batch):
    assert where_not_finite(step, state, batch) == "weights and gradients are finite"
