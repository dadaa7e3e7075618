"""The executor under every schedule against `jax.grad` on one device, and what XLA makes of it."""

import re

import jax
import numpy as np
import pytest

from meshwright.algebra.schedules.file import read_schedule
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.hlo.collectives import collectives
from meshwright.parallel.mesh import device_mesh
from tests.parallel.pipeline_toy import LENGTH, SEQS, WIDTH, compiled, data, gradients, lowered, plain_loss
from tests.schedule_toy import added_file
from tests.traffic import num_permutes

TOLERANCE = 1e-5


def made(name, stages, microbatches=8, chunks=None):
    return build(name, stages=stages, microbatches=microbatches, chunks=chunks or default_chunks(name))


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(one - other).max() <= TOLERANCE * np.abs(other).max()


def assert_as_on_one_device(schedule, layers_each=2):
    weights, inputs = data(layers_each * schedule.num_virtual_stages, schedule.num_microbatches)
    sums, grads = gradients(schedule, weights, inputs)
    loss, wanted = jax.value_and_grad(plain_loss)(weights, inputs)
    assert sums["count"] == inputs["targets"].size
    assert_equal(sums["loss"], loss)
    assert_equal(grads, wanted)


@pytest.mark.parametrize(
    ("stages", "layers_each"),
    [(4, 2), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(8, 1, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", schedule_names())
def test_gradients_are_those_of_one_device(name, stages, layers_each):
    assert_as_on_one_device(made(name, stages, microbatches=2 * stages), layers_each)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [3, 4])
def test_more_chunks(chunks):
    assert_as_on_one_device(made("interleaved", 2, chunks=chunks))


def test_a_schedule_of_a_persons_own(tmp_path):
    """A V on two devices whose passes are split for some microbatches only."""
    path = tmp_path / "own.txt"
    path.write_text("placement = v\n0: F0 F1 F0/1 B0/1 F1/1 B0 W0 B1/1 B1\n1: F0 F0/1 F1 B0/1 W0/1 F1/1 B0 B1/1 B1\n")
    assert_as_on_one_device(read_schedule(path))


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v"])
def test_the_loss_alone(name):
    schedule = made(name, 4)
    weights, inputs = data(schedule.num_virtual_stages, 8)
    program = lowered(schedule, device_mesh({"pipeline": 4}), weights, inputs, alone=True)
    # layers that are all alike need no order
    same = weights._replace(layers=jax.tree.map(lambda a: np.broadcast_to(a[:1], a.shape), weights.layers))
    assert_equal(program.compile()(same, inputs)["loss"], plain_loss(same, inputs))


# -- what XLA makes of it ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_permutes_stand_outside_the_branches(name):
    """One for each way and tick; where microbatches enter at both ends, the two copies of w and b meet once as well."""
    tables, program = tick_tables(made(name, 4)), compiled(made(name, 4), 2)
    found = [c for c in collectives(program.as_text(), {"pipeline": 4}) if c.kind == "permute"]
    assert not any(c.in_conditional for c in found)
    every_tick = [c for c in found if c.trips == tables.num_ticks]
    assert [c.full_bytes for c in every_tick] == [4 * SEQS * LENGTH * WIDTH] * num_permutes(tables)
    once = [c for c in found if c.trips == 1]
    assert len(every_tick) + len(once) == len(found)
    assert len(once) == (4 if tables.schedule.weight_copies == 2 else 0)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_buffers_stay_in_place(name):
    """No branch copies a stash, or what waits for W: only their first filling with zeros is a copy."""
    tables, program = tick_tables(made(name, 4)), compiled(made(name, 4), 2)
    for slots in {tables.slots.stash, tables.slots.handed} - {0}:
        shape = f"f32[{slots},2,{SEQS},{LENGTH},{WIDTH}]"
        copies = re.findall(rf"= {re.escape(shape)}\S* copy\((\S+)\)", program.as_text())
        assert all("broadcast" in source for source in copies), copies


def temp_bytes(name, microbatches):
    """Of the compiled step, and the slots of its tables, for 4 stages of 2 layers."""
    schedule = made(name, 4, microbatches)
    return compiled(schedule, 2).memory_analysis().temp_size_in_bytes, tick_tables(schedule)


def test_memory_grows_with_the_slots_and_not_with_microbatches():
    """A slot of the stash is x and y of two layers, one of the head a stream."""
    stream = 4 * SEQS * LENGTH * WIDTH
    small, large = temp_bytes("gpipe", 8), temp_bytes("gpipe", 24)
    added = [after - before for before, after in zip(slots(small[1]), slots(large[1]), strict=True)]
    assert added == [0, 0, 16, 16]
    ticks = 4 * 18 * (large[1].num_ticks - small[1].num_ticks)
    assert large[0] - small[0] == pytest.approx(16 * (2 * 2 + 1) * stream + ticks, rel=0.02)
    small, large = temp_bytes("1f1b", 8), temp_bytes("1f1b", 24)
    assert slots(small[1]) == slots(large[1]) == (1, 1, 7, 1)
    assert large[0] - small[0] < 2 * stream + 4 * 18 * (large[1].num_ticks - small[1].num_ticks)


def slots(tables):
    return tables.slots.x, tables.slots.dx, tables.slots.stash, tables.slots.head


def test_a_longer_schedule_is_the_same_program():
    lengths = []
    for microbatches in (8, 64):
        weights, inputs = data(8, microbatches)
        text = lowered(made("1f1b", 4, microbatches), device_mesh({"pipeline": 4}), weights, inputs).as_text()
        lengths.append(len(text.splitlines()))
    assert lengths[0] == lengths[1]


def test_a_schedule_of_one_file(tmp_path):
    """An order that no closed form knows: the executor runs its rows as any others."""
    with added_file(tmp_path) as name:
        assert_as_on_one_device(made(name, 4))
