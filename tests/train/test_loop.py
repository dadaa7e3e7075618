import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.parallel import mesh
from meshwright.spec.job import Job
from meshwright.spec.prediction import Prediction
from meshwright.train.data.batches import Batches
from meshwright.train.interrupt import stop_on_signals
from meshwright.train.loop import train
from tests.train.event_files import scalars
from tests.train.small import JOB, MODEL, lines_of, settings, stop_at, strategy

FILES = [
    *("SHA256SUMS", "checkpoints", "config.json", "metrics.jsonl", "model.safetensors"),
    *("resolved.toml", "summary.json", "tokenizer.json"),
]

PREDICTED = Prediction(
    step_s=0.1, step_s_lower=0.05, step_s_upper=0.2, mfu=0.01, hfu=0.015, bound_by="compute", hbm_bytes_per_chip=1e6,
    memory={}, flops=1.5e9,
)  # fmt: skip

STEADY = {"steps": 30, "learning_rate": 3e-3}
"""A rate at which the loss has no spikes: on the text of some Python versions 1e-2 has one, which makes 400 times as
much of how two meshes round."""


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """One whole run on 8 devices, and the compilations that JAX reports after the first step.

    Step 10 is left out: Orbax compiles a slice for each kind of replicated array at the first checkpoint.
    """
    compiled: list[str] = []
    active = False

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if active and "/jax/core/compile" in event:
            compiled.append(event)

    def on_step(record):
        nonlocal active
        active = 1 <= record.step < 30 and record.step != 10

    jax.monitoring.register_event_duration_secs_listener(listen)
    result = train(
        MODEL,
        strategy(fsdp=4, tensor=2),
        JOB,
        settings(text, **STEADY, checkpoint_every=10, keep_every=20, evaluate_every=10, track=("tensorboard",)),
        run_root=tmp_path_factory.mktemp("runs"),
        predicted=PREDICTED,
        on_step=on_step,
        texts={"plan.toml": "version = 1\n"},
    )
    return result, compiled


def test_the_loss_falls_on_real_text(finished):
    result, _ = finished
    assert result.losses[0] == pytest.approx(np.log(MODEL.vocab_size), rel=0.03)
    assert np.mean(result.losses[-5:]) < result.losses[0] - 0.7
    assert result.validation_loss < result.losses[0] - 0.5


def test_no_step_evaluation_or_later_checkpoint_compiles_anything(finished):
    assert finished[1] == []


def test_the_result_has_what_was_measured(finished):
    result, _ = finished
    metrics = lines_of(result.run)
    assert result.steps == 30
    assert not result.stopped
    assert result.step_s == pytest.approx(np.median([m["step_s"] for m in metrics[2:]]))
    assert result.tokens_per_s == pytest.approx(JOB.tokens_per_step / result.step_s)
    assert result.mfu == pytest.approx(1e9 / (result.step_s * 1e12))
    assert result.hfu == pytest.approx(1.5e9 / (result.step_s * 1e12))
    assert result.step_s_predicted == 0.1
    assert result.compile_s > 0


def test_memory_is_that_of_one_device(finished):
    memory = finished[0].memory
    vectors = (2 * MODEL.num_layers + 1) * MODEL.d_model
    matrices = 2 * 300 * 32 + MODEL.num_layers * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    assert memory.weights_bytes == 4 * (matrices // 8 + vectors)
    assert memory.optimizer_bytes == pytest.approx(2 * memory.weights_bytes, abs=64)  # and counters of steps
    tokens_labels_positions = 3 * 4 * JOB.tokens_per_step // 4
    assert memory.batch_bytes == tokens_labels_positions + 4  # and the number of labels
    assert memory.temporaries_bytes > 0


def test_the_wall_time_is_accounted_for(finished):
    result, _ = finished
    goodput, steps = result.goodput, lines_of(result.run)
    assert goodput.steps_s == pytest.approx(sum(m["step_s"] for m in steps))
    assert goodput.compile_s == result.compile_s
    assert min(goodput.checkpoint_s, goodput.evaluation_s, goodput.data_s) > 0
    parts = goodput.steps_s + goodput.compile_s + goodput.checkpoint_s + goodput.evaluation_s + goodput.data_s
    assert parts < goodput.wall_s
    assert goodput.share == pytest.approx(goodput.steps_s / goodput.wall_s)


def test_the_run_folder_holds_everything(finished):
    result, _ = finished
    assert sorted(os.listdir(result.run)) == sorted([*FILES, "plan.toml", "evaluations.jsonl", "tensorboard"])
    metrics = lines_of(result.run)
    assert [m["step"] for m in metrics] == list(range(1, 31))
    assert [m["tokens"] for m in metrics] == [JOB.tokens_per_step * n for n in range(1, 31)]
    assert [m["loss"] for m in metrics] == result.losses
    assert all(m["predicted_step_s"] == 0.1 and m["mfu"] > 0 and m["grad_norm"] > 0 for m in metrics)
    with open(f"{result.run}/summary.json") as file:
        summary = json.load(file)
    assert summary["losses"] == result.losses
    assert summary["diverged"] is False
    with open(f"{result.run}/resolved.toml", "rb") as file:
        resolved = tomllib.load(file)
    assert resolved["train"]["steps"] == 30
    assert resolved["strategy"]["mesh"]["fsdp"] == 4
    assert resolved.get("compiler", {}) == {}  # CPUs get no options


@pytest.mark.slow
def test_options_of_the_compiler_are_kept_and_refused_ones_named(text, tmp_path, monkeypatch, capfd):
    wanted = {"xla_dump_to": str(tmp_path / "dump"), "xla_no_such_option": True}
    monkeypatch.setattr(mesh, "options_of", lambda name: wanted)
    result = train(MODEL, strategy(fsdp=2), JOB, settings(text, steps=1), run_root=tmp_path / "runs")
    with open(f"{result.run}/resolved.toml", "rb") as file:
        assert tomllib.load(file)["compiler"] == {"xla_dump_to": str(tmp_path / "dump")}
    assert list((tmp_path / "dump").glob("*jit__step*"))
    assert "the installed compiler refuses xla_no_such_option: compiled without" in capfd.readouterr().err


def test_held_out_text_is_evaluated_on_the_way(finished):
    result, _ = finished
    with open(f"{result.run}/evaluations.jsonl") as lines:
        found = [json.loads(line) for line in lines]
    assert [record["step"] for record in found] == [10, 20, 30]
    assert found[-1]["loss"] == result.validation_loss < found[0]["loss"]
    assert [record.loss for record in result.evaluations] == [record["loss"] for record in found]


def test_checkpoints_are_kept_by_policy(finished):
    folder = f"{finished[0].run}/checkpoints"
    assert sorted(map(int, os.listdir(folder))) == [20, 30]  # the newest two; 20 for good


def test_tensorboard_gets_every_loss(finished):
    result, _ = finished
    found = scalars(Path(result.run) / "tensorboard")
    assert [found["loss", step] for step in range(1, 31)] == pytest.approx(result.losses)
    assert found["evaluation_loss", 30] == pytest.approx(result.validation_loss)


def test_standard_output_stays_empty_and_plain_lines_go_to_stderr(tmp_path, text, capfd):
    train(MODEL, strategy(), JOB, settings(text, log_every=2), run_root=tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    first, compiled, *steps = err.splitlines()
    assert first.endswith("starts from random weights")
    assert ": compiled in " in compiled
    assert [line.split("  ")[0] for line in steps] == ["step 1/6", "step 2/6", "step 4/6", "step 6/6"]


def test_one_device_trains_alike(finished, tmp_path, text):
    other = train(MODEL, strategy(), JOB, settings(text, **STEADY), run_root=tmp_path)
    np.testing.assert_allclose(other.losses, finished[0].losses, rtol=1e-5)
    assert other.validation_loss == pytest.approx(finished[0].validation_loss, rel=1e-5)


@pytest.mark.slow
def test_two_byte_weights_train(tmp_path, text):
    result = train(MODEL, strategy(state="bf16-adam"), JOB, settings(text, steps=8), run_root=tmp_path)
    assert result.losses[-1] < result.losses[0] - 0.3
    assert result.memory.optimizer_bytes == pytest.approx(4 * result.memory.weights_bytes, abs=64)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def nothing_ignored():
    """Signals as a terminal gives them: a child of nohup ignores SIGHUP, one of a script's & SIGINT."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("nothing_ignored")
@pytest.mark.parametrize("number", [None, *SIGNALS], ids=["Ctrl-C", *(one.name for one in SIGNALS)])
def test_a_request_to_stop_ends_with_everything_written(tmp_path, text, number):
    before = [signal.getsignal(number) for number in SIGNALS]
    result = train(MODEL, strategy(), JOB, settings(text), run_root=tmp_path, on_step=stop_at(3, number))
    assert result.stopped
    assert result.steps == len(result.losses) == len(lines_of(result.run)) == 3
    assert sorted(os.listdir(result.run)) == FILES
    assert os.listdir(f"{result.run}/checkpoints") == ["3"]
    assert result.validation_loss is None
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_an_ignored_signal_stays_ignored():
    """What nohup asks for: a run goes on when its terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(print) as request:
            signal.raise_signal(signal.SIGHUP)
        assert not request.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_step_in_hand_changes_no_number(tmp_path, text, monkeypatch):
    """What runs on accelerators: the next step is handed over before the loss of this one is read."""
    plain = train(MODEL, strategy(), JOB, settings(text), run_root=tmp_path)
    monkeypatch.setattr("meshwright.train.loop.steps_ahead", lambda: 1)
    pauses = settings(text, checkpoint_every=2, evaluate_every=3)
    ahead = train(MODEL, strategy(), JOB, pauses, run_root=tmp_path)
    assert ahead.losses == plain.losses
    assert ahead.validation_loss == plain.validation_loss
    assert [m["step"] for m in lines_of(ahead.run)] == [1, 2, 3, 4, 5, 6]
    stopped = train(MODEL, strategy(), JOB, settings(text), run_root=tmp_path, on_step=stop_at(3))
    assert stopped.losses == plain.losses[:4]  # step 4 was in hand when step 3 was read
    assert os.listdir(f"{stopped.run}/checkpoints") == ["4"]


def test_the_wait_for_slow_data_is_no_time_in_steps(tmp_path, text, monkeypatch):
    """Also where the next step is handed over early: then a step ends unseen while the batch is waited for."""
    read, wait_s = Batches.global_batch, 0.3

    def slowly(self, first_sample, shardings):
        time.sleep(wait_s)
        return read(self, first_sample, shardings)

    monkeypatch.setattr("meshwright.train.loop.steps_ahead", lambda: 1)
    monkeypatch.setattr(Batches, "global_batch", slowly)
    result = train(MODEL, strategy(), JOB, settings(text, steps=8, held_out=0.0), run_root=tmp_path)
    goodput = result.goodput
    assert goodput.steps_s == pytest.approx(sum(m["step_s"] for m in lines_of(result.run)))
    assert goodput.data_s > 4 * wait_s
    assert result.step_s < wait_s / 2
    assert goodput.steps_s + goodput.data_s + goodput.compile_s < goodput.wall_s


@pytest.mark.usefixtures("nothing_ignored")
def test_a_second_signal_ends_the_process_with_its_number():
    code = (
        "import os, signal\nfrom meshwright.train.interrupt import stop_on_signals\n"
        "with stop_on_signals(print) as request:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(request.asked, flush=True)\n    os.kill(os.getpid(), signal.SIGTERM)\nprint('not reached')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.usefixtures("nothing_ignored")
def test_a_second_ctrl_c_stops_at_once(tmp_path, text, monkeypatch, capsys):
    """While a step runs there is no whole state to save, so the interrupt goes through."""

    def impatient(tree):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return read(tree)

    def on_step(record):  # from now on the loss of a step is waited for twice as impatiently
        monkeypatch.setattr(jax, "device_get", impatient)

    read = jax.device_get
    with pytest.raises(KeyboardInterrupt):
        train(MODEL, strategy(), JOB, settings(text), run_root=tmp_path, on_step=on_step)
    assert "a second signal stops at once" in capsys.readouterr().err
    assert len(lines_of(tmp_path / "mini-001")) == 1


def test_a_loss_that_is_not_finite_stops_with_one_line(tmp_path, text):
    wild = settings(text, learning_rate=1e30, warmup_steps=0, steps=20)
    wild = msgspec.structs.replace(wild, checkpoint_every=1)
    with pytest.raises(CannotRunError, match=r"at step \d+ with learning_rate=1e\+30") as caught:
        train(MODEL, strategy(), JOB, wild, run_root=tmp_path)
    assert "\n" not in str(caught.value)
    assert re.search(r"holds (NaN|infinity)", str(caught.value))
    run = tmp_path / "mini-001"
    broken = lines_of(run)[-1]
    assert None in (broken["loss"], broken["grad_norm"])
    newest = max(map(int, os.listdir(run / "checkpoints")))
    assert newest == broken["step"] - 1
    assert f"the checkpoint of step {newest} and the metrics are in" in str(caught.value)
    assert json.loads((run / "summary.json").read_text())["diverged"] is True
    assert not (run / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("axes", "job", "message"),
    [
        (
            {"data": 8},
            Job(batch_seqs=12, seq_len=32),
            "batch_seqs=12 does not divide into 8 parts .data.*multiple of 8",
        ),
        ({"context": 8}, Job(batch_seqs=8, seq_len=36), "seq_len=36 does not divide into 8 parts .context"),
        ({}, Job(batch_seqs=8, seq_len=10**6), "not one sequence of 1000000"),
    ],
)
def test_jobs_that_do_not_fit_are_refused_before_a_folder_is_made(tmp_path, text, axes, job, message):
    with pytest.raises(InputError, match=message):
        train(MODEL, strategy(**axes), job, settings(text), run_root=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
