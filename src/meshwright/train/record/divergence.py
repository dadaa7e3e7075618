"""Why a step has no finite loss or gradient: the first array that is not finite, in one line."""

from typing import Any

from meshwright.parallel.train_step import State, TrainStep
from meshwright.train.record.health import non_finite


def where_not_finite(step: TrainStep, state: State, batch: Any, *, model: Any) -> str:
    """What is not finite after a step whose loss or gradient was not: a weight, a gradient, or the loss alone.

    Weights are looked at first. Where they are finite, the step's own batch gives the gradients once more; where
    those are finite too the weights have moved on since, and the loss alone is known to have been bad. Layers are
    numbered as in the model, in whatever order the stages of a pipeline hold them.
    """
    weights = non_finite(step.to_canonical(state.params), model)
    if weights:
        return f"in the weights after it, {weights}"
    gradients = non_finite(step.to_canonical(step.gradients(state.params, batch)[1]), model)
    if gradients:
        return f"all weights are finite; in its gradients, {gradients}"
    return "weights and gradients are finite"
