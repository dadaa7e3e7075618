"""Proofs by the real compilers of hardware that is not here; `make test-aot` installs them."""

import pytest

from meshwright.cli.verbs.verify_request import PROGRAM, request_of
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify.proof import Proof, prove
from meshwright.verify.running import python_program
from meshwright.verify.targets import PLUGINS, is_installed, target_of


def proof_of(given, on, axes, *, seqs=16, length=1024, timeout_s=120, choices=None, **asked) -> Proof:
    """The proof of a model's step on a cluster; skips where the compiler for it is not installed."""
    cluster = parse_cluster(on)
    platform = target_of(cluster).platform
    if not is_installed(platform):
        pytest.skip(f'the compiler for {platform} is not installed: pip install "meshwright[{PLUGINS[platform][1]}]"')
    strategy = Strategy(mesh=make_mesh(axes), state="bf16-adam", **(choices or {}))
    request = request_of(given, cluster, strategy, Job(batch_seqs=seqs, seq_len=length), **asked)
    return prove(request, program=python_program(PROGRAM), timeout_s=timeout_s)
