import json
import os
import signal
import tomllib

import jax
import numpy as np
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.job import Job
from meshwright.train.data import Batches, TokenStore
from meshwright.train.evaluate import held_out_loss
from meshwright.train.loop import train
from meshwright.train.metrics import Predicted
from tests.train.small import JOB, MODEL, settings, strategy, write_text

FILES = ["config.json", "metrics.jsonl", "resolved.toml", "summary.json", "tokenizer.json", "weights.safetensors"]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def metrics_of(run):
    with open(f"{run}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """One whole run on 8 devices, and the compilations that JAX reports after the first step."""
    compiled: list[str] = []
    active = False

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if active and "/jax/core/compile" in event:
            compiled.append(event)

    def on_step(record):
        nonlocal active
        active = 1 <= record.step < 30

    jax.monitoring.register_event_duration_secs_listener(listen)
    result = train(
        MODEL,
        strategy(fsdp=4, tensor=2),
        JOB,
        settings(text, steps=30),
        run_root=tmp_path_factory.mktemp("runs"),
        predicted=Predicted(step_s=0.1, model_flops=1e9, peak_flops_per_s=1e12),
        on_step=on_step,
        texts={"plan.toml": "version = 1\n"},
    )
    return result, compiled


def test_the_loss_falls_on_real_text(finished):
    result, _ = finished
    assert result.losses[0] == pytest.approx(np.log(MODEL.vocab_size), rel=0.03)
    assert np.mean(result.losses[-5:]) < result.losses[0] - 0.7
    assert result.validation_loss < result.losses[0] - 0.5


def test_nothing_is_compiled_after_the_first_step(finished):
    assert finished[1] == []


def test_the_result_has_what_was_measured(finished):
    result, _ = finished
    metrics = metrics_of(result.run)
    assert result.steps == 30
    assert not result.stopped
    assert result.step_s == pytest.approx(np.median([m["step_s"] for m in metrics[2:]]))
    assert result.tokens_per_s == pytest.approx(JOB.tokens_per_step / result.step_s)
    assert result.mfu == pytest.approx(1e9 / (result.step_s * 1e12))
    assert result.step_s_predicted == 0.1
    assert result.compile_s > 0


def test_memory_is_that_of_one_device(finished):
    memory = finished[0].memory
    vectors = (2 * MODEL.num_layers + 1) * MODEL.d_model
    matrices = 2 * 300 * 32 + MODEL.num_layers * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64)
    assert memory.weights_bytes == 4 * (matrices // 8 + vectors)
    assert memory.optimizer_bytes == pytest.approx(2 * memory.weights_bytes, abs=64)  # and counters of steps
    assert memory.batch_bytes == 2 * 4 * JOB.tokens_per_step // 4
    assert memory.temporaries_bytes > 0


def test_the_run_folder_holds_everything(finished):
    result, _ = finished
    assert sorted(os.listdir(result.run)) == sorted([*FILES, "plan.toml"])
    metrics = metrics_of(result.run)
    assert [m["step"] for m in metrics] == list(range(1, 31))
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


def test_standard_output_stays_empty_and_plain_lines_go_to_stderr(tmp_path, text, capfd):
    train(MODEL, strategy(), JOB, settings(text, steps=4, log_every=2), run_root=tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split("  ")[0] for line in err.splitlines()[1:]] == ["step 1/4", "step 2/4", "step 4/4"]


def test_every_mesh_trains_alike(finished, tmp_path, text):
    other = train(MODEL, strategy(data=2, context=2, tensor=2), JOB, settings(text, steps=30), run_root=tmp_path)
    np.testing.assert_allclose(other.losses, finished[0].losses, rtol=1e-4)
    assert other.validation_loss == pytest.approx(finished[0].validation_loss, rel=1e-3)


def test_two_byte_weights_train(tmp_path, text):
    result = train(MODEL, strategy(state="bf16-adam", fsdp=8), JOB, settings(text, steps=8), run_root=tmp_path)
    assert result.losses[-1] < result.losses[0] - 0.3
    assert result.memory.optimizer_bytes == pytest.approx(4 * result.memory.weights_bytes, abs=64)


def interrupt(record):
    if record.step == 3:
        raise KeyboardInterrupt


def send_signal(record):
    if record.step == 3:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("on_step", "done"), [(interrupt, 3), (send_signal, 3)])
def test_ctrl_c_ends_with_everything_written(tmp_path, text, on_step, done):
    before = signal.getsignal(signal.SIGINT)
    result = train(MODEL, strategy(), JOB, settings(text), run_root=tmp_path, on_step=on_step)
    assert result.stopped
    assert result.steps == len(result.losses) == len(metrics_of(result.run)) == done
    assert sorted(os.listdir(result.run)) == FILES
    assert result.validation_loss is None
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once(tmp_path, text, monkeypatch, capsys):
    """While a step runs there is no whole state to save, so the interrupt goes through."""

    def impatient(self, step, shardings):
        if step == 2:  # read while the second step runs
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return read(self, step, shardings)

    read = Batches.global_batch
    monkeypatch.setattr(Batches, "global_batch", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(MODEL, strategy(), JOB, settings(text), run_root=tmp_path)
    assert "Ctrl-C again stops at once" in capsys.readouterr().err
    assert len(metrics_of(tmp_path / "mini-001")) == 1


def test_a_loss_that_is_not_finite_stops_with_one_line(tmp_path, text):
    wild = settings(text, learning_rate=1e30, warmup_steps=0, steps=20)
    with pytest.raises(CannotRunError, match=r"the loss is (nan|inf) at step \d+ with learning_rate=1e\+30") as caught:
        train(MODEL, strategy(), JOB, wild, run_root=tmp_path)
    assert "\n" not in str(caught.value)
    run = tmp_path / "mini-001"
    assert metrics_of(run)[-1]["loss"] is None
    assert json.loads((run / "summary.json").read_text())["diverged"] is True
    assert not (run / "weights.safetensors").exists()


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


def test_held_out_loss_counts_each_window_once_and_needs_one_per_shard():
    tokens = TokenStore(np.random.default_rng(0).integers(0, 300, 5 * 32 + 1).astype(np.uint16))
    step = TrainStep(MODEL, strategy(fsdp=2))
    params = step.init(0).params
    found = held_out_loss(step, params, tokens, batch_seqs=8, seq_len=32)
    assert found == pytest.approx(np.log(300), rel=0.03)
    batch = Batches(tokens, batch_seqs=4, seq_len=32, seed=0).global_batch(0, step.batch_shardings)
    assert found == pytest.approx(float(step.gradients(params, batch)[0]), rel=1e-5)
    assert held_out_loss(step, params, TokenStore(tokens.tokens[:33]), batch_seqs=8, seq_len=32) is None
