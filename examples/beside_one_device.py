"""Train one small model under a strategy on eight emulated devices, and again on one: what the examples share."""

import jax
import numpy as np
import optax
from msgspec.structs import replace

from meshwright.algebra.derive import Derived
from meshwright.algebra.steps import Step
from meshwright.parallel.mesh import emulate_devices
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

emulate_devices(8)  # leave it out on a machine with eight accelerators

MODEL = Model(
    name="small",
    family="llama",
    num_layers=4,
    d_model=64,
    d_ff=128,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    vocab_size=256,
)
MIXTURE = replace(
    MODEL, name="mixture", family="mixtral", num_experts=8, experts_per_token=2, d_ff_expert=64, gates_sum_to_one=True
)
NUM_STEPS, BATCH_SEQS, SEQ_LEN = 5, 16, 32
MOST = 1e-5
"""Relative difference that float32 sums in another order may make."""


def compare(*, model: Model = MODEL, zero: int = 3, axes: dict[str, int], **choices: object) -> None:
    """Print the collectives that are derived for a strategy, and its losses beside those of one device.

    ``choices`` are fields of `Strategy`. The same batch is learnt by heart in every step, so that the loss falls.
    Raises SystemExit where a loss is not that of one device, or does not fall.
    """
    assignment = standard_assignment(zero=zero)
    strategy = Strategy(mesh=make_mesh(axes), assignment=assignment, state="fp32", **choices)  # type: ignore[arg-type]
    step = make_step(model, strategy)
    print(f"{model.name} over {' x '.join(f'{axis}={size}' for axis, size in axes.items())}")
    print_collectives(step.declared)
    found, expected = losses(step), losses(make_step(model, Strategy(mesh=make_mesh({}), state="fp32")))
    print_losses(found, expected)


def make_step(model: Model, strategy: Strategy) -> TrainStep:
    return TrainStep(model, strategy, optimizer=optax.adamw(1e-2), max_grad_norm=1.0)


def losses(step: TrainStep) -> list[float]:
    """The loss before each of a few updates."""
    rows = np.random.default_rng(0).integers(0, step.model.vocab_size, (BATCH_SEQS, SEQ_LEN + 1)).astype(np.int32)
    batch = step.place({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
    state, found = step.init(seed=0), []
    for _ in range(NUM_STEPS):
        state, metrics = step.step(state, batch)
        found.append(float(jax.device_get(metrics.loss)))
    return found


def print_collectives(derived: Derived) -> None:
    """All that is sent in a step, in the notation of the book, by block and direction."""
    for block in derived.blocks:
        times = f", {block.repeat} times" if block.repeat > 1 else ""
        print_steps(f"{block.block.name} forward{times}", block.forward)
        print_steps(f"{block.block.name} backward{times}", block.backward)
    print_steps("from stage to stage", derived.boundary)
    print_steps("once a step", (*derived.ends, *derived.update))


def print_steps(title: str, steps: tuple[Step, ...]) -> None:
    lines = [str(step) for step in steps if step.is_collective or step.parts]
    if lines:
        print(f"\n{title}", *lines, sep="\n  ")


def print_losses(found: list[float], expected: list[float]) -> None:
    """A row for each step; the end of the program where they are not alike."""
    print("\nstep    loss   on one device")
    for number, (ours, one) in enumerate(zip(found, expected, strict=True), 1):
        print(f"{number:>4}  {ours:.5f}  {one:.5f}")
    largest = float(np.max(np.abs(np.array(found) / np.array(expected) - 1)))
    print(f"largest relative difference {largest:.0e}")
    if not largest < MOST:
        raise SystemExit(f"the losses are not those of one device: {largest:.1e} is more than {MOST:.0e}")
    if not found[-1] < found[0]:
        raise SystemExit(f"the loss did not fall: {found[0]:.5f} to {found[-1]:.5f}")
