"""Masks that a user wrote, ``module:function``: their blocks are counted in a child process, so that this one imports
neither their code nor what it needs, and outlives what it does."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from meshwright.core.errors import InputError, nearest
from meshwright.masks.mods import Mask
from meshwright.masks.ranges import Ranges
from meshwright.masks.table import BlockTable, CountedTable, counted_table

TIMEOUT_S = 120.0


def table_of_user(
    spec: str,
    *,
    q_len: int,
    kv_len: int,
    batch: int = 1,
    heads: int = 1,
    block: int = 128,
    timeout_s: float = TIMEOUT_S,
) -> CountedTable:
    """Returns the blocks and pairs of the mask_mod ``module:function`` of (b, h, q_idx, kv_idx), which may be in the
    current folder.

    Raises:
        InputError: there is no such function, it fails, returns anything but Booleans of the indices' shape, ends the
            process, or takes longer than ``timeout_s`` seconds.
    """
    sizes = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads, "block": block}
    with TemporaryDirectory() as folder:
        found, failed = Path(folder) / "found.npz", Path(folder) / "failed.txt"
        # -P: a json.py of the user is not the child's
        command = [sys.executable, "-P", "-m", __name__, spec, json.dumps(sizes), folder]
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        child = subprocess.Popen(command, env={"JAX_PLATFORMS": "cpu", **os.environ}, start_new_session=True, **quiet)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise InputError(
                f"{spec} took more than {timeout_s:g} s for {q_len} x {kv_len} pairs. Use a shorter sequence."
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if failed.exists():
            raise InputError(failed.read_text())
        if not found.exists():
            raise InputError(f"{spec} ended its process with exit code {code}. Return Booleans instead.")
        with np.load(found) as held:
            table = BlockTable(kinds=held["kinds"], q_block=block, kv_block=block, q_len=q_len, kv_len=kv_len)
            return CountedTable(table, float(held["visible_pairs"]), float(held["table_s"]), held.get("points"))


def load_user(spec: str) -> Mask:
    """Imports ``module:function``, the current folder first.

    Raises:
        InputError: the text is of another form, or there is no such module or function.
    """
    name, _, attribute = spec.partition(":")
    if not all(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", part) for part in (name, attribute)):
        raise InputError(f"{spec!r} is not module:function. Write for example my_masks:dilated for my_masks.py.")
    sys.path.insert(0, os.getcwd())
    try:
        importlib.invalidate_caches()
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InputError(f"{spec}: there is no module {error.name!r} in this folder or the environment.") from None
    finally:
        sys.path.remove(os.getcwd())
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{spec}: there is no {part!r}.{nearest(part, vars(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{spec} is {type(found).__name__}, not a function of (b, h, q_idx, kv_idx).")
    return found


def checked(mask: Mask, spec: str) -> Mask:
    """Returns a mask of NumPy's arrays that raises InputError unless ``mask`` returns Booleans that broadcast to the
    shape of its indices."""

    def of(*at: Any) -> Any:
        found = mask(*at)
        if any(isinstance(x, Ranges) for x in (*at, found)):
            return found
        found, wanted = np.asarray(found), np.broadcast_shapes(*(x.shape for x in at))
        if found.dtype != bool:
            raise InputError(f"{spec} returns {found.dtype}, not Booleans. Compare indices, such as q_idx >= kv_idx.")
        if found.ndim > len(wanted) or any(
            a not in (1, b) for a, b in zip(found.shape[::-1], wanted[::-1], strict=False)
        ):
            raise InputError(
                f"{spec} returns the shape {found.shape} for indices of {wanted}. Return one Boolean a pair."
            )
        return found.reshape((1,) * (len(wanted) - found.ndim) + found.shape)

    return of


def words_of(error: BaseException, spec: str) -> str:
    """Returns one sentence on what a user's function raised, and where."""
    if isinstance(error, InputError):
        return str(error)
    places = [
        at for at in traceback.extract_tb(error.__traceback__) if Path(at.filename).parent != Path(__file__).parent
    ]
    inside = [at for at in places if not {"importlib", "site-packages"} & set(Path(at.filename).parts)]
    at = f" ({Path(inside[-1].filename).name}:{inside[-1].lineno})" if inside else ""
    hint = " Indices are arrays: use &, | and where for and, or and if." if "truth value" in str(error) else ""
    return f"{spec} raised {type(error).__name__}{': ' * bool(str(error))}{error}{at}.{hint}"


def main(spec: str, sizes: str, folder: str) -> None:
    """Counts the blocks of a mask and writes them, or why that failed, to a folder."""
    try:
        found = counted_table(checked(load_user(spec), spec), **json.loads(sizes))
    except BaseException as error:
        (Path(folder) / "failed.txt").write_text(words_of(error, spec))
        return
    points = {} if found.points is None else {"points": found.points}
    counts = {"visible_pairs": np.float64(found.visible_pairs), "table_s": np.float64(found.table_s)}
    np.savez(Path(folder) / "found.npz", allow_pickle=False, kinds=found.table.kinds, **counts, **points)


if __name__ == "__main__":
    main(*sys.argv[1:])
