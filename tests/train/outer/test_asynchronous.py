"""Asynchronous SGD: its formula, islands of different speeds, staleness, failures, and the state in all islands."""

import time
from functools import partial

import numpy as np
import pytest
from benchmarks.asynchronous_sgd import Arrival, AsynchronousSGD

from meshwright.core.errors import CannotRunError
from meshwright.train.outer.diloco import DiLoCo, OuterSettings
from tests.islands.threads import members, together
from tests.train.outer.islands import (
    SHAPES,
    Island,
    copied,
    drift,
    first_weights,
    require_same_weights,
    run,
    same_outer,
)


def islands_of(count, **settings):
    return [Island(AsynchronousSGD(OuterSettings(**settings)), first_weights(), drift(rank)) for rank in range(count)]


def run_apart(islands, num_steps, seconds=()):
    """Runs all islands, each with its own number of steps and seconds a step, until all have settled."""

    def steps_of(island, member, count, step_s):
        for number in range(1, count + 1):
            time.sleep(step_s)
            island.step(number, member)
        island.outer.settle()

    seconds = seconds or [0.0] * len(islands)
    calls = zip(islands, members(len(islands)), num_steps, seconds, strict=True)
    together([partial(steps_of, *call) for call in calls])


def test_one_island_is_diloco():
    """Each round has all islands: the delayed momentum is that of Nesterov."""
    (alone,) = islands_of(1, every=2)
    run_apart([alone], [12])
    (plain,) = [Island(DiLoCo(OuterSettings(every=2)), first_weights(), drift(0))]
    run([plain], range(1, 13))
    assert alone.outer.updates == 6
    assert alone.outer.arrivals == [Arrival(update, 0, 0) for update in range(1, 7)]
    for name in SHAPES:
        np.testing.assert_allclose(alone.weights[name], plain.weights[name], rtol=1e-5, atol=1e-6)


def replayed(settings, power, arrivals, differences, count):
    """The formula in NumPy: outer weights after updates of these arrivals, from each island's differences in order."""
    outer = first_weights()
    momentum, gathered = ({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(2))
    num_gathered = 0
    queues = [list(own) for own in differences]
    for update in range(1, arrivals[-1].update + 1):
        present = [arrival for arrival in arrivals if arrival.update == update]
        own = [queues[arrival.rank].pop(0) for arrival in present]
        num_gathered += len(present)
        for name in SHAPES:
            g = sum(
                difference[name] / (1 + arrival.staleness) ** power / count
                for difference, arrival in zip(own, present, strict=True)
            )
            outer[name] = outer[name] - settings.rate * g
            gathered[name] = gathered[name] + g
            if num_gathered >= count:
                momentum[name] = settings.momentum * momentum[name] + gathered[name]
                outer[name] = outer[name] - settings.rate * settings.momentum * momentum[name]
                gathered[name] = np.zeros_like(gathered[name])
        num_gathered -= count if num_gathered >= count else 0
    assert not any(queues)
    return outer


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_islands_of_different_speeds(power):
    """The slow do not hold up the fast; every difference counts once; all have the same bits."""
    settings = OuterSettings(every=2, rate=0.5, momentum=0.6)
    islands = [
        Island(AsynchronousSGD(settings, staleness_power=power), first_weights(), drift(rank)) for rank in range(3)
    ]
    differences = [[] for _ in islands]

    def kept(rank, inner, weights, number):
        if number % 2:
            began[rank] = copied(weights)
        new = inner(weights, number)
        if number % 2 == 0:
            differences[rank].append({name: began[rank][name] - new[name] for name in SHAPES})
        return new

    began = [{} for _ in islands]
    for rank, island in enumerate(islands):
        island.inner = partial(kept, rank, island.inner)
    run_apart(islands, [24, 12, 6], seconds=[0.01, 0.02, 0.08])
    arrivals = islands[0].outer.arrivals
    assert all(island.outer.arrivals == arrivals for island in islands)
    counts = [[arrival.rank for arrival in arrivals].count(rank) for rank in range(3)]
    assert counts == [12, 6, 3]
    staleness = [max(arrival.staleness for arrival in arrivals if arrival.rank == rank) for rank in range(3)]
    assert staleness[2] >= 2  # the fast made updates while the slow computed
    assert same_outer(islands)
    expected = replayed(settings, power, arrivals, differences, 3)
    final = islands[0].outer.weights(first_weights(1))
    for name in SHAPES:
        np.testing.assert_allclose(final[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits(bits):
    islands = islands_of(3, every=2, bits=bits)
    run_apart(islands, [8, 8, 6])
    assert same_outer(islands)
    assert all(np.all(np.isfinite(block)) for block in islands[0].outer.state().values())


def test_without_tokens_nothing_is_sent():
    islands = islands_of(2, every=1)
    islands[1].tokens = 0.0
    run_apart(islands, [4, 4])
    assert [arrival.rank for arrival in islands[1].outer.arrivals] == [0] * 4
    assert same_outer(islands)


def test_differences_that_are_not_finite_stay_at_home():
    islands = islands_of(2, every=1)
    islands[1].inner = lambda weights, number: {**weights, "norm": np.full(4, np.inf, np.float32)}

    def failing(island, member):
        with pytest.raises(CannotRunError, match="the outer gradient of step 1 is not finite"):
            island.step(1, member)
        island.weights, island.inner = island.outer.weights(island.weights), drift(1)
        island.step(2, member)
        island.outer.settle()

    def steps_of(island, member):
        for number in (1, 2):
            island.step(number, member)
        island.outer.settle()

    group = members(2)
    together([partial(steps_of, islands[0], group[0]), partial(failing, islands[1], group[1])])
    assert sorted(arrival.rank for arrival in islands[0].outer.arrivals) == [0, 0, 1]
    assert same_outer(islands)
    assert np.all(np.isfinite(islands[0].outer.weights(first_weights())["norm"]))


def test_an_island_is_lost_and_another_comes_with_the_state_of_a_peer():
    """What was not sent in the group that broke is sent in the next."""
    islands = islands_of(3, every=1)
    run_apart(islands, [2, 2, 2])
    updates = islands[0].outer.updates
    lost = members(3)
    lost[0].shared.barrier.abort()

    def failing(island, member):
        with pytest.raises(ConnectionError):
            island.step(3, member)
        island.outer.settle()

    together([partial(failing, *pair) for pair in zip(islands, lost, strict=True)])
    assert all(island.outer.updates == updates for island in islands)
    newcomer = Island(AsynchronousSGD(OuterSettings(every=1)), first_weights(1), drift(9))
    newcomer.outer.load_state(islands[1].outer.state())
    newcomer.weights = newcomer.outer.weights(newcomer.weights)
    world = [*islands[:2], newcomer]
    require_same_weights(newcomer.weights, islands[0].outer.weights(copied(islands[0].weights)))
    for island in islands[:2]:
        island.inner, island.tokens = (lambda weights, number: weights), 0.0
    run_apart(world, [1, 1, 2])
    assert sorted(arrival.rank for arrival in newcomer.outer.arrivals) == [0, 1, 2, 2]
    assert same_outer(world)
