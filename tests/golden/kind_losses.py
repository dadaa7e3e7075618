"""Golden kind ``losses``: three training steps of small models on eight emulated devices, to the last bit.

A line of ``cases/losses.txt`` is a name, a model, mesh axes, choices of the strategy and settings of the run. Numbers
are kept as float hex. `environment.fix` says which flags of XLA make them the same from run to run.
"""

from typing import Any

from tests.golden import product
from tests.golden.cases_file import Case, each, table
from tests.golden.files import Golden
from tests.golden.kind_steps import named_model

STEPS, BATCH_SEQS, SEQ_LEN, VOCAB = 3, 16, 16, 64


def make() -> Golden:
    """Every case."""
    batches = [_batch(seed) for seed in range(STEPS)]
    return each("losses.txt", lambda case: _trained(case, batches))


def _batch(seed: int) -> dict[str, Any]:
    import numpy as np

    rows = np.random.default_rng(seed).integers(0, VOCAB, (BATCH_SEQS, SEQ_LEN + 1)).astype(np.int32)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def _trained(case: Case, batches: list[dict[str, Any]]) -> dict[str, Any]:
    model, axes, choices, settings = case.parts
    strategy = product.make_strategy(table(axes), {"state": "fp32", **table(choices)})
    steps = product.train_steps(named_model(model), strategy, table(settings), batches)
    return {
        "case": " | ".join(case.parts),
        "loss": {str(number): step.loss.hex() for number, step in enumerate(steps, 1)},
        "grad_norm": {str(number): step.grad_norm.hex() for number, step in enumerate(steps, 1)},
        "extras": {name: [value.hex() for value in values] for name, values in steps[-1].extras.items()},
    }
