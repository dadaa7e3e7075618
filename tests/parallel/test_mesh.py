"""Programs on several CPU devices are compiled each time: read from JAX's cache they lose the order of collectives.

Options of the compiler, played on CPUs: one that leaves a trace (the dump), and one that no compiler knows.
"""

import subprocess
import sys

import pytest

from meshwright.parallel import mesh as mesh_module
from meshwright.parallel.generation.packed_step import PackedShape
from meshwright.parallel.mesh import abstract_mesh, compiler_options, device_mesh
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.chip import GivenOptions
from tests.parallel.generate_cases import step_of
from tests.parallel.small import MODEL, strategy

PROGRAM = """
import jax
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from meshwright.parallel.mesh import device_mesh

def compiled(number):
    jax.jit(lambda x: x + number)(1.0).block_until_ready()

device_mesh({{"data": 1}})
compiled(1)
device_mesh({{"data": {size}}})
compiled(2)
"""


def kept(folder, size):
    """How many programs a process keeps that makes a mesh of one device, then one of ``size``."""
    done = [sys.executable, "-c", PROGRAM.format(folder=str(folder), size=size)]
    subprocess.run(done, check=True, capture_output=True)
    return sum("lambda" in path.name and path.name.endswith("-cache") for path in folder.iterdir())


def test_programs_of_several_cpu_devices_are_not_kept(tmp_path):
    assert kept(tmp_path / "one", 1) == 2
    assert kept(tmp_path / "two", 2) == 1


@pytest.fixture
def dumped(tmp_path, monkeypatch):
    """The folder in which the recommended options make the compiler dump its programs."""
    wanted = {"xla_dump_to": str(tmp_path), "xla_no_such_option": True}
    monkeypatch.setattr(mesh_module, "options_of", lambda name: wanted if name == "cpu" else {})
    return tmp_path


def test_every_step_is_compiled_with_the_options_that_the_compiler_takes(dumped):
    given = GivenOptions({"xla_dump_to": str(dumped)}, ("xla_no_such_option",))
    train, generate = TrainStep(MODEL, strategy({"fsdp": 2})), step_of(MODEL, {"tensor": 2})
    assert train.compiler == generate.compiler == given
    assert not list(dumped.iterdir())  # the trial of the options is not dumped
    train.lower(8, 16).compile()
    assert list(dumped.glob("*jit__step*"))
    generate.lower(PackedShape(4, 4, 4, 1)).compile()
    assert list(dumped.glob("*jit_step*"))


def test_the_user_s_own_flags_stay(dumped, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_no_such_option=false --xla_dump_to_other=x")
    assert compiler_options(device_mesh({"data": 2})) == GivenOptions({"xla_dump_to": str(dumped)})


def test_no_options_without_devices_or_for_an_unknown_chip(dumped, monkeypatch):
    assert compiler_options(abstract_mesh({"data": 2})) == GivenOptions()
    find = mesh_module.chip_of_kind
    monkeypatch.setattr(mesh_module, "chip_of_kind", lambda kind: find("abacus"))
    assert compiler_options(device_mesh({"data": 2})) == GivenOptions()
