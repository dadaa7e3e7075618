"""Proofs by the real compilers of hardware that is not here; `make test-aot` installs them."""

import pytest

from meshwright.algebra.generation import Storage
from meshwright.api.proving import ProofOptions, prove_strategy
from meshwright.cli.asked import job_of_step
from meshwright.cost.setting import Setting
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify.proof import Proof
from meshwright.verify.targets import PLUGINS, is_installed, target_of


def proof_of(
    given, on, axes, *, seqs=16, length=1024, timeout_s=120, choices=None, step="train", weights="as they are", **asked
) -> Proof:
    """The proof of a model's step on a cluster; skips where the compiler for it is not installed."""
    cluster = parse_cluster(on)
    platform = target_of(cluster).platform
    if not is_installed(platform):
        pytest.skip(f'the compiler for {platform} is not installed: pip install "meshwright[{PLUGINS[platform][1]}]"')
    strategy = Strategy(mesh=make_mesh(axes), state="bf16-adam", **(choices or {}))
    stored = Storage(cache_dtype=asked.pop("cache_dtype", "bf16"), quantised=weights == "int8")
    job = job_of_step(Job(batch_seqs=seqs, seq_len=length), step)
    setting = Setting(given, cluster, job, storage=stored)
    return prove_strategy(setting, strategy, ProofOptions(timeout_s=timeout_s, asked=step, **asked))
