"""The executor over real processes: what runs on one device's own time, and meets only in its messages."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.algebra.schedule_rows import SCHEDULES

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def errors(num_processes, devices_each, names):
    """The largest error that each process found for each schedule."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices_each),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    command = [sys.executable, "-m", "tests.parallel.pipeline_child", f"127.0.0.1:{free_port()}", str(num_processes)]
    started = [
        subprocess.Popen(
            [*command, str(i), *names], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for i in range(num_processes)
    ]
    try:
        texts = [one.communicate(timeout=TIMEOUT_S)[0].decode() for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * num_processes, "\n".join(text[-2000:] for text in texts)
    return [dict(re.findall(r"^error (\S+) (\S+)$", text, re.MULTILINE)) for text in texts]


def assert_equal(found, names):
    for of_process in found:
        assert set(of_process) == set(names)
        assert max(map(float, of_process.values())) <= 1e-5


def test_two_processes():
    names = ("dualpipe-v",)
    assert_equal(errors(2, 1, names), names)


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "devices_each"), [(2, 2), (4, 1)])
def test_every_schedule(num_processes, devices_each):
    assert_equal(errors(num_processes, devices_each, SCHEDULES), SCHEDULES)
