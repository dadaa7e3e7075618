"""A derived model in stages: the derived collectives in the compiled text, and what does not run in stages."""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import CannotRunError, InputError
from meshwright.hlo.collectives import collectives
from meshwright.nn.context import Context
from meshwright.nn.experts import products, slots
from meshwright.parallel.pipeline.stages import Pipeline, layer_rows, strategy_schedule
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.job import OPTIMIZERS
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.settings import TrainSettings, program_options
from meshwright.train.step import make_step
from tests.parallel import cases
from tests.parallel.small import BATCH_SEQS, MODEL, SEQ_LEN, batch, mean_slots
from tests.schedule_toy import added_file
from tests.traffic import pipeline_traffic

TWO_KINDS = msgspec.structs.replace(
    MODEL, name="two-kinds", num_layers=8, sliding_window=4, sliding_layers=(0, 2, 4, 6), tied_embeddings=True
)


def check(model, axes, schedule, *, count=4, **choices):
    """Gradients of one device, no permute in a branch, and exactly the derived collectives, tick by tick."""
    chunks = choices.pop("chunks", default_chunks(schedule))
    strategy = cases.strategy_of(axes, num_microbatches=count, schedule=schedule, chunks=chunks, **choices)
    found = cases.run(model, strategy)
    cases.assert_equal(found, cases.on_one_device(model))
    everything = collectives(found.hlo, strategy.mesh)
    assert not any(c.in_conditional for c in everything if c.kind == "permute")
    dims = {**model.dims, "B": BATCH_SEQS, "T": SEQ_LEN, "C": mean_slots(model, count)}
    tables = tick_tables(strategy_schedule(strategy))
    derived = derive(transformer(model), strategy)
    assert found.compiled == pipeline_traffic(derived, tables, dims, strategy.mesh, width=4)
    # a tick without a pass does nothing of it; sums of gradients once per step may have the name of one in a pass
    passes, once = (names_of_collectives(derived, is_once) for is_once in (False, True))
    assert not {c.step for c in everything if c.label and not c.in_conditional} & (passes - once)


def names_of_collectives(derived, is_once):
    """Names of the collectives of blocks that run once per step, or in every pass of a microbatch."""
    return {
        f"{block.block.name}:{step.phase}:{step.result.name}"
        for block in derived.blocks
        for step in (*block.forward, *block.backward)
        if step.is_collective and (step.scope == "step") == is_once
    }


SIXTEEN = msgspec.structs.replace(TWO_KINDS, num_layers=16, sliding_layers=tuple(range(0, 16, 2)))
EXPERTS = msgspec.structs.replace(cases.DEEP_MOE, num_layers=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes", "schedule"),
    [
        (msgspec.structs.replace(cases.DEEP, num_layers=7), {"pipeline": 2, "data": 2, "tensor": 2}, "1f1b"),
        pytest.param(
            msgspec.structs.replace(TWO_KINDS, num_layers=5, sliding_layers=(0, 2, 4)),
            {"pipeline": 2},
            "zb-h1",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["7 layers", "two kinds"],
)
def test_stages_of_other_numbers_of_layers(model, axes, schedule):
    check(model, axes, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_further_rounds_in_a_backward_pass_of_two_parts(schedule, monkeypatch):
    """Gradients with room for a part of the rows: both parts of the backward pass run further rounds."""
    monkeypatch.setattr(products, "FEW_SLOTS", 0)
    monkeypatch.setattr(slots, "ROOM", 0.5)
    strategy = cases.strategy_of({"pipeline": 2, "expert": 2}, num_microbatches=4, schedule=schedule)
    cases.assert_equal(cases.run(cases.DEEP_MOE, strategy), cases.on_one_device(cases.DEEP_MOE))


@pytest.mark.slow
def test_a_stage_with_fewer_experts_counts_its_own_routers():
    model = msgspec.structs.replace(cases.DEEP_MOE, num_layers=3)
    options = ProgramOptions(balance_loss=0.01)
    found = []
    for axes, schedule in (({"expert": 2}, {}), ({"pipeline": 2, "expert": 2}, {"schedule": "dualpipe"})):
        strategy = cases.strategy_of(axes, num_microbatches=4, **schedule)
        step = TrainStep(model, strategy, optimizer=cases.keep_gradients(), options=options)
        state, metrics = step.step(step.init(0), batch())
        found.append((float(metrics.loss), step.to_canonical(state.opt_state), metrics.extras))
    (loss, grads, extras), (wanted_loss, wanted, of_one) = reversed(found)
    assert abs(loss / wanted_loss - 1) < cases.RELATIVE
    assert {name: a.shape for name, a in extras.items()} == dict.fromkeys(extras, (3,))
    for name, value in {**wanted, **of_one}.items():
        atol = cases.RELATIVE * np.abs(value).max()
        np.testing.assert_allclose((grads | extras)[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_leaves_layers_of_zeros_alone(optimizer):
    model, settings = msgspec.structs.replace(MODEL, num_layers=3), TrainSettings(optimizer=optimizer)
    found = []
    for axes in ({}, {"pipeline": 2, "fsdp": 2}):
        strategy = cases.strategy_of(axes, num_microbatches=2)
        options = program_options(settings, strategy, several_documents=False)
        step = make_step(model, strategy, settings, options=options)
        state = step.init(0)
        for _ in range(3):
            state, _ = step.step(state, batch())
        found.append(jax.device_get(step.to_canonical(state.params)))
    assert not np.asarray(state.params["wq"])[-1].any()
    for name, value in found[0].items():
        # Adam divides by the root of a gradient's square: a single entry near zero may move by more than rounding.
        assert np.linalg.norm(found[1][name] - value) < 1e-5 * np.linalg.norm(value), name


@pytest.mark.slow
def test_two_kinds_of_layers_and_a_stream_that_is_sent_in_parts():
    """Where all devices of ``tensor`` have the whole stream, each sends a part of it, and the next stage gathers it."""
    check(TWO_KINDS, {"pipeline": 2, "tensor": 2}, "interleaved", sequence_parallel=False, remat="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes", "schedule"),
    [
        *((SIXTEEN, {"pipeline": 4, "data": 2}, one) for one in schedule_names() if not one.startswith("dualpipe")),
        (EXPERTS, {"pipeline": 2, "expert": 2, "tensor": 2}, "1f1b"),
    ],
)
def test_every_schedule_on_four_stages_and_experts(model, axes, schedule):
    check(model, axes, schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "schedule", "choices"),
    [
        ({"pipeline": 2, "data": 2, "tensor": 2}, "1f1b", {}),
        ({"pipeline": 2, "tensor": 4}, "gpipe", {"sequence_parallel": False}),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, "zb-h1", {}),
        ({"pipeline": 2, "fsdp": 2, "context": 2}, "interleaved", {"remat": "selective"}),
        ({"pipeline": 2, "context": 2, "tensor": 2}, "zb-h2", {"context_attention": "ulysses"}),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, "zb-h1", {"remat": "every-4"}),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, "zb-h1", {"remat": "recompute-all"}),
        ({"pipeline": 2, "fsdp": 2, "tensor": 2}, "dualpipe-v", {"remat": "none"}),
        ({"pipeline": 2, "tensor": 2}, "dualpipe", {}),
        ({"pipeline": 2, "data": 2, "fsdp": 2}, "1f1b", {"remat": "full", "count": 2, "zero": 1}),
    ],
)
def test_mixes(axes, schedule, choices):
    check(TWO_KINDS, axes, schedule, **choices)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe", "dualpipe-v"])
def test_the_loss_alone(schedule):
    axes = {"pipeline": 2, "fsdp": 2, "tensor": 2}
    strategy = cases.strategy_of(axes, num_microbatches=4, schedule=schedule, chunks=default_chunks(schedule))
    step = TrainStep(cases.DEEP, strategy)
    loss = step.loss_sum(step.init(0).params, step.place(batch()))
    assert abs(float(loss) / (BATCH_SEQS * SEQ_LEN) / cases.on_one_device(cases.DEEP).loss - 1) < cases.RELATIVE


def stepped(model, strategy, **choices):
    """Loss and gradients, in the order of the model, of one step."""
    step = TrainStep(model, strategy, optimizer=cases.keep_gradients(), **choices)
    state, metrics = step.step(step.init(0), batch())
    return float(metrics.loss), {name: np.asarray(g) for name, g in step.to_canonical(state.opt_state).items()}


def assert_alike(found, wanted, relative):
    assert abs(found[0] / wanted[0] - 1) < relative
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=0, atol=relative * np.abs(value).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_losses_that_are_made_in_the_layers(schedule):
    """Balance losses count the tokens of a microbatch, so they are compared with the same microbatches."""
    options = ProgramOptions(balance_loss=0.1, z_loss=1e-2)
    stages = cases.strategy_of({"pipeline": 2, "data": 2}, num_microbatches=4, schedule=schedule)
    alone = cases.strategy_of({"data": 2}, num_microbatches=4, gradient_sync="naive")
    found, wanted = (stepped(cases.DEEP_MOE, one, options=options) for one in (stages, alone))
    assert_alike(found, wanted, cases.RELATIVE)
    plain = stepped(cases.DEEP_MOE, alone)[1]["router"]
    assert np.abs(plain - wanted[1]["router"]).max() > 1e-2 * np.abs(plain).max(), "the balance loss changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_of_bf16_weights_are_summed_in_float32(schedule):
    """As on one device, but for what bf16 rounds (2^-8) in products that are split."""
    axes = {"pipeline": 2, "fsdp": 2}
    stages, alone = (
        Strategy(mesh=make_mesh(mesh), state="bf16-adam", num_microbatches=4, schedule=schedule, gradient_sync="naive")
        for mesh in (axes, {})
    )
    found, wanted = stepped(cases.DEEP, stages), stepped(cases.DEEP, alone)
    assert_alike(found, wanted, 2**-7)
    for name, grad in found[1].items():
        assert grad.dtype == np.float32
        assert (grad != grad.astype(jnp.bfloat16).astype(np.float32)).any(), f"{name} was rounded"


def stages_of(model, schedule, *, prefetch=False, **choices):
    derived = derive(transformer(model), Strategy(mesh={}, state="fp32", prefetch=prefetch))
    context = Context(model=model, derived=derived, mesh={}, **choices)
    return Pipeline(context=context, schedule=schedule, stacked=frozenset())


def test_what_does_not_run_in_stages():
    with pytest.raises(CannotRunError, match=r"pipeline=5 makes more stages than the 4 layers\. Use at most 4\."):
        stages_of(cases.DEEP, build("1f1b", stages=5, microbatches=5))
    with pytest.raises(CannotRunError, match="offload of activations does not run in a pipeline"):
        stages_of(cases.DEEP, build("1f1b", stages=2, microbatches=4), offload=True)
    with pytest.raises(CannotRunError, match="prefetch does not run in a pipeline"):
        stages_of(cases.DEEP, build("1f1b", stages=2, microbatches=4), prefetch=True)


def test_layers_stay_where_they_are_while_they_change_places():
    """A pipeline that is resumed puts the layers of its stages in order on the devices that hold them."""
    strategy = cases.strategy_of({"pipeline": 2}, num_microbatches=4, schedule="interleaved", chunks=2)
    step = TrainStep(cases.DEEP, strategy, optimizer=cases.keep_gradients())
    params = step.init(0).params
    for moved in (step.to_canonical(params), step.from_canonical(params)):
        assert {n: a.sharding for n, a in moved.items()} == {n: a.sharding for n, a in params.items()}
    again = step.from_canonical(step.to_canonical(params))
    assert all((np.asarray(again[name]) == np.asarray(params[name])).all() for name in params)
    assert (np.asarray(moved["wq"]) != np.asarray(params["wq"])).any()


@pytest.mark.slow
def test_a_train_step_under_a_schedule_of_one_file(tmp_path):
    with added_file(tmp_path) as name:
        check(TWO_KINDS, {"pipeline": 2, "data": 2}, name)


def test_a_schedule_file(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n")
    strategy = Strategy(mesh=make_mesh({"pipeline": 2}), num_microbatches=2, schedule=str(path))
    assert strategy_schedule(strategy).name == "own"
    more = msgspec.structs.replace(strategy, num_microbatches=4)
    with pytest.raises(InputError, match="is for 2 stages and 2 microbatches, and the strategy has pipeline=2 and num"):
        strategy_schedule(more)
    with pytest.raises(InputError, match="schedule '1f2b' is not known"):
        strategy_schedule(msgspec.structs.replace(strategy, schedule="1f2b"))


def made(name, stages, chunks=None):
    return build(name, stages=stages, microbatches=2 * stages, chunks=chunks or default_chunks(name))


def rows_of(schedule, num_layers):
    return layer_rows(schedule, ("layer",) * num_layers)["layer"].tolist()


def test_round_and_round_and_in_a_v():
    """Device 0 of two stores the first piece and, of a loop, the third; of a V, the last."""
    assert rows_of(made("interleaved", 2), 8) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert rows_of(made("dualpipe-v", 2), 8) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert rows_of(made("interleaved", 2, chunks=3), 6) == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("name", schedule_names())
def test_one_piece_per_device_keeps_the_order(name):
    order = rows_of(made(name, 4), 16)
    assert sorted(order) == list(range(16))
    plain = name not in ("interleaved", "dualpipe-v")
    assert (order == list(range(16))) == plain


def test_layers_that_do_not_divide_leave_rows_of_zeros():
    assert rows_of(made("1f1b", 2), 7) == [0, 1, 2, 3, 4, 5, 6, -1]
    assert rows_of(made("1f1b", 4), 9) == [0, 1, 2, 3, 4, -1, 5, 6, -1, 7, 8, -1]
    assert rows_of(made("interleaved", 2), 7) == [0, 1, 4, 5, 2, 3, 6, -1]
