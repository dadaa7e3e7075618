"""The held-out loss: every row at most once, as many as the mesh divides, the same as the step's own loss."""

import numpy as np
import pytest

from meshwright.algebra.layers import ProgramOptions
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.job import Job
from meshwright.train.data.batches import Source
from meshwright.train.data.token_store import TokenStore
from meshwright.train.setup import held_out
from meshwright.train.step import batch_parts
from tests.train.small import MODEL, strategy


def source(num_rows: int) -> Source:
    tokens = np.random.default_rng(0).integers(0, 300, num_rows * 32 + 1).astype(np.uint16)
    return Source(TokenStore(tokens), packing=False)


@pytest.fixture(scope="module")
def step():
    return TrainStep(MODEL, strategy(fsdp=2))


def test_it_is_the_mean_over_rows_that_the_mesh_divides(step):
    params = step.init(0).params
    found = held_out(step, (source(5),), Job(batch_seqs=8, seq_len=32), max_batches=16)
    assert found.loss(params) == pytest.approx(np.log(300), rel=0.03)
    batch = found._batch(0)
    assert batch["tokens"].shape == (4, 32)  # of five rows, the most that two devices share evenly
    assert found.loss(params) == pytest.approx(float(step.gradients(params, batch)[0]), rel=1e-5)


def test_the_z_loss_is_trained_on_and_not_evaluated(step):
    trained = TrainStep(MODEL, strategy(fsdp=2), options=ProgramOptions(z_loss=0.1))
    params = step.init(0).params
    plain, found = (held_out(s, (source(5),), Job(batch_seqs=8, seq_len=32), max_batches=16) for s in (step, trained))
    assert found.loss(params) == plain.loss(params)
    assert float(trained.gradients(params, found._batch(0))[0]) > found.loss(params) + 1


@pytest.mark.parametrize(("num_rows", "max_batches", "batches"), [(9, 16, 4), (9, 3, 3), (2, 16, 1)])
def test_as_many_batches_as_there_are_and_no_more_than_asked(step, num_rows, max_batches, batches):
    found = held_out(step, (source(num_rows),), Job(batch_seqs=2, seq_len=32), max_batches=max_batches)
    assert found._num_batches == batches
    rows = [number for i in range(batches) for row in (0, 1) for number in [found._batches.find(2 * i + row)[1]]]
    assert len(rows) == len(set(rows))


def test_too_little_text_gives_none(step):
    assert batch_parts(step, "B") == (("fsdp",), 2)
    assert held_out(step, (source(1),), Job(batch_seqs=8, seq_len=32), max_batches=16) is None
    assert held_out(step, (), Job(batch_seqs=8, seq_len=32), max_batches=16) is None
