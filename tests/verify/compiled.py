"""Proofs by the real compilers of hardware that is not here; `make test-aot` installs them."""

from contextlib import contextmanager

import jax
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from meshwright.algebra.generation.program import Storage
from meshwright.api.proving import PROGRAM, ProofOptions, request_of
from meshwright.cli.asked import job_of_step
from meshwright.cost.setting import Setting
from meshwright.nn.attention.platform import traced_for
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify.proof import Proof, prove
from meshwright.verify.request import Request
from meshwright.verify.running import python_program
from meshwright.verify.targets import PLUGINS, Target, is_installed, target_of


def proof_of(given, on, axes, *, timeout_s=120, **asked) -> Proof:
    """The proof of a model's step on a cluster; skips where the compiler for it is not installed."""
    request = request_for(given, on, axes, **asked)
    return prove(request, program=python_program(PROGRAM), timeout_s=timeout_s)


def need_compiler(target: Target) -> None:
    """Skips a test where the compiler for a target is not installed."""
    if not is_installed(target.platform):
        name, extra = target.platform, PLUGINS[target.platform][1]
        pytest.skip(f'the compiler for {name} is not installed: pip install "meshwright[{extra}]"')


def request_for(
    given, on, axes, *, seqs=16, length=1024, choices=None, step="train", weights="as they are", **asked
) -> Request:
    """The request of `proof_of`; skips where the compiler for it is not installed."""
    cluster = parse_cluster(on)
    need_compiler(target_of(cluster))
    strategy = Strategy(mesh=make_mesh(axes), **({"state": "bf16-adam"} | (choices or {})))
    stored = Storage(cache_dtype=asked.pop("cache_dtype", "bf16"), weights="int8" if weights == "int8" else "")
    job = job_of_step(Job(batch_seqs=seqs, seq_len=length), step)
    setting = Setting(given, cluster, job, storage=stored)
    return request_of(setting, strategy, ProofOptions(asked=step, **asked))


@contextmanager
def no_cache():
    """Has JAX compile, whatever its own cache has."""
    cached = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", cached)
    reset_cache()


def compiled_for(on, function, *arguments, layouts=()):
    """A function compiled for the first chip of a cluster; skips where the compiler for it is not installed.

    ``layouts`` are those of the last arguments, None for the compiler's own, which are donated and returned behind the
    result.
    """
    target = target_of(parse_cluster(on))
    need_compiler(target)
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in target.options.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in target.environment.items():
            patch.setenv(name, value)
        device = topologies.get_topology_desc(platform=target.platform, topology_name=target.topology, **options)
        device = device.devices[0]
    where, first = SingleDeviceSharding(device), len(arguments) - len(layouts)
    formats = [Format(layout, where) if layout else where for layout in layouts]

    def shaped(a, sharding=where):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    given = [*jax.tree.map(shaped, arguments[:first]), *map(shaped, arguments[first:], formats)]
    more = {"out_shardings": (where, *formats), "donate_argnums": range(first, len(arguments))}
    # what these compilers make cannot be read back from the cache of the tests
    with traced_for(target.platform, device), no_cache():
        return jax.jit(function, **(more if layouts else {})).lower(*given).compile()
