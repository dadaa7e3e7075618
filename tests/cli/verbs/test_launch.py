"""`launch`: several processes that live and die together, with the losses of one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import run
from meshwright.cli.verbs.launch import child_environment, noise_filter
from meshwright.cli.verbs.launch import launch as launch_program
from meshwright.core.errors import EX_TEMPFAIL
from meshwright.plan.plan_file import load_plan
from tests.cli.made_rates import write_rates
from tests.train.small import write_text

ROOT = Path(__file__).parents[3]
SMALL = [
    "--set", "model.num_layers=2", "--set", "model.d_model=32", "--set", "model.d_ff=64", "--set", "model.head_dim=4",
    "--set", "model.vocab_size=300", "--batch", "8seq", "--seq", "32",
]  # fmt: skip
AXES = {2: "fsdp=2", 4: "fsdp=2,tensor=2"}
STEPS, LONGEST_S = 6, 600


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def devices(request):
    """Emulated devices of a plan, one for each process."""
    return request.param


@pytest.fixture(scope="module")
def plan(tmp_path_factory, devices):
    folder = tmp_path_factory.mktemp("plan")
    path, rates = folder / "plan.toml", write_rates(folder)
    where = ["--on", f"cpu:{devices}", "--axes", AXES[devices]]
    assert run(["plan", "tiny", *SMALL, *where, "--calibration", str(rates), "-o", str(path)]) == 0
    assert load_plan(path).strategy.num_chips == devices
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def launch(*arguments, **options):
    command = [sys.executable, "-c", "from meshwright.cli.main import main; main()", "launch", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


def train_arguments(plan, text, runs, *more):
    given = ("checkpoint_every=2", "log_every=1", "held_out=0")
    changes = [word for change in given for word in ("--set", f"train.{change}")]
    return ["train", plan, "--steps", STEPS, "--data", text, "--runs", runs, *changes, *more]


@pytest.fixture(scope="module")
def alone(plan, text, tmp_path_factory):
    """The losses of one process with all devices."""
    runs = tmp_path_factory.mktemp("alone")
    assert run([str(a) for a in train_arguments(plan, text, runs)]) == 0
    return losses_of(runs / "tiny-001")


def losses_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def test_several_processes_train_as_one(plan, text, alone, tmp_path, devices):
    child = launch("--processes", devices, "--", *train_arguments(plan, text, tmp_path, "--json"))
    out, error = child.communicate(timeout=LONGEST_S)
    assert child.returncode == 0, error
    result = json.loads(out)  # what process 0 says, and nothing beside it
    assert result["processes"] == devices
    np.testing.assert_allclose(result["losses"], alone, rtol=1e-5)
    assert losses_of(tmp_path / "tiny-001") == result["losses"]
    lines = error.splitlines()
    assert all(line.startswith("[") for line in lines)
    assert not any("[Gloo]" in line for line in lines)
    assert sum("step 6/6" in line for line in lines) == 1
    # On with one process, from the checkpoint of several.
    more = ["train", "--resume", str(tmp_path / "tiny-001"), "--steps", str(STEPS + 1)]
    assert run(more) == 0
    assert losses_of(tmp_path / "tiny-001")[:STEPS] == result["losses"]


@pytest.mark.slow
def test_one_that_is_killed_in_training_takes_the_others_along(plan, text, tmp_path):
    """Process 1 is killed in the middle of training: the others would wait for it for ever."""
    child = launch("--processes", 2, "--", *train_arguments(plan, text, tmp_path, "--steps", 100_000))
    wait_for_checkpoint(tmp_path / "tiny-001")
    killed = next(pid for pid in children_of(child.pid) if b"MESHWRIGHT_PROCESS=1" in environment(pid))
    os.kill(killed, signal.SIGKILL)
    _, error = child.communicate(timeout=LONGEST_S)
    assert child.returncode == 128 + signal.SIGKILL
    assert "process 1 was killed by SIGKILL; the others are stopped" in error
    assert whole_checkpoints(tmp_path / "tiny-001")


@pytest.mark.slow
def test_ctrl_c_reaches_all_and_leaves_a_run_for_other_processes(plan, text, tmp_path, devices):
    child = launch("--processes", devices, "--", *train_arguments(plan, text, tmp_path, "--steps", 100_000))
    wait_for_checkpoint(tmp_path / "tiny-001")
    child.send_signal(signal.SIGINT)
    out, error = child.communicate(timeout=LONGEST_S)
    assert child.returncode == EX_TEMPFAIL, error
    assert "steps (stopped)" in out
    before = losses_of(tmp_path / "tiny-001")
    newest = whole_checkpoints(tmp_path / "tiny-001")[-1]
    assert newest == len(before) < 100_000
    steps = ["--steps", newest + 3]
    again = launch("--processes", devices // 2, "--", "train", "--resume", tmp_path / "tiny-001", *steps, "--json")
    out, error = again.communicate(timeout=LONGEST_S)
    assert again.returncode == 0, error
    assert (json.loads(out)["resumed_from"], json.loads(out)["processes"]) == (newest, devices // 2)
    after = losses_of(tmp_path / "tiny-001")
    assert after[:newest] == before
    assert len(after) == newest + 3


# -- any program, since it is quicker to start than a run ------------------------------------------------

PROGRAM = """
import os, signal, sys, time
index = int(os.environ["MESHWRIGHT_PROCESS"])
print(f"out of {index}"); print(f"error of {index}", file=sys.stderr)
print("[Gloo] Rank 0 is connected to 1 peer ranks.")
"""


def run_program(capfd, rest, processes=3):
    code = launch_program([sys.executable, "-c", PROGRAM + rest], processes=processes)
    return (code, *(stream.splitlines() for stream in capfd.readouterr()))


def test_standard_output_is_that_of_the_first_and_the_rest_is_numbered(capfd):
    code, out, error = run_program(capfd, "")
    assert code == 0
    assert out == ["out of 0"]
    assert sorted(error) == ["[0] error of 0", "[1] error of 1", "[1] out of 1", "[2] error of 2", "[2] out of 2"]


@pytest.mark.parametrize(
    ("fate", "code", "words"),
    [
        ("sys.exit(3)", 3, "process 1 ended with exit code 3; the others are stopped"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 was killed by SIGKILL; the others are stopped"),
    ],
)
def test_one_that_fails_takes_the_others_along(capfd, monkeypatch, fate, code, words):
    monkeypatch.setattr("meshwright.cli.verbs.launch.GRACE_S", 0.2)
    start = time.monotonic()
    found, _, error = run_program(capfd, f"if index == 1: {fate}\ntime.sleep(100)")
    assert found == code
    assert words in error
    assert time.monotonic() - start < 50


def test_others_that_end_in_time_are_not_stopped(capfd):
    code, _, error = run_program(capfd, "time.sleep(0.1 * index); sys.exit(index and 4)")
    assert code == 4
    assert not any("stopped" in line for line in error)


def test_processes_that_were_asked_to_stop_and_did_have_not_failed(capfd):
    code, _, error = run_program(capfd, "time.sleep(0.1 * index); sys.exit(75)")
    assert code == 75
    assert not any("stopped" in line for line in error)


def test_once_a_process_is_lost_the_others_say_nothing(capfd, monkeypatch):
    """What they say is that a collective failed, in the words of a library."""
    monkeypatch.setattr("meshwright.cli.verbs.launch.GRACE_S", 0.5)
    rest = "if index == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.3); print('peer', file=sys.stderr)"
    code, _, error = run_program(capfd, f"{rest}; sys.exit(1)")
    assert code == 137
    assert "process 1 was killed by SIGKILL; the others are stopped" in error
    assert not any("peer" in line for line in error)


def test_processes_end_with_a_launch_that_is_killed(tmp_path):
    """They get SIGTERM, after which a run writes a checkpoint."""
    listen = f"signal.signal(signal.SIGTERM, lambda *_: (open(f'{tmp_path}/end{{index}}', 'w').close(), os._exit(0)))"
    ready = f"open(f'{tmp_path}/{{index}}', 'w').close()"
    program = f"{PROGRAM}\n{listen}\n{ready}\nwhile True: time.sleep(1)"
    start = (
        "import sys; from meshwright.cli.verbs.launch import child_program, launch; "
        "first = child_program().partition('; from meshwright.cli.main')[0]; "
        "launch([sys.executable, '-c', first + sys.argv[1]], processes=2)"
    )
    child = subprocess.Popen([sys.executable, "-c", start, program])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    child.kill()
    child.wait()
    while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "end0", "end1"]


def test_an_error_that_all_have_in_common_is_said_once(capfd):
    rest = 'print(f"meshwright: all {index // 2}", file=sys.stderr); sys.exit(2)'
    code, _, error = run_program(capfd, rest)
    assert code == 2
    said = [line.partition("] ")[2] for line in error if "meshwright: " in line]
    assert sorted(said) == ["meshwright: all 0", "meshwright: all 1"]


def interrupt_when_ready(folder, *, count, times):
    """Send this process Ctrl-C, ``times`` times, once each child has left a file to say that it listens."""

    def send():
        while len(list(folder.iterdir())) < count:
            time.sleep(0.02)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize(("handler", "times", "code"), [("sys.exit(0)", 1, 0), ("None", 2, 128 + signal.SIGINT)])
def test_ctrl_c_reaches_all_and_a_second_one_kills(capfd, tmp_path, handler, times, code):
    listen = f"signal.signal(signal.SIGINT, lambda *_: {handler}); open(f'{tmp_path}/{{index}}', 'w').close()"
    interrupt_when_ready(tmp_path, count=2, times=times)
    found, _, _ = run_program(capfd, f"{listen}\nwhile True: time.sleep(1)", processes=2)
    assert found == code


def wait_for_checkpoint(folder):
    deadline = time.monotonic() + LONGEST_S
    while not whole_checkpoints(folder) and time.monotonic() < deadline:
        time.sleep(0.05)


def whole_checkpoints(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_what_all_refuse_ends_with_their_exit_code(tmp_path):
    child = launch("--processes", 2, "--", "train", tmp_path / "missing.toml")
    _, error = child.communicate(timeout=LONGEST_S)
    assert child.returncode == 2
    (line,) = error.splitlines()
    assert line.endswith("missing.toml cannot be read (No such file or directory). Give a TOML file.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "--processes", "2"], "VERB"),
        (["launch", "--processes", "0", "--", "train"], "0 is not in the range"),
        (["launch", "--processes", "2", "--", "launch", "train"], "launch cannot start itself"),
    ],
)
def test_what_launch_refuses(arguments, words, capsys):
    assert run(arguments) == 2
    assert words in capsys.readouterr().err


def test_what_gloo_says_is_left_out_however_it_is_cut():
    """Two devices of one process write their lines at once, piece by piece."""
    end = "Expected number of connected peer ranks is : "
    said = [
        *("first", "", "7", f"[Gloo] Rank 0 is connected to 1 peer ranks. {end}1", '{"steps": 6}'),
        *(f"[Gloo] Rank [Gloo] Rank 01 is connected to 33 peer ranks. {end}", "3", "", "last", "8"),
    ]
    is_noise = noise_filter()
    assert [line for line in said if not is_noise(line)] == ["first", "", "7", '{"steps": 6}', "last", "8"]


def test_a_process_is_told_who_it_is_and_which_devices_are_its_own():
    before = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --other", "JAX_NUM_CPU_DEVICES": "8"}
    found = child_environment(dict(before), 1, 2, port=7000, devices=None)
    assert found["XLA_FLAGS"] == "--other"  # the plan says how many
    assert "JAX_NUM_CPU_DEVICES" not in found
    assert (found["MESHWRIGHT_PROCESS"], found["MESHWRIGHT_PROCESSES"]) == ("1", "2")
    assert found["MESHWRIGHT_COORDINATOR"] == found["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:7000"
    given = child_environment(dict(before), 1, 2, port=7000, devices=3)
    assert "--xla_force_host_platform_device_count=3" in given["XLA_FLAGS"]
    assert given["JAX_LOCAL_DEVICE_IDS"] == "3,4,5"
