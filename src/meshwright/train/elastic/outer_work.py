"""What one island does from one exchange to the next: whole steps of its own, and the update by the outer gradient."""

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
"""Name of the number of tokens by which an island's differences count."""


def outer_settings(islands: Strategy, settings: TrainSettings) -> OuterSettings | None:
    """Returns those of the strategy of all islands, None if they add gradients. Raises InputError for what does not
    run."""
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
    """The work of an island that trains apart. A round is a period: the inner steps up to the exchange of a fragment.

    The last period may be shorter. Optimizer moments stay an island's own; who comes gets those of another, and begins
    with the outer weights. ``begin_sum`` is called ``overlap`` inner steps before the end, and adds beside them.
    """

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
        """The inner steps of the present period."""
        assert self.position is not None
        outer, first = self.outer.settings, self.position.step + 1
        return range(first, min(outer.end(outer.number(first - 1) + 1), self.setup.settings.steps) + 1)

    def shared_state(self) -> State:
        """Returns the state with the outer weights."""
        return self._with(self.outer.weights(self._weights()))

    def beside(self) -> dict[str, Params]:
        """Returns outer weights and momentum."""
        return {"outer": self.outer.weights(self._zeros()), "momentum": self.outer.momentum(self._zeros())}

    # -- what `Rounds` calls ----------------------------------------------------------------------------

    def start(self) -> tuple[int, Ledger]:
        """Takes the newest checkpoint, or the first state. Returns the exchanges that it has had."""
        step, ledger = super().start()
        with self._open_store() as store:
            held = store.restore_beside({"outer": self._zeros(), "momentum": self._zeros()})
        outer, momentum = (held["outer"], held["momentum"]) if held else (self._weights(), None)
        self.outer.begin(outer, momentum)
        self.state = self.shared_state()
        return (self.rounds if step >= self.setup.settings.steps else self.outer.settings.number(step)), ledger

    def sizes(self, samples: Mapping[int, int]) -> dict[int, int]:
        """Returns how many samples each island takes in a period."""
        return {island: len(self._period) * count for island, count in samples.items()}

    def compute(
        self, step: int, block: SampleBlock, dealt: dict[int, SampleBlock]
    ) -> tuple[Sequence[np.ndarray], Said]:
        """Runs the inner steps of a period. Returns the differences of the fragment that is due, and all losses."""
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
        """Returns that of the outer weights and momentum, in every round."""
        checksum = 0
        for view in views(list(self.outer.state().values())) if self.setup.settings.compare_every else ():
            checksum = zlib.crc32(view, checksum)
        return f"{checksum:08x}" if checksum else ""

    def nothing(self) -> Sequence[np.ndarray]:
        """Returns the differences of no sample."""
        assert self.position is not None
        return self.outer.summands(self.outer.settings.number(self.position.step) + 1, None)[0]

    def apply(self, sums: Sequence[np.ndarray], done: Done) -> None:
        """Updates the outer weights by the sums of all islands, and goes on from these."""
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
        """Sends the state, outer weights and momentum."""
        super().give(links, ranks)
        links.give(ranks, views(list(self.outer.state().values())))

    def take(self, links: Links, rank: int, facts: dict[str, Any]) -> None:
        """Takes the state of another island, and begins with the outer weights."""
        super().take(links, rank, facts)
        self.outer.begin(self._weights())
        links.take(rank, views(list(self.outer.state().values())))
        self.state = self.shared_state()

    # -- weights -----------------------------------------------------------------------------------------

    def _weights(self) -> Params:
        """Returns the weights that islands exchange, as every mesh has them."""
        assert self.state is not None
        return self.setup.step.to_canonical(exchanged(self.setup.step, self.state))

    def _with(self, weights: Params) -> State:
        assert self.state is not None
        step = self.setup.step
        return jax.device_put(with_exchanged(self.state, step.from_canonical(weights)), step.state_shardings)

    def _zeros(self) -> Params:
        """Returns float32 arrays like the weights: in host memory, if this process has all of them."""
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
