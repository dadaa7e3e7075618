"""Islands of a test: each has weights, an outer optimizer, and an inner step that is a function."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from meshwright.islands.group import IslandGroup
from meshwright.nn.weights import Params
from tests.islands.threads import members, together

Inner = Callable[[Params, int], Params]


SHAPES = {"embed": (11, 4), "layers": (5, 4, 6), "norm": (4,)}
STACKED = {"layers"}


def first_weights(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def drift(seed):
    """An inner step that adds noise of its own to each weight, as a new array."""

    def inner(weights, number):
        rng = np.random.default_rng([seed, number])
        noise = {name: rng.standard_normal(array.shape).astype(np.float32) for name, array in weights.items()}
        return {name: array - np.float32(0.01) * noise[name] for name, array in weights.items()}

    return inner


def require_same_weights(left, right):
    for name, array in left.items():
        assert np.asarray(array).tobytes() == np.asarray(right[name]).tobytes(), name


class Island:
    """One island; ``inner`` makes its next weights from the present ones and the number of the step."""

    def __init__(self, outer, weights: Params, inner: Inner, *, tokens: float = 1.0) -> None:
        self.outer, self.weights, self.inner, self.tokens = outer, weights, inner, tokens
        self.history = [copied(weights)]
        outer.begin(weights)

    def step(self, number: int, group: IslandGroup) -> None:
        self.weights = self.inner(self.weights, number)
        self.weights = self.outer.after_step(number, self.weights, group, self.tokens)
        self.history.append(copied(self.weights))


def copied(weights: Params) -> Params:
    return {name: np.array(array) for name, array in weights.items()}


def run(islands: Sequence[Island], steps: Iterable[int]) -> None:
    """Steps all islands at the same time, as one group."""
    group = members(len(islands))

    def steps_of(island: Island, member: IslandGroup) -> None:
        for number in numbers:
            island.step(number, member)

    numbers = list(steps)
    together([partial(steps_of, *pair) for pair in zip(islands, group, strict=True)])


def same_outer(islands: Sequence[Island]) -> bool:
    """True if the outer states have the same bits."""
    states = [island.outer.state() for island in islands]
    return all(
        state.keys() == states[0].keys() and all(state[name].tobytes() == states[0][name].tobytes() for name in state)
        for state in states
    )
