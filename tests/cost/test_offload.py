"""What host memory takes over, and the seconds of its way there: counts by hand on one chip."""

import msgspec
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.offload import NOTHING, offloaded
from meshwright.cost.pipeline import ONE_STAGE, PipelineCost
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.spec.weights import num_params, params_by_part

TINY = catalogue.load_model("tiny")
ONE_CHIP = parse_cluster("v5e:1x1")
PCIE = ONE_CHIP.chip.pcie_bytes_per_s
JOB = Job(batch_seqs=16, seq_len=512)
STREAM = 2 * 16 * 512 * 256


def parts(**fields):
    strategy = Strategy(mesh=make_mesh({}), **fields)
    return memory_parts(derive(transformer(TINY), strategy), Setting(TINY, ONE_CHIP, JOB).sizes(strategy))


def estimate(cluster=ONE_CHIP, axes=None, **fields):
    return price_strategy(Setting(TINY, cluster, JOB), Strategy(mesh=make_mesh(axes or {}), **fields)).estimate


def test_nothing_is_moved_unless_it_is_chosen():
    assert offloaded(parts(), PCIE, ONE_STAGE, ()) == NOTHING
    assert offloaded(parts(), None, ONE_STAGE, ()) == NOTHING
    assert "pcie" not in estimate().terms


def test_the_optimizer_goes_there_and_back_once_a_step():
    """bf16-adam: 8 bytes of every parameter, both ways; two of eight layers' part stays on the chip."""
    plain, moved = (estimate(offload=chosen, num_microbatches=4) for chosen in ((), ("optimizer",)))
    seconds = 2 * 8 * num_params(TINY) / PCIE
    assert moved.terms["pcie"] == pytest.approx(seconds)
    assert moved.step_s - plain.step_s == pytest.approx(seconds)
    assert moved.memory["optimizer"] == pytest.approx(plain.memory["optimizer"] * 2 / 8)
    assert {**moved.memory, "optimizer": 0} == {**plain.memory, "optimizer": 0}


def test_activations_leave_two_layers_behind():
    """The results of one layer, of 8: each pass takes at least as long as those take over PCIe."""
    plain, moved = (estimate(offload=chosen, remat="none") for chosen in ((), ("activations",)))
    layer = parts(remat="none").layers[0].kept_bytes / 8
    assert layer > 10 * STREAM
    assert plain.memory["activations"] - moved.memory["activations"] == pytest.approx(6 * layer)
    assert moved.terms["pcie"] == pytest.approx(2 * 8 * layer / PCIE)
    assert moved.step_s - plain.step_s > 0.5 * moved.terms["pcie"]
    assert moved.step_s_upper - plain.step_s_upper == pytest.approx(moved.terms["pcie"])


def test_what_a_pass_hides_costs_nothing():
    """With a hundred times the bandwidth the passes take longer than their transfers."""
    fast = msgspec.structs.replace(ONE_CHIP.chip, pcie_bytes_per_s=100 * PCIE)
    cluster = msgspec.structs.replace(ONE_CHIP, chip=fast)
    plain, moved = (estimate(cluster, offload=chosen, remat="none") for chosen in ((), ("activations",)))
    assert moved.terms["pcie"] > 0
    assert moved.step_s == pytest.approx(plain.step_s)


def test_with_segments_only_their_inputs_leave():
    """Every fourth layer's input; the four layers that are run again stay."""
    every = parts(remat="every-4")
    layer = every.layers[0].kept_bytes / 8
    moved = offloaded(every, PCIE, ONE_STAGE, ("activations",))
    assert moved.activations_s == pytest.approx(STREAM / 4 / PCIE)
    plain, left = (every.items(offload=chosen)["activations"] for chosen in ((), ("activations",)))
    assert plain - left == pytest.approx(2 * STREAM - 2 * STREAM / 4)
    assert left > 4 * layer


def test_a_stage_moves_its_own_layers_of_every_microbatch():
    every, pipeline = parts(remat="block", num_microbatches=4), PipelineCost(stages=4, microbatches=4)
    moved = offloaded(every, PCIE, pipeline, ("activations", "optimizer"))
    tables = params_by_part(TINY)["embedding"]
    held = (num_params(TINY) - 2 * tables - 256) / 4 + 2 * tables + 256
    assert moved.optimizer_s == pytest.approx(2 * 8 * held / PCIE)
    assert moved.activations_s == pytest.approx(STREAM / 4 / PCIE)
    assert moved.serial_s == pytest.approx(2 * 2 * 4 * moved.activations_s + moved.optimizer_s)


def test_few_layers_have_nothing_to_offload():
    """A stage of two layers holds the buffers of two."""
    axes = {"pipeline": 4}
    plain, moved = (
        estimate(parse_cluster("v5e:2x2"), axes, offload=chosen, num_microbatches=1) for chosen in ((), ("optimizer",))
    )
    assert moved.memory["optimizer"] == plain.memory["optimizer"]


def test_the_way_to_the_host_must_be_known():
    with pytest.raises(InputError, match="offload needs the chip's pcie_bytes_per_s, which is not known"):
        offloaded(parts(), None, ONE_STAGE, ("optimizer",))
