"""Checkpoints of a run: written in the background, whole or absent, restored on any mesh and process count."""

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp
from jaxtyping import Array
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN
from orbax.checkpoint.path import atomicity

from meshwright.core.digests import SUMS, require_intact, write_sums
from meshwright.core.errors import CannotRunError, InputError, first_line
from meshwright.core.files import sync
from meshwright.islands.ledger import SampleBlock
from meshwright.parallel.processes import first_error, is_first, wait_for_all
from meshwright.train.data.sources import DataPhase

CHECKPOINTS = "checkpoints"
NEAR = "near"
"""Name of the link in a run's folder to its states on the disk or in the memory of this machine."""
STATE, POSITION, BESIDE = "state", "position", "beside"
UNFINISHED = ".orbax-checkpoint-tmp"
DAMAGED = ".damaged"
UNCHECKED = f"has no {SUMS}: whether it is whole is not known"
WRITE_TIMEOUT_S = 3600

Reorder = Callable[[dict[str, Array]], dict[str, Array]]
"""Converts weights, or an optimizer's arrays by weight names, to another layout, like `TrainStep.to_canonical`."""


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of a run: optimizer steps done, samples and tokens consumed. Data continue with the ``postponed``
    samples of islands that left, then at ``samples``.

    ``model`` and ``settings`` are the run's as plain tables; ``phase`` says how samples are drawn. ``base`` is the
    fingerprint of frozen weights, which are in no checkpoint; "" if there are none.
    """

    step: int
    samples: int
    tokens: int
    model: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    phase: DataPhase | None = None
    base: str = ""
    postponed: SampleBlock = ()


class StorageError(CannotRunError):
    """A file of a run cannot be written."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint, checked before its arrays are read; ``arrays`` is from `describe_arrays`."""

    position: Position
    arrays: dict[str, str]


class _Summed(atomicity.AtomicRenameTemporaryPath):
    """A checkpoint that is being written; digests of its files are written before it gets its final name."""

    async def finalize(self) -> None:
        folder = Path(self.get())
        # Orbax changes its own files once more, at the top of the folder.
        files = [path for part in folder.iterdir() if part.is_dir() for path in part.rglob("*") if path.is_file()]
        await asyncio.to_thread(write_sums, folder, files)
        await super().finalize()
        # The name must be on the disk too before an older checkpoint is removed.
        sync(folder.parent)


class Checkpoints:
    """The checkpoints of one run folder: the newest ``keep`` of them, and every ``keep_every``-th step for good.

    State and position are one unit, whole or absent: a process killed at any moment leaves the previous one. Digests of
    their files are checked before they are read; a checkpoint without digests is read only with ``trust``. With several
    processes every process calls every method, in one order. ``passed_over`` has lines to print: on damaged
    checkpoints, on the older one that was read instead, and on one that was not checked.

    ``near`` is a folder on this machine for the newest of more frequent states; the newer of both is restored.
    """

    def __init__(self, run: Path, *, keep: int = 2, keep_every: int = 0, trust: bool = False, near: str = "") -> None:
        # Orbax warns of normal conditions, such as a first start in an empty folder; it also raises its errors.
        for logger_name in ("absl", "asyncio"):
            logging.getLogger(logger_name).setLevel(logging.CRITICAL)
        policies: list[Any] = [LatestN(keep)]
        if keep_every:
            policies.append(EveryNSteps(keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(policies),
            async_options=ocp.AsyncOptions(timeout_secs=WRITE_TIMEOUT_S),
            temporary_path_class=_Summed,
        )
        # TensorStore prints a traceback for each array whose write ends after another array's write has failed.
        if getattr(sys.unraisablehook, "func", None) is not _show_unless_closed:
            sys.unraisablehook = partial(_show_unless_closed, sys.unraisablehook)
        self.passed_over: list[str] = []
        self.near_fault = ""
        self._trust = trust
        self._newest_step: int | None = None
        self.folder = run.absolute() / CHECKPOINTS
        if is_first():
            # Orbax ignores checkpoints that were killed while being written, and cannot write those steps again.
            for leftover_folder in self.folder.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(leftover_folder, ignore_errors=True)
        wait_for_all("old checkpoints are cleared")
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self.near = Checkpoints(near_folder(run, near), keep=1, trust=trust) if near else None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def _source(self) -> "Checkpoints":
        """Returns this object or ``near``, whichever has the newest whole state."""
        if not (self.near and self.near.steps()):
            return self
        own, fault = None, None
        try:
            own = self._stored()
        except CannotRunError as error:
            fault = error
        try:
            near = self.near._stored()
        except CannotRunError:
            self.passed_over.append(f"the state in {self.near.folder.parent} is damaged, and passed over")
            for step in self.near.steps():
                self.near._manager.delete(step)
            if fault:
                raise fault from None
            return self
        return self.near if near and (own is None or near.position.step > own.position.step) else self

    def forget_near(self) -> None:
        """Removes the states in ``near``, when the run is over."""
        if self.near:
            self.near.close()
            if is_first():
                shutil.rmtree(self.near.folder.parent, ignore_errors=True)
                (self.folder.parent / NEAR).unlink(missing_ok=True)
            self.near = None

    def save(self, state: Any, position: Position, *, to_canonical: Reorder | None = None, beside: Any = None) -> None:
        """Starts to write the state after ``position.step``, and further arrays ``beside``; does nothing for a step
        that has a checkpoint.

        Copies the arrays to the host before it returns, so that the next step may reuse their memory; waits for the
        previous checkpoint, if that is still being written.
        """
        if position.step in self._manager.all_steps():
            return
        self._wait_near()  # else processes would confuse the barriers of both writes
        saved_tree = reordered(state, to_canonical)
        stored_table = msgspec.to_builtins(Stored(position=position, arrays=describe_arrays(saved_tree)))
        args_by_item = {STATE: ocp.args.StandardSave(saved_tree), POSITION: ocp.args.JsonSave(stored_table)}
        args_by_item |= {BESIDE: ocp.args.StandardSave(beside)} if beside else {}
        with self._writing():
            self._manager.save(position.step, args=ocp.args.Composite(**args_by_item), force=True)
        self._newest_step = None

    def forget_after(self, step: int) -> None:
        """Removes checkpoints of later steps, which a leader wrote before it died and live islands computed anew."""
        for later_step in [number for number in self.steps() if number > step]:
            self._manager.delete(later_step)
        if self.near:
            self.near.forget_after(step)

    def wait(self) -> None:
        """Waits until all saved checkpoints are whole on disk."""
        self._wait_near()
        with self._writing():
            self._manager.wait_until_finished()

    def _wait_near(self) -> None:
        """Waits for a write to ``near``; a failure is kept in ``near_fault`` and does not end the run."""
        try:
            if self.near:
                self.near.wait()
        except StorageError as error:
            self.near_fault = str(error).partition(" Make room")[0].rstrip(".")

    def save_near(
        self, state: Any, position: Position, *, to_canonical: Reorder | None = None, beside: Any = None
    ) -> None:
        """Starts to write a state to ``near`` unless a checkpoint has it; a failure is kept in ``near_fault``."""
        if self.near and position.step not in self.steps():
            self.wait()
            try:
                self.near.save(state, position, to_canonical=to_canonical, beside=beside)
            except StorageError as error:
                self.near_fault = str(error).partition(" Make room")[0].rstrip(".")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # Orbax raises these where a disk is full, ValueError for arrays
            message = first_line(error)
            # The reason stands last, behind the names of files.
            reason = getattr(error, "strerror", None) or message.rpartition(": ")[2].rstrip(".")
            raise StorageError(
                f"no checkpoint can be written in {self.folder}: {reason}. Make room there, and resume."
            ) from None

    def position(self) -> Position | None:
        """Returns the newest whole checkpoint's position, None if none. Raises CannotRunError if all are damaged."""
        stored_info = self._source()._stored()
        return stored_info.position if stored_info else None

    def restore(self, shapes: Any, shardings: Any, *, from_canonical: Reorder | None = None) -> Any:
        """Returns the newest whole state with these ``shardings``, whatever mesh it was saved from.

        ``shapes`` is the state's tree of `jax.ShapeDtypeStruct`. Raises InputError when the checkpoint has other
        arrays, CannotRunError when all are damaged.
        """
        if (source := self._source()) is not self:
            self.passed_over.append(f"going on from the state of step {source.steps()[-1]} in {source.folder.parent}")
            return source.restore(shapes, shardings, from_canonical=from_canonical)
        stored = self._stored()
        assert stored is not None, "nothing to restore"
        text_by_path = describe_arrays(shapes)
        for name in sorted(stored.arrays.keys() | text_by_path.keys()):
            want, held = text_by_path.get(name, "nothing"), stored.arrays.get(name, "nothing")
            if want != held:
                raise InputError(
                    f"{self.folder / str(stored.position.step)} has {held} as {name.lstrip('.')} and this run needs "
                    f"{want}. Resume with the model, state and optimizer that the run was started with, or start a new "
                    f"run."
                )
        array_specs = jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, shardings)
        state = self._read(stored.position.step, STATE, ocp.args.StandardRestore(array_specs))
        return reordered(state, from_canonical)

    def restore_beside(self, like: Any) -> Any:
        """Returns the arrays saved ``beside`` the newest whole state, shaped as ``like``; None if there are none."""
        if (source := self._source()) is not self:
            return source.restore_beside(like)
        stored = self._stored()
        if stored is None or not (self.folder / str(stored.position.step) / BESIDE).is_dir():
            return None
        return self._read(stored.position.step, BESIDE, ocp.args.StandardRestore(like))

    def close(self) -> None:
        """Finishes writing and releases the folder."""
        if self.near:
            self.near.close()
        self._manager.close()

    def _stored(self) -> Stored | None:
        if not self.steps():
            return None
        step = self._newest_step = self._newest_step or self._newest_whole()
        table = self._read(step, POSITION, ocp.args.JsonRestore())
        try:
            stored_info = msgspec.convert(table, Stored)
        except msgspec.ValidationError as error:
            raise self._damaged(step, error) from None
        if stored_info.position.step != step:
            raise CannotRunError(
                f"{self.folder / str(step)} holds the checkpoint of step {stored_info.position.step}. Give each folder "
                f"the name of its step."
            )
        return stored_info

    def _newest_whole(self) -> int:
        """Returns the newest step whose files match their digests, and renames newer, damaged checkpoints."""
        fault_by_step: dict[int, str] = {}
        for step in reversed(self.steps()):
            # each process checks its share of the files
            process_share = (jax.process_index(), jax.process_count())
            fault = first_error(partial(require_intact, self.folder / str(step), share=process_share))
            if not fault and not self._trust and not (self.folder / str(step) / SUMS).is_file():
                fault = (
                    f"{self.folder / str(step)} {UNCHECKED}; --set train.trust_checkpoints=true reads it all the same."
                )
            if not fault:
                break
            fault_by_step[step] = fault
        else:
            raise CannotRunError(
                f"no checkpoint in {self.folder} is whole: {' '.join(fault_by_step.values())} Start a new run, "
                f"or put a copy of these files back."
            )
        for newer_step, fault in fault_by_step.items():
            self.passed_over.append(
                f"checkpoint {newer_step} is passed over and kept as {newer_step}{DAMAGED}: {fault}"
            )
            if is_first():
                (self.folder / str(newer_step)).rename(self.folder / f"{newer_step}{DAMAGED}")
        if fault_by_step:
            self.passed_over.append(f"going on from checkpoint {step}")
            wait_for_all("damaged checkpoints are moved")
            self._manager.reload()
        if not (self.folder / str(step) / SUMS).is_file():
            self.passed_over.append(f"checkpoint {step} {UNCHECKED}")
        return step

    def _read(self, step: int, item_name: str, args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item_name: args}))[item_name]
        except Exception as error:  # Orbax and its storage raise many kinds for files that are missing or cut short
            raise self._damaged(step, error) from None

    def _damaged(self, step: int, error: Exception) -> CannotRunError:
        reason = first_line(error).rstrip(":.")
        earlier_steps = [earlier_step for earlier_step in self.steps() if earlier_step < step]
        origin = f"step {earlier_steps[-1]}" if earlier_steps else "the start"
        return CannotRunError(
            f"the checkpoint {self.folder / str(step)} is damaged: {reason}. Remove that folder to go on from {origin}."
        )


def near_folder(run: Path, root: str) -> Path:
    """Returns the folder under ``root`` to which a run's link `NEAR` points; makes the folder and the link if missing.

    Raises InputError if the folder cannot be made.
    """
    link = run.absolute() / NEAR
    try:
        if is_first() and not link.is_dir():
            link.unlink(missing_ok=True)
            Path(root).mkdir(parents=True, exist_ok=True)
            link.symlink_to(tempfile.mkdtemp(prefix=f"{run.name}-", dir=root))
    except OSError as error:
        raise InputError(f"train.local_folder={root} cannot be used: {error.strerror}. Give another folder.") from None
    wait_for_all("the folder of near states is made")
    return link.resolve()


def _show_unless_closed(show: Callable[[Any], object], unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        show(unraisable)


def describe_arrays(tree: Any) -> dict[str, str]:
    """Returns the path of each array -> its dtype and shape, such as ``.params['wq'] -> float32[2,32,4,8]``."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def reordered(state: Any, reorder: Reorder | None) -> Any:
    """Returns a state with ``reorder``, if given, applied to its weights and to each dict with names of weights."""
    if reorder is None:
        return state
    param_names = set(state.params)

    def is_like_params(part: Any) -> bool:
        return isinstance(part, dict) and bool(part) and set(part) <= param_names

    return jax.tree.map(lambda part: reorder(part) if is_like_params(part) else part, state, is_leaf=is_like_params)
