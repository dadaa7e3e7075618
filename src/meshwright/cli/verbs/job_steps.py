"""Options of the verbs that take a step to train, prefill or decode: `verify` and `profile`."""

import msgspec

from meshwright.core.errors import InputError
from meshwright.spec.job import Job

STEPS = ("train", "prefill", "decode", "generate")
"""Values of --step; "generate" is another word for "decode"."""
CACHE_DTYPES = ("bf16", "fp32", "int8")


def job_of_step(job: Job, step: str | None) -> Job:
    """The job with a step of another kind, on as many sequences and positions; its own without one."""
    kind = "decode" if step == "generate" else step or job.kind
    return msgspec.structs.replace(job, kind=kind, train_tokens=job.train_tokens if kind == "train" else None)


def require_storage(step: str, *, weights: str, cache_dtype: str) -> None:
    """Raise InputError where a training step is asked to store anything otherwise."""
    if step == "train" and (weights, cache_dtype) != ("as they are", "bf16"):
        raise InputError("--weights and --cache-dtype are of prefill and generation. Take --step generate.")
