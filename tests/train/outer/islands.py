"""Islands of a test: each has weights, an outer optimizer, and an inner step that is a function."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from meshwright.islands.group import IslandGroup
from meshwright.nn.weights import Params
from tests.islands.threads import members, together

Inner = Callable[[Params, int], Params]


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
