"""Two networks that are cut apart: one side goes on, the other stops, and comes back. Needs root and Linux."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.islands.service import Bounds
from tests.islands.runs import ToyRun

NAMES = (f"mw{os.getpid()}a", f"mw{os.getpid()}b")


def ip(words: str) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture
def two_networks() -> Iterator[tuple[str, str]]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    a, b = NAMES
    try:
        for name in NAMES:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"link add {a} type veth peer name {b}")
        for name, host in zip(NAMES, (1, 2), strict=True):
            ip(f"link set {name} netns {name}")
            ip(f"-n {name} addr add 10.77.0.{host}/24 dev {name}")
            ip(f"-n {name} link set {name} up")
        yield a, b
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_of_two_networks_one_side_stops_and_comes_back(tmp_path: Path, two_networks: tuple[str, str]):
    here, there = two_networks
    with ToyRun(tmp_path, Bounds(count=4, beat_s=1.0, start_s=60.0), steps=600, address="10.77.0.1:7900") as run:
        run.serve(network=here)
        for island in range(4):
            run.start(island, network=here if island < 2 else there)
        run.until_step(20)
        ip(f"-n {there} link set {there} down")
        run.until("island 2 is out")
        run.until("island 3 is out")
        time.sleep(1)
        cut_at = time.time()
        time.sleep(3)
        late = {line["at"]: line for line in run.lines() if line["at"] > cut_at}
        assert late
        assert {line["total"] for line in late.values()} == {3.0 + 2.0}, "both sides trained"
        ip(f"-n {there} link set {there} up")
        run.until("island 3 is in")
        run.until("island 2 is in")
        run.wait(timeout_s=120)
        run.require_whole()
