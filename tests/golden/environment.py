"""The surroundings in which golden files are made: fixed before JAX starts, so that two runs agree to the last bit.

XLA's flags: eight emulated devices; optimisation level 0, which compiles three times faster; products of one device on
one thread, so that sums do not depend on the number of cores; no instructions beyond AVX2, so that they do not depend
on the processor; and the older emitter of fusions, as in the other tests.

No compilation cache is kept: with jax 0.10.2, programs with a pipeline that come out of one begin independent
collectives in another order on each emulated device, and wait for each other until XLA ends the process after 40 s.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
WIDTH = "80"


def fix() -> None:
    """Set all of it. Must come before JAX is imported."""
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_multi_thread_eigen=false",
        "--xla_cpu_max_isa=AVX2",
    ]
    if version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ["COLUMNS"] = WIDTH
    os.environ["TZ"] = "UTC"
    for name in ("MESHWRIGHT_DEBUG", "LINES", "JAX_COMPILATION_CACHE_DIR"):
        os.environ.pop(name, None)


@contextmanager
def as_shipped() -> Iterator[None]:
    """Without the flags of XLA: compilers of other hardware are child processes, and take what a user's would."""
    kept = {name: os.environ.pop(name) for name in ("XLA_FLAGS", "JAX_PLATFORMS") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def empty_folder() -> Iterator[Path]:
    """A working folder of its own, with an empty cache of rates and links to the files that commands name."""
    before = os.environ.get("MESHWRIGHT_CACHE")
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        os.environ["MESHWRIGHT_CACHE"] = str(folder / "cache")
        for source in ("tests/data", "tests/golden/models", "tests/golden/fixtures", "benchmarks/data"):
            link = folder / source
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(ROOT / source)
        try:
            with chdir(folder):
                yield folder
        finally:
            os.environ.pop("MESHWRIGHT_CACHE")
            if before is not None:
                os.environ["MESHWRIGHT_CACHE"] = before
