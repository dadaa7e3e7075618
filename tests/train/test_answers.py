"""Losses on answers alone: a mean over the answers' tokens of the whole batch, on any mesh and microbatches."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.algebra.layers import ProgramOptions
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.job import Job
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.data.batches import Batches, open_data
from meshwright.train.loop import train
from tests.train.data.chats import CHATS, TEMPLATES, write_records, write_tokenizer
from tests.train.small import MODEL, settings, stop_at, strategy, write_text

pytestmark = pytest.mark.usefixtures("cache")
SEQ_LEN, BATCH_SEQS = 128, 8
MESHES = [
    ({"data": 2, "context": 2}, {"num_microbatches": 2}),
    pytest.param({"data": 8}, {}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 4, "tensor": 2}, {"num_microbatches": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "data": 2}, {"num_microbatches": 4}, marks=pytest.mark.slow),
    pytest.param({"context": 4, "fsdp": 2}, {"num_microbatches": 4}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "context": 2, "tensor": 2}, {"num_microbatches": 4}, marks=pytest.mark.slow),
    pytest.param({}, {"num_microbatches": 8}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Settings for records with answers of very unequal lengths, on which alone the loss is."""
    folder = tmp_path_factory.mktemp("answers")
    long = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "word " * 40}]
    records = [*CHATS, {"messages": long}] * 5
    data = write_records(folder / "chats.jsonl", records)
    tokenizer = write_tokenizer(folder / "qwen", TEMPLATES["qwen"])
    return settings(data, tokenizer=str(tokenizer), loss_on="assistant", held_out=0.0)


def batches_of(given, tmp_path, step):
    data = open_data(given, vocab_size=MODEL.vocab_size, folder=tmp_path)
    order = step.token_order(SEQ_LEN)
    return Batches(data.train, batch_seqs=BATCH_SEQS, seq_len=SEQ_LEN, seed=0, order=order)


def step_of(axes, choices):
    strategy_here = msgspec.structs.replace(strategy(**axes), **choices)
    return TrainStep(MODEL, strategy_here, options=ProgramOptions(documents=True))


def loss_and_gradients(step, given, tmp_path):
    batch = batches_of(given, tmp_path, step).global_batch(0, step.batch_shardings)
    loss, gradients = step.gradients(step.init(0).params, batch)
    return float(loss), step.to_canonical(gradients)


@pytest.fixture(scope="module")
def one_device(answers, tmp_path_factory):
    return loss_and_gradients(step_of({}, {}), answers, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("axes", "choices"), MESHES, ids=str)
def test_no_mesh_or_microbatch_changes_the_mean_over_answers(answers, one_device, axes, choices, tmp_path):
    step = step_of(axes, choices)
    batches = batches_of(answers, tmp_path, step)
    counts = (batches.rows(0)["labels"] >= 0).sum(axis=1)
    assert counts.max() > 1.5 * counts.min()  # a mean of the rows' means would be another
    loss, gradients = loss_and_gradients(step, answers, tmp_path)
    assert loss == pytest.approx(one_device[0], rel=2e-6)
    for name, expected in one_device[1].items():
        np.testing.assert_allclose(gradients[name], expected, atol=2e-5 * float(np.abs(expected).max()), err_msg=name)


@pytest.mark.slow
def test_a_run_with_two_sources_stops_and_goes_on_to_the_bit_and_counts_epochs(answers, tmp_path):
    text = write_text(tmp_path)
    given = msgspec.structs.replace(answers, data=f"{answers.data}:1,{text}:3", steps=4)
    job = Job(batch_seqs=4, seq_len=SEQ_LEN)
    whole = train(MODEL, strategy(data=2), job, given, run_root=tmp_path / "whole")

    first = train(MODEL, strategy(data=2), job, given, run_root=tmp_path / "runs", on_step=stop_at(2))
    again = train(MODEL, strategy(data=2), job, given, run_root=tmp_path / "runs", resume=Path(first.run))
    assert again.losses == whole.losses
    assert again.epochs == whole.epochs
    assert set(again.epochs) == {answers.data, text}
    assert all(0 < seen < 3 for seen in again.epochs.values())


@pytest.mark.slow
def test_a_second_phase_has_longer_rows_on_another_mesh_and_repeats_nothing(tmp_path):
    """64 positions, then 256 with context 2: together they stay within an epoch, and draw no token twice."""
    text = write_text(tmp_path, num_topics=3)
    longer = msgspec.structs.replace(MODEL, max_positions=256)
    given = settings(text, held_out=0.0)
    first_job, second_job = Job(batch_seqs=8, seq_len=64), Job(batch_seqs=4, seq_len=256)
    first = train(MODEL, strategy(data=2), first_job, msgspec.structs.replace(given, steps=4), run_root=tmp_path)
    resumed = {"run_root": tmp_path, "resume": Path(first.run)}
    both = strategy(data=2, context=2)
    second = train(longer, both, second_job, msgspec.structs.replace(given, steps=6), **resumed)
    assert second.resumed_from == 4
    assert len(second.losses) == 6
    assert second.losses[:4] == first.losses
    assert np.isfinite(second.losses).all()
    with Checkpoints(Path(first.run)) as kept:
        position = kept.position()
    assert (position.samples, position.phase.first) == (4 * 8 + 2 * 4, 4 * 8)
    batches = [
        Batches(
            open_data(given, vocab_size=MODEL.vocab_size, folder=tmp_path / "tokens").train,
            batch_seqs=1,
            seq_len=seq_len,
            seed=given.seed,
        )
        for seq_len in (64, 256)
    ]
    batches[1].go_on(position.phase, position.samples)
    found = [batches[0].find(sample) for sample in range(32)] + [batches[1].find(sample) for sample in range(32, 40)]
    spans = sorted(one for rows, row in found for span in rows.spans(row) for one in rows.store.in_file(*span))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert sum(stop - start for start, stop in spans) == 32 * 64 + 8 * 256
    (before,), (after,) = first.epochs.values(), second.epochs.values()
    assert 0 < before < after < 1
