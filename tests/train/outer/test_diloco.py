"""DiLoCo beside published numbers, its own formula and synchronous SGD; islands of other sizes, and ones that fail."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.islands.codec import codec_of
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.train_step import TrainStep
from meshwright.train.outer.diloco import DiLoCo, OuterSettings
from tests.islands.threads import members, together
from tests.train.outer import worked
from tests.train.outer.islands import (
    SHAPES,
    STACKED,
    Island,
    copied,
    drift,
    first_weights,
    require_same_weights,
    run,
    same_outer,
)
from tests.train.small import MODEL, strategy


def islands_of(count, **settings):
    return [
        Island(DiLoCo(OuterSettings(**settings), stacked=STACKED), first_weights(), drift(rank))
        for rank in range(count)
    ]


def test_four_steps_of_maxtext():
    def loss_of(weights, rank):
        predicted = jnp.array(worked.MAXTEXT_INPUTS[rank]) @ weights["kernel"] + weights["bias"][None]
        return jnp.mean(jnp.square(predicted - jnp.array(worked.MAXTEXT_LABELS[rank])))

    losses = [[], []]

    def inner(rank, weights, number):
        loss, grads = jax.value_and_grad(partial(loss_of, rank=rank))(weights)
        losses[rank].append(float(loss))
        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, weights, grads)

    weights = {"kernel": jnp.array([[2.0], [1.0]]), "bias": jnp.array([1.0])}
    settings = OuterSettings(every=3, rate=1.0, momentum=0.9)
    islands = [Island(DiLoCo(settings), weights, partial(inner, rank)) for rank in range(2)]
    run(islands, range(1, 5))
    np.testing.assert_allclose(losses[0], worked.MAXTEXT_LOSSES[0], rtol=1e-5)
    np.testing.assert_allclose(losses[1], worked.MAXTEXT_LOSSES[1], rtol=2e-3)
    np.testing.assert_allclose(islands[0].history[3]["kernel"], [[1.5345], [1.0494]], atol=1e-4)
    np.testing.assert_allclose(islands[0].history[3]["bias"], [0.5839], atol=1e-4)
    require_same_weights(islands[0].history[3], islands[1].history[3])


def torchft_islands(overlap, mixing):
    """Two layers of one weight, which loses 2 in each inner step."""
    settings = OuterSettings(every=6, rate=2, momentum=0, fragments=2, overlap=overlap, mixing=mixing)

    def inner(weights, number):
        return {"layers": weights["layers"] - np.float32(2)}

    return [Island(DiLoCo(settings, stacked={"layers"}), {"layers": np.ones(2, np.float32)}, inner) for _ in range(2)]


@pytest.mark.parametrize(("overlap", "mixing", "text"), worked.TORCHFT)
def test_sixteen_steps_of_torchft(overlap, mixing, text):
    islands, expected = torchft_islands(overlap, mixing), worked.pairs(text)
    outer_weights = {}
    for number in range(1, len(expected)):
        run(islands, [number])
        outer_weights[number] = tuple(np.concatenate([blocks[0] for blocks in islands[1].outer.outer]).tolist())
    for island in islands:
        assert [tuple(weights["layers"].tolist()) for weights in island.history] == expected
    wanted = {step: pair for step, pair in worked.TORCHFT_OUTER[overlap, mixing].items() if 0 < step < len(expected)}
    assert {step: outer_weights[step] for step in wanted} == wanted


def test_an_island_of_torchft_that_fails_and_comes_back():
    """Source: test_diloco_mocked_failure_recovery_0.json: one is gone after two updates, and back after the third."""
    islands = torchft_islands(0, 0.0)
    run(islands, range(1, 7))
    run(islands[:1], range(7, 10))
    back = torchft_islands(0, 0.0)[1]
    back.outer.load_state(islands[0].outer.state())
    back.weights = copied(islands[0].weights)
    run([islands[0], back], range(10, 19))
    assert [tuple(weights["layers"].tolist()) for weights in islands[0].history[9:19]] == [
        *((-35, -29), (-37, -31), (-39, -33), (-41, -47), (-43, -49), (-45, -51), (-59, -53), (-61, -55), (-63, -57)),
        (-65, -71),
    ]
    assert [h["layers"].tolist() for h in back.history[-9:]] == [h["layers"].tolist() for h in islands[0].history[-9:]]
    assert same_outer([islands[0], back])


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_one_fragment_without_overlap_is_the_formula(bits):
    """To the bit: a NumPy loop over the same differences, with the same codec."""
    every, rate, momentum, count, tokens = 3, np.float32(0.7), np.float32(0.9), 4, 3.0
    islands = islands_of(count, every=every, rate=0.7, momentum=0.9, bits=bits)
    run(islands, range(1, 10))
    inner = [first_weights() for _ in range(count)]
    outer, trace = first_weights(), {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    order = sorted(SHAPES, key=lambda name: (-np.prod(SHAPES[name]), name))
    for number in range(1, 10):
        inner = [drift(rank)(weights, number) for rank, weights in enumerate(inner)]
        if number % every == 0:
            moves = [[(outer[name] - own[name]) * np.float32(tokens) for name in order] for own in inner]
            sums = together(
                [
                    partial(member.sum, own, codec=codec_of(bits))
                    for member, own in zip(members(count), moves, strict=True)
                ]
            )[0]
            for name, total in zip(order, sums, strict=True):
                mean = total / np.float32(count * tokens)
                trace[name] = trace[name] * momentum + mean
                outer[name] = outer[name] - rate * (mean + momentum * trace[name])
            inner = [dict(outer) for _ in range(count)]
        for rank, island in enumerate(islands):
            require_same_weights(island.history[number], inner[rank])
    assert same_outer(islands)


def test_nesterov_is_that_of_optax():
    islands = islands_of(2, every=2, rate=0.3, momentum=0.9)
    optimizer = optax.sgd(0.3, momentum=0.9, nesterov=True)
    outer = first_weights()
    state = optimizer.init(outer)
    for round_number in range(4):
        inner = [outer, outer]
        for number in (2 * round_number + 1, 2 * round_number + 2):
            run(islands, [number])
            inner = [drift(rank)(weights, number) for rank, weights in enumerate(inner)]
        mean = jax.tree.map(lambda weight, *own: weight - sum(own) / len(own), outer, *inner)
        moves, state = optimizer.update(mean, state)
        outer = optax.apply_updates(outer, moves)
        for name in SHAPES:
            np.testing.assert_allclose(islands[0].weights[name], outer[name], rtol=1e-5, atol=1e-6)


def test_local_sgd_is_the_mean_of_the_weights():
    islands = islands_of(3, every=2, rate=1.0, momentum=0.0)
    run(islands, [1])
    own = [drift(rank)(island.weights, 2) for rank, island in enumerate(islands)]
    run(islands, [2])
    for name in SHAPES:
        np.testing.assert_allclose(islands[1].weights[name], np.mean([w[name] for w in own], axis=0), atol=1e-6)


def test_one_step_at_rate_1_is_synchronous_sgd():
    """Two islands with half of each batch, on devices of their own, beside one with all of it."""
    steps = [
        TrainStep(
            MODEL, strategy(), optimizer=optax.sgd(0.3), mesh=device_mesh(strategy().mesh, jax.devices()[i : i + 1])
        )
        for i in range(3)
    ]
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, MODEL.vocab_size, (8, 33)).astype(np.int32) for _ in range(5)]
    states = [step.init(0) for step in steps]

    def stepped(which, tokens):
        states[which], metrics = steps[which].step(states[which], {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        return float(metrics.loss)

    def inner(which, weights, number):
        states[which] = states[which]._replace(params=weights)
        stepped(which, batches[number - 1][4 * which : 4 * which + 4])
        return states[which].params

    settings = OuterSettings(every=1, rate=1.0, momentum=0.0)
    islands = [
        Island(DiLoCo(settings, stacked=steps[which].stacked), states[which].params, partial(inner, which), tokens=128)
        for which in range(2)
    ]
    for number, batch in enumerate(batches, start=1):
        for which, island in enumerate(islands):
            island.weights = inner(which, island.weights, number)
        group = members(2)
        results = together(
            [
                partial(island.outer.after_step, number, island.weights, member, 128.0)
                for island, member in zip(islands, group, strict=True)
            ]
        )
        for which, (island, weights) in enumerate(zip(islands, results, strict=True)):
            island.weights = weights
            states[which] = states[which]._replace(params=weights)
        stepped(2, batch)
        for name, array in states[2].params.items():
            for island in islands:
                np.testing.assert_allclose(np.asarray(island.weights[name]), np.asarray(array), rtol=1e-6, atol=1e-6)


def test_islands_count_by_their_tokens():
    tokens = [300.0, 100.0, 0.0]
    islands = islands_of(3, every=2, rate=1.0, momentum=0.0)
    for island, count in zip(islands, tokens, strict=True):
        island.tokens = count
    islands[2].inner = lambda weights, number: {name: np.full_like(array, np.nan) for name, array in weights.items()}
    run(islands, [1, 2])
    own = []
    for rank in range(2):
        weights = first_weights()
        for number in (1, 2):
            weights = drift(rank)(weights, number)
        own.append(weights)
    for island in islands:
        for name in SHAPES:
            expected = 0.75 * own[0][name] + 0.25 * own[1][name]
            np.testing.assert_allclose(island.weights[name], expected, atol=1e-6)
    assert same_outer(islands)


def test_without_any_tokens_nothing_changes():
    islands = islands_of(2, every=2)
    run(islands, [1, 2])
    momentum = islands[0].outer.state()["momentum.0.0"].copy()
    for island in islands:
        island.tokens = 0.0
    run(islands, [3])
    own = drift(0)(islands[0].weights, 4)
    run(islands, [4])
    require_same_weights(islands[0].weights, own)
    assert np.array_equal(islands[0].outer.state()["momentum.0.0"], momentum)


STREAMS = [
    {"every": 6, "fragments": 3, "overlap": 1, "mixing": 0.5},
    {"every": 6, "fragments": 2, "overlap": 2, "bits": 4},
    {"every": 7, "fragments": 3, "overlap": 1, "mixing": 0.25, "bits": 8},
]


@pytest.mark.parametrize("settings", STREAMS)
def test_streams_have_the_same_outer_state_in_all_islands(settings):
    islands = islands_of(3, **settings)
    run(islands, range(1, 22))
    assert same_outer(islands)
    assert all(np.abs(momentum).max() > 0 for blocks in islands[0].outer.momenta for momentum in blocks)


@pytest.mark.parametrize("settings", STREAMS)
@pytest.mark.parametrize("leaves", [1, 3, 4])
def test_an_island_that_comes_back_has_the_state_of_the_others(settings, leaves):
    """It leaves at the end of a period; the others go on, and it comes back two periods later."""
    end = OuterSettings(**settings).end
    islands = islands_of(3, **settings)
    run(islands, range(1, end(leaves) + 1))
    stay = islands[:2]
    run(stay, range(end(leaves) + 1, end(leaves + 2) + 1))
    back = Island(DiLoCo(OuterSettings(**settings), stacked=STACKED), first_weights(1), drift(7))
    back.outer.load_state({name: array.copy() for name, array in stay[1].outer.state().items()})
    back.weights = back.outer.weights(back.weights)
    assert same_outer([*stay, back])
    run([*stay, back], range(end(leaves + 2) + 1, end(leaves + 6) + 1))
    assert same_outer([*stay, back])


def test_a_state_is_kept_as_arrays_of_the_weights():
    """As a checkpoint has it: outer weights and momentum by name."""
    (island,) = islands_of(1, every=2, fragments=2)
    run([island], range(1, 9))
    zeros = [{name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(2)]
    kept = island.outer.weights(zeros[0]), island.outer.momentum(zeros[1])
    again = DiLoCo(island.outer.settings, stacked=STACKED)
    again.begin(*kept)
    assert all(array.tobytes() == again.state()[name].tobytes() for name, array in island.outer.state().items())
    assert any(np.abs(array).max() > 0 for array in kept[1].values())


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_a_gradient_that_is_not_finite_is_refused_by_all(bits):
    islands = islands_of(2, every=2, bits=bits)
    run(islands, [1, 2])
    before = {name: array.copy() for name, array in islands[0].outer.state().items()}
    islands[1].inner = lambda weights, number: {**weights, "norm": np.array([1, np.nan, 1, 1], np.float32)}
    run(islands, [3])

    def refused(island, member):
        with pytest.raises(CannotRunError, match="the outer gradient of step 4 is not finite"):
            island.step(4, member)

    together([partial(refused, island, member) for island, member in zip(islands, members(2), strict=True)])
    assert all(np.array_equal(array, before[name]) for name, array in islands[0].outer.state().items())
    islands[1].inner = drift(1)
    islands[1].weights = islands[1].outer.weights(islands[1].weights)
    run(islands, [5, 6])
    assert same_outer(islands)
    assert np.all(np.isfinite(islands[1].weights["norm"]))


def test_periods():
    def ends(**settings):
        periods = OuterSettings(**settings)
        numbers = [periods.number(step) for step in range(15)]
        assert numbers == [max(n for n in range(16) if periods.end(n) <= step) for step in range(15)]
        return [periods.end(number) for number in range(1, numbers[-1] + 1)]

    assert ends(every=1) == list(range(1, 15))
    assert ends(every=5) == [5, 10]
    assert ends(every=6, fragments=2) == [3, 6, 9, 12]
    assert ends(every=7, fragments=2) == [3, 7, 10, 14]
    assert ends(every=7, fragments=3, overlap=1) == [2, 4, 7, 9, 11, 14]


def test_differences_are_taken_before_the_end():
    """With an overlap of 2 the update of step 3 has what one of step 1 has."""
    early, late = islands_of(2, every=3, overlap=2), islands_of(2, every=1)
    run(early, [1, 2, 3])
    run(late, [1])
    require_same_weights(early[0].weights, late[0].weights)


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_bytes_between_islands(bits):
    """A round sends what one synchronous float32 sum would, times bits / 32, and the count of tokens."""
    size = 1 << 16
    outers = [DiLoCo(OuterSettings(every=2, bits=bits)) for _ in range(4)]
    group, weights = members(4), {"layers": np.zeros((4, size // 4), np.float32)}
    for outer in outers:
        outer.begin(weights)
    together([partial(outer.after_step, 2, weights, member, 1.0) for outer, member in zip(outers, group, strict=True)])
    synchronous = 2 * 3 / 4 * 4 * size
    assert max(group[0].shared.sent_bytes) / synchronous <= {32: 1.05, 8: 1.05 / 4, 4: 1.2 / 8}[bits]
    assert max(group[0].shared.sent_bytes) / synchronous >= bits / 32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "outer_every=0, at least 1"),
        ({"every": 4, "fragments": 5}, "outer_fragments=5 must be 1 to outer_every=4"),
        ({"every": 4, "overlap": 4}, "outer_overlap=4 must be 0 to 3"),
        ({"every": 7, "fragments": 3, "overlap": 2}, "outer_overlap=2 must be 0 to 1"),
        ({"every": 4, "rate": 0}, "outer_rate must be above 0"),
        ({"every": 4, "momentum": 1.0}, "outer_momentum in"),
        ({"every": 4, "mixing": 1.5}, "outer_mixing in"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(InputError, match=words.replace("[", r"\[")):
        OuterSettings(**settings)


def test_local_sgd_has_no_rate_of_its_own():
    given = {"rate": 0.3, "momentum": 0.8, "every": 5, "fragments": 2}
    assert OuterSettings.of("diloco", **given) == OuterSettings(**given)
    assert OuterSettings.of("local-sgd", **given) == OuterSettings(every=5, rate=1.0, momentum=0.0, fragments=2)
