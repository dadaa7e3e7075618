"""Work of an island between two exchanges with an outer optimizer: inner steps, then the outer update."""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.core.errors import InputError
from meshwright.islands.exchange import Links
from meshwright.islands.ledger import Ledger, SampleBlock, num_samples, sample_numbers
from meshwright.islands.rounds import Done, Said
from meshwright.nn.weights import Params
from meshwright.parallel.train_step import Metrics, State
from meshwright.spec.strategy import Strategy
from meshwright.train.elastic.work import GradientWork, views
from meshwright.train.outer.diloco import DiLoCo, OuterSettings
from meshwright.train.outer.fragments import exchanged, with_exchanged
from meshwright.train.record.metrics import on_host, over_layers
from meshwright.train.settings import TrainSettings

TOKENS = "tokens"
"""Name under which an island reports its tokens, by which its differences are weighted."""


def outer_settings(islands: Strategy, settings: TrainSettings) -> OuterSettings | None:
    """Returns the outer optimizer's settings for the strategy of all islands, None if they sum gradients. Raises
    InputError for "async-sgd" and for an average of weights, which are not run."""
    sync = islands.islands_sync
    if sync == "gradients":
        return None
    if sync == "async-sgd":
        raise InputError(
            "islands_sync=async-sgd is priced, and run by benchmarks/diloco.py; launch --elastic has gradients, diloco "
            "and local-sgd. Plan one of these."
        )
    if settings.average:
        raise InputError(f"train.average={settings.average:g} is over steps of all islands. Leave it out with {sync}.")
    return OuterSettings.of(
        sync,
        rate=settings.outer_rate,
        momentum=settings.outer_momentum,
        every=islands.outer_every,
        bits=islands.outer_bits,
        fragments=islands.outer_fragments,
        overlap=islands.outer_overlap,
    )


class OuterWork(GradientWork):
    """Work of an island under DiLoCo or local SGD. A round is a period: the inner steps up to a fragment's exchange.

    The last period may be shorter. Optimizer moments are not exchanged; a joining island copies another island's, and
    starts from the outer weights. ``begin_sum`` is called ``overlap`` inner steps before a period's end, and sums
    while these run."""

    begin_sum: Callable[[Sequence[np.ndarray]], None] = staticmethod(lambda arrays: None)

    def __init__(self, outer: OuterSettings, *of_gradients: Any) -> None:
        super().__init__(*of_gradients)
        self.outer = DiLoCo(outer, stacked=self.setup.step.stacked)

    def _compile(self, step: Any, state: State, batch: dict[str, jax.ShapeDtypeStruct]) -> None:
        self.program = step.compile.lower(state, batch).compile()

    @property
    def rounds(self) -> int:
        """The number of periods of the run."""
        return self.outer.settings.number(self.setup.settings.steps - 1) + 1

    @property
    def _period(self) -> range:
        """The inner steps of the current period."""
        assert self.position is not None
        outer, first = self.outer.settings, self.position.step + 1
        return range(first, min(outer.end(outer.number(first - 1) + 1), self.setup.settings.steps) + 1)

    def shared_state(self) -> State:
        """Returns the island's training state with the outer weights in place of its weights."""
        return self._with(self.outer.weights(self._weights()))

    def beside(self) -> dict[str, Params]:
        """Returns the outer weights and momentum, which checkpoints store beside the state."""
        return {"outer": self.outer.weights(self._zeros()), "momentum": self.outer.momentum(self._zeros())}

    # -- what `Rounds` calls ----------------------------------------------------------------------------

    def start(self) -> tuple[int, Ledger]:
        """Restores the newest checkpoint, or makes an initial state. Returns the periods done, and the ledger."""
        step, ledger = super().start()
        with self._open_store() as store:
            held = store.restore_beside({"outer": self._zeros(), "momentum": self._zeros()})
        outer, momentum = (held["outer"], held["momentum"]) if held else (self._weights(), None)
        self.outer.begin(outer, momentum)
        self.state = self.shared_state()
        return (self.rounds if step >= self.setup.settings.steps else self.outer.settings.number(step)), ledger

    def sizes(self, samples: Mapping[int, int]) -> dict[int, int]:
        """Returns each island's samples in the current period, from its ``samples`` in a step."""
        return {island: len(self._period) * count for island, count in samples.items()}

    def compute(
        self, step: int, block: SampleBlock, dealt: dict[int, SampleBlock]
    ) -> tuple[Sequence[np.ndarray], Said]:
        """Runs the inner steps of a period. Returns the weight differences of the fragment due, and all metrics."""
        start_s, job, period = time.perf_counter(), self.setup.job, self._period
        outer_digest = self._digest(step)
        samples, size = sample_numbers(block), job.batch_seqs
        due = max(period[-1] - self.outer.settings.overlap, period[0])
        metrics: list[Metrics] = []
        arrays, tokens = list[np.ndarray](), 0.0
        for i, number in enumerate(period):
            batch = self.setup.batches.global_batch(samples[i * size : (i + 1) * size], self.setup.step.batch_shardings)
            jax.block_until_ready(metrics[-1:])  # one program at a time
            self.state, own = self.program(self.state, batch)
            metrics.append(own)
            self.outer.add(size * job.seq_len)
            if number == due:
                arrays, tokens = self.outer.summands(step, self._weights())
                if number < period[-1]:
                    self.begin_sum(arrays)
        numbers = {f"{name} {i}": value for i, own in enumerate(metrics) for name, value in _numbers(own).items()}
        work_s = time.perf_counter() - start_s
        numbers[TOKENS] = tokens
        return arrays, Said(
            island=self._place[0], process=self._place[1], numbers=numbers, work_s=work_s, digest=outer_digest
        )

    def _digest(self, step: int) -> str:
        """Returns the checksum of outer weights and momentum; "" if islands do not compare states."""
        checksum = 0
        for view in views(list(self.outer.state().values())) if self.setup.settings.compare_every else ():
            checksum = zlib.crc32(view, checksum)
        return f"{checksum:08x}" if checksum else ""

    def nothing(self) -> Sequence[np.ndarray]:
        """Returns the contribution of an island without samples to the sum of differences."""
        assert self.position is not None
        return self.outer.summands(self.outer.settings.number(self.position.step) + 1, None)[0]

    def apply(self, sums: Sequence[np.ndarray], done: Done) -> None:
        """Updates the outer weights by the sums of all islands, and makes the next period's state and metrics."""
        self.state = self._with(self.outer.update(done.step, list(sums), done.total(TOKENS), self._weights()))
        there = [(num_samples(done.blocks[said.island]), said.numbers) for said in done.firsts if said.numbers]
        self.metrics, num_steps, total = [], len(self._period), sum(count for count, _ in there)
        for i in range(num_steps):
            names = [name.removesuffix(f" {i}") for name in there[0][1] if name.endswith(f" {i}")]
            mean: dict[str, Any] = {
                name: np.float32(sum(count * numbers[f"{name} {i}"] for count, numbers in there) / total)
                for name in names
            }
            self.metrics.append(Metrics(mean.pop("loss"), mean.pop("grad_norm"), mean))
        self._advance(done, num_steps)

    def give(self, links: Links, ranks: Sequence[int]) -> None:
        """Sends the state, outer weights and momentum to the islands ``ranks``."""
        super().give(links, ranks)
        links.give(ranks, views(list(self.outer.state().values())))

    def take(self, links: Links, rank: int, facts: dict[str, Any]) -> None:
        """Receives the state, outer weights and momentum of island ``rank``; starts from the outer weights."""
        super().take(links, rank, facts)
        self.outer.begin(self._weights())
        links.take(rank, views(list(self.outer.state().values())))
        self.state = self.shared_state()

    # -- weights -----------------------------------------------------------------------------------------

    def _weights(self) -> Params:
        """Returns the weights that islands exchange, in the layout that does not depend on the mesh."""
        assert self.state is not None
        return self.setup.step.to_canonical(exchanged(self.setup.step, self.state))

    def _with(self, weights: Params) -> State:
        assert self.state is not None
        step = self.setup.step
        return jax.device_put(with_exchanged(self.state, step.from_canonical(weights)), step.state_shardings)

    def _zeros(self) -> Params:
        """Returns float32 zeros in the shapes of the weights: in host memory, if the island has one process."""
        shapes, shardings = (exchanged(self.setup.step, state) for state in self.setup.step.canonical)
        if jax.process_count() == 1:
            host_zeros: dict[str, Any] = {name: np.zeros(shape.shape, np.float32) for name, shape in shapes.items()}
            return host_zeros
        zeros = jax.jit(
            lambda: {n: jnp.zeros(s.shape, jnp.float32) for n, s in shapes.items()}, out_shardings=shardings
        )
        return zeros()


def _numbers(metrics: Metrics) -> dict[str, float]:
    host = on_host(metrics)
    return {"loss": float(host.loss), "grad_norm": float(host.grad_norm), **over_layers(host.extras)}
