"""Four islands that train apart, beside one synchronous run on the same text: held-out loss, and bytes between islands.

python -m benchmarks.diloco                           about 20 minutes of one core
python -m benchmarks.diloco --steps 60 --width 64     a quick look

A Llama of two layers reads the bytes of Python's standard library; every 20th file is held out. The synchronous run has
batches of 32 rows of 128 bytes, an island a quarter of each. Islands start from the synchronous run's state at half of
the steps, as in the paper of DiLoCo (arXiv 2311.08105), and from scratch. The learning rate of each is the best of the
same three by the held-out loss; variants have the rate of the islands at H = 30. Islands are states in one process that
step in turn; their sums go through a group of threads.
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from benchmarks.asynchronous_sgd import AsynchronousSGD
from tests.islands.threads import ThreadMember, members, together

from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.train_step import State, TrainStep
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.optimizers.table import make_optimizer
from meshwright.train.outer.diloco import DiLoCo, OuterSettings
from meshwright.train.settings import TrainSettings

ISLANDS, BATCH_SEQS, SEQ_LEN = 4, 32, 128
GOALS = {30: 4.0, 10: 1.5}
"""Steps between exchanges -> most percent of held-out loss above the synchronous run's."""


class Outcome(NamedTuple):
    """A finished run: its held-out loss, and the bytes that an island sent, of those of float32 sums every step."""

    name: str
    rate: float
    loss: float
    share_of_bytes: float
    seconds: float


class Trainer:
    """One learning rate: compiled steps, a state after half of the steps, and runs from there or from scratch."""

    def __init__(self, width: int, steps: int, rate: float, text: tuple[np.ndarray, np.ndarray]) -> None:
        self.steps, self.rate = steps, rate
        self.rows, held_out = text
        heads = width // 32
        model = Model(
            name="bytes",
            family="llama",
            num_layers=2,
            d_model=width,
            d_ff=4 * width,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=32,
            vocab_size=256,
            max_positions=SEQ_LEN,
            norm_eps=1e-5,
        )
        strategy = Strategy(mesh=make_mesh({}), state="fp32", remat="none")
        settings = TrainSettings(steps=steps, learning_rate=rate, warmup_steps=max(1, steps // 20))
        self.step = TrainStep(
            model,
            strategy,
            optimizer=make_optimizer(model, settings, strategy.state),
            max_grad_norm=settings.max_grad_norm,
            mesh=device_mesh(strategy.mesh, jax.devices()[:1]),
        )
        self.held_out = [self.step.place(batch(part)) for part in np.split(held_out, len(held_out) // BATCH_SEQS)]

    def synchronous(self) -> Outcome:
        """Trains on whole batches, and keeps the state at half of the steps."""
        start_s, state = time.perf_counter(), self.step.init(0)
        for number in range(1, self.steps + 1):
            state, _ = self.step.step(state, batch(self._rows(number)))
            if number == self.steps // 2:
                self.half = jax.tree.map(np.array, state)
        return Outcome("synchronous", self.rate, self.loss(state.params), 1.0, time.perf_counter() - start_s)

    def islands(self, name: str, settings: OuterSettings, *, from_scratch: bool = False) -> Outcome:
        """Trains islands apart, which exchange as the settings say."""
        start_s, first_step = time.perf_counter(), 1 if from_scratch else self.steps // 2 + 1
        states = [self.step.init(0) if from_scratch else self._copy_of_half() for _ in range(ISLANDS)]
        outers = [DiLoCo(settings, stacked=self.step.stacked) for _ in states]
        for outer, state in zip(outers, states, strict=True):
            outer.begin(state.params)
        group, tokens = members(ISLANDS), BATCH_SEQS * SEQ_LEN / ISLANDS
        for number in range(first_step, self.steps + 1):
            for i, rows in enumerate(np.split(self._rows(number), ISLANDS)):
                states[i], _ = self.step.step(states[i], batch(rows))
            calls = zip(outers, states, group, strict=True)
            weights = together([partial(o.after_step, number, s.params, g, tokens) for o, s, g in calls])
            states = [state._replace(params=new) for state, new in zip(states, weights, strict=True)]
        loss, share = self.loss(outers[0].weights(states[0].params)), self._share(group[0], self.steps - first_step + 1)
        return Outcome(name, self.rate, loss, share, time.perf_counter() - start_s)

    def asynchronous(self, name: str, settings: OuterSettings) -> tuple[Outcome, float]:
        """Trains islands in threads, of which the second to the fourth sleep 20 to 60 ms a step; returns the mean
        staleness too."""
        start_s, first_step, group = time.perf_counter(), self.steps // 2 + 1, members(ISLANDS)
        outers = [AsynchronousSGD(settings) for _ in range(ISLANDS)]

        def island(i: int) -> State:
            state, outer = self._copy_of_half(), outers[i]
            outer.begin(state.params)
            for number in range(first_step, self.steps + 1):
                state, _ = self.step.step(state, batch(np.split(self._rows(number), ISLANDS)[i]))
                time.sleep(0.02 * i)
                params = outer.after_step(number, state.params, group[i], BATCH_SEQS * SEQ_LEN / ISLANDS)
                state = state._replace(params=params)
            outer.settle()
            outer.close()
            return state

        states = together([partial(island, i) for i in range(ISLANDS)])
        loss, share = self.loss(outers[0].weights(states[0].params)), self._share(group[0], self.steps - first_step + 1)
        staleness = sum(arrival.staleness for arrival in outers[0].arrivals) / len(outers[0].arrivals)
        return Outcome(name, self.rate, loss, share, time.perf_counter() - start_s), staleness

    def _share(self, member: ThreadMember, num_steps: int) -> float:
        """Returns the bytes that the busiest island sent, as a share of float32 sums of gradients every step."""
        num_weights = sum(math.prod(shape.shape) for shape in self.step.param_shapes.values())
        return max(member.shared.sent_bytes) / (num_steps * 4 * num_weights * 2 * (ISLANDS - 1) / ISLANDS)

    def loss(self, params: dict[str, jax.Array]) -> float:
        """Returns the mean loss of a held-out byte."""
        sums = [float(self.step.loss_sum(params, part)) for part in self.held_out]
        return sum(sums) / (len(sums) * BATCH_SEQS * SEQ_LEN)

    def _rows(self, number: int) -> np.ndarray:
        return self.rows[(number - 1) * BATCH_SEQS : number * BATCH_SEQS]

    def _copy_of_half(self) -> State:
        return jax.device_put(jax.tree.map(np.copy, self.half), self.step.state_shardings)


def batch(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of bytes as tokens and labels."""
    return {"tokens": rows[:, :-1].astype(np.int32), "labels": rows[:, 1:].astype(np.int32)}


def text(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled rows of the standard library's modules: those to train on, and 8 batches of other files."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    parts = [
        b"".join(path.read_bytes() for i, path in enumerate(files) if (i % 20 == 0) == out) for out in (False, True)
    ]
    train, held_out = (
        np.frombuffer(part[: len(part) // (SEQ_LEN + 1) * (SEQ_LEN + 1)], np.uint8).reshape(-1, SEQ_LEN + 1)
        for part in parts
    )
    rng = np.random.default_rng(0)
    needed = steps * BATCH_SEQS
    rows = np.concatenate([rng.permutation(train) for _ in range(-(-needed // len(train)))])[:needed]
    return rows, rng.permutation(held_out)[: 8 * BATCH_SEQS]


def main() -> None:
    """Runs all, and prints a line for each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--rates", type=float, nargs=3, default=(2e-3, 4e-3, 8e-3))
    parser.add_argument("--outer-rate", type=float, default=0.7)
    args = parser.parse_args()
    rows = text(args.steps)
    print(f"Python {sys.version.split()[0]}: {rows[0].size:,} bytes to train on, {rows[1].size:,} held out")
    trainers = [Trainer(args.width, args.steps, rate, rows) for rate in args.rates]
    settings = partial(OuterSettings, rate=args.outer_rate)

    base = [trainer.synchronous() for trainer in trainers]
    lowest = min(outcome.loss for outcome in base)

    def line(outcome: Outcome) -> None:
        over = 100 * (outcome.loss / lowest - 1)
        print(
            f"{outcome.name:34} rate {outcome.rate:g}  loss {outcome.loss:.4f}  {over:+6.2f}%  bytes "
            f"1/{1 / outcome.share_of_bytes:<6.1f} {outcome.seconds:6.1f} s",
            flush=True,
        )

    def best(outcomes: list[Outcome]) -> int:
        for outcome in outcomes:
            line(outcome)
        return min(range(len(outcomes)), key=lambda i: outcomes[i].loss)

    best(base)
    chosen = 0
    for every, goal in GOALS.items():
        outcomes = [
            trainer.islands(f"H {every}, first half synchronous", settings(every=every)) for trainer in trainers
        ]
        which = best(outcomes)
        over = 100 * (outcomes[which].loss / lowest - 1)
        met = "met" if over <= goal else "not met"
        print(f"H {every}: {over:+.2f}% at rate {outcomes[which].rate:g}; goal {goal}%: {met}")
        chosen = which if every == 30 else chosen
    trainer = trainers[chosen]
    stream = partial(settings, every=30, fragments=3, overlap=5)
    for name, variant in {
        "8 bits": settings(every=30, bits=8),
        "4 bits": settings(every=30, bits=4),
        "4 bits, H 10": settings(every=10, bits=4),
        "3 fragments": settings(every=30, fragments=3),
        "3 fragments, overlap 5": stream(),
        "3 fragments, overlap 5, mixing 0.5": stream(mixing=0.5),
        "the same in 4 bits": stream(mixing=0.5, bits=4),
        "local SGD, H 30": OuterSettings(every=30, rate=1.0, momentum=0.0),
    }.items():
        line(trainer.islands(name, variant))
    outcome, staleness = trainer.asynchronous("asynchronous, H 30", settings(every=30))
    line(outcome)
    print(f"staleness of the asynchronous islands: {staleness:.2f} updates in the mean")
    for every in GOALS:
        best(
            [
                trainer.islands(f"H {every}, from scratch", settings(every=every), from_scratch=True)
                for trainer in trainers
            ]
        )


if __name__ == "__main__":
    main()
