import re
from collections import Counter
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.algebra.derive import derive
from meshwright.algebra.kinds import Updated
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops import op_kind
from meshwright.algebra.transformer import transformer, weight_variables
from meshwright.core.errors import InputError
from meshwright.nn.interpreter import run_update
from meshwright.nn.ops.muon import newton_schulz
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.optimizer import UpdateLayout, plain_optimizer
from meshwright.spec.strategy import STATE_BYTES, Strategy
from meshwright.train.optimizers import table
from meshwright.train.settings import TrainSettings
from tests.train.small import MODEL

ROUTED = msgspec.structs.replace(
    MODEL, name="routed", family="mixtral", num_experts=4, experts_per_token=2, d_ff_expert=16
)
NAMES = ("embed", "attn_norm", "wq", "wo", "experts_w_up", "experts_w_down")
"""One array of each form: the others would only be more to compile."""

KINDS = ("adamw", "lion", "adafactor", "muon")
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
AXES = {"D": "fsdp", "N": "tensor", "Fe": "tensor", "V": "tensor", "E": "data"}


def settings(**changes):
    return TrainSettings(**{"steps": 20, "warmup_steps": 2, "learning_rate": 1e-2, **changes})


def weights():
    """Name -> row of the table and number of layers, of the arrays that are tested."""
    return {name: row for name, row in weight_variables(ROUTED).items() if name in NAMES}


def arrays(seed, *, scale=1e-2, dtype=jnp.float32):
    """Random arrays, the layers in front; gradients by default."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(0, scale, (repeat, *w.shape) if w.layers else w.shape), jnp.float32).astype(dtype)
        for name, (w, repeat) in weights().items()
    }


def first_weights(dtype=jnp.float32):
    return arrays(0, scale=0.02, dtype=dtype)


def run(optimizer, *, steps=4, dtype=jnp.float32):
    """Weights and state after a few updates on one device; every update is one compiled program."""
    params = first_weights(dtype)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(1, steps + 1):
        params, state = update(arrays(step, dtype=dtype), state, params)
    assert update._cache_size() == 1
    return params, state


def close(found, expected):
    """Each array within 1e-5 of its largest entry."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        wide = np.asarray(array, np.float64)
        np.testing.assert_allclose(np.asarray(found[name], np.float64), wide, atol=1e-5 * np.abs(wide).max(), rtol=0)


def by_formula(rule, given):
    """Every array after four updates of a rule (gradient, memory, step) -> change, in float64."""
    falls = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi / 18))
    params = {name: np.asarray(a, np.float64) for name, a in first_weights().items()}
    memory = {name: {} for name in params}
    for step, share in enumerate([0.5, 1, 1, falls], 1):
        for name, grad in arrays(step).items():
            decay = 0.0 if "norm" in name else given.weight_decay
            change = rule(np.asarray(grad, np.float64), memory[name], step)
            params[name] = params[name] - given.learning_rate * share * (change + decay * params[name])
    return params


def test_adamw_is_the_formula():
    given = settings(weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-4)

    def rule(grad, memory, step):
        memory["m"] = 0.8 * memory.get("m", 0) + 0.2 * grad
        memory["v"] = 0.9 * memory.get("v", 0) + 0.1 * grad**2
        return memory["m"] / (1 - 0.8**step) / (np.sqrt(memory["v"] / (1 - 0.9**step)) + 1e-4)

    close(run(table.make_optimizer(ROUTED, given))[0], by_formula(rule, given))


def test_lion_is_the_formula():
    given = settings(optimizer="lion", weight_decay=0.3, beta1=0.8, beta2=0.9)

    def rule(grad, memory, step):
        old = memory.get("m", 0)
        memory["m"] = 0.9 * old + 0.1 * grad
        return np.sign(0.8 * old + 0.2 * grad)

    close(run(table.make_optimizer(ROUTED, given))[0], by_formula(rule, given))


def every_matrix(tree):
    """(name, layer, expert) -> one matrix [in, out] or vector, cut by the rows of the weight table alone."""
    found = {}
    for name, (weight, _) in weights().items():
        lead = bool(weight.layers) + (weight.part == "experts")
        array = np.asarray(tree[name])
        for place in np.ndindex(array.shape[:lead]):
            one = array[place]
            rows = int(np.prod(one.shape[: 2 if name == "wo" else 1]))
            found[name, *place] = one.reshape(rows, -1) if weight.kind == "matrix" else one
    return found


STEADY = {"weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}


def test_adafactor_is_optaxs_on_each_matrix_of_each_layer_and_expert():
    given = settings(optimizer="adafactor", **STEADY)
    found, _ = run(table.make_optimizer(ROUTED, given))
    params = every_matrix(first_weights())
    assert params["experts_w_down", 1, 3].shape == (16, 32)
    assert params["wo", 1].shape == (32, 32)
    theirs = optax.adafactor(given.learning_rate, min_dim_size_to_factor=1)
    state, update = theirs.init(params), jax.jit(theirs.update)
    for step in range(1, 5):
        changes, state = update(every_matrix(arrays(step)), state, params)
        params = {key: np.asarray(one + changes[key]) for key, one in params.items()}
    close(every_matrix(found), params)


def test_muon_is_optaxs_on_the_matrices_of_layers_and_the_rest_is_adamw():
    given = settings(optimizer="muon", **STEADY)
    # wq [layer, D, N, H], wo [layer, N, H, D], experts [layer, E, in, out]
    axes = {"wq": ((1,), (2, 3)), "wo": ((1, 2), (3,)), "experts_w_up": ((2,), (3,)), "experts_w_down": ((2,), (3,))}
    inside = tuple(axes)
    numbers = {name: optax.contrib.MuonDimensionNumbers(*pair) for name, pair in axes.items()}
    theirs = optax.contrib.muon(
        given.learning_rate,
        beta=given.momentum,
        consistent_rms=0.2,
        muon_weight_dimension_numbers={name: numbers.get(name) for name in NAMES},
    )
    of_muon, _ = run(table.in_state(plain_optimizer(theirs)))
    of_adamw, _ = run(table.make_optimizer(ROUTED, settings(**STEADY)))
    close(run(table.make_optimizer(ROUTED, given))[0], {n: (of_muon if n in inside else of_adamw)[n] for n in NAMES})


def test_newton_schulz_is_the_polynomial_of_the_singular_values():
    for shape in ((2, 3, 12, 8), (2, 3, 8, 12)):
        x = np.random.default_rng(0).standard_normal(shape)
        u, s, v = np.linalg.svd(x, full_matrices=False)
        s = s / np.sqrt((s**2).sum(-1, keepdims=True))
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        expected = (u * s[..., None, :]) @ v
        np.testing.assert_allclose(newton_schulz(jnp.asarray(x, jnp.float32)), expected, atol=1e-4)
        assert s.min() > 0.6
        assert s.max() < 1.3


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix():
    state = table.make_optimizer(ROUTED, settings(optimizer="adafactor")).init(first_weights())
    factored = state.inner[0]
    assert factored.rows["wo"].shape == (2, 4, 8, 1)
    assert factored.columns["wo"].shape == (2, 1, 1, 32)
    assert factored.rows["experts_w_up"].shape == (2, 4, 32, 1)
    assert factored.whole["attn_norm"].shape == (2, 32)
    assert factored.whole.keys().isdisjoint(factored.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_only_matrices_decay(kind):
    optimizer = table.make_optimizer(ROUTED, settings(optimizer=kind, weight_decay=0.5))
    params = first_weights()
    new, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for name, array in params.items():
        share = 1.0 if "norm" in name else 1 - 0.5e-2 * 0.5
        np.testing.assert_allclose(new[name], share * np.asarray(array), rtol=1e-5)


# -- on a mesh -------------------------------------------------------------------------------------


def specs_of(axes):
    """Every weight split over the mesh axes that its dims go with."""
    return {
        name: PartitionSpec(*[None] * bool(w.layers), *(a if (a := AXES.get(dim)) in axes else None for dim in w.dims))
        for name, (w, _) in weights().items()
    }


def layout_of(kind):
    """Everything as the optimizers have it on the mesh."""
    steps = {}
    for name, one in derive(transformer(ROUTED), Strategy(mesh={})).weights.items():
        split = {dim: (a,) if (a := AXES.get(dim)) in MESH else () for dim in one.shard.dims}
        steps[name] = op_kind(kind).update(msgspec.structs.replace(one, shard=one.shard.resharded(split)))
    return UpdateLayout(steps, device_mesh(MESH), specs_of(MESH))


class OnMesh:
    """The update of one optimizer on eight devices, everything split alike and donated."""

    def __init__(self, optimizer, dtype, layout):
        self.optimizer, self.dtype, specs = optimizer, dtype, specs_of(MESH)
        shapes = jax.eval_shape(partial(first_weights, dtype))
        mesh = device_mesh(MESH)
        here = partial(jax.tree.map, partial(NamedSharding, mesh), is_leaf=lambda s: isinstance(s, PartitionSpec))
        self.of_params, self.of_state = here(specs), here(optimizer.specs(shapes, specs))
        update = jax.jit(
            lambda *arrays: optimizer.update(*arrays, layout),
            in_shardings=(self.of_params, self.of_state, self.of_params),
            out_shardings=(self.of_params, self.of_state),
            donate_argnums=(1, 2),
        )
        state_shapes = jax.eval_shape(optimizer.init, shapes)
        self.num_donated = len(jax.tree.leaves((state_shapes, shapes)))
        self.compiled = update.lower(shapes, state_shapes, shapes).compile()

    def run(self, steps=4):
        params = jax.device_put(first_weights(self.dtype), self.of_params)
        state = jax.device_put(self.optimizer.init(params), self.of_state)
        for step in range(1, steps + 1):
            grads = jax.device_put(arrays(step, dtype=self.dtype), self.of_params)
            params, state = self.compiled(grads, state, params)
        return params, state


def collectives(compiled):
    """Communication of a compiled program: kind -> how often."""
    return Counter(
        re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", compiled.as_text())
    )


@pytest.mark.parametrize(
    ("kind", "state", "allowed"),
    [
        ("adamw", "fp32", set()),
        ("adamw", "pure-16bit", set()),
        ("lion", "fp32", set()),
        ("adafactor", "fp32", {"all-reduce"}),
        ("muon", "fp32", {"all-to-all"}),
    ],
)
def test_a_mesh_gives_the_numbers_of_one_device_in_one_donated_program(kind, state, allowed):
    dtype = jnp.float32 if state == "fp32" else jnp.bfloat16
    optimizer = table.make_optimizer(ROUTED, settings(optimizer=kind, rounding="stochastic"), state)
    mesh = OnMesh(optimizer, dtype, layout_of(kind))
    found, expected = mesh.run()[0], run(optimizer, dtype=dtype)[0]
    close(found, expected)
    header = mesh.compiled.as_text().splitlines()[0]
    assert len(re.findall(r"(?:may|must)-alias", header)) == mesh.num_donated
    assert collectives(mesh.compiled).keys() == allowed


def test_dealing_out_whole_matrices_takes_two_all_to_alls_for_each_split_dim():
    """Five layers on eight devices: three are filled up."""
    mesh, spec = device_mesh({"fsdp": 4, "tensor": 2}), PartitionSpec(None, "tensor", None, "fsdp")
    shard = ShardedArray("wo", ("N", "H", "D"), (("tensor",), (), ("fsdp",)))
    weight, here = Updated(shard=shard, inputs=("N", "H"), layers="L"), NamedSharding(mesh, spec)
    whole = msgspec.structs.replace(weight, shard=shard.resharded({"N": (), "D": ()}))
    values = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 3, 8)), jnp.float32)
    context = SimpleNamespace(number=jnp.int32(1), rate=-1.0, decays={}, momentum=0.9)

    def updated(weight, grad):
        """The change alone."""
        arrays = {"wo": jnp.zeros_like(grad), "dwo": grad, "wo.momentum.state": jnp.zeros_like(grad)}
        return run_update(context, op_kind("muon").update(weight), arrays, attrgetter("name"))["wo"]

    body = jax.shard_map(lambda x: updated(weight, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    function = jax.jit(body, in_shardings=here, out_shardings=here)
    close({"x": function(values)}, {"x": updated(whole, values)})
    assert collectives(function.lower(values).compile()) == {"all-to-all": 4}


def test_the_state_lies_as_the_weights_do():
    specs, shapes = specs_of(("fsdp", "tensor")), jax.eval_shape(first_weights)
    adamw = table.make_optimizer(ROUTED, settings(average=0.9), "bf16-master")
    found = adamw.specs(shapes, specs)
    assert found.master == found.average == found.inner[0].mu == found.inner[0].nu == specs
    assert found.count == found.inner[0].count == PartitionSpec()
    factored = table.make_optimizer(ROUTED, settings(optimizer="adafactor")).specs(shapes, specs).inner[0]
    assert factored.rows["wq"] == PartitionSpec(None, "fsdp", None, None)
    assert factored.columns["wq"] == PartitionSpec(None, None, "tensor", None)
    assert factored.whole["attn_norm"] == specs["attn_norm"]
    # What optax's own form keeps is of another rank: it lies whole everywhere.
    theirs = table.in_state(plain_optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=1))).specs(shapes, specs)
    assert theirs.inner[0].v_row["wq"] == PartitionSpec()


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATE_BYTES)
def test_bytes_kept_per_weight_are_those_that_are_planned(state):
    params = first_weights(jnp.float32 if state == "fp32" else jnp.bfloat16)
    kept = table.make_optimizer(ROUTED, settings(), state).init(params)
    count = sum(a.size for a in params.values())
    assert sum(a.nbytes for a in jax.tree.leaves(kept) if a.ndim) == STATE_BYTES[state]["optimizer"] * count
    assert sum(a.nbytes for a in params.values()) == STATE_BYTES[state]["weights"] * count


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_of_sixteen_bits_stay(kind):
    optimizer = table.make_optimizer(ROUTED, settings(optimizer=kind), "pure-16bit")
    params = first_weights(jnp.bfloat16)
    first = optimizer.init(params)
    found = jax.eval_shape(optimizer.update, params, first, params)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(
        lambda a: (a.shape, a.dtype), (params, first)
    )
    kept = {a.dtype for a in jax.tree.leaves(first.inner) if a.ndim > 1}
    assert kept == {jnp.dtype("bfloat16")}


def test_a_master_copy_is_what_float32_gives_and_the_weights_are_nearest_to_it():
    params, kept = run(table.make_optimizer(ROUTED, settings(rounding="stochastic"), "bf16-master"), dtype=jnp.bfloat16)
    wide = table.make_optimizer(ROUTED, settings())
    expected = {name: a.astype(jnp.float32) for name, a in first_weights(jnp.bfloat16).items()}
    state, update = wide.init(expected), jax.jit(wide.update)
    for step in range(1, 5):
        expected, state = update(arrays(step, dtype=jnp.bfloat16), state, expected)
    close(kept.master, expected)
    for name, array in params.items():
        np.testing.assert_array_equal(array, kept.master[name].astype(jnp.bfloat16))


def test_an_optimizer_says_as_which_op_its_update_runs():
    assert [table.make_optimizer(ROUTED, settings(optimizer=kind)).kind for kind in KINDS] == list(KINDS)
    assert table.in_state(plain_optimizer(optax.sgd(1e-4))).kind == "adamw", "elementwise, without communication"
    assert table.in_state(plain_optimizer(optax.lion(1e-4), "lion")).kind == "lion"


@pytest.mark.parametrize(("rounding", "moved"), [("nearest", 0.0), ("stochastic", -0.01)])
def test_updates_below_a_step_of_two_bytes_survive_on_average(rounding, moved):
    """100 updates of 1e-4 on weights of 1, where neighbours lie 2^-8 below and 2^-7 above."""
    optimizer = table.in_state(plain_optimizer(optax.sgd(1e-4)), state="bf16-adam", rounding=rounding, seed=5)
    params = {"w": jnp.ones((4096,), jnp.bfloat16)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(100):
        params, state = update({"w": jnp.ones((4096,), jnp.bfloat16)}, state, params)
    assert update._cache_size() == 1
    assert float(params["w"].astype(jnp.float32).mean()) - 1 == pytest.approx(moved, abs=5e-4)


def test_random_bits_differ_between_updates_and_seeds():
    def after(seed, steps):
        optimizer = table.in_state(
            plain_optimizer(optax.sgd(1e-3)), state="bf16-adam", rounding="stochastic", seed=seed
        )
        params, update = {"w": jnp.ones((512,), jnp.bfloat16)}, jax.jit(optimizer.update)
        state, found = optimizer.init(params), []
        for _ in range(steps):
            found.append(update(params, state, params)[0]["w"])
            state = state._replace(count=state.count + 1)
        return found

    first, second = after(0, 2)
    assert bool((first != second).any())
    assert bool((first != after(1, 1)[0]).any())
    assert bool((first == after(0, 1)[0]).all())


# -- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["fp32", "bf16-adam", "bf16-master"])
def test_the_average_is_of_the_weights_that_were_trained(state):
    dtype = jnp.float32 if state == "fp32" else jnp.bfloat16
    optimizer = table.in_state(plain_optimizer(optax.sgd(0.3)), state=state, average=0.5)
    params = first_weights(dtype)
    # Donated: the mean must not be in the buffers of the weights.
    kept, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update, donate_argnums=(1, 2))
    expected = {name: np.asarray(a, np.float64) for name, a in params.items()}
    for step in range(1, 4):
        params, kept = update(arrays(step, dtype=dtype), kept, params)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, array in (kept.master or params).items():
            expected[name] = decay * expected[name] + (1 - decay) * np.asarray(array, np.float64)
    close(kept.average, expected)
    read = table.averaged(kept, params)
    assert {a.dtype for a in read.values()} == {jnp.dtype(dtype)}
    assert table.averaged(kept._replace(average={}), params) is params


def test_an_unknown_state_is_refused():
    with pytest.raises(InputError, match=r"state 'bf16-adm' is not known\. Did you mean 'bf16-adam'"):
        table.make_optimizer(ROUTED, settings(), "bf16-adm")


# -- peers -----------------------------------------------------------------------------------------


def by_torch(optimizer, **options):
    """Every matrix and vector after four updates of one of torch's optimizers."""
    import torch

    params = {key: torch.tensor(one, requires_grad=True) for key, one in every_matrix(first_weights()).items()}
    matrices, vectors = ([t for k, t in params.items() if ("norm" in k[0]) == norms] for norms in (False, True))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    theirs = getattr(torch.optim, optimizer)(groups, lr=1e-2, **options)
    for step in range(1, 5):
        for key, grad in every_matrix(arrays(step)).items():
            params[key].grad = torch.tensor(grad)
        theirs.step()
    return {key: tensor.detach().numpy() for key, tensor in params.items()}


@pytest.mark.peer
@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [("adamw", "AdamW", {"betas": (0.8, 0.9), "eps": 1e-6}), ("adafactor", "Adafactor", {})],
)
def test_numbers_are_those_of_torch(kind, name, options):
    pytest.importorskip("torch")
    given = settings(**{**STEADY, "weight_decay": 0.3}, optimizer=kind, beta1=0.8, beta2=0.9, epsilon=1e-6)
    found, _ = run(table.make_optimizer(ROUTED, given))
    close(every_matrix(found), by_torch(name, **options))


def test_the_decay_grows_to_the_one_that_is_set():
    found = np.asarray(table.average_decay(0.99, np.array([1, 8, 10**6])))
    np.testing.assert_allclose(found, [2 / 11, 9 / 18, 0.99], rtol=1e-6)


def test_the_mean_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((6, 4)).astype(np.float32)
    expected = weights[0].astype(np.float64)
    mean = table.start_average({"w": jnp.asarray(weights[0])})
    for count in range(1, 6):
        decay = min(0.5, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * weights[count]
        mean = table.update_average(mean, {"w": jnp.asarray(weights[count])}, decay=0.5, count=count)
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-5, atol=1e-6)


def test_small_changes_of_two_byte_weights_are_kept_in_four():
    mean = table.start_average({"w": jnp.ones((3,), jnp.bfloat16)})
    assert mean["w"].dtype == jnp.float32
    for count in range(1, 40):
        mean = table.update_average(mean, {"w": jnp.full((3,), 1.0078125, jnp.bfloat16)}, decay=0.999, count=count)
    assert (np.asarray(mean["w"]) > 1.0).all()
    assert (np.asarray(mean["w"]) < 1.0078125).all()
