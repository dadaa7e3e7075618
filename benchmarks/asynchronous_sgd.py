"""Asynchronous SGD without a server: an island's differences count when they are there, and nobody waits for the slow.

A thread of each island takes part in rounds of sums all the time. A round applies whatever the islands have ready, in
all of them alike, so that each holds what a server would. An island that is ready waits for its round: for the network,
not for the other islands' steps. `benchmarks/diloco.py` runs it; `launch --elastic` does not.

Sources: Liu et al., Asynchronous Local-SGD Training for Language Modeling (arXiv 2401.09135), for the delayed Nesterov
momentum; Xie et al., Asynchronous Federated Optimization (arXiv 1903.03934), for polynomial weights of staleness.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition
from typing import NamedTuple

import numpy as np

from meshwright.core.errors import CannotRunError
from meshwright.islands.codec import codec_of
from meshwright.islands.group import IslandGroup
from meshwright.nn.weights import Params
from meshwright.train.outer.diloco import OuterSettings, OuterWeights, all_finite, named
from meshwright.train.outer.fragments import read

_IDLE_S = 0.01
"""Time between rounds in which no island has anything."""


class Arrival(NamedTuple):
    """Differences of one island in an update: ``staleness`` is the number of updates between the one that made the
    weights that it started from and this one."""

    update: int
    rank: int
    staleness: int


class AsynchronousSGD(OuterWeights):
    """The outer optimizer of one process of an island, which calls it at its own speed, as it calls `DiLoCo`.

    Of M islands those of a set R are ready in a round; g_i are the differences of island i over H inner steps, which
    began s_i updates ago, and a is the ``staleness_power``::

        g        = sum over R of g_i / (1 + s_i)^a / M
        outer    = outer - rate g
        momentum = sum of g since the last time + mu momentum        once in M arrivals, and then
        outer    = outer - rate mu momentum

    If all islands arrive in each round this is DiLoCo with equal weights. ``arrivals`` lists all that were applied.
    """

    def __init__(self, settings: OuterSettings, *, staleness_power: float = 0.5) -> None:
        super().__init__(settings)
        self.staleness_power = staleness_power

    def begin(self, weights: Params, momentum: Params | None = None) -> None:
        """Takes these weights as the outer ones, with this momentum or none."""
        super().begin(weights, momentum)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outer")
        self._gathered, self._own = ([np.zeros_like(block) for block in flat(self.outer)] for _ in range(2))
        self._tokens, self._num_gathered, self.updates = 0.0, 0, 0
        self._changed, self._is_ready, self._is_pausing, self._is_running = Condition(), False, False, False
        self._rounds: Future[None] | None = None
        self.arrivals: list[Arrival] = []
        self._take()

    def due(self, step: int) -> bool:
        """True if `after_step` has something to do after this step."""
        return step % self.settings.every == 0

    def after_step(self, step: int, weights: Params, group: IslandGroup, tokens: float) -> Params:
        """Returns the outer weights after the round that has this island's differences, where `due`.

        Without tokens nothing is sent. The group belongs to the thread until `settle`. Raises what a round raised: the
        next call sends the differences in the group that it is given. Raises CannotRunError, in this island alone, for
        differences that are not finite.
        """
        self._tokens += tokens
        if not self.due(step):
            return weights
        if self._tokens and not self._is_ready:
            for own, inner in zip(self._own, self._read(weights), strict=True):
                own -= inner  # of the outer weights that it began from
            if not all_finite(self._own):
                self._take()
                raise CannotRunError(f"the outer gradient of step {step} is not finite; it is not sent.")
            self._is_ready, self._tokens = True, 0.0
        if not self._rounds:
            self._is_pausing, self._is_running = False, True
            self._rounds = self._thread.submit(self._run, group)
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_ready and self._is_running))
        if not self._is_running:
            rounds, self._rounds = self._rounds, None
            rounds.result()
        self._take()
        return self.weights(weights)

    def settle(self) -> None:
        """Takes part in rounds until all islands have called this: before the group changes, and at the end."""
        self._is_pausing = True
        if self._rounds:
            self._rounds.exception()
        self._rounds = None

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def state(self) -> dict[str, np.ndarray]:
        """Returns the outer state: after `settle` the same in all islands."""
        counts = {"counts": np.array([self.updates, self._num_gathered])}
        return super().state() | named("gathered", [self._gathered]) | counts

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the state of another island after `begin`."""
        super().load_state(arrays)
        self.updates, self._num_gathered = arrays["counts"].tolist()
        for name, block in named("gathered", [self._gathered]).items():
            block[...] = arrays[name]
        self._take()

    def weights(self, weights: Params) -> Params:
        """Returns the outer weights."""
        with self._changed:
            return super().weights(weights)

    def _read(self, weights: Params) -> list[np.ndarray]:
        return flat([read(weights, fragment) for fragment in self.fragments])

    def _take(self) -> None:
        """Copies the outer weights, from which the next inner steps begin."""
        with self._changed:
            for own, block in zip(self._own, flat(self.outer), strict=True):
                own[...] = block
            self._began = self.updates

    def _run(self, group: IslandGroup) -> None:
        """Takes part in rounds until all islands pause and have nothing.

        In each an island says if it is ready, since when, and if it pauses.
        """
        try:
            while True:
                said = np.zeros((group.size, 3), np.float32)
                said[group.rank] = self._is_ready, self._began, self._is_pausing
                (rows,) = group.sum([said])
                ready_ranks = np.flatnonzero(rows[:, 0])
                if ready_ranks.size:
                    self._round(group, ready_ranks, (self.updates - rows[:, 1]).astype(int))
                elif rows[:, 2].all():
                    return
                else:
                    time.sleep(_IDLE_S)
        finally:
            with self._changed:
                self._is_running = False
                self._changed.notify_all()

    def _round(self, group: IslandGroup, ready_ranks: np.ndarray, staleness: np.ndarray) -> None:
        """Sums and applies what is ready."""
        settings, is_ready = self.settings, group.rank in ready_ranks
        share = np.float32((1.0 + staleness[group.rank]) ** -self.staleness_power / group.size if is_ready else 0)
        own = [share * block if is_ready else np.zeros_like(block) for block in self._own]
        gradients = group.sum(own, codec=codec_of(settings.bits))
        rate, mu = np.float32(settings.rate), np.float32(settings.momentum)
        with self._changed:
            self.updates, self._num_gathered = self.updates + 1, self._num_gathered + ready_ranks.size
            has_momentum = mu > 0 and self._num_gathered >= group.size
            arrays = zip(flat(self.outer), flat(self.momenta), self._gathered, gradients, strict=True)
            for outer, momentum, gathered, gradient in arrays:
                outer -= rate * gradient
                gathered += gradient
                if has_momentum:
                    momentum *= mu
                    momentum += gathered
                    gathered[...] = 0
                    outer -= rate * mu * momentum
            self._num_gathered -= group.size if has_momentum else 0
            self.arrivals += [Arrival(self.updates, rank, int(staleness[rank])) for rank in ready_ranks.tolist()]
            self._is_ready = self._is_ready and not is_ready
            self._changed.notify_all()


def flat(lists: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """Returns the arrays of all lists in one."""
    return [block for blocks in lists for block in blocks]
