"""Eight emulated devices, no silent rank promotion, and a compilation cache, set once before JAX starts.

Every worker of `pytest -n` keeps a cache of its own: JAX writes an entry in place, and another process could read half
of one. Dtype promotion is not strict: optax 0.2.8 mixes integer counts with floats.
"""

import ctypes
import gc
import os
from importlib.metadata import version
from pathlib import Path

# Level 0 makes XLA's CPU code three times faster to compile. The older emitter of fusions, which jax 0.11 no longer
# has, saves a fifth of what is left, and code in one part a tenth; the HLO, and so the collectives, are the same.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"  # a busy machine is not stuck
if version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", Path(__file__).parents[1] / ".jax_cache"))
    / os.environ.get("PYTEST_XDIST_WORKER", "")
)
os.environ.setdefault("MESHWRIGHT_CACHE", str(Path(__file__).parents[1] / ".cache" / "tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

from jaxtyping import install_import_hook

CHECKED = (
    "activations",
    *(f"ops.{op}" for op in ("rms_norm", "layer_norm", "rope", "embed", "join_heads", "token_gate")),
)
"""Modules of `nn` whose functions check the shapes that they are given and give."""
install_import_hook([f"meshwright.nn.{name}" for name in CHECKED], "beartype.beartype")

if hasattr(libc := ctypes.CDLL(None), "mallopt"):
    libc.mallopt(-8, 2)  # M_ARENA_MAX: each of XLA's threads has a heap of its own else, whose holes are not given back
# A worker's heap is large, and tracing makes many objects: collecting less often saves a fifth of the time.
gc.set_threshold(50_000)

pytest_plugins = ["tests.tier"]
