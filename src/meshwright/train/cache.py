"""Where compiled programs and tokenised texts are kept between runs, and files that are whole or absent."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax


def cache_folder() -> Path:
    """``MESHWRIGHT_CACHE`` where it is set, else ``~/.cache/meshwright``."""
    given = os.environ.get("MESHWRIGHT_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "meshwright"


def keep_compiled_programs(folder: Path) -> None:
    """Let JAX keep what it compiles in ``folder/xla``; a cache that is set already is left alone.

    A folder that cannot be written only costs the time of compiling again.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    target = folder / "xla"
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(target))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file through a temporary one beside it, so that ``path`` is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    # mkstemp makes files that only their owner may read.
    os.chmod(name, 0o644)
    try:
        write(Path(name))
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """`write_whole` for text."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
