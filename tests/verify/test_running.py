"""A compilation in a process of its own, played by small programs: however it ends, it is told and nothing is left."""

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify import running
from meshwright.verify.request import Request
from meshwright.verify.targets import Target

START = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def lowered(): (folder / "lowered").touch()
def compiled():
    memory = {"arguments": 1, "temporaries": 2, "outputs": 0, "peak": 9}
    (folder / "memory.json").write_text(json.dumps(memory))
def error(kind, message): (folder / "error.json").write_text(json.dumps({"kind": kind, "message": message}))
def dump():
    (folder / "dump").mkdir(exist_ok=True)
    name = str(folder / "dump" / "module_0001.jit__step.")
    open(name + "before_optimizations.txt", "w").write("program")
    open(name + "after_optimizations.txt", "w").write("HloModule made")
    allocations = "allocation 0: size 600, parameter 0, x\\nallocation 1: size 70, preallocated-temp:\\n"
    open(name + "after_optimizations-buffer-assignment.txt", "w").write(allocations)
    open(name + "after_optimizations-memory-usage-report.txt", "w").write("report")
"""

TPU = Target(platform="tpu", topology="v5e:2x2", num_devices=4)
CPU = Target(platform="cpu", num_devices=4)


def request(target=TPU, **fields) -> Request:
    strategy = Strategy(mesh=make_mesh({"fsdp": 4}), state="bf16-adam")
    cluster = parse_cluster("v5e:2x2")
    setting = Setting(load_model("tiny"), cluster, Job(batch_seqs=8, seq_len=64))
    return Request(setting=setting, strategy=strategy, target=target, **fields)


def run(body: str, *, timeout_s: float = 20.0, target=TPU, keep=None, **fields):
    return running.run_request(
        request(target, **fields), program=(sys.executable, "-c", START + body), timeout_s=timeout_s, keep=keep
    )


def children() -> set[str]:
    """Processes that this one has started and that are still there."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        # a thread may end between being listed and being asked
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= set((task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No process and no temporary folder, whatever a test does."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = children()
    yield
    assert children() <= before
    assert list(folder.iterdir()) == []


def test_done_on_a_cpu():
    found = run("lowered(); compiled(); (folder / 'module.hlo').write_text('HloModule x'); time.sleep(0.3)", target=CPU)
    assert (found.ended, found.hlo, found.lowered) == ("done", "HloModule x", True)
    assert found.memory.needed == 3
    assert found.wall_s > 0
    assert found.cpu_s > 0
    assert found.max_rss_bytes > 1e6


def test_peak_memory_is_that_of_the_compiler_below_a_large_process():
    """Linux counts the peak of the process that starts another one among the other's own."""
    large = np.ones(300_000_000, np.uint8)
    found = run("lowered(); compiled(); (folder / 'module.hlo').write_text('x'); time.sleep(0.3)", target=CPU)
    assert 1e6 < found.max_rss_bytes < large.nbytes


def test_done_at_full_depth_takes_what_was_dumped():
    """And the peak from the compiler's summary, whose other figures count what is aliased twice."""
    found = run("lowered(); dump(); compiled()", depth="full")
    assert (found.ended, found.hlo, found.program) == ("done", "HloModule made", "program")
    memory = found.memory
    assert (memory.arguments, memory.temporaries, memory.peak) == (600, 70, 9)


def test_stopped_once_buffers_are_assigned():
    started = time.monotonic()
    found = run("lowered(); dump(); time.sleep(600)")
    assert found.ended == "stopped"
    assert time.monotonic() - started < 10
    assert (found.memory.needed, found.hlo, found.out_of_memory) == (670, "HloModule made", "")


def test_full_depth_is_not_stopped():
    assert run("lowered(); dump(); time.sleep(600)", depth="full", timeout_s=1.0).ended == "timeout"


def test_a_file_that_still_grows_is_waited_for():
    body = """
lowered(); dump()
with open(folder / "dump" / "module_0001.jit__step.after_optimizations.txt", "a") as file:
    for _ in range(20):
        file.write(" more"); file.flush(); time.sleep(0.04)
time.sleep(600)
"""
    assert run(body).hlo.count("more") == 20


def test_out_of_memory_is_no_error_where_buffers_were_assigned():
    message = "RESOURCE_EXHAUSTED: Used 60.4G of 15.7G hbm.\\nand many lines"
    for depth in ("partition", "full"):
        found = run(f"lowered(); dump(); error('JaxRuntimeError', '''{message}'''); sys.exit(1)", depth=depth)
        assert found.ended == "stopped"
        assert found.memory.needed == 670
        assert "60.4G" in found.out_of_memory


def test_an_error_is_its_first_line():
    found = run("lowered(); error('JaxRuntimeError', 'INTERNAL: no such thing\\n  at here'); sys.exit(1)")
    assert (found.ended, found.message) == ("error", "INTERNAL: no such thing")
    assert found.memory is None
    assert run("error('ValueError', ''); sys.exit(1)").message == "no message"


def test_an_error_after_the_dump_is_an_error():
    found = run("lowered(); dump(); error('JaxRuntimeError', 'INTERNAL: no code'); sys.exit(1)", depth="full")
    assert (found.ended, found.message, found.memory) == ("error", "INTERNAL: no code", None)


def test_a_crash_by_signal_has_its_last_words():
    found = run("print('F0101 check failed: x > 0', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGABRT)")
    assert (found.ended, found.message) == ("crash", "signal SIGABRT: F0101 check failed: x > 0")
    assert not found.lowered
    assert run("os.kill(os.getpid(), signal.SIGSEGV)").message == "signal SIGSEGV"


def test_garbage_and_exit_status_1():
    found = run("sys.stdout.buffer.write(bytes(range(256)) * 50 + b'\\n' + b'z' * 9999); sys.exit(1)")
    assert found.ended == "crash"
    assert found.message == "exit status 1: " + "z" * 300


def test_a_crash_behind_the_last_result_is_none():
    """libtpu may fail while it is taken down."""
    found = run("lowered(); dump(); compiled(); os.kill(os.getpid(), signal.SIGSEGV)", depth="full")
    assert (found.ended, found.memory.needed) == ("done", 670)


def test_a_program_that_hangs():
    started = time.monotonic()
    found = run("lowered(); time.sleep(600)", timeout_s=0.6)
    assert (found.ended, found.memory) == ("timeout", None)
    assert found.message.startswith("stopped after")
    assert time.monotonic() - started < 5


def test_what_a_program_has_started_is_ended_too(tmp_path):
    body = f"""
import subprocess
one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(one.pid))
time.sleep(600)
"""
    assert run(body, timeout_s=1.5).ended == "timeout"
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.02)
    pytest.fail("a grandchild goes on")


def is_running(pid: int) -> bool:
    """A process that ended and that nobody has asked after is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_the_compiler(monkeypatch, tmp_path):
    """It runs in a session of its own, which the terminal's signal does not reach."""

    def interrupted(seconds):
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.verify.running.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(600)")


def test_remarks_of_the_partitioner():
    found = run(
        "print('W1 [SPMD] Involuntary full rematerialization. The compiler cannot go', file=sys.stderr); lowered()",
        target=CPU,
        depth="lower",
    )
    (remark,) = found.remarks
    assert remark.startswith("W1 [SPMD] Involuntary")


def test_two_at_once():
    def one(number: int):
        return run(f"time.sleep(0.3); lowered(); error('E', 'number {number}'); sys.exit(1)")

    with ThreadPoolExecutor(2) as pool:
        assert [found.message for found in pool.map(one, (1, 2))] == ["number 1", "number 2"]
    assert threading.active_count() < 20


# -- the environment and the folder -------------------------------------------------------------------

SHOW = "error('env', json.dumps({name: os.environ.get(name, '') for name in %r})); sys.exit(1)"


def test_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    names = ["XLA_FLAGS", "JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "JAX_ENABLE_COMPILATION_CACHE"]

    def seen(**fields):
        return dict(zip(names, eval(run(SHOW % names, **fields).message).values(), strict=True))

    tpu = seen()
    assert tpu["XLA_FLAGS"].startswith("--xla_dump_to=")
    assert (tpu["JAX_PLATFORMS"], tpu["TPU_SKIP_MDS_QUERY"]) == ("", "1")
    assert tpu["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    cpu = seen(target=CPU)
    assert cpu["XLA_FLAGS"].startswith("--xla_force_host_platform_device_count=4 ")
    assert " --xla_dump_to=" in cpu["XLA_FLAGS"]
    assert (seen(depth="lower")["XLA_FLAGS"], seen(depth="lower")["JAX_PLATFORMS"]) == ("", "cpu")


def test_a_folder_that_is_kept_and_used_again(tmp_path):
    keep = tmp_path / "a" / "kept"
    assert run("lowered(); dump(); time.sleep(600)", keep=keep).ended == "stopped"
    assert {path.name for path in keep.iterdir()} == {"request.json", "lowered", "dump", "compiler.log"}
    again = run("os.kill(os.getpid(), signal.SIGKILL)", keep=keep)
    assert (again.ended, again.lowered, again.program) == ("crash", False, "")


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="has other files"):
        run("", keep=tmp_path)
    assert (tmp_path / "dump" / "mine.txt").read_text() == "precious"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be written: Not a directory"):
        run("", keep=tmp_path / "file" / "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="every folder can be written to by root")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(InputError, match="Permission denied"):
        run("", keep=closed)


# -- what compilers dump ------------------------------------------------------------------------------

DATA = Path(__file__).parents[1] / "data" / "verify"
GIB = 2**30

REPORTED = {"v5e": 15852636672, "h100": 38440867928}
"""Bytes in HBM (memory space 0) by the memory report that the compiler wrote beside each of the two files."""


def buffers(name: str) -> str:
    return (DATA / f"{name}_buffers.txt").read_text()


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_the_sum_is_that_of_the_compilers_report(name):
    """The report counts scratch of single kernels too, which is not held while the program runs."""
    text = buffers(name)
    in_kernels = sum(int(size) for size in re.findall(r"size (\d+), thread-local", text))
    assert 0 < in_kernels < 1e-4 * REPORTED[name]
    assert running.read_memory(text).needed == REPORTED[name] - in_kernels


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_arguments_are_weights_and_optimizer(name):
    """llama3-8b over 16 chips: bf16 weights and two float32 moments, 10 bytes a parameter, norms whole on each chip."""
    norms, all_weights = 65 * 4096, 8030261248
    assert running.read_memory(buffers(name)).arguments == pytest.approx(
        10 * ((all_weights - norms) / 16 + norms), rel=1e-3
    )


def test_other_memory_spaces_and_scratch_do_not_count():
    text = """BufferAssignment:
allocation 0: size 1000, parameter 0, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
allocation 1: size 200, color 1, preallocated-temp:
allocation 2: size 30, thread-local:
allocation 3: size 7, constant:
allocation 4: size 400, maybe-live-out:
allocation 5: size 60, color 0, preallocated-temp:
"""
    found = running.read_memory(text)
    assert (found.arguments, found.temporaries, found.outputs) == (1000, 67, 400)
    assert found.needed == 1467


@pytest.mark.parametrize(
    ("message", "offered"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 60.42G of 15.75G hbm. Exceeded hbm capacity by 44.67G.",
            round(15.75 * GIB),
        ),
        ("RESOURCE_EXHAUSTED: the program's size (16.2G) exceeds available HBM (15.75G)", round(15.75 * GIB)),
        ("Used 900.0M of 512.5K hbm.", round(512.5 * 1024)),
        ("RESOURCE_EXHAUSTED: vmem", None),
        ("", None),
    ],
)
def test_what_a_refusal_offers(message, offered):
    assert running.available_bytes(message) == offered


def write_dump(
    folder: Path, module: str, *, size: int = 10, ends=(running.MODULE_END, running.BUFFERS_END, running.LAST_END)
) -> None:
    for end in ends:
        (folder / f"{module}.{end}").write_text("x" * size)


def test_the_files_of_the_largest_step(tmp_path):
    assert running.dump_files(tmp_path) is None
    write_dump(tmp_path, "module_0001.jit_zeros.sm_9.0_gpu", size=5)
    write_dump(tmp_path, "module_0002.jit__step.sm_9.0_gpu")
    write_dump(tmp_path, "module_0003.other", size=99)
    found = running.dump_files(tmp_path)
    assert set(found) == {running.MODULE_END, running.BUFFERS_END, running.LAST_END}
    assert {path.name.split(".")[1] for path in found.values()} == {"jit__step"}


@pytest.mark.parametrize("missing", [running.MODULE_END, running.BUFFERS_END, running.LAST_END])
def test_files_that_are_not_there_yet(tmp_path, missing):
    write_dump(
        tmp_path, "module_0002.jit__step", ends={running.MODULE_END, running.BUFFERS_END, running.LAST_END} - {missing}
    )
    assert running.dump_files(tmp_path) is None
    (tmp_path / f"module_0002.jit__step.{missing}").touch()  # there, and still empty
    assert running.dump_files(tmp_path) is None


def test_the_program(tmp_path):
    assert running.read_program(tmp_path) == ""
    (tmp_path / "module_0001.jit_zeros.before_optimizations.txt").write_text("small")
    (tmp_path / "module_0002.jit__step.before_optimizations.txt").write_text("the larger one")
    assert running.read_program(tmp_path) == "the larger one"
