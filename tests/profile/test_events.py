"""Events from planes of each platform, and from a real trace of a tiny program."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from meshwright.core.errors import InputError
from meshwright.profile.events import STEP, STEP_END, Window, load_trace, newest_trace, read_trace
from meshwright.profile.hlo import parse_program
from meshwright.profile.run import traced
from meshwright.profile.times import measure_times
from tests.profile.test_times import PROGRAM


def event(name, start_ns, duration_ns, **stats):
    return SimpleNamespace(name=name, start_ns=start_ns, duration_ns=duration_ns, stats=list(stats.items()))


def line(name, *events):
    return SimpleNamespace(name=name, events=events)


def plane(name, *lines):
    return SimpleNamespace(name=name, lines=lines)


def read(*planes):
    return read_trace(planes, PROGRAM, source="the trace")


STEPS = plane("/host:CPU", line("python", event(STEP, 0, 5000, step=0), event(STEP, 5000, 5000, step=1)))


def test_gpu_streams_are_lanes_of_a_device():
    found = read(
        plane(
            "/device:GPU:1",
            line("Stream #13(Compute)", event("ampere_gemm", 1000, 500, hlo_op="dot.1"), event("memset", 0, 1)),
            line("Stream #14(NCCL)", event("ncclKernel", 1200, 800, hlo_op="all-gather.1")),
            line("XLA Ops", event("dot.1", 1000, 500, hlo_op="dot.1")),
        ),
        STEPS,
    )
    assert found.platform == "gpu"
    assert [(e.op, e.device, e.lane) for e in found.events] == [
        ("dot.1", 1, "Stream #13(Compute)"),
        ("all-gather.1", 1, "Stream #14(NCCL)"),
    ]
    assert found.unnamed_s == pytest.approx(1e-9)  # the memset
    assert found.windows == (Window(0, pytest.approx(5e-6)), Window(pytest.approx(5e-6), pytest.approx(1e-5)))
    assert measure_times(found, PROGRAM).overlap == pytest.approx(300 / 800)


def test_kernels_are_found_by_their_own_names():
    found = read(plane("/device:GPU:0", line("Stream #1", event("add_1", 1000, 500), event("all_gather_1", 2000, 5))))
    assert [e.op for e in found.events] == ["add.1", "all-gather.1"]


def test_tpu_instructions_are_named_by_their_text():
    found = read(
        plane(
            "/device:TPU:0",
            line("XLA Modules", event("jit_f(1)", 0, 5000)),
            line("XLA Ops", event("%dot.1 = f32[256,256]{1,0} dot(%a, %b)", 1000, 500), event("unknown.3", 2000, 1)),
        )
    )
    assert found.platform == "tpu"
    assert [e.op for e in found.events] == ["dot.1"]
    assert found.found_steps == "none"
    assert found.windows == (Window(pytest.approx(1e-6), pytest.approx(1.5e-6)),)


def test_cpu_threads_work_for_the_device_that_they_name():
    threads = plane(
        "/host:CPU",
        line(
            "pool/17",
            event("dot.1", 0, 1000, hlo_op="dot.1", hlo_module="made", device_ordinal=3, run_id=7),
            event("all-gather.1", 1000, 4000, hlo_op="all-gather.1", hlo_module="made", device_ordinal=2, run_id=7),
            event("Wait: pending_threads=1/2", 1500, 2000),
            event("dot.1", 8000, 1000, hlo_op="dot.1", hlo_module="another", device_ordinal=3, run_id=8),
        ),
    )
    found = read(threads)
    assert [(e.op, e.device) for e in found.events] == [("all-gather.1", 2), ("dot.1", 3)]
    assert found.events[0].waited_s == pytest.approx(2e-6)
    assert found.found_steps == "runs"
    assert found.windows == (Window(0, pytest.approx(5e-6)),)
    assert not found.by_thread


def test_without_a_device_each_thread_is_one():
    found = read(plane("/host:CPU", line("a/1", event("dot.1", 0, 10, hlo_op="dot.1")), line("b/2")))
    assert found.by_thread
    assert len(found.devices) == 1


def test_a_device_that_is_no_number_is_none():
    stats = {"hlo_op": "dot.1", "device_ordinal": "nan", "run_id": "nan"}
    found = read(plane("/host:CPU", line("a/1", event("dot.1", 0, 10, **stats))))
    assert (found.by_thread, found.found_steps) == (True, "none")


def test_steps_of_a_training_run_lie_between_marks():
    marks = [event(STEP_END, at, 0) for at in (1000, 4000, 9000)]
    found = read(
        plane(
            "/host:CPU", line("python", *marks), line("a/1", event("dot.1", 2000, 10, hlo_op="dot.1", device_ordinal=0))
        )
    )
    assert found.found_steps == "marks"
    assert [w.seconds for w in found.windows] == [pytest.approx(3e-6), pytest.approx(5e-6)]


def test_a_trace_of_another_program_is_refused():
    with pytest.raises(InputError, match=r"no event of the program 'made'.*that was traced"):
        read(STEPS)


def test_files_that_are_no_trace(tmp_path):
    with pytest.raises(InputError, match="there is no trace"):
        load_trace(tmp_path / "none.xplane.pb", PROGRAM)
    junk = tmp_path / "junk.xplane.pb"
    junk.write_bytes(b"\xff\xfe not a protocol buffer")
    with pytest.raises(InputError, match=r"(is not a trace|has no event)"):
        load_trace(junk, PROGRAM)
    with pytest.raises(InputError, match="has no trace"):
        newest_trace(tmp_path / "empty")


def test_a_real_trace_of_a_tiny_program(tmp_path):
    def tiny(a):
        with jax.named_scope("layer:forward:q=einsum"):
            return a @ a.T

    a = jnp.ones((256, 256))
    compiled = jax.jit(tiny).lower(a).compile()
    compiled(a).block_until_ready()
    with traced(tmp_path):
        for number in range(2):
            with jax.profiler.TraceAnnotation(STEP, step=number):
                compiled(a).block_until_ready()
    program = parse_program(compiled.as_text())
    found = load_trace(newest_trace(tmp_path), program)
    assert found.platform == "cpu"
    assert found.devices == (0,)
    assert len(found.windows) == 2
    times = measure_times(found, program)
    assert sum(program.fact(op.name).flops * op.count for op in times.ops) == 2 * 256**3
    assert {program.fact(op.name).step for op in times.ops if program.fact(op.name).flops} == {"layer:forward:q=einsum"}
    assert times.mean.total_s == pytest.approx(sum(w.seconds for w in found.windows) / 2)
