"""Work of an island in a step: the gradients of its samples, and the update by their sum over all islands."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from meshwright.islands.exchange import Links
from meshwright.islands.ledger import Ledger, SampleBlock, sample_numbers
from meshwright.islands.rounds import Done, Said
from meshwright.parallel.held import Tree
from meshwright.parallel.train_step import Metrics, State
from meshwright.train.bad_loss import LossWatch
from meshwright.train.checkpoint import Checkpoints, Position, reordered
from meshwright.train.elastic.arrays import empty, on_devices, on_host
from meshwright.train.setup import Setup, digest, start_state

PLANNED = "planned"
"""Name under which an island reports the labels of all islands dealt into the step, by which it divided gradients."""


class GradientWork:
    """Work of an island whose gradients are summed with all islands' in every step.

    Gradients are of the mean loss over the labels of all islands that got samples of the step. If some islands have
    left before the sum, it is rescaled to the mean over the labels of the remaining ones.
    """

    def __init__(self, setup: Setup, place: tuple[int, int], open_store: Callable[[], Checkpoints]) -> None:
        self.setup, self._place, self._open_store = setup, place, open_store
        self.position: Position | None = None
        self.state: State | None = None
        self.metrics: list[Metrics] = []
        self.losses = LossWatch(setup.settings)
        self.skips_to: Ledger | None = None
        step, job = setup.step, setup.job
        state = _with_shardings(step.state_shapes, step.state_shardings)
        batch = _with_shardings(step.batch_shapes(job.batch_seqs, job.seq_len), step.batch_shardings)
        self._compile(step, state, batch)

    def _compile(self, step: Any, state: State, batch: dict[str, jax.ShapeDtypeStruct]) -> None:
        """Compiles the halves of a step: the gradients, and the update."""
        self.program = step.summands.lower(state.params, batch).compile()
        losses, self._grad_shapes = jax.eval_shape(step.summands, state.params, batch)
        self._grad_shardings = self.program.output_shardings[1]
        grads = _with_shardings(self._grad_shapes, self._grad_shardings)
        self._finish = step.finish.lower(state, losses, grads).compile()

    @property
    def rounds(self) -> int:
        """Number of exchanges of the run: one per step."""
        return self.setup.settings.steps

    def shared_state(self) -> State:
        """Returns the state that all islands have."""
        assert self.state is not None
        return self.state

    def beside(self) -> Any:
        """Returns further arrays for checkpoints: none."""
        return None

    # -- what `Rounds` calls ----------------------------------------------------------------------------

    def start(self) -> tuple[int, Ledger]:
        """Restores the newest checkpoint, or makes an initial state. Returns the steps done, and the ledger."""
        with self._open_store() as store:
            self.position, self.state = start_state(self.setup, store)
        if self.skips_to:
            samples, postponed = self.skips_to.samples, self.skips_to.postponed
            self.position = msgspec.structs.replace(self.position, samples=samples, postponed=postponed)
            self.skips_to = None
        return self.position.step, Ledger(samples=self.position.samples, postponed=self.position.postponed)

    @property
    def samples(self) -> int:
        """Number of samples in this island's batch."""
        return self.setup.job.batch_seqs

    def sizes(self, samples: Mapping[int, int]) -> dict[int, int]:
        """Returns how many samples each island uses in a step."""
        return dict(samples)

    def compute(
        self, step: int, block: SampleBlock, dealt: dict[int, SampleBlock]
    ) -> tuple[Sequence[np.ndarray], Said]:
        """Returns the gradients of a block of samples, and a report with its part of the mean losses."""
        assert self.state is not None
        start_s = time.perf_counter()
        batches, shardings = self.setup.batches, self.setup.step.batch_shardings
        batch = batches.global_batch(sample_numbers(block), shardings)
        totals = {name: self._labels(dealt.values(), name) for name in self.setup.step.counts.values()}
        batch |= {name: jax.device_put(np.float32(total), shardings[name]) for name, total in totals.items()}
        losses, grads = self.program(self.state.params, batch)
        arrays = on_host(grads)
        numbers = {name: float(loss) for name, loss in losses.items()} | {PLANNED: totals["num_labels"]}
        said = Said(
            island=self._place[0],
            process=self._place[1],
            numbers=numbers,
            work_s=time.perf_counter() - start_s,
            digest=self._digest(step),
        )
        return arrays, said

    def _digest(self, step: int) -> str:
        """Returns the digest of the state before a step; "" unless islands compare states at this step."""
        every = self.setup.settings.compare_every
        leaves = [leaf for leaf in jax.tree.leaves(self.state) if leaf.sharding.memory_kind != "pinned_host"]
        return digest(leaves) if every and step > 1 and step % every == 1 % every else ""

    def nothing(self) -> Sequence[np.ndarray]:
        """Returns gradients of zero, the part of an island without samples."""
        return [np.zeros_like(array) for array in empty(self._grad_shapes, self._grad_shardings)]

    def apply(self, sums: Sequence[np.ndarray], done: Done) -> None:
        """Updates the state by the gradients summed over all islands."""
        planned = next(said.numbers[PLANNED] for said in done.firsts if said.numbers)
        there = self._labels(done.blocks.values(), "num_labels")
        scale = np.float32(planned / there if there else 1.0)
        if scale != 1:
            for array in sums:
                array *= scale
        losses = {name: np.float32(done.total(name) * float(scale)) for name in self.setup.step.counts}
        grads = on_devices(sums, self._grad_shapes, self._grad_shardings)
        self.state, metrics = self._finish(self.state, losses, grads)
        self.metrics = [metrics]
        self._advance(done, 1)

    def _advance(self, done: Done, num_steps: int) -> None:
        assert self.position is not None
        num_samples = sum(count for block in done.blocks.values() for _, count in block)
        self.position = msgspec.structs.replace(
            self.position,
            step=self.position.step + num_steps,
            samples=done.ledger.samples,
            postponed=done.ledger.postponed,
            tokens=self.position.tokens + num_samples * self.setup.job.seq_len,
        )

    def give(self, links: Links, ranks: Sequence[int]) -> None:
        """Sends the state to the islands ``ranks``."""
        links.give(ranks, views(on_host(reordered(self.state, self.setup.step.to_canonical))))

    def take(self, links: Links, rank: int, facts: dict[str, Any]) -> None:
        """Receives the state of island ``rank``; ``facts`` has its position and recent losses."""
        step, (shapes, shardings) = self.setup.step, self.setup.step.canonical
        arrays = empty(shapes, shardings)
        links.take(rank, views(arrays))
        state = reordered(on_devices(arrays, shapes, shardings), step.from_canonical)
        self.state = jax.device_put(state, step.state_shardings)
        self.position = msgspec.convert(facts["position"], Position)
        self.losses.recent.extend(facts["losses"])
        self.setup.batches.go_on(self.position.phase, self.position.samples)

    def facts(self) -> dict[str, Any]:
        """Returns the position and the recent losses, which a joining island needs besides the state."""
        return {"position": msgspec.to_builtins(self.position), "losses": list(self.losses.recent)}

    def reset(self) -> None:
        """Drops the state, the position and the recent losses."""
        self.state = self.position = None
        self.losses.recent.clear()

    def _labels(self, blocks: Any, name: str) -> float:
        skipped = int(name == "num_mtp_labels")
        numbers = [number for block in blocks for number in sample_numbers(block)]
        return float(self.setup.batches.num_labels(numbers, skipped=skipped))


def views(arrays: Sequence[np.ndarray]) -> list[memoryview]:
    """Returns each array's bytes: a view of its memory if it is contiguous, else of a copy."""
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]


def _with_shardings(shapes: Tree, shardings: Tree) -> Any:
    return jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, shardings)
