"""One run in a process of its own that may be killed: python -m tests.train.child ROOT TEXT CHANGES [RUN]."""

import json
import sys
import time
from pathlib import Path

from meshwright.parallel.processes import start_processes

NUM_DEVICES = 2


def main(root: str, text: str, changes: str, *resume: str) -> None:
    """Train the test model on two devices, slowly enough to be killed between any two things it does."""
    processes = start_processes()
    from meshwright.parallel.mesh import emulate_devices

    emulate_devices(NUM_DEVICES // processes)
    from meshwright.train.loop import train
    from tests.train.small import JOB, MODEL, settings, strategy

    given = json.loads(changes)
    pause_s = given.pop("pause_s", 0.0)
    result = train(
        MODEL,
        strategy(fsdp=NUM_DEVICES),
        JOB,
        settings(text, **given),
        run_root=Path(root),
        resume=Path(resume[0]) if resume else None,
        on_step=lambda _: time.sleep(pause_s),
    )
    print(json.dumps({"losses": result.losses, "from": result.resumed_from, "processes": result.processes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
