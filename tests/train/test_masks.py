"""Runs of models whose mask reads records: equal losses on every mesh, and the mask in the folder of the run."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import log_softmax
from msgspec.structs import replace

from meshwright.api.running import TextOptions, generate_text
from meshwright.masks.names import mask_named
from meshwright.nn.hf.weights import load_params
from meshwright.nn.weights import init_params
from meshwright.serve.model_folder import open_model
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.loop import train
from tests.logits import logits_fn
from tests.tier import sampled
from tests.train.data.chats import write_records
from tests.train.small import JOB, MODEL, settings, strategy

pytestmark = pytest.mark.usefixtures("cache")
MASKS = {"prefix_lm": "prefix", "transfusion": "spans", "tree": "parents", "causal & global_sliding(2)": "is_global"}


def records(field):
    """Records of tokens, with a prefix of all but five, two images, two branches, or a global token in eight."""
    rng = np.random.default_rng(0)
    for length in rng.integers(12, 28, 40).tolist():
        made = {
            "prefix": length - 5,
            "spans": [[1, 3], [4, length - 2]],
            "parents": [-1, *np.where(np.arange(1, length) == length // 2, 3, np.arange(length - 1)).tolist()],
            "is_global": [int(at % 8 == 0) for at in range(length)],
        }
        yield {"tokens": rng.integers(0, MODEL.vocab_size, length).tolist(), field: made[field]}


def first_losses(model, given, folder):
    """The loss of the first batch by the forward pass of whole rows, and with zeros for what the mask reads."""
    rule = mask_named(model.attention_mask)
    data = open_data(given, vocab_size=model.vocab_size, folder=folder, mask=rule)
    batches = Batches(data.train, batch_seqs=JOB.batch_seqs, seq_len=JOB.seq_len, seed=given.seed)
    rows = {n: jnp.asarray(a) for n, a in batches.rows(0, data=rule.data).items()}
    read = {name: rows[name] for name in rule.data}
    for arrays in (read, {name: 0 * array for name, array in read.items()}):
        logits = logits_fn(model)(init_params(model, given.seed), rows["tokens"], rows["documents"], **arrays)
        found = jnp.take_along_axis(log_softmax(logits), rows["labels"][..., None], axis=2)[..., 0]
        yield -float(found[rows["labels"] >= 0].mean())


@pytest.mark.parametrize("mask", sampled(MASKS, "tree"))
def test_a_run_on_records_is_the_same_on_every_mesh(mask, tmp_path):
    model = replace(MODEL, attention_mask=mask)
    given = settings(write_records(tmp_path / "data.jsonl", records(MASKS[mask])), steps=3, held_out=0.2)
    meshes = strategy(), replace(strategy(data=2, context=2, tensor=2), context_attention="ring")
    runs = [train(model, one, JOB, given, run_root=tmp_path / one.context_attention) for one in meshes]
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, rtol=1e-5)
    assert json.loads((Path(runs[0].run) / "config.json").read_text())["attention_mask"] == mask
    expected, unread = first_losses(model, given, tmp_path)
    assert runs[0].losses[0] == pytest.approx(expected, rel=1e-6)
    # first weights are small: what is seen makes a difference of 5e-6 to 2e-4
    assert abs(unread / expected - 1) > 3e-6


@pytest.mark.slow
def test_a_run_with_a_prefix_goes_on_from_a_prompt_that_sees_all_of_itself(tmp_path):
    given = settings(write_records(tmp_path / "data.jsonl", records("prefix")), held_out=0.2)
    trained = replace(MODEL, attention_mask="prefix_lm", attention_score="alibi")
    run = Path(train(trained, strategy(), JOB, given, run_root=tmp_path).run)
    prompt = [7, 150, 33, 290, 61]
    found = generate_text(run, [" ".join(map(str, prompt))], TextOptions(max_tokens=6, mesh={"tensor": 2}))
    model = open_model(run).model
    assert (model.attention_mask, model.attention_score) == ("prefix_lm", "alibi")
    logits, params, tokens = logits_fn(model), load_params(model, run), list(prompt)
    for _ in range(6):
        tokens.append(int(logits(params, jnp.array([tokens]), prefix=jnp.array([len(prompt)]))[0, -1].argmax()))
    assert found.texts[0].split() == list(map(str, tokens[len(prompt) :]))
