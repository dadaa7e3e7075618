"""Golden kind ``losses``: three training steps of small models on eight emulated devices, to the last bit.

A line of ``cases/losses.txt`` is a name, a model, mesh axes, choices of the strategy and settings of the run. Numbers
are kept as float hex. `environment.fix` says which flags of XLA make them the same from run to run.

The cases run in a process of their own: where one ends it, another goes on with the rest.
"""

import json
import subprocess
import sys
from typing import Any

from tests.golden import environment, product
from tests.golden.cases_file import Case, cases, made, table
from tests.golden.files import Golden
from tests.golden.kind_steps import named_model

STEPS, BATCH_SEQS, SEQ_LEN, VOCAB = 3, 16, 16, 64
TRIES = 3
"""How often a case may end its process."""


def make() -> Golden:
    """Every case."""
    found: Golden = {}
    waiting = [case.name for case in cases("losses.txt")]
    tries = 0
    while waiting:
        command = [sys.executable, "-m", "tests.golden.kind_losses", *waiting]
        with subprocess.Popen(command, cwd=environment.ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            told = [json.loads(line) for line in child.stdout]
        for case, values in told:
            found[case] = values
            waiting.remove(case)
        tries = tries + 1 if not told else 1
        if waiting:
            print(f"losses: the process of {waiting[0]} ended with {child.returncode}", file=sys.stderr)
        if waiting and tries == TRIES:
            found[waiting.pop(0)] = {"failed": f"its process ended {TRIES} times"}
            tries = 0
    return found


def _batch(seed: int) -> dict[str, Any]:
    import numpy as np

    rows = np.random.default_rng(seed).integers(0, VOCAB, (BATCH_SEQS, SEQ_LEN + 1)).astype(np.int32)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def _trained(case: Case) -> dict[str, Any]:
    model, axes, choices, settings = case.parts
    strategy = product.make_strategy(table(axes), {"state": "fp32", **table(choices)})
    batches = [_batch(seed) for seed in range(STEPS)]
    steps = product.train_steps(named_model(model), strategy, table(settings), batches)
    return {
        "case": " | ".join(case.parts),
        "loss": {str(number): step.loss.hex() for number, step in enumerate(steps, 1)},
        "grad_norm": {str(number): step.grad_norm.hex() for number, step in enumerate(steps, 1)},
        "extras": {name: [value.hex() for value in values] for name, values in steps[-1].extras.items()},
    }


def main(names: list[str]) -> None:
    """Run these cases; each is a line on standard output as soon as it is done."""
    environment.fix()
    for case in cases("losses.txt"):
        if case.name in names:
            print(json.dumps([case.name, made(case, _trained)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
