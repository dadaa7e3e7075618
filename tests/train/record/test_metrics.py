"""What is said of a step: of experts one number for all layers, on every process."""

import jax
import numpy as np

from meshwright.algebra.layers import ProgramOptions
from meshwright.spec.strategy import Strategy
from meshwright.train.record.metrics import StepRecord, describe, on_host, over_layers
from meshwright.train.settings import TrainSettings, program_options

LAYERS = {
    "balance_loss": np.array([2.0, 2.2], np.float32),
    "load_max_over_mean": np.array([1.25, 1.5], np.float32),
    "dropped_share": np.array([0.0, 0.05], np.float32),
}


def record(extras):
    return StepRecord(
        step=3,
        tokens=300,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=0.1,
        step_s=0.5,
        tokens_per_s=200.0,
        mfu=None,
        predicted_step_s=None,
        extras=extras,
    )


def test_the_busiest_layer_and_means_of_the_rest():
    found = over_layers(LAYERS)
    assert (round(found["balance_loss"], 6), found["load_max_over_mean"]) == (2.1, 1.5)
    assert describe(record(found), 10).endswith("step 500 ms  busiest expert 1.50x  dropped 2.5%")


def test_nothing_is_said_of_a_dense_model_or_of_nothing_dropped():
    assert over_layers({}) == {}
    assert describe(record({}), 10).endswith("step 500 ms")
    assert "dropped" not in describe(record({"load_max_over_mean": 1.0, "dropped_share": 0.0}), 10)


def test_arrays_split_over_devices_come_whole():
    mesh = jax.make_mesh((2,), ("pipeline",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("pipeline"))
    np.testing.assert_array_equal(on_host({"a": jax.device_put(np.arange(4), split)})["a"], np.arange(4))


def test_documents_are_told_apart_where_there_are_several():
    packed = TrainSettings(router_z_loss=0.5)
    expected = ProgramOptions(documents=True, balance_loss=0.01, router_z_loss=0.5, capacity_factor=2.0)
    alone = Strategy(mesh={}, capacity_factor=2.0)
    assert program_options(packed, alone, several_documents=True) == expected
    assert not program_options(packed, alone, several_documents=False).documents
    assert not program_options(TrainSettings(packing=False), alone, several_documents=True).documents
