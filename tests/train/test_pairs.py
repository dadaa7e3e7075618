"""An encoder and its decoder are trained on pairs and on text with noise, alike on every mesh, and go on where they
stopped."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.spec.job import Job
from meshwright.spec.model import Encoder
from meshwright.train.data.tokenizer import save_tokenizer, train_tokenizer
from meshwright.train.loop import train
from tests.parallel.cases import RELATIVE
from tests.train.small import MODEL, settings, stop_at, strategy, write_text

pytestmark = pytest.mark.usefixtures("cache")
BOTH = msgspec.structs.replace(MODEL, vocab_size=320, encoder=Encoder(num_layers=2, length=48, start_token=3))
JOB = Job(batch_seqs=8, seq_len=16)
MESHES = {
    "data-context-tensor": ({"data": 2, "context": 2, "tensor": 2}, {}),
    "ring": ({"context": 2, "tensor": 2}, {"context_attention": "ring"}),
    "fsdp": ({"fsdp": 8}, {}),
    "microbatches": ({"fsdp": 2, "tensor": 2}, {"num_microbatches": 2}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs whose target is the source backwards, of several lengths, and a text."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = np.random.default_rng(0).integers
    sources = [draw(4, 40, draw(2, 15)).tolist() for _ in range(64)]
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(f"{json.dumps({'source': s, 'target': [*s[::-1], 1]})}\n" for s in sources))
    return {"pairs": str(pairs), "text": write_text(folder)}


def run(data, root, axes=(), choices=(), *, resume=None, on_step=None, model=BOTH, **changes):
    given = settings(data, steps=4, evaluate_every=2, held_out=0.2, **changes)
    mesh = msgspec.structs.replace(strategy(**dict(axes)), **dict(choices))
    return train(model, mesh, JOB, given, run_root=root, resume=resume, on_step=on_step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "text"])
def test_losses_are_alike_on_every_mesh(data, tmp_path, kind):
    one = run(data[kind], tmp_path)
    assert len(one.evaluations) == 2
    assert one.losses[-1] < one.losses[0]
    for axes, choices in MESHES.values():
        found = run(data[kind], tmp_path, axes, choices)
        np.testing.assert_allclose(found.losses, one.losses, rtol=10 * RELATIVE)
        assert found.validation_loss == pytest.approx(one.validation_loss, rel=10 * RELATIVE)


@pytest.mark.slow
def test_files_of_features_are_sources_on_every_mesh(tmp_path):
    """Each file is drawn around the number that its target says."""
    speech = msgspec.structs.replace(BOTH, encoder=msgspec.structs.replace(BOTH.encoder, length=16, features=6))
    pairs, tokenizer = tmp_path / "pairs.jsonl", tmp_path / "tokenizer.json"
    save_tokenizer(train_tokenizer((), vocab_size=257), tokenizer)
    with pairs.open("w") as lines:
        for number in range(48):
            file = tmp_path / f"{number}.npy"
            np.save(file, np.random.default_rng(number).normal(number % 10, size=(6, 32)).astype(np.float32))
            lines.write(f"{json.dumps({'source': str(file), 'target': str(number % 10)})}\n")
    one = run(str(pairs), tmp_path / "one", model=speech, tokenizer=str(tokenizer))
    assert one.losses[-1] < one.losses[0]
    for axes, choices in MESHES.values():
        found = run(str(pairs), tmp_path / "many", axes, choices, model=speech, tokenizer=str(tokenizer))
        np.testing.assert_allclose(found.losses, one.losses, rtol=10 * RELATIVE)


@pytest.mark.slow
def test_a_run_goes_on_with_the_rows_and_the_noise_that_would_have_come(data, tmp_path):
    mixed = f"{data['pairs']}:1,{data['text']}:1"
    tokenizer = f"{run(data['text'], tmp_path).run}/tokenizer.json"

    whole = run(mixed, tmp_path, tokenizer=tokenizer)
    half = run(mixed, tmp_path, {"fsdp": 2}, tokenizer=tokenizer, on_step=stop_at(2))
    assert half.stopped
    again = run(mixed, tmp_path, {"tensor": 2}, tokenizer=tokenizer, resume=Path(half.run))
    assert again.resumed_from == 2
    np.testing.assert_allclose(again.losses, whole.losses, rtol=10 * RELATIVE)
