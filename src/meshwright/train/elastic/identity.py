"""Texts that must be equal in all islands of a run, by name, so that a difference can be named."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import msgspec

import meshwright
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.strategy import ISLAND_FIELDS


def settings_of(told: Any, step: TrainStep) -> dict[str, str]:
    """Returns the versions, the digest of the code and every setting of an island's run, by name.

    Batch sizes may differ; with outer gradients and one process per island, so may platforms, meshes and compilers.
    """
    fields = msgspec.to_builtins(told.settings)
    compiler = hashlib.sha256(repr(sorted(step.compiler.used.items())).encode()).hexdigest()[:8]
    own = {"platform": jax.default_backend(), "compiler": compiler, "strategy": _digest(told.strategy)}
    return {
        "meshwright": meshwright.__version__,
        "code": code_digest(),
        "jax": jax.__version__,
        "number of processes": str(jax.process_count()),
        **(own if told.islands.islands_sync == "gradients" or jax.process_count() > 1 else {}),
        "model": _digest(told.model),
        **{
            f"job.{name}": str(value)
            for name, value in msgspec.structs.asdict(told.job).items()
            if name != "batch_seqs"
        },
        **{f"strategy.{name}": str(getattr(told.islands, name)) for name in ISLAND_FIELDS},
        **{f"train.{name}": str(value) for name, value in sorted(fields.items())},
    }


def code_digest() -> str:
    """Returns the first 8 hexadecimal digits of a hash of the package's Python files."""
    root = Path(meshwright.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:8]
