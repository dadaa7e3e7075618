"""Stores compiled programs in files, so that later processes start without tracing or compiling.

JAX's own cache of compiled programs saves compiling, not tracing, which takes a second or more of a large step.
"""

import hashlib
import json
import os
import pickle
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jaxlib
import msgspec
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import meshwright
from meshwright.core.files import write_whole
from meshwright.nn.attention.platform import processor


class ProgramStore:
    """Programs in files under ``folder``, keyed by machine, versions and ``about`` (all else that they depend on).

    A program that cannot be read is compiled again. Nothing is stored without a folder, for several CPU devices (see
    `device_mesh`), or on a CPU with JAX's own cache enabled: a program loaded from that cache cannot be serialised
    again (jaxlib 0.10.2).
    """

    def __init__(self, folder: Path | None, about: Any) -> None:
        devices = jax.devices()
        is_kept = folder is not None and (
            devices[0].platform != "cpu" or (len(devices) == 1 and not jax.config.values["jax_compilation_cache_dir"])
        )
        key_facts = [
            *(jax.__version__, jaxlib.__version__, sources(), platform.machine(), processor()),
            *(devices[0].device_kind, len(devices)),
            *(str(jax.config.values[name]) for name in ("jax_enable_x64", "jax_default_matmul_precision")),
        ]
        key_text = json.dumps([key_facts, msgspec.to_builtins(about)], sort_keys=True, default=str)
        self.folder = folder / hashlib.sha256(key_text.encode()).hexdigest()[:24] if is_kept and folder else None
        self.num_loaded = self.num_compiled = 0
        self._locks: dict[str, Lock] = {}

    def has(self, names: Iterable[str]) -> bool:
        """True if all of these programs have files."""
        return self.folder is not None and all(_is_own(self.folder / f"{name}.program") for name in names)

    def get(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Returns the program ``name`` from its file, or compiles the result of ``lower`` and stores it."""
        with self._locks.setdefault(name, Lock()):  # a thread loads programs while the first requests run
            return self._get(name, lower)

    def _get(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        program_path = self.folder / f"{name}.program" if self.folder else None
        program = _read(program_path) if program_path else None
        self.num_loaded += program is not None
        if program is None:
            program = lower().compile()
            self.num_compiled += 1
            if program_path:
                _write(program_path, program)
        return program


def _is_own(path: Path) -> bool:
    """True for a file of this user that others cannot write, in such a folder: loading a program runs code from it."""
    return path.exists() and all(
        entry.stat().st_uid == os.getuid() and not entry.stat().st_mode & 0o002 for entry in (path, path.parent)
    )


def _read(path: Path) -> jax.stages.Compiled | None:
    try:
        file_bytes = path.read_bytes() if _is_own(path) else b""
        if hashlib.sha256(file_bytes[32:]).digest() == file_bytes[:32]:  # else cut or damaged
            return deserialize_and_load(*pickle.loads(file_bytes[32:]))
    except Exception:  # such as a file of another compiler: compile again
        return None
    return None


def _write(path: Path, compiled: jax.stages.Compiled) -> None:
    payload = pickle.dumps(serialize(compiled))
    file_bytes = hashlib.sha256(payload).digest() + payload
    with suppress(OSError):  # without disk space or permission, the next process compiles again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda part: part.write_bytes(file_bytes))  # other processes may read it meanwhile


@cache
def sources() -> str:
    """Returns a digest of the sources that programs are made from."""
    root = Path(meshwright.__file__).parent
    digest = hashlib.sha256()
    for subpath in ("algebra", "core", "masks", "nn", "parallel", "spec", "serve/drawing"):
        path = root / subpath
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
