"""DiLoCo: islands train independently, and every H steps an outer optimizer updates their common weights.

`train.elastic.outer_work` runs it between islands that may leave and return. In your own loop::

    outer = DiLoCo(OuterSettings(every=30), stacked=step.stacked)
    outer.begin(weights)                                  # equal weights in every island
    for number in range(1, steps + 1):
        ...                                               # an inner step
        weights = outer.after_step(number, weights, group, tokens)

Sources: Douillard et al., DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512). Where the papers leave a
choice, this follows MaxText (trainers/diloco) and torchft (local_sgd.py), and torchft where their schedules differ.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

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
    """Settings of an outer optimizer: SGD at ``rate`` with Nesterov's ``momentum``, once in ``every`` inner steps.

    Local SGD, the mean of the weights, has rate 1 and momentum 0. ``bits`` is the size of a value sent between islands.
    Each of ``fragments`` is exchanged once in ``every`` steps, during the last ``overlap`` steps of its period; its new
    weights are ``mixing`` times the island's plus 1 - ``mixing`` times the outer ones. The default rate and momentum
    are from DiLoCo's paper. Raises InputError for invalid values.
    """

    every: int
    rate: float = 0.7
    momentum: float = 0.9
    bits: Bits = 32
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1 or not 1 <= self.fragments <= self.every:
            raise InputError(f"outer_fragments={self.fragments} must be 1 to outer_every={self.every}, at least 1.")
        if not 0 <= self.overlap < self.every // self.fragments:
            period_text = f"0 to {self.every // self.fragments - 1}, below outer_every / outer_fragments"
            raise InputError(f"outer_overlap={self.overlap} must be {period_text}: one sum is in flight at a time.")
        if not (self.rate > 0 and 0 <= self.momentum < 1 and 0 <= self.mixing <= 1):
            raise InputError("outer_rate must be above 0, outer_momentum in [0, 1), outer_mixing in [0, 1].")

    @classmethod
    def of(cls, sync: Literal["diloco", "local-sgd"], *, rate: float, momentum: float, **fields: Any) -> Self:
        """Returns the settings for a strategy's ``islands_sync``; for local SGD the rate is 1 and the momentum 0."""
        rate, momentum = (rate, momentum) if sync == "diloco" else (1.0, 0.0)
        return cls(rate=rate, momentum=momentum, **fields)

    def end(self, number: int) -> int:
        """Returns the inner step after which exchange ``number``, from 1, updates the weights of fragment (number - 1)
        mod ``fragments``."""
        return self.every * number // self.fragments

    def number(self, step: int) -> int:
        """Returns how many exchanges have ended after inner step ``step``."""
        return ((step + 1) * self.fragments - 1) // self.every


class OuterWeights:
    """Outer weights and their momentum, float32 in host memory; equal in all islands that made equal updates."""

    def __init__(self, settings: OuterSettings, *, stacked: Collection[str] = ()) -> None:
        self.settings, self.stacked = settings, stacked

    def begin(self, weights: Params, momentum: Params | None = None) -> None:
        """Starts from copies of ``weights`` as outer weights, and of ``momentum`` (default: zeros)."""
        self.fragments: list[Fragment] = fragments_of(weights, self.stacked, self.settings.fragments)
        self.outer = self._copied(weights)
        self.momenta = [[np.zeros_like(b) for b in blocks] for blocks in self.outer]
        if momentum:
            self.momenta = self._copied(momentum)

    def weights(self, weights: Params) -> Params:
        """Returns ``weights`` with the outer values, to evaluate or to start a joining island with."""
        return self._written(weights, self.outer)

    def momentum(self, weights: Params) -> Params:
        """Returns arrays like ``weights`` with the momentum's values."""
        return self._written(weights, self.momenta)

    def _copied(self, weights: Params) -> list[list[np.ndarray]]:
        return [[np.array(block, order="C") for block in read(weights, part)] for part in self.fragments]

    def _written(self, weights: Params, lists: Sequence[list[np.ndarray]]) -> Params:
        for fragment, blocks in zip(self.fragments, lists, strict=True):
            weights = written(weights, fragment, blocks)
        return weights

    def state(self) -> dict[str, np.ndarray]:
        """Returns outer weights and momentum by name, not copied, for a joining island or a checkpoint."""
        return named("outer", self.outer) | named("momentum", self.momenta)

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies the state of another island, or of a checkpoint, into this one, on which `begin` was called."""
        for name, block in OuterWeights.state(self).items():
            block[...] = arrays[name]


def named(name: str, lists: Sequence[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the arrays by names ``name.i.j``, with their indices in ``lists``."""
    return {f"{name}.{i}.{j}": block for i, blocks in enumerate(lists) for j, block in enumerate(blocks)}


def all_finite(blocks: Sequence[np.ndarray]) -> bool:
    """True if no value is a NaN or infinite; needs no temporary arrays of their size."""
    return all(bool(np.isfinite(np.add.reduce(block, axis=None, dtype=np.float64))) for block in blocks)


class DiLoCo(OuterWeights):
    """The outer optimizer of one process of an island.

    Fragment p of P is updated at steps t with t = H (p + 1) / P (rounded down) modulo H, from differences taken
    ``overlap`` steps earlier. With ``inner`` of each island weighted by its tokens since its last exchange::

        mean     = sum(tokens (outer - inner)) / sum(tokens)
        momentum = mean + mu momentum                        as optax.sgd and torch.optim.SGD, no dampening
        outer    = outer - rate (mean + mu momentum)
        inner    = mixing inner + (1 - mixing) outer         the inner optimizer's moments stay

    If no island has tokens nothing changes. All members must begin with equal weights and make equal updates; their
    outer states are then equal to the last bit.
    """

    def begin(self, weights: Params, momentum: Params | None = None) -> None:
        """Starts from copies of ``weights`` as outer weights, and of ``momentum`` (default: zeros)."""
        super().begin(weights, momentum)
        self._tokens = [0.0] * len(self.fragments)
        self._flight: tuple[int, list[np.ndarray], float] | None = None

    def add(self, tokens: float) -> None:
        """Counts tokens that this island has read."""
        self._tokens = [count + tokens for count in self._tokens]

    def summands(self, number: int, weights: Params | None) -> tuple[list[np.ndarray], float]:
        """Returns this island's part of the sums of exchange ``number``: differences times tokens, and tokens.

        The fragment's tokens are counted from zero afterwards. Without ``weights``, or tokens, both results are zero.
        """
        fragment = (number - 1) % len(self.fragments)
        outer, (tokens, self._tokens[fragment]) = self.outer[fragment], (self._tokens[fragment], 0.0)
        if not tokens or weights is None:
            return [np.zeros_like(block) for block in outer], 0.0
        blocks = [a - b for a, b in zip(outer, read(weights, self.fragments[fragment]), strict=True)]
        for block in blocks:
            block *= np.float32(tokens)
        return blocks, tokens

    def update(self, number: int, sums: list[np.ndarray], tokens: float, weights: Params) -> Params:
        """Returns the weights after the update of exchange ``number`` by sums over islands of `summands`.

        Raises CannotRunError for sums that are not finite; then nothing has changed.
        """
        fragment, alpha = (number - 1) % len(self.fragments), np.float32(self.settings.mixing)
        pieces, outer = self.fragments[fragment], self.outer[fragment]
        if not tokens:
            return weights
        if not all_finite(sums):
            step = self.settings.end(number)
            raise CannotRunError(f"the outer gradient of step {step} is not finite; weights stay as before.")
        for block, momentum, gradient in zip(outer, self.momenta[fragment], sums, strict=True):
            gradient /= np.float32(tokens)
            nesterov(block, momentum, gradient, self.settings)
        if not alpha:
            return written(weights, pieces, outer)
        inner = read(weights, pieces)
        return written(weights, pieces, [alpha * a + (1 - alpha) * b for a, b in zip(inner, outer, strict=True)])

    def after_step(self, step: int, weights: Params, group: IslandGroup, tokens: float) -> Params:
        """Returns the weights for the next step; ``tokens`` is the number that this island read since the last call.

        All members of the group call it after each step: it sums differences ``overlap`` steps before a period ends,
        and updates weights at its end.
        """
        self.add(tokens)
        settings, number = self.settings, self.settings.number(step + self.settings.overlap)
        if number and settings.end(number) == step + settings.overlap:
            blocks, own_tokens = self.summands(number, weights)
            (total,) = group.sum([np.array([own_tokens], np.float32)])
            self._flight = number, group.sum(blocks, codec=codec_of(settings.bits)), float(total[0])
        if self._flight and settings.end(self._flight[0]) == step:
            flight, self._flight = self._flight, None
            weights = self.update(*flight, weights)
        return weights


def nesterov(outer: np.ndarray, momentum: np.ndarray, gradient: np.ndarray, settings: OuterSettings) -> None:
    """Updates the outer weights and the momentum in place, by the formula of `DiLoCo`, in float32."""
    mu, rate = np.float32(settings.momentum), np.float32(settings.rate)
    arrays = (outer.reshape(-1), momentum.reshape(-1), gradient.reshape(-1))
    for start in range(0, outer.size, _CHUNK):
        weight, trace, mean = (array[start : start + _CHUNK] for array in arrays)
        trace *= mu
        trace += mean
        weight -= rate * (mean + mu * trace)
