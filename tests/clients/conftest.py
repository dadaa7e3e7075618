"""A folder and a server of it, shared by the checks of one run, and the commands of the clients' installation."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.folder import NAME, make_folder
from tests.clients.server import ROOT, Server

CLIENTS = Path(os.environ.get("CLIENTS", ROOT / ".clients"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("clients") / NAME)


@pytest.fixture(scope="session")
def server(folder):
    with Server(folder) as started:
        yield started


@pytest.fixture
def client(tmp_path):
    """Runs a command of the clients' installation; returns what it said. No network but the loopback."""

    def run(command: str, *given: str, timeout_s: float = 600, **more: str) -> str:
        path = CLIENTS / "bin" / command
        if not path.exists():
            pytest.skip(f"{command} is not installed: make test-clients installs it")
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        environment |= {**offline, "CUDA_VISIBLE_DEVICES": "", **more}
        done = subprocess.run(
            [str(path), *given], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
        return done.stdout + done.stderr

    return run
