"""Masks written by a user, ``module:function``. A child process counts their blocks, so that this process does not
import the user's code, and survives its faults."""

import contextlib
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from meshwright.core.errors import InputError, nearest
from meshwright.masks.mods import Mask
from meshwright.masks.ranges import Index, Ranges
from meshwright.masks.table import CountedTable, counted_table


def table_of_user(spec: str, *, timeout_s: float = 120.0, **sizes: int) -> CountedTable:
    """Returns the table and pairs of a user's mask function ``module:function`` of (b, h, q_idx, kv_idx); the module
    may be in the current folder. ``sizes`` are arguments of `counted_table`.

    Raises:
        InputError: the function does not exist, fails, does not return Booleans of the indices' shape, ends its
            process, or takes longer than ``timeout_s`` seconds.
    """
    with TemporaryDirectory() as folder:
        result_path = Path(folder) / "found"
        # -P: the child must not import a json.py of the user
        command = [sys.executable, "-P", "-m", __name__, spec, json.dumps(sizes), str(result_path)]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        child = subprocess.Popen(command, env={"JAX_PLATFORMS": "cpu", **os.environ}, start_new_session=True, **streams)
        try:
            exit_code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise InputError(f"{spec} took more than {timeout_s:g} s. Use a shorter sequence.") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if not result_path.exists():
            raise InputError(f"{spec} ended its process with exit code {exit_code}. Return Booleans instead.")
        table_or_fault = pickle.loads(result_path.read_bytes())
    if isinstance(table_or_fault, CountedTable):
        return table_or_fault
    raise InputError(table_or_fault)


def is_users(text: str) -> bool:
    """True if a text has the form ``module:function``."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", text) is not None


def load_user(spec: str) -> Mask:
    """Imports ``module:function``, from the current folder first, and returns the function.

    Raises:
        InputError: the text has another form, or the module or function does not exist.
    """
    if not is_users(spec):
        raise InputError(f"{spec!r} is not module:function. Write for example my_masks:dilated for my_masks.py.")
    module_name, attribute = spec.split(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InputError(f"{spec}: there is no module {error.name!r} in this folder or the environment.") from None
    function: Mask | None = getattr(module, attribute, None)
    if not callable(function):
        suggestion = nearest(attribute, (name for name, value in vars(module).items() if callable(value)))
        raise InputError(f"{spec}: there is no function {attribute!r}.{suggestion}")
    return function


def checked(mask: Mask, spec: str) -> Mask:
    """Returns ``mask`` wrapped to raise InputError, naming ``spec``, unless it returns Booleans that broadcast to the
    shape of its indices."""

    def of(*indices: Index) -> Index:
        is_seen = mask(*indices)
        if any(isinstance(x, Ranges) for x in (*indices, is_seen)):
            return is_seen
        is_seen, in_dims = np.asarray(is_seen), np.broadcast_shapes(*(x.shape for x in indices))
        if is_seen.dtype != bool:
            raise InputError(f"{spec} returns {is_seen.dtype}, not Booleans. Compare indices, such as q_idx >= kv_idx.")
        shape = (1,) * (len(in_dims) - is_seen.ndim) + is_seen.shape
        if len(shape) != len(in_dims) or any(size not in (1, full) for size, full in zip(shape, in_dims, strict=True)):
            raise InputError(f"{spec} returns shape {is_seen.shape} for indices of {in_dims}. Return a Boolean a pair.")
        return is_seen.reshape(shape)

    return of


def words_of(error: BaseException, spec: str) -> str:
    """Returns a message on an error of a user's function: its type, text and line."""
    if isinstance(error, InputError):
        return str(error)
    libs = {"importlib", "site-packages", Path(__file__).parent.name}
    trace = [frame for frame in traceback.extract_tb(error.__traceback__) if not libs & set(Path(frame.filename).parts)]
    where_text = f" ({Path(trace[-1].filename).name}:{trace[-1].lineno})" if trace else ""
    hint_text = " Indices are arrays: use &, | and where for and, or and if." if "truth value" in str(error) else ""
    return f"{spec} raised {type(error).__name__}: {error}{where_text}.{hint_text}"


def main(spec: str, sizes: str, path: str) -> None:
    """Counts the blocks of a user's mask and writes the `CountedTable`, or the error's message, to ``path``."""
    try:
        counted_blocks = counted_table(checked(load_user(spec), spec), **json.loads(sizes))
        # without the mask, a function that cannot be pickled
        table_or_fault: CountedTable | str = counted_blocks._replace(table=replace(counted_blocks.table, mask=None))
    except BaseException as error:
        table_or_fault = words_of(error, spec)
    Path(path).write_bytes(pickle.dumps(table_or_fault))


if __name__ == "__main__":
    main(*sys.argv[1:])
