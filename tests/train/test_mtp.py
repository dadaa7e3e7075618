"""Training on the token after the next: from the command line, resumed, and in the published form."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from meshwright.algebra.transformer import rows
from meshwright.core.digests import SUMS
from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import load_params, save_hf
from meshwright.parallel.second_labels import second_labels
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.hf.write import config_from_model
from meshwright.spec.weights import without_mtp
from meshwright.train.data.batches import Batches
from meshwright.train.data.rows import Rows, WholeRows
from meshwright.train.data.sources import Source
from meshwright.train.data.token_store import TokenStore
from meshwright.train.settings import TrainSettings
from meshwright.train.setup import start_words
from tests.cli.made_rates import write_rates
from tests.nn.hf.test_weights import on_device, random_params, require_equal
from tests.parallel.plain_mtp import MODEL
from tests.train.small import JOB

SEQ_LEN = 16
NEXT = {"mtp_tokens", "mtp_labels"}


def store(*, masked: bool) -> TokenStore:
    """Documents of 1 to 19 tokens; ``masked`` gives a third of the tokens no loss."""
    tokens = np.arange(190, dtype=np.int32)
    if masked:
        tokens = np.where(np.random.default_rng(0).random(190) < 1 / 3, ~tokens, tokens)
    return TokenStore(tokens, np.cumsum([0, *range(1, 20)]).astype(np.uint64))


@pytest.mark.parametrize(
    ("kind", "packing", "masked"),
    [(Rows, True, False), (Rows, False, False), (WholeRows, True, True), (WholeRows, False, True)],
)
def test_second_labels_are_counted_without_their_tokens(kind, packing, masked):
    """Each is the label of the next position, in its row and document."""
    found, positions = kind(store(masked=masked), SEQ_LEN, packing=packing), np.arange(SEQ_LEN)
    total = 0
    for number in range(len(found)):
        here, after = (found.read(number, at)._asdict() for at in (positions, np.minimum(positions + 1, SEQ_LEN - 1)))
        second = second_labels(here, after)
        goes_on = here["documents"][1:] == here["documents"][:-1]
        expected = np.append(np.where(goes_on, here["labels"][1:], -1), -1)
        np.testing.assert_array_equal(second["mtp_labels"], expected)
        assert found.num_labels(number, skipped=1) == np.count_nonzero(expected >= 0)
        assert found.num_labels(number) == np.count_nonzero(here["labels"] >= 0)
        total += np.count_nonzero(expected >= 0)
    assert total > 50


def test_a_device_reads_the_second_labels_of_its_own_positions():
    given = {"batch_seqs": 4, "seq_len": SEQ_LEN, "seed": 0, "order": np.random.default_rng(1).permutation(SEQ_LEN)}
    batches = Batches((Source(store(masked=False), True),), **given)
    whole = batches.rows(0, with_second=True)
    part = batches.rows(0, slice(1, 3), slice(4, 8), with_second=True)
    for name in NEXT:
        np.testing.assert_array_equal(part[name], whole[name][1:3, 4:8])
    shardings = dict.fromkeys((*NEXT, "num_mtp_labels"), SingleDeviceSharding(jax.devices()[0]))
    arrays = batches.global_batch(0, shardings)
    assert float(arrays["num_mtp_labels"]) == np.count_nonzero(np.asarray(arrays["mtp_labels"]) >= 0) > 0


# -- the published form ---------------------------------------------------------------------------------


def test_weights_are_read_and_written_under_the_names_of_the_hub(tmp_path):
    params = random_params(MODEL)
    save_hf(MODEL, on_device(params), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    of_layer = {name.removeprefix("model.layers.3.") for name in stored if name.startswith("model.layers.3.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < of_layer
    assert {"self_attn.kv_b_proj.weight", "mlp.experts.3.up_proj.weight", "mlp.gate.weight"} < of_layer
    np.testing.assert_array_equal(stored["model.layers.3.eh_proj.weight"], params["w_join_mtp"][0].T)
    for copy, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        np.testing.assert_array_equal(stored[f"model.layers.3.{copy}.weight"], stored[f"{source}.weight"])
    read = model_from_config(tmp_path, MODEL.name)
    assert (read.num_mtp_layers, read.mtp_weight) == (1, 0.0)
    require_equal(load_params(MODEL, tmp_path), params)
    # without being asked for, it is left out
    require_equal(load_params(read, tmp_path), {name: params[name] for name in rows(read)})

    other = stored | {"model.layers.3.embed_tokens.weight": stored["model.embed_tokens.weight"] + 1}
    save_file(other, tmp_path / "model.safetensors")
    (tmp_path / SUMS).unlink()
    with pytest.raises(InputError, match=r"model\.layers\.3\.embed_tokens\.weight differs .* Leave mtp_weight out"):
        load_params(MODEL, tmp_path)


def test_convert_keeps_the_layer_and_readers_say_that_they_leave_it_out(call, tmp_path):
    save_hf(MODEL, on_device(random_params(MODEL)), tmp_path / "run")
    said = call("convert", "run", "all")
    assert said.code == 0, said.err
    assert "token after the next" not in said.out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "all"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    assert json.loads((tmp_path / "all/config.json").read_text())["num_nextn_predict_layers"] == 1

    # of a layer that is not whole nothing is kept, and a line says so
    (tmp_path / "run" / SUMS).unlink()
    save_file(
        {name: array for name, array in before.items() if "eh_proj" not in name}, tmp_path / "run/model.safetensors"
    )
    said = call("convert", "run", "rest")
    assert said.code == 0, said.err
    assert "without the layer for the token after the next" in " ".join(said.out.split())
    assert not any("layers.3." in name for name in load_file(tmp_path / "rest/model.safetensors"))

    read = model_from_config(tmp_path / "all")
    settings = TrainSettings(weights="all")
    assert start_words(settings, read).endswith("; without the layer for the token after the next (model.mtp_weight)")
    assert "without" not in start_words(settings, replace(read, mtp_weight=0.3))


def test_a_folder_without_the_layer_says_what_it_lacks(tmp_path):
    without = without_mtp(MODEL)
    save_hf(without, on_device(random_params(without)), tmp_path)
    assert model_from_config(tmp_path).num_mtp_layers == 0
    with pytest.raises(InputError, match=r"lacks model\.layers\.3\.\S+ \(\w+_mtp\)"):
        load_params(MODEL, tmp_path)


# -- runs -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_reports_the_second_loss_and_goes_on(call, text, tmp_path):
    rates = str(write_rates(tmp_path))
    config = config_from_model(replace(MODEL, vocab_size=300))
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["--on", "cpu:2", "--axes", "expert=2", "--batch", f"{JOB.batch_seqs}seq", "--seq", "32", "--data", text]
    given += ["--set", "model.mtp_weight=0.3", "--set", "train.log_every=1", "--calibration", rates, "--json"]

    def lines(run):
        return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]

    whole = call("train", "config.json", *given, "--steps", "6", "--runs", "whole")
    assert whole.code == 0, whole.err
    assert "second token" in whole.err
    losses = [line["extras"]["mtp_loss"] for line in lines(whole.json["run"])]
    assert losses[-1] < losses[0], "a layer that trains"
    assert "model.layers.3.eh_proj.weight" in load_file(f"{whole.json['run']}/model.safetensors")

    half = call("train", "config.json", *given, "--steps", "6", "--runs", "half", "--set", "train.checkpoint_every=3")
    found = lines(half.json["run"])
    assert [line["extras"]["mtp_loss"] for line in found] == losses
    shutil.rmtree(f"{half.json['run']}/checkpoints/6")
    again = call("train", "--resume", half.json["run"], "--steps", "6", "--json")
    assert again.code == 0, again.err
    np.testing.assert_allclose([line["extras"]["mtp_loss"] for line in lines(half.json["run"])], losses, rtol=1e-6)
    said = call("generate", again.json["run"], "--prompt", "a", "--max-tokens", "2", "--axes", "tensor=2")
    assert said.code == 0, said.err
    assert "without the layer for the token after the next" in said.err
    assert call("convert", again.json["run"], "converted").code == 0
    assert "model.layers.3.eh_proj.weight" in load_file("converted/model.safetensors")

    wild = ["--set", "model.mtp_weight=1e38", "--set", "train.held_out=0.0001"]
    said = call("train", "config.json", *given, "--steps", "3", "--runs", "wild", *wild)
    assert "no held-out loss: train.held_out=0.0001 gives too few rows for the mesh. Change it" in said.err
    assert said.code != 0
    assert "Use a lower rate or a longer warmup, or a lower mtp_weight=1e+38; the metrics are in" in said.err
