"""Runs that start from published weights: their first loss, on any mesh, and what a resumed run does with them."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from meshwright.api.planning import make_setting, plan_of
from meshwright.api.running import run_training
from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import load_params, save_hf
from meshwright.nn.weights import init_params
from meshwright.plan.plan_file import load_plan, save_plan
from meshwright.spec.catalogue import has_weights, load_model, weights_of
from meshwright.spec.hf.write import config_from_model
from meshwright.spec.model import Lora
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.data.tokenizer import save_tokenizer, train_tokenizer
from meshwright.train.loop import train
from meshwright.train.settings import TrainSettings, fine_tuning_rate, with_whole_paths
from meshwright.train.setup import prepare, start_words
from tests.cli.made_rates import write_rates
from tests.logits import logits_fn
from tests.nn.hf.test_published import write_packed
from tests.tier import sampled
from tests.train.small import JOB, MODEL, read_documents, settings, stop_at, strategy

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ODD = msgspec.structs.replace(MODEL, name="odd", vocab_size=301)
"""Of a vocabulary that ``tensor`` does not divide."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text):
    """A published model: weights larger than fresh ones, their config, and a tokenizer of their own."""
    path = tmp_path_factory.mktemp("published") / "odd"
    path.mkdir()
    params = jax.tree.map(lambda array: array * 3 if array.ndim > 1 else array, init_params(ODD, 7))
    save_hf(ODD, params, path)
    save_tokenizer(train_tokenizer(read_documents(text), vocab_size=290), path / "tokenizer.json")
    return path


def given(text: str, folder: Path, **changes: object) -> TrainSettings:
    return settings(text, **{"weights": str(folder), "held_out": 0.0, "packing": False, "steps": 2, **changes})


def mean_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Cross entropy of float64 logits, over the labels that count."""
    logits = logits.astype(np.float64)
    lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    picked = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return float(((lse - picked) * (labels >= 0)).sum() / (labels >= 0).sum())


def first_batch(model, text: str, folder: Path) -> dict[str, np.ndarray]:
    setup = prepare(model, strategy(), JOB, with_whole_paths(given(text, folder)))
    return {
        name: np.asarray(array) for name, array in setup.batches.global_batch(0, setup.step.batch_shardings).items()
    }


@pytest.mark.parametrize(
    "axes",
    [
        {"pipeline": 2, "tensor": 2},
        *(pytest.param(a, marks=pytest.mark.slow) for a in ({"tensor": 2, "fsdp": 2}, {}, {"context": 2})),
    ],
)
def test_the_first_loss_is_that_of_the_weights(axes, folder, text, tmp_path, capfd):
    batch = first_batch(ODD, text, folder)
    logits = jax.jit(logits_fn(ODD))(load_params(ODD, folder), jnp.asarray(batch["tokens"]))
    expected = mean_loss(np.asarray(logits), batch["labels"])
    found = train(ODD, strategy(**axes), JOB, given(text, folder, steps=1), run_root=tmp_path)
    assert found.losses[0] == pytest.approx(expected, rel=1e-5)
    assert f"starts from the weights in {folder}, at learning_rate 0.01" in capfd.readouterr().err
    # what it leaves is of the model's own shapes
    assert load_params(ODD, found.run)["embed"].shape == (301, 32)


@pytest.mark.parametrize("lora", [None, pytest.param(Lora(rank=2), marks=pytest.mark.slow), Lora(rank=2, base="int8")])
def test_quantised_weights_are_widened_to_train(lora, folder, text, tmp_path):
    """From matrices in int4 with zero points, all weights or adapters beside them; of int8, what it loses is small."""
    path = tmp_path / "awq"
    path.mkdir()
    shutil.copy(folder / "tokenizer.json", path)
    write_packed(path, "awq", config_from_model(ODD))
    batch, model = first_batch(ODD, text, path), msgspec.structs.replace(ODD, lora=lora)
    logits = jax.jit(logits_fn(ODD))(load_params(ODD, path, dtype=jnp.float32), jnp.asarray(batch["tokens"]))
    found = train(model, strategy(), JOB, given(text, path, steps=1), run_root=tmp_path)
    expected = mean_loss(np.asarray(logits), batch["labels"])
    assert found.losses[0] == pytest.approx(expected, rel=1e-2 if lora and lora.base else 1e-5)


def test_the_default_rate_is_one_of_fine_tuning():
    """TRL's and torchtune's for all weights, a tenfold one for adapters; random weights keep the settings' own."""
    adapters = msgspec.structs.replace(ODD, lora=Lora(rank=2))
    assert (fine_tuning_rate(ODD), fine_tuning_rate(adapters)) == (2e-5, 2e-4)
    whole = TrainSettings(weights="w", learning_rate=2e-5)
    assert start_words(whole, ODD).endswith("at learning_rate 2e-05, the default to fine-tune all weights")
    tuned = TrainSettings(weights="w", learning_rate=2e-4)
    assert start_words(tuned, adapters).endswith("at learning_rate 0.0002, the default to fine-tune adapters")
    assert start_words(tuned, ODD).endswith("at learning_rate 0.0002")
    assert start_words(TrainSettings(), ODD) == "starts from random weights"


@pytest.mark.peer
@pytest.mark.parametrize("family", sampled(["gpt2", "llama"], "llama"))
def test_the_first_loss_is_the_one_that_transformers_gives(family, text, folder, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 301}
    sizes |= {"intermediate_size": 64} if family == "llama" else {}
    config = transformers.AutoConfig.for_model(family, **sizes, max_position_embeddings=64, initializer_range=0.2)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    path = tmp_path / family
    theirs.save_pretrained(path)
    shutil.copy(folder / "tokenizer.json", path)
    batch = first_batch(load_model(str(path)), text, path)
    with torch.no_grad():
        logits = theirs(torch.tensor(batch["tokens"]).long()).logits.numpy()
    found = train(load_model(str(path)), strategy(tensor=2), JOB, given(text, path, steps=1), run_root=tmp_path)
    assert found.losses[0] == pytest.approx(mean_loss(logits, batch["labels"]), rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_does_not_read_the_weights_again(folder, text, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    whole = train(ODD, strategy(), JOB, given(text, copy, steps=4), run_root=tmp_path)
    first = train(ODD, strategy(), JOB, given(text, copy, steps=4), run_root=tmp_path, on_step=stop_at(2))
    assert first.stopped
    (copy / "model.safetensors").unlink()
    again = train(ODD, strategy(tensor=2), JOB, given(text, copy, steps=4), run_root=tmp_path, resume=Path(first.run))
    np.testing.assert_allclose(again.losses, whole.losses, rtol=1e-5)


@pytest.mark.slow
def test_a_plan_keeps_where_weights_come_from(folder, text, tmp_path):
    rates = write_rates(tmp_path)
    setting = make_setting(str(folder), "cpu:1", batch="8seq", seq_len=32, calibration=rates)
    assert setting.job.weights == weights_of(str(folder / "config.json")) == str(folder)
    assert make_setting("tiny", "cpu:1", batch="8seq", seq_len=32, calibration=rates).job.weights == ""
    plan = plan_of(setting, Strategy(mesh=make_mesh({}), state="fp32"))
    save_plan(plan, tmp_path / "plan.toml")
    plan = load_plan(tmp_path / "plan.toml")
    options = {"steps": 1, "data": text, "held_out": 0.0}
    first = run_training(plan, options, runs=tmp_path)
    resolved = Path(first.run, "resolved.toml").read_text()
    assert f'weights = "{folder}"' in resolved
    assert f'tokenizer = "{folder}/tokenizer.json"' in resolved
    assert "learning_rate = 2e-05" in resolved
    fresh = run_training(plan, {**options, "weights": ""}, runs=tmp_path)
    assert fresh.losses[0] == pytest.approx(np.log(300), abs=0.2)
    assert abs(first.losses[0] - fresh.losses[0]) > 0.01
    resolved = Path(fresh.run, "resolved.toml").read_text()
    assert 'weights = ""' in resolved
    assert "learning_rate = 0.003" in resolved


def test_what_is_missing_is_named(folder, text, tmp_path):
    gone = given(text, tmp_path / "gone", tokenizer=str(folder / "tokenizer.json"))
    with pytest.raises(InputError, match=r"gone has neither \*\.safetensors nor pytorch_model\.bin"):
        train(ODD, strategy(), JOB, gone, run_root=tmp_path)
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has weights and no tokenizer\.json\. Name the one"):
        train(ODD, strategy(), JOB, given(text, bare), run_root=tmp_path)
    assert has_weights(bare)
    (bare / "model.safetensors").unlink()
    assert not has_weights(bare)
    assert json.loads((bare / "config.json").read_text())["vocab_size"] == 301
