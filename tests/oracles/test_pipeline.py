"""Worked answers on pipelines: bubbles, and the utilisation that they leave."""

from meshwright.algebra.schedules.registry import build
from meshwright.algebra.schedules.simulation import Simulation, simulate
from tests.oracles.worked import Answers, Inputs


def step(name: str, i: Inputs) -> Simulation:
    """One step of the row's stages and microbatches."""
    made = build(name, stages=i["stages"], microbatches=i["microbatches"])
    return simulate(made, forward_s=1.0, backward_s=2.0)


ANSWERS: Answers = {
    "s000-bubble": lambda i: step("gpipe", i).bubble_share,
    "s004-pp8": lambda i: 1 - step("naive", i).bubble_share,
    "s004-pp4x4": lambda i: 1 - step("gpipe", i).bubble_share,
}
