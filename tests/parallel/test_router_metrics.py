"""What a step says of its routers: the same on every mesh and for any number of microbatches, and at no cost."""

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.hlo.collectives import collectives
from meshwright.parallel.pipeline.stages import strategy_schedule
from meshwright.parallel.train_step import TrainStep
from tests.nn.families import FAMILIES
from tests.parallel.cases import DEEP_MOE, MOE, RELATIVE, keep_gradients, strategy_of
from tests.parallel.small import BATCH_SEQS, MODEL, SEQ_LEN, batch, mean_slots
from tests.traffic import compiled_traffic, derived_traffic, pipeline_traffic

COUNTED = ProgramOptions(balance_loss=1e-2)
MESHES = [
    ({"expert": 2, "tensor": 2}, {}),
    pytest.param({"fsdp": 2, "context": 2}, {"num_microbatches": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2}, {"num_microbatches": 2, "gradient_sync": "naive"}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2}, {"num_microbatches": 4, "schedule": "zb-h1"}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "fsdp": 2}, {"num_microbatches": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2}, {"num_microbatches": 4, "schedule": "dualpipe"}, marks=pytest.mark.slow),
]


def extras(model, axes, options=COUNTED, **choices):
    step = TrainStep(model, strategy_of(axes, **choices), optimizer=keep_gradients(), options=options)
    _, metrics = step.step(step.init(0), batch())
    return {name: np.asarray(value) for name, value in metrics.extras.items()}


@pytest.fixture(scope="module")
def on_one_device():
    return extras(MOE, {})


def test_of_one_device(on_one_device):
    """The loss of a router that spreads tokens about evenly is near the choices of a token; nothing is dropped."""
    assert all(value.shape == (MOE.num_layers,) for value in on_one_device.values())
    np.testing.assert_allclose(on_one_device["balance_loss"], MOE.experts_per_token, rtol=0.05)
    assert np.all(on_one_device["balance_loss"] != MOE.experts_per_token)
    assert np.all(on_one_device["load_max_over_mean"] > 1)
    np.testing.assert_array_equal(on_one_device["dropped_share"], 0)


@pytest.mark.parametrize(("axes", "choices"), MESHES)
def test_equal_on_every_mesh(axes, choices, on_one_device):
    found = extras(MOE, axes, **choices)
    assert found.keys() == on_one_device.keys()
    for name, value in on_one_device.items():
        np.testing.assert_allclose(found[name], value, rtol=RELATIVE, atol=RELATIVE, err_msg=name)


@pytest.mark.parametrize(("axes", "choices"), MESHES[:1])
def test_at_no_further_collective(axes, choices):
    """The counts' own sums, one for each layer, are in the derivation; nothing else is sent for the metrics."""
    step = TrainStep(MOE, strategy_of(axes, **choices), optimizer=keep_gradients(), options=COUNTED)
    mesh = step.strategy.mesh
    compiled = compiled_traffic(collectives(step.lower(BATCH_SEQS, SEQ_LEN).compile().as_text(), mesh), mesh)
    dims = {
        **MOE.dims,
        "B": BATCH_SEQS,
        "T": SEQ_LEN,
        "C": mean_slots(MOE),
        "Er": len(ROUTING_ROWS),
    }
    assert compiled == derived_traffic(step.declared, dims, mesh, num_microbatches=1, width=4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_stages_send_no_other_collective(schedule):
    """Where a device holds layers of two stages, the counts of one go home with the gradients, as derived."""
    strategy = strategy_of({"pipeline": 2, "fsdp": 2}, num_microbatches=4, schedule=schedule)
    step = TrainStep(DEEP_MOE, strategy, optimizer=keep_gradients(), options=COUNTED)
    text = step.lower(BATCH_SEQS, SEQ_LEN).compile().as_text()
    tables = tick_tables(strategy_schedule(strategy))
    dims = {**DEEP_MOE.dims, "B": BATCH_SEQS, "T": SEQ_LEN, "C": mean_slots(DEEP_MOE, 4), "Er": len(ROUTING_ROWS)}
    compiled = compiled_traffic(collectives(text, strategy.mesh), strategy.mesh)
    assert compiled == pipeline_traffic(step.declared, tables, dims, strategy.mesh, width=4)


def test_dropped_choices_are_those_without_a_slot():
    """Half of the mean load per expert: at least half of the choices find no slot."""
    options = ProgramOptions(capacity_factor=0.5)
    dropped = extras(MOE, {"fsdp": 2}, options)["dropped_share"]
    assert np.all((dropped >= 0.5) & (dropped < 0.6))


@pytest.mark.parametrize("options", [COUNTED, ProgramOptions()])
def test_a_dense_model_and_a_router_that_is_not_counted_say_nothing(options):
    model = MOE if options == ProgramOptions() else MODEL
    step = TrainStep(model, strategy_of({}), options=options)
    _, _, _, found = jax.eval_shape(step._gradients, step.param_shapes, step.batch_shapes(BATCH_SEQS, SEQ_LEN))
    assert found == ({}, {})


# -- corrections that follow the load -------------------------------------------------------------------------

CORRECTED = replace(FAMILIES["deepseek_v3"], num_layers=2, dense_layers=())
RATE = 0.0005


def corrected_steps(axes, *, steps, rate=RATE, **choices):
    """The corrections and the routers' metrics after each of some steps that change no weight."""
    step = TrainStep(
        CORRECTED,
        strategy_of(axes, **choices),
        optimizer=keep_gradients(),
        options=ProgramOptions(balance_loss=1e-2, correction_rate=rate),
    )
    state, kept, load = step.init(0), [], []
    assert "router_correction" not in state.opt_state
    for _ in range(steps):
        state, metrics = step.step(state, batch())
        kept.append(np.asarray(state.params["router_correction"]))
        load.append(float(np.max(metrics.extras["load_max_over_mean"])))
    return kept, load


@pytest.fixture(scope="module")
def twelve_steps():
    return corrected_steps({}, steps=12)


@pytest.mark.slow
def test_a_correction_evens_the_load_out(twelve_steps):
    kept, load = twelve_steps
    assert set(np.unique(kept[0])) <= {-np.float32(RATE), np.float32(0), np.float32(RATE)}
    assert min(load) < load[0] - 0.1
    kept, load = corrected_steps({}, steps=2, rate=0.0)
    assert not kept[-1].any()
    assert load[0] == load[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "choices"),
    [
        ({"expert": 2, "tensor": 2, "data": 2}, {}),
        pytest.param({"fsdp": 2}, {"num_microbatches": 2, "zero": 1}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "data": 2}, {"num_microbatches": 4, "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2}, {"num_microbatches": 4, "schedule": "dualpipe"}, marks=pytest.mark.slow),
    ],
)
def test_corrections_are_the_same_on_every_mesh(axes, choices, twelve_steps):
    np.testing.assert_array_equal(corrected_steps(axes, steps=3, **choices)[0], twelve_steps[0][:3])
