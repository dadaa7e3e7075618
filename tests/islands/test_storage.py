"""Training in islands goes on while nothing can be written, and writes when it can."""

import resource
import signal
from pathlib import Path

import pytest

from tests.islands.trained import TrainedRun, write_plan

TWO = ("--on", "2*cpu:1@10Gbit/s", "--batch", "8seq")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    write_plan(folder, *TWO)
    return folder


def test_a_full_disk_and_storage_that_is_lost_end_no_training(folder: Path):
    with TrainedRun(folder, ["-n", "2"], steps=600, settings=["train.checkpoint_every=20"]) as run:
        run.until_step(20)
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in run.processes().values()}
        for pid, (_, most) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**14, most))  # a disk that takes no more
        run.until("no checkpoint can be written in")
        run.until("File too large [os_error_code='27']; training goes on, and tries again")
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        step = run.records()[-1]["step"]
        run.until_step(step + 50)
        assert max(int(path.name) for path in run.run.glob("checkpoints/[0-9]*[0-9]")) > step - 20
        run.runs.rename(folder / "lost")
        run.runs.write_text("")
        run.until("Not a directory")
        run.runs.unlink()
        result = run.end()
    assert result["steps"] == 600
    assert (run.run / "model.safetensors").is_file()
    assert (run.run / "checkpoints" / "600").is_dir()
    steps = [record["step"] for record in run.records()]
    assert steps == list(range(steps[0], 601)), "lines after the storage came back"


def test_a_run_whose_islands_and_service_are_all_killed_goes_on_in_its_folder(folder: Path):
    with TrainedRun(folder, ["-n", "2"], steps=200, settings=["train.checkpoint_every=20"]) as run:
        run.until_step(50)
        for island in (0, 1, -1):
            run.kill(island)
        run.until("goes on after step")
        run.end()
        assert [path.name for path in run.runs.iterdir()] == ["mini-001"]
        assert [record["step"] for record in run.records()] == list(range(1, 201))


def test_an_island_that_is_asked_to_stop_leaves_and_the_others_train_on(folder: Path):
    with TrainedRun(folder, ["-n", "2"], steps=800) as run:
        run.until_step(20)
        run.kill(0, number=signal.SIGTERM)
        run.until("island 0 was asked to stop, and leaves")
        run.until("island 0 ended with exit code 75; it restarts")
        run.until("island 0 is in; 2 of 2 islands train")
        run.end()
        assert [record["step"] for record in run.records()] == list(range(1, 801))
