"""JAX's cache of compiled programs."""

from pathlib import Path

import jax


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
