"""`convert` from the command line: which folders it takes, what it leaves, what it refuses."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from safetensors.numpy import load_file

from meshwright.core.units import format_params
from meshwright.nn.weights import init_params
from meshwright.parallel.train_step import State
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.weights import num_params
from meshwright.train.checkpoint import Checkpoints, Position
from meshwright.train.data.tokenizer import save_tokenizer, train_tokenizer
from meshwright.train.weights import save_weights
from tests.nn.families import FAMILIES

MODEL = replace(FAMILIES["phi3"], vocab_size=300)


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, 0)


@pytest.fixture(scope="module")
def run(params, tmp_path_factory):
    """A run that stopped after two checkpoints, of steps 2 and 4, the second with all weights one higher."""
    folder = tmp_path_factory.mktemp("runs") / "phi3-001"
    folder.mkdir()
    later = {name: array + 1 for name, array in params.items()}
    with Checkpoints(folder) as kept:
        for step, weights in ((2, params), (4, later)):
            position = Position(step=step, samples=step, tokens=step, model=to_builtins(MODEL))
            kept.save(State(weights, {"moment": jnp.zeros(3)}), position)
        kept.wait()
    save_tokenizer(train_tokenizer(["some text"], vocab_size=300), folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def finished(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    save_weights(MODEL, params, folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def qkv(folder, layer=1):
    return load_file(folder / "model.safetensors")[f"model.layers.{layer}.self_attn.qkv_proj.weight"]


def expected_qkv(params, layer=1):
    return np.concatenate([np.asarray(params[name][layer]).reshape(32, -1) for name in ("wq", "wk", "wv")], 1).T


def test_a_finished_run_in_another_dtype(call, finished, params, tmp_path):
    said = call("convert", str(finished), "out", "--dtype", "bf16")
    assert said.code == 0, said.err
    assert f"family phi3, {format_params(num_params(MODEL))} parameters" in said.words
    assert "1 file of weights" in said.words
    assert "in bfloat16" in said.words
    out = tmp_path / "out"
    np.testing.assert_array_equal(qkv(out), expected_qkv(params).astype(ml_dtypes.bfloat16))
    assert (out / "tokenizer_config.json").is_file()
    assert replace(model_from_config(out), name=MODEL.name) == MODEL


def test_the_newest_checkpoint_of_a_run_that_stopped(call, run, params, tmp_path):
    said = call("convert", str(run), "out", "--json")
    assert said.code == 0, said.err
    assert said.json["step"] == 4
    assert said.json["num_params"] == num_params(MODEL)
    assert said.json["files"] == ["model.safetensors"]
    np.testing.assert_array_equal(qkv(tmp_path / "out"), expected_qkv(params) + 1)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_checkpoint_by_its_step_in_several_files(call, run, params, tmp_path):
    said = call("convert", str(run), "out", "--step", "2", "--file-size", "30KB")
    assert said.code == 0, said.err
    assert "(checkpoint after step 2)" in said.words
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    name = "model.layers.1.self_attn.qkv_proj.weight"
    stored = load_file(tmp_path / "out" / index["weight_map"][name])[name]
    np.testing.assert_array_equal(stored, expected_qkv(params))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere", "out"], "nowhere is no folder. Give the folder of a run or of a Hugging Face model."),
        (["empty", "out"], "empty has neither config.json with *.safetensors nor checkpoints. Give a run or a"),
        (["RUN", "out", "--step", "3"], "has no checkpoint of step 3. It has: 2, 4."),
        (["RUN", "full"], "full is there already and is not an empty folder. Give a new one."),
        (["RUN", "out", "--file-size", "lots"], "lots"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_line(call, run, tmp_path, arguments, text):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    call("convert", *(str(run) if word == "RUN" else word for word in arguments)).assert_refused(2, text)
    assert not (tmp_path / "out").exists()
