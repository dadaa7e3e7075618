"""DiLoCo: islands train apart, and every H steps an outer optimizer moves the weights that they share.

How to use it::

    outer = DiLoCo(OuterSettings(every=30), stacked=step.stacked)
    outer.begin(weights)                                  # the same in every island
    for number in range(1, steps + 1):
        ...                                               # an inner step
        if outer.due(number):
            weights = outer.after_step(number, weights, group, tokens)

Sources: Douillard et al., DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512). Where the papers leave a
choice, MaxText's (trainers/diloco) and torchft's (local_sgd.py), which agree but for the schedule; that is torchft's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from meshwright.core.errors import CannotRunError, InputError
from meshwright.islands.codec import Bits, codec_of
from meshwright.islands.group import IslandGroup
from meshwright.nn.weights import Params
from meshwright.train.outer.fragments import Fragment, fragments_of, read, written

_CHUNK = 1 << 18
"""Values that are updated at a time: their temporary arrays stay in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """Choices of an outer optimizer: SGD at ``rate`` with Nesterov's ``momentum``, ``every`` so many inner steps.

    Local SGD, the mean of the weights, has rate 1 and momentum 0. ``bits`` are those of a value between islands.
    Each of ``fragments`` is exchanged once in ``every`` steps, during ``overlap`` further inner steps; of the weights
    at their end the share ``mixing`` stays an island's own. ``staleness_power`` is of `AsynchronousSGD`, which has no
    fragments. The rate and momentum are those of DiLoCo's paper. Raises InputError for values that cannot be.
    """

    every: int
    rate: float = 0.7
    momentum: float = 0.9
    bits: Bits = 32
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    staleness_power: float = 0.5

    def __post_init__(self) -> None:
        if self.every < 1 or not 1 <= self.fragments <= self.every:
            raise InputError(f"outer_fragments={self.fragments} must be 1 to outer_every={self.every}, at least 1.")
        if not 0 <= self.overlap < self.every:
            raise InputError(f"outer_overlap={self.overlap} must be 0 to {self.every - 1}, below outer_every.")
        if not (self.rate > 0 and 0 <= self.momentum < 1 and 0 <= self.mixing <= 1):
            raise InputError("outer_rate must be above 0, outer_momentum in [0, 1), outer_mixing in [0, 1].")


class OuterWeights:
    """Outer weights and their momentum, float32 in host memory, the same in every island after the same updates."""

    def __init__(self, settings: OuterSettings, *, stacked: Collection[str] = ()) -> None:
        self.settings, self.stacked = settings, stacked
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outer")

    def begin(self, weights: Params) -> None:
        """Takes these weights as the outer ones, with no momentum."""
        self.fragments: list[Fragment] = fragments_of(weights, self.stacked, self.settings.fragments)
        self.outer = [[np.array(block, order="C") for block in read(weights, part)] for part in self.fragments]
        self.momenta = [[np.zeros_like(block) for block in blocks] for blocks in self.outer]

    def weights(self, weights: Params) -> Params:
        """Returns the weights with all outer ones in their place: those to evaluate, or that a newcomer begins with."""
        for fragment, blocks in zip(self.fragments, self.outer, strict=True):
            weights = written(weights, fragment, blocks)
        return weights

    def state(self) -> dict[str, np.ndarray]:
        """Returns the outer state for a newcomer or a checkpoint: the arrays in use, the same in all islands."""
        return named("outer", self.outer) | named("momentum", self.momenta)

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the state of another island, or of a checkpoint, after `begin`. This island has no tokens yet."""
        for name, block in OuterWeights.state(self).items():
            block[...] = arrays[name]

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


def named(name: str, lists: Sequence[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns arrays by the name of a state and their place in its lists."""
    return {f"{name}.{i}.{j}": block for i, blocks in enumerate(lists) for j, block in enumerate(blocks)}


def all_finite(blocks: Sequence[np.ndarray]) -> bool:
    """True if no value is a NaN or infinite; needs no temporary arrays of their size."""
    return all(bool(np.isfinite(np.add.reduce(block, axis=None, dtype=np.float64))) for block in blocks)


@dataclass
class _Flight:
    """The exchange of a fragment: the island's own differences times ``share``, then the mean of all islands."""

    fragment: int
    end_step: int
    tokens: float
    blocks: list[np.ndarray]
    share: float = 1.0
    result: Future[list[np.ndarray]] | None = None
    mean: list[np.ndarray] | None = None


class DiLoCo(OuterWeights):
    """The outer optimizer of one process of an island.

    Fragment p of P is updated at steps t with t = H (p + 1) / P (rounded down) modulo H, from differences taken
    ``overlap`` steps earlier. With ``inner`` of each island weighted by its tokens since its last exchange::

        mean     = sum(tokens (outer - inner)) / sum(tokens)
        momentum = mean + mu momentum                        as optax.sgd and torch.optim.SGD, no dampening
        outer    = outer - rate (mean + mu momentum)
        inner    = mixing inner + (1 - mixing) outer         the inner optimizer's moments stay

    If no island has tokens nothing changes. All members call `after_step` at the same steps, and `begin` with the
    same weights; the outer state then has the same bits in all. ``confirm`` is called between a sum and its update:
    it raises unless all members are known to have the sum.
    """

    confirm: Callable[[], None] = staticmethod(lambda: None)

    def begin(self, weights: Params) -> None:
        """Takes these weights as the outer ones, with no momentum."""
        super().begin(weights)
        self.updates, self._tokens = [0] * len(self.fragments), [0.0] * len(self.fragments)
        self.flights: list[_Flight] = []

    def due(self, step: int) -> bool:
        """True if `after_step` has something to do after this step."""
        return bool(self._fragments_at(step) or self._fragments_at(step + self.settings.overlap))

    def after_step(self, step: int, weights: Params, group: IslandGroup, tokens: float) -> Params:
        """Returns the weights to go on with; ``tokens`` are this island's since the last call.

        Begins the exchange of a fragment, in a thread that has the group until the exchange ends; waits for the one
        that must have ended. If an exchange fails its error is raised and nothing has changed: the next call, at the
        same step with no tokens, exchanges the same differences again in the group that it is given.
        """
        self._tokens = [count + tokens for count in self._tokens]
        for fragment in self._fragments_at(step + self.settings.overlap):
            if fragment not in (flight.fragment for flight in self.flights):
                outer, inner = self.outer[fragment], read(weights, self.fragments[fragment])
                blocks = [a - b for a, b in zip(outer, inner, strict=True)]
                end_step = step + self.settings.overlap
                self.flights.append(_Flight(fragment, end_step, self._tokens[fragment], blocks))
                self._tokens[fragment] = 0.0
        for flight in self.flights:
            if flight.result is None and flight.mean is None:
                flight.result = self._thread.submit(self._exchange, flight, group)
        for flight in [flight for flight in self.flights if flight.end_step <= step]:
            if flight.result:
                result, flight.result = flight.result, None
                flight.mean = result.result()
            self.confirm()
            weights = self._land(flight, weights)
        return weights

    def agree(self, newest: int, weights: Params) -> Params:
        """Returns the weights after updates that another member has made, before the first step in a new group.

        ``newest`` is the largest sum of ``updates`` of its members. Means that no member has applied are forgotten:
        the group exchanges these differences again. Raises CannotRunError if this member needs the state of another.
        """
        self.settle()
        while sum(self.updates) < newest:
            if not self.flights or self.flights[0].mean is None:
                raise CannotRunError("this island has missed an update of the others. Load the state of another.")
            weights = self._land(self.flights[0], weights)
        for flight in self.flights:
            flight.mean = None
        return weights

    def settle(self) -> None:
        """Waits until no exchange is under way, before the group changes; the failed ones start again in the next."""
        for flight in self.flights:
            if flight.result is not None:
                flight.mean = None if flight.result.exception() else flight.result.result()
                flight.result = None

    def state(self) -> dict[str, np.ndarray]:
        """Settles, then returns the state, with a row of ``flights`` for each exchange that has not landed: fragment,
        last step, and 1 if its mean is known."""
        self.settle()
        rows = [[flight.fragment, flight.end_step, flight.mean is not None] for flight in self.flights]
        counts = {"updates": np.array(self.updates), "flights": np.array(rows, np.int64).reshape(-1, 3)}
        return super().state() | named("mean", [flight.mean or [] for flight in self.flights]) | counts

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the state of another island after `begin`; this one joins exchanges that have not ended, with no
        tokens."""
        super().load_state(arrays)
        self.updates, self._tokens, self.flights = arrays["updates"].tolist(), [0.0] * len(self.fragments), []
        for i, (fragment, end_step, has_mean) in enumerate(arrays["flights"].tolist()):
            flight = _Flight(fragment, end_step, 0.0, [np.zeros_like(block) for block in self.outer[fragment]])
            if has_mean:
                names = [f"mean.{i}.{j}" for j in range(len(flight.blocks))]
                flight.mean = [np.array(arrays[name]) for name in names if name in arrays]  # none without tokens
            self.flights.append(flight)

    def _fragments_at(self, step: int) -> list[int]:
        """Returns the fragments that are updated at a step."""
        every, count = self.settings.every, self.settings.fragments
        return [p for p in range(count) if (step - every * (p + 1) // count) % every == 0]

    def _exchange(self, flight: _Flight, group: IslandGroup) -> list[np.ndarray]:
        """Returns the mean of all islands' differences, [] if no island has tokens."""
        own_tokens = np.array([flight.tokens], np.float32)
        (total_tokens,) = group.sum([own_tokens])
        if total_tokens[0] == 0:
            return []
        share = float(own_tokens[0]) / float(total_tokens[0])
        for block in flight.blocks:
            if flight.tokens:
                block *= np.float32(share / flight.share)
            else:
                block[...] = 0
        flight.share = share or 1.0
        return group.sum(flight.blocks, codec=codec_of(self.settings.bits))

    def _land(self, flight: _Flight, weights: Params) -> Params:
        """Returns the weights after the update of the fragment."""
        mean, fragment = flight.mean, flight.fragment
        assert mean is not None
        pieces, outer, alpha = self.fragments[fragment], self.outer[fragment], np.float32(self.settings.mixing)
        self.flights.remove(flight)
        if not mean:
            return weights
        if not all_finite(mean):
            raise CannotRunError(f"the outer gradient of step {flight.end_step} is not finite; weights stay as before.")
        for block, momentum, gradient in zip(outer, self.momenta[fragment], mean, strict=True):
            nesterov(block, momentum, gradient, self.settings)
        self.updates[fragment] += 1
        if not alpha:
            return written(weights, pieces, outer)
        inner = read(weights, pieces)
        return written(weights, pieces, [alpha * a + (1 - alpha) * b for a, b in zip(inner, outer, strict=True)])


def nesterov(outer: np.ndarray, momentum: np.ndarray, gradient: np.ndarray, settings: OuterSettings) -> None:
    """Updates the outer weights and the momentum in place, as `DiLoCo` says, in float32."""
    mu, rate = np.float32(settings.momentum), np.float32(settings.rate)
    arrays = (outer.reshape(-1), momentum.reshape(-1), gradient.reshape(-1))
    for start in range(0, outer.size, _CHUNK):
        weight, trace, mean = (array[start : start + _CHUNK] for array in arrays)
        trace *= mu
        trace += mean
        weight -= rate * (mean + mu * trace)
