"""Checkpoints of a run: written in the background, whole or absent, restored on any mesh and process count."""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp
from jax.sharding import Sharding
from jaxtyping import Array
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from meshwright.core.errors import CannotRunError, InputError, first_line
from meshwright.parallel.processes import is_first, wait_for_all

CHECKPOINTS = "checkpoints"
STATE, POSITION = "state", "position"
UNFINISHED = ".orbax-checkpoint-tmp"
WRITE_TIMEOUT_S = 3600

Reorder = Callable[[dict[str, Array]], dict[str, Array]]
"""Returns weights, or an optimizer's arrays by their names, with the layers in another order."""


def unchanged(named: dict[str, Array]) -> dict[str, Array]:
    """Returns the arrays; for layers that are in the order of the model."""
    return named


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of a run: optimizer steps done, samples and tokens consumed. The data continue at ``samples``.

    ``model`` and ``settings`` are those of the run as plain tables.
    """

    step: int
    samples: int
    tokens: int
    model: dict[str, Any] = {}
    settings: dict[str, Any] = {}


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The part stored beside the arrays: it lets a mismatch be refused before any array is read."""

    position: Position
    arrays: dict[str, str]


class Checkpoints:
    """The checkpoints of one run folder: the newest ``keep`` of them, and every ``keep_every``-th step for good.

    State and position are one unit, whole or absent: a process killed at any moment leaves the previous one. With
    several processes every process calls every method, in the same order.
    """

    def __init__(self, run: Path, *, keep: int = 2, keep_every: int = 0) -> None:
        # Orbax warns of normal conditions, such as a first start in an empty folder.
        logging.getLogger("absl").setLevel(logging.ERROR)
        kept: list[Any] = [LatestN(keep)]
        if keep_every:
            kept.append(EveryNSteps(keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(kept),
            async_options=ocp.AsyncOptions(timeout_secs=WRITE_TIMEOUT_S),
        )
        self.folder = run.absolute() / CHECKPOINTS
        if is_first():
            # Orbax skips checkpoints killed at their start, and then cannot write those steps again.
            for left in self.folder.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(left)
        wait_for_all("old checkpoints are cleared")
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: Any, position: Position, *, to_canonical: Reorder = unchanged) -> None:
        """Starts to write the state after ``position.step``; does nothing for a step that exists.

        Copies the arrays to the host before it returns, so that the next step may reuse their memory; waits for the
        previous checkpoint, if that is still being written.
        """
        if position.step in self._manager.all_steps():
            return
        tree = _reordered(state, to_canonical)
        stored = msgspec.to_builtins(_Stored(position=position, arrays=describe_arrays(tree)))
        parts = {STATE: ocp.args.StandardSave(tree), POSITION: ocp.args.JsonSave(stored)}
        with self._writing():
            self._manager.save(position.step, args=ocp.args.Composite(**parts), force=True)

    def wait(self) -> None:
        """Waits until everything that was saved is whole on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # what Orbax raises where a disk is full: the second for arrays
            said = first_line(error)
            # The reason stands last, behind the names of files.
            why = getattr(error, "strerror", None) or said.rpartition(": ")[2].rstrip(".")
            raise CannotRunError(
                f"no checkpoint can be written in {self.folder}: {why}. Make room there, and resume."
            ) from None

    def position(self) -> Position | None:
        """Returns that of the newest checkpoint, None without one. Raises CannotRunError when its files are damaged."""
        stored = self._stored()
        return stored.position if stored else None

    def restore(self, shapes: Any, shardings: Any, *, from_canonical: Reorder = unchanged) -> Any:
        """Returns the newest state with these ``shardings``, whatever mesh it was saved from.

        ``shapes`` is the state's tree of `jax.ShapeDtypeStruct`. Raises InputError when the checkpoint holds other
        arrays, CannotRunError when its files are damaged.
        """
        stored = self._stored()
        assert stored is not None, "nothing to restore"
        _require_same_arrays(stored.arrays, describe_arrays(shapes), self.folder / str(stored.position.step))

        def abstract(shape: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        wanted = jax.tree.map(abstract, shapes, shardings)
        state = self._read(stored.position.step, STATE, ocp.args.StandardRestore(wanted))
        return _reordered(state, from_canonical)

    def close(self) -> None:
        """Finishes writing and releases the folder."""
        self._manager.close()

    def _stored(self) -> _Stored | None:
        newest = self._manager.latest_step()
        if newest is None:
            return None
        found = self._read(newest, POSITION, ocp.args.JsonRestore())
        try:
            return msgspec.convert(found, _Stored)
        except msgspec.ValidationError as error:
            raise self._damaged(newest, error) from None

    def _read(self, step: int, part: str, args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{part: args}))[part]
        except (KeyError, OSError, ValueError) as error:  # what Orbax raises for files that are missing or cut short
            raise self._damaged(step, error) from None

    def _damaged(self, step: int, error: Exception) -> CannotRunError:
        why = first_line(error).rstrip(":.")
        before = [each for each in self.steps() if each < step]
        then = f"step {before[-1]}" if before else "the start"
        return CannotRunError(
            f"the checkpoint {self.folder / str(step)} is damaged: {why}. Remove that folder to go on from {then}."
        )


def describe_arrays(tree: Any) -> dict[str, str]:
    """Returns path of each array -> dtype and shape, such as ``.params['wq'] -> float32[2,32,4,8]``."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _require_same_arrays(stored: Mapping[str, str], wanted: Mapping[str, str], where: Path) -> None:
    for name in sorted(stored.keys() | wanted.keys()):
        here, there = wanted.get(name, "nothing"), stored.get(name, "nothing")
        if here != there:
            raise InputError(
                f"{where} has {there} as {name.lstrip('.')} and this run needs {here}. "
                f"Resume with the model, state and optimizer that the run was started with, or start a new run."
            )


def _reordered(state: Any, reorder: Reorder) -> Any:
    """Applies ``reorder`` to the weights and to each dict of the state with their names."""
    names = set(state.params)

    def is_like_params(part: Any) -> bool:
        return isinstance(part, dict) and bool(part) and set(part) <= names

    return jax.tree.map(lambda part: reorder(part) if is_like_params(part) else part, state, is_leaf=is_like_params)
