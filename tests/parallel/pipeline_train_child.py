"""A run of the trainer in stages that hold their layers out of order: ``python -m tests.parallel.pipeline_train_child
ROOT TEXT STEPS [RUN]``, in any number of processes."""

import json
import sys
from pathlib import Path

import msgspec

from meshwright.parallel.processes import start_processes
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.settings import TrainSettings
from tests.train.small import JOB, MODEL, settings

DEEP = msgspec.structs.replace(MODEL, num_layers=4)
STAGES = Strategy(mesh=make_mesh({"pipeline": 2}), state="fp32", num_microbatches=4, schedule="interleaved", chunks=2)


def chosen(text: str, steps: int) -> TrainSettings:
    """Settings whose steps are the same however many there will be."""
    return settings(text, steps=steps, held_out=0.0, average=0.9, schedule="constant")


def main(root: str, text: str, steps: str, *resume: str) -> None:
    start_processes()
    from meshwright.train.loop import train

    run = Path(resume[0]) if resume else None
    found = train(DEEP, STAGES, JOB, chosen(text, int(steps)), run_root=Path(root), resume=run)
    said = {"losses": found.losses, "from": found.resumed_from, "run": str(found.run), "processes": found.processes}
    print("said " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
