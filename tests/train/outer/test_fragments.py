"""Fragments: which layers, and the same values from NumPy, from one device, from shards, from a part of the shards."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.algebra.derive import derive
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.notation import local_elements
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.strategy import Strategy, held_dims, make_mesh, standard_assignment
from meshwright.train.optimizers.table import make_optimizer
from meshwright.train.outer import fragments
from meshwright.train.outer.diloco import DiLoCo, OuterSettings
from meshwright.train.outer.fragments import FragmentPart, exchanged, fragments_of, read, with_exchanged, written
from meshwright.train.settings import TrainSettings
from tests.islands.threads import members, together
from tests.nn.families import FAMILIES
from tests.train.small import MODEL

SPECS = {
    "embed": PartitionSpec("x", None),
    "layers": PartitionSpec("y", None, "x"),
    "gates": PartitionSpec(None, ("y", "x")),
    "norm": PartitionSpec(),
}
STACKED = {"layers", "gates"}


def values():
    rng = np.random.default_rng(0)
    shapes = {"embed": (8, 3), "layers": (6, 2, 4), "gates": (5, 16), "norm": (3,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def held(kind, dtype=np.float32):
    if kind == "numpy":
        return {name: array.astype(dtype) for name, array in values().items()}
    if kind == "device":
        return {name: jnp.array(array, dtype) for name, array in values().items()}
    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return {
        name: jax.device_put(array.astype(dtype), NamedSharding(mesh, SPECS[name])) for name, array in values().items()
    }


@pytest.fixture(params=["numpy", "device", "shards", "own shards"])
def kind(request, monkeypatch):
    """Of "own shards" the process is one of several: it reads and writes shards."""
    if request.param == "own shards":
        monkeypatch.setattr(fragments, "_is_here", lambda array: False)
    return request.param


def test_layers_are_dealt_in_strides_and_the_rest_after_them():
    assert fragments_of(values(), STACKED, 1) == [
        (FragmentPart("gates"), FragmentPart("layers"), FragmentPart("embed"), FragmentPart("norm"))
    ]
    # six layers: the next is of fragment 2, then 3
    assert fragments_of(values(), STACKED, 4) == [
        (FragmentPart("gates", 0, 4), FragmentPart("layers", 0, 4)),
        (FragmentPart("gates", 1, 4), FragmentPart("layers", 1, 4)),
        (FragmentPart("gates", 2, 4), FragmentPart("layers", 2, 4), FragmentPart("embed")),
        (FragmentPart("gates", 3, 4), FragmentPart("layers", 3, 4), FragmentPart("norm")),
    ]
    with pytest.raises(InputError, match="outer_fragments=9: this model"):
        fragments_of(values(), STACKED, 9)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["mixtral", "gpt2", "deepseek_v3", "whisper"])
def test_a_derivation_lists_what_is_summed(name, count):
    """By fragment: an untied model, a tied one, corrections that counts move, and an encoder's table that stays."""
    model, fields = FAMILIES[name], {"islands_sync": "diloco", "outer_every": 6, "outer_fragments": count}
    plan = Strategy(mesh=make_mesh({"islands": 2}), state="fp32", **fields)
    options = ProgramOptions(correction_rate=1e-3)
    step = TrainStep(model, plan.inner(), optimizer=make_optimizer(model, TrainSettings(), "fp32"), options=options)
    outer = DiLoCo(OuterSettings(every=6, fragments=count), stacked=step.stacked)
    weights = {n: np.zeros(s.shape, np.float32) for n, s in exchanged(step, step.canonical[0]).items()}
    outer.begin(weights)
    summed = [sum(block.size for block in outer.summands(number, weights)[0]) for number in range(1, count + 1)]
    listed, sizes = [0] * count, held_dims(model.dims, {})
    for sum_step in derive(transformer(model, options), plan).outer:
        details = sum_step.details
        listed[details.fragment] += local_elements(sum_step.result, sizes, {}) * (details.num_layers or 1)
    assert listed == summed


def test_every_value_is_in_one_fragment():
    for count in (1, 2, 3, 5):
        counts = {name: np.zeros(array.shape, np.float32) for name, array in values().items()}
        for fragment in fragments_of(counts, STACKED, count):
            blocks = [block + 1 for block in read(counts, fragment)]
            written(counts, fragment, blocks)
        assert all(np.all(array == 1) for array in counts.values())


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_is_written_is_read(kind, count, dtype):
    weights = held(kind, dtype)
    originals, shardings = dict(weights), {name: getattr(array, "sharding", None) for name, array in weights.items()}
    plain = {name: np.array(array, np.float32) for name, array in weights.items()}
    for fragment in fragments_of(weights, STACKED, count):
        blocks = read(weights, fragment)
        assert all(block.dtype == np.float32 for block in blocks)
        new = [np.ascontiguousarray(2 * block + 1) for block in blocks]
        weights = written(weights, fragment, new)
        for block in new:
            block[...] = np.nan  # the weights have copies
        for block, again in zip(blocks, read(weights, fragment), strict=True):
            np.testing.assert_allclose(again, again if kind == "numpy" else 2 * block + 1, rtol=1e-2)
    for name, array in weights.items():
        expected = np.array(2 * plain[name] + 1, dtype).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(array, np.float32), expected)
        assert array.dtype == dtype
        assert getattr(array, "sharding", None) == shardings[name]
        assert (array is originals[name]) == (kind == "numpy")


def test_a_process_reads_each_of_its_shards_once(monkeypatch):
    weights = held("shards")
    monkeypatch.setattr(fragments, "_is_here", lambda array: False)
    whole = fragments_of(weights, STACKED, 1)[0]
    assert sum(block.size for block in read(weights, whole)) == sum(array.size for array in values().values())


@pytest.mark.parametrize("state", ["fp32", "bf16-adam", "bf16-master"])
def test_float32_weights_of_a_state_are_exchanged(state):
    """Where the state has them; the model's two-byte weights follow."""
    sharded = Strategy(mesh=make_mesh({"data": 4, "tensor": 2}), state=state, assignment=standard_assignment(zero=1))
    step = TrainStep(MODEL, sharded, optimizer=make_optimizer(MODEL, TrainSettings(), state))
    start = step.init(0)
    weights = exchanged(step, start)
    has_master = bool(start.opt_state.master)
    assert has_master == state.startswith("bf16-master")
    assert {array.dtype for array in weights.values()} == {jnp.dtype("bfloat16" if state == "bf16-adam" else "float32")}
    whole = fragments_of(weights, step.stacked, 1)[0]
    new = with_exchanged(start, written(weights, whole, [block + np.float32(0.01) for block in read(weights, whole)]))
    assert jax.tree.structure(new) == jax.tree.structure(start)
    for name, array in new.params.items():
        assert array.dtype == start.params[name].dtype
        assert array.sharding == start.params[name].sharding
        np.testing.assert_allclose(
            np.asarray(array, np.float32), np.asarray(weights[name], np.float32) + 0.01, atol=0.02
        )
    batch = {name: np.zeros((8, 32), np.int32) for name in ("tokens", "labels")}
    step.step(new, batch)


@pytest.mark.parametrize("state", ["fp32", "bf16-master"])
def test_islands_of_different_meshes(state):
    """One of one device, one of four, which has half of the tokens: after each update both have the same weights."""
    settings = OuterSettings(every=4, fragments=2, overlap=1)
    strategies = [Strategy(mesh=make_mesh(axes), state=state) for axes in ({}, {"fsdp": 2, "tensor": 2})]
    steps = [
        TrainStep(
            MODEL,
            strategy,
            optimizer=make_optimizer(MODEL, TrainSettings(), state),
            mesh=device_mesh(strategy.mesh, jax.devices()[first : first + strategy.num_chips]),
        )
        for first, strategy in zip((0, 4), strategies, strict=True)
    ]
    states, outers, group = [step.init(0) for step in steps], [], members(2)
    for step, start in zip(steps, states, strict=True):
        outers.append(DiLoCo(settings, stacked=step.stacked))
        outers[-1].begin(exchanged(step, start))
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (8, 12, 33)).astype(np.int32)

    def trained(which):
        step, outer = steps[which], outers[which]
        for number, rows in enumerate(tokens, start=1):
            own = rows[:8] if which == 0 else rows[8:]
            batch = {"tokens": own[:, :-1], "labels": own[:, 1:]}
            states[which] = jax.block_until_ready(step.step(states[which], batch)[0])
            weights = exchanged(step, states[which])
            weights = outer.after_step(number, weights, group[which], own.size)
            states[which] = with_exchanged(states[which], weights)
        return outer.state()

    left, right = together([partial(trained, which) for which in range(2)])
    assert all(left[name].tobytes() == right[name].tobytes() for name in left)
    last = outers[0].fragments[1]
    for blocks in zip(*(read(exchanged(*pair), last) for pair in zip(steps, states, strict=True)), strict=True):
        np.testing.assert_array_equal(*blocks)
    first = read(exchanged(steps[0], steps[0].init(0)), last)
    assert all(np.abs(new - old).max() > 1e-3 for new, old in zip(outers[0].outer[1], first, strict=True))
