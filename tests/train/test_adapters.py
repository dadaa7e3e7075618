"""Runs that train an adapter: what they leave, how they go on, and what reads it."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import convert_hf, load_params, open_source
from meshwright.serve.model_folder import open_model
from meshwright.spec.model import Lora
from meshwright.spec.weights import frozen_base
from meshwright.train.loop import train
from meshwright.train.weights import BASE, open_run_checkpoint
from tests.train.small import JOB, MODEL, settings, stop_at, strategy, write_text

ADAPTED = replace(MODEL, lora=Lora(rank=4, alpha=8, targets="attention"))

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of an adapter that stopped after its fourth step of six, on two devices."""
    folder = tmp_path_factory.mktemp("adapter")
    text = write_text(folder)

    given = settings(text, average=0.9, held_out=0.0)
    found = train(ADAPTED, strategy(fsdp=2), JOB, given, run_root=folder / "runs", on_step=stop_at(4))
    whole = train(ADAPTED, strategy(fsdp=2), JOB, given, run_root=folder / "whole")
    return Path(found.run), text, whole


def test_the_checkpoint_holds_the_adapter_alone(run):
    with open_run_checkpoint(run[0]) as found:
        assert {name.rpartition("_")[0] for name in found.dtypes} == {f"{w}_lora" for w in ("wq", "wk", "wv", "wo")}
        assert found.base == run[0] / BASE
    assert not (run[0] / "model.safetensors").exists()


def test_another_base_is_refused_and_another_mesh_goes_on(run, tmp_path):
    folder, text, whole = run
    other = settings(text, average=0.9, held_out=0.0, seed=7)
    with pytest.raises(InputError, match="trains an adapter of other weights than these"):
        train(ADAPTED, strategy(tensor=2), JOB, other, run_root=tmp_path, resume=folder)
    given = settings(text, average=0.9, held_out=0.0)
    found = train(ADAPTED, strategy(tensor=2), JOB, given, run_root=tmp_path, resume=folder)
    assert found.losses == pytest.approx(whole.losses, rel=1e-5)


def test_the_base_of_a_run_is_a_base_for_another(run, tmp_path):
    """Weights from a folder are those that the seed draws: the losses are those of the run that drew them."""
    folder, text, whole = run
    given = settings(text, average=0.9, held_out=0.0, weights=str(folder / BASE), steps=2)
    found = train(ADAPTED, strategy(data=2), JOB, given, run_root=tmp_path)
    assert found.losses[0] == pytest.approx(whole.losses[0], rel=1e-5)
    config = (Path(found.run) / "adapter_config.json").read_text()
    assert str(folder / BASE) in config
    assert not (Path(found.run) / BASE).exists()


def test_merged_weights_are_base_and_product(run, tmp_path):
    folder, *_ = run
    source = open_model(folder)
    assert source.model.lora == replace(ADAPTED.lora, targets=("q", "k", "v", "o"))
    params = load_params(source.model, folder)
    convert_hf(source.model, folder, tmp_path / "merged")
    plain = frozen_base(source.model)
    found = load_params(plain, tmp_path / "merged")
    product = np.einsum("ldr,lrnh->ldnh", params["wq_lora_a"], params["wq_lora_b"])
    np.testing.assert_allclose(found["wq"], params["wq"] + 2 * product, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(found["w_up"], params["w_up"])


def test_convert_writes_the_adapter_or_merges_it(run, tmp_path, call):
    folder, _, whole = run
    alone = call("convert", str(folder), str(tmp_path / "alone"), "--json").json
    assert alone["files"] == ["adapter_model.safetensors"]
    merged = call("convert", whole.run, str(tmp_path / "merged"), "--merge", "--step", "6", "--json").json
    assert merged["files"] == ["model.safetensors"]
    adapter = open_model(tmp_path / "alone").model
    with open_source(adapter, tmp_path / "alone") as (fetch, _), open_source(adapter, folder) as (other, _):
        np.testing.assert_array_equal(fetch("wo_lora_b", (1,)), other("wo_lora_b", (1,)))
    refused = call("convert", str(tmp_path / "merged"), str(tmp_path / "again"), "--merge")
    refused.assert_refused(2, "has no adapter to merge. Leave --merge out.")
