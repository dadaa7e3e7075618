"""`launch --elastic` with outer gradients: beside the same computation in one process, and under faults."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.api.running import island_plan
from meshwright.core.errors import InputError
from meshwright.islands.ledger import Ledger, deal, sample_numbers
from meshwright.nn.hf.weights import load_params
from meshwright.plan.plan_file import load_plan
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.elastic.outer_work import outer_settings
from meshwright.train.outer.diloco import DiLoCo, OuterSettings
from meshwright.train.outer.fragments import exchanged, with_exchanged
from meshwright.train.settings import TrainSettings, settings_from_table
from meshwright.train.setup import prepare
from tests.cli.verbs.test_launch_islands import (
    CONFIG,
    CONSTANT,
    islands_of,
    meshwright,
    plan,
    records,
    require_once,
    train_by_hand,
    until,
)
from tests.islands.threads import members, together

__all__ = ["plan"]
COUNT, SLOW = 3, pytest.mark.slow
LAUNCH = ("launch", "-n", str(COUNT), "--elastic", "--devices", "1", "--", "train")


def planned(folder: Path, name: str = "diloco.toml", *, chips: int = 1, batch: int = 12, **fields: Any) -> None:
    """Writes a plan with these fields of the strategy."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 2}))
    pairs = [word for name, value in fields.items() for word in ("--set", f"strategy.{name}={value}")]
    words = ("plan", "config.json", "--on", f"3*cpu:{chips}@10Gbit/s", "--batch", f"{batch}seq", "--seq", "32", *pairs)
    words += ("--set", "strategy.state=fp32", "--calibration", "cpu.toml", "-o", name)
    assert meshwright(folder, *words).wait(120) == 0, (folder / "said.txt").read_text()[-3000:]


class InOneProcess:
    """Islands that step in turn, on ``batches`` of so many samples, and whose sums go through threads."""

    def __init__(self, folder: Path, outer: OuterSettings, batches: tuple[int, ...] = (4,) * COUNT) -> None:
        self.batches = batches
        whole = island_plan(load_plan(folder / "diloco.toml"), COUNT)
        settings = settings_from_table({"schedule": "constant", "warmup_steps": 1, "steps": 15})
        self.setup, self.settings = prepare(whole.model, whole.strategy, whole.job, settings), outer
        jobs = [replace(whole.job, batch_seqs=size) for size in batches]
        self.setups = [prepare(whole.model, whole.strategy, job, settings) for job in jobs]
        self.states = [self.setup.step.init(settings.seed) for _ in range(COUNT)]
        self.outers = [DiLoCo(outer, stacked=self.setup.step.stacked) for _ in range(COUNT)]
        for state, island in zip(self.states, self.outers, strict=True):
            island.begin(exchanged(self.setup.step, state))
        self.losses, self.ledger, self.period = [], Ledger(), 0

    def run(self, steps: int) -> None:
        """Runs so many steps, in whole periods."""
        group, job, step = members(COUNT), self.setup.job, self.setup.step
        while len(self.losses) < steps:
            self.period += 1
            first, end = len(self.losses) + 1, self.settings.end(self.period)
            sizes = {island: (end - first + 1) * size for island, size in enumerate(self.batches)}
            blocks, self.ledger = deal(self.ledger, sizes)
            for number in range(first, end + 1):
                losses = []
                for island, block in blocks.items():
                    size = self.batches[island]
                    samples = sample_numbers(block)[(number - first) * size :][:size]
                    own = self.setups[island]
                    batch = own.batches.global_batch(samples, own.step.batch_shardings)
                    self.states[island], metrics = own.step.step(self.states[island], batch)
                    losses.append(float(metrics.loss))
                self.losses.append(np.average(losses, weights=self.batches))
                calls = zip(self.outers, self.states, group, self.batches, strict=True)
                all_weights = together(
                    [
                        partial(o.after_step, number, exchanged(step, s), g, float(size * job.seq_len))
                        for o, s, g, size in calls
                    ]
                )
                self.states = [with_exchanged(*pair) for pair in zip(self.states, all_weights, strict=True)]

    def begin_again(self) -> None:
        """All islands get the outer weights, and the moments of the first: what a checkpoint has."""
        step = self.setup.step
        weights = exchanged(step, self.states[0])
        momentum = self.outers[0].momentum({name: np.zeros(array.shape, np.float32) for name, array in weights.items()})
        first = with_exchanged(self.states[0], self.outers[0].weights(weights))
        for island, outer in enumerate(self.outers):
            self.states[island] = jax.tree.map(lambda array: jax.device_put(np.array(array), array.sharding), first)
            outer.begin(exchanged(step, first), momentum)


@pytest.mark.parametrize(
    ("sync", "fields", "outer"),
    [
        ("diloco", {"outer_every": 6, "outer_fragments": 2, "outer_overlap": 1}, {}),
        pytest.param("local-sgd", {"outer_every": 3, "outer_bits": 8}, {"rate": 1.0, "momentum": 0}, marks=SLOW),
        pytest.param("diloco", {"outer_every": 3, "outer_bits": 4, "outer_overlap": 2}, {}, marks=SLOW),
    ],
)  # fmt: skip
def test_a_run_has_the_losses_and_weights_of_one_process(plan: Path, sync: str, fields: Any, outer: Any):
    """It ends after 9 steps, and goes on from its checkpoint to 15."""
    planned(plan, islands_sync=sync, **fields)
    assert meshwright(plan, *LAUNCH, "diloco.toml", "--steps", "9", *CONSTANT).wait(200) == 0
    (run,) = plan.glob("runs/*")
    assert meshwright(plan, *LAUNCH, "--resume", str(run), "--steps", "15").wait(200) == 0
    lines = records(plan)
    require_once(lines)
    settings = {name.removeprefix("outer_"): value for name, value in fields.items()}
    alone = InOneProcess(plan, OuterSettings(**settings, **outer))
    alone.run(9)
    alone.begin_again()
    alone.run(15)
    np.testing.assert_allclose([line["loss"] for line in lines], alone.losses, rtol=1e-6)
    step = alone.setup.step
    weights = load_params(step.model, run, step.canonical[1].params, step.dtype)
    for name, array in alone.outers[0].weights(exchanged(step, alone.states[0])).items():
        np.testing.assert_allclose(np.asarray(weights[name]), np.asarray(array), atol=1e-6)


def test_an_island_that_is_killed_in_a_period_comes_back_and_a_run_without_islands_goes_on(plan: Path):
    """Four bits, added beside the last steps of a period; at last all islands are killed at once."""
    planned(plan, islands_sync="diloco", outer_every=8, outer_bits=4, outer_overlap=3)
    child = meshwright(
        plan, *LAUNCH, "diloco.toml", "--steps", "100001", *CONSTANT, "--set", "train.checkpoint_every=24"
    )
    until(plan, lambda lines: len(lines) >= 40, child)
    os.kill(islands_of(plan)[0], signal.SIGKILL)
    until(plan, lambda lines: lines[-1]["islands"].keys() == {"1", "2"}, child)
    until(plan, lambda lines: lines[-1]["islands"].keys() == {"0", "1", "2"}, child)
    for pid in islands_of(plan).values():
        os.kill(pid, signal.SIGKILL)
    step = records(plan)[-1]["step"]
    until(plan, lambda lines: lines[-1]["step"] > step + 40, child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == 75, (plan / "said.txt").read_text()[-3000:]
    lines = records(plan)
    require_once(lines)
    held_steps = [int(path.name) for path in plan.glob("runs/*/checkpoints/[0-9]*")]
    assert held_steps
    assert all(step % 8 == 0 for step in held_steps)
    assert np.mean([line["loss"] for line in lines[-8:]]) < lines[0]["loss"] - 0.5
    text = (plan / "said.txt").read_text()
    assert "island 0 is out: its process ended or was disconnected; 2 of 3 islands train" in text
    assert "island 0 is in" in text


@pytest.mark.slow
def test_islands_of_different_meshes_and_batches_train_together(plan: Path):
    """Started by hand: two islands of one device, and one of two that split each weight, with twice the samples."""
    fields = {"islands_sync": "diloco", "outer_every": 5}
    planned(plan, **fields)
    planned(plan, "two.toml", chips=2, batch=24, tensor=2, **fields)
    train_by_hand(plan, ("diloco.toml", "two.toml", "diloco.toml"), steps=15)
    alone = InOneProcess(plan, OuterSettings(every=5), (4, 8, 4))
    alone.run(15)
    np.testing.assert_allclose([line["loss"] for line in records(plan)], alone.losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"islands_sync": "async-sgd", "outer_every": 4}, "islands_sync=async-sgd is priced, and run by benchmarks"),
        ({"islands_sync": "diloco", "outer_every": 4, "outer_fragments": 2, "outer_overlap": 2},
         "outer_overlap=2 must be between 0 and 1 with outer_every=4 and outer_fragments=2"),
    ],
)  # fmt: skip
def test_what_does_not_run_is_refused_in_one_line(fields: Any, words: str):
    with pytest.raises(InputError, match=words):
        outer_settings(Strategy(mesh=make_mesh({"islands": 3}), **fields), TrainSettings())
