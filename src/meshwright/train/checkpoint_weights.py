"""The weights alone out of a run's checkpoint, array by array: what a conversion needs of it."""

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import Fetch
from meshwright.nn.weights import param_shapes
from meshwright.spec.model import Model
from meshwright.train.checkpoint import CHECKPOINTS, POSITION, STATE

_ARRAYS_AT_ONCE = 4
"""A stored tensor holds parts of up to three arrays (q, k and v in one), and they come in turn."""


class CheckpointWeights(NamedTuple):
    """The model of a checkpoint, the step it was made after, its weights one by one, and their dtypes."""

    model: Model
    step: int
    fetch: Fetch
    dtypes: dict[str, np.dtype]


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of the checkpoints of a run's folder, oldest first; none where there are none."""
    folder = run / CHECKPOINTS
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


class OpenCheckpoint:
    """One checkpoint of a run, held open for reading; the run may go on meanwhile."""

    def __init__(self, run: Path, step: int | None = None) -> None:
        steps = checkpoint_steps(run)
        if not steps:
            raise InputError(f"{run} has no checkpoint. Give the folder of a run that wrote one.")
        self.step = steps[-1] if step is None else step
        if self.step not in steps:
            raise InputError(f"{run} has no checkpoint of step {step}. It has: {', '.join(map(str, steps))}.")
        # It warns of what reading alone means for options that nobody gave.
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(read_only=True)
        self._manager = ocp.CheckpointManager((run / CHECKPOINTS).absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.close()

    def weights(self) -> CheckpointWeights:
        """What it holds. An array is read when it is first asked for, and the last few are kept."""
        stored = self._restore(**{POSITION: ocp.args.JsonRestore()})[POSITION]
        model = msgspec.convert(stored["position"]["model"], Model)
        dtypes = {name: np.dtype(_dtype(stored["arrays"][f".params['{name}']"])) for name in param_shapes(model)}
        read: Callable[[str], np.ndarray] = lru_cache(_ARRAYS_AT_ONCE)(lambda name: self._array(model, name, dtypes))
        return CheckpointWeights(model, self.step, lambda name, index: read(name)[index], dtypes)

    def _array(self, model: Model, name: str, dtypes: dict[str, np.dtype]) -> np.ndarray:
        here = SingleDeviceSharding(jax.devices()[0])
        shape = jax.ShapeDtypeStruct(param_shapes(model)[name].shape, dtypes[name], sharding=here)
        item = {"params": {name: shape}}
        arguments = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        return np.asarray(self._restore(**{STATE: arguments})[STATE]["params"][name])

    def _restore(self, **parts: Any) -> Any:
        return self._manager.restore(self.step, args=ocp.args.Composite(**parts))


def _dtype(description: str) -> str:
    """``bfloat16`` of ``bfloat16[2,32]``."""
    return description.partition("[")[0]
