"""The explanation of a plan: lines of the derived steps, what hides, and what is refused."""

import msgspec
import pytest

from meshwright.core.errors import CannotRunError
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.explain import explain
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job


def planned(cluster="v5e:4x4", model="llama3-8b", batch_seqs=128, **axes):
    job = Job(batch_seqs=batch_seqs, seq_len=4096)
    return rank_plans(Setting(catalogue.load_model(model), parse_cluster(cluster), job), axes=axes, top=1).plans[0]


def changed(one, **fields):
    return msgspec.structs.replace(one, strategy=msgspec.structs.replace(one.strategy, **fields))


def test_the_parts_add_up_to_the_step():
    """All work of the repeated block by itself is what the two passes say, times layers and microbatches."""
    one = planned(fsdp=4, tensor=4)
    told = explain(one)
    priced = price_strategy(Setting(one.model, one.cluster, one.job), one.strategy)
    layer = [block.block.name for block in priced.derived.blocks if block.block.carry]
    costs = [cost for cost in priced.costs.all if cost.step.block in layer and cost.step.phase != "update"]
    assert costs
    local = sum(cost.local_s for cost in costs if not cost.step.is_collective)
    assert told.forward.compute_s + told.backward.compute_s == pytest.approx(local)
    moved = sum(cost.network_s for cost in costs if cost.step.is_collective)
    hidden = told.forward.hidden_s + told.backward.hidden_s
    assert hidden + told.forward.critical_s + told.backward.critical_s == pytest.approx(moved)


def test_every_collective_is_listed_and_small_local_steps_are_not():
    one = planned(fsdp=4, tensor=4)
    told = explain(one)
    priced = price_strategy(Setting(one.model, one.cluster, one.job), one.strategy)
    block = next(block for block in priced.derived.blocks if block.block.carry)
    for part, steps in ((told.forward, block.forward), (told.backward, block.backward)):
        collectives = [str(step) for step in steps if step.is_collective]
        assert [line.text for line in part.lines if line.op in ("all_gather", "reduce_scatter", "all_reduce")] == (
            collectives
        )
        assert len(part.lines) + part.num_left_out == len(steps)
        assert [line.number for line in part.lines] == list(range(1, len(part.lines) + 1))


def test_weights_hide_and_activations_do_not():
    told = explain(planned(fsdp=4, tensor=4))
    lines = {line.text.split(" = ")[0]: line for line in told.forward.lines if line.op == "all_gather"}
    assert lines["w_up[D, F_tensor]"].overlaps == "can overlap, prefetched"
    assert lines["h[B_fsdp, T, D]"].overlaps == "on the critical path"
    assert not lines["w_up[D, F_tensor]"].critical
    assert lines["h[B_fsdp, T, D]"].critical


def test_recomputed_lines_say_so():
    told = explain(changed(planned(fsdp=4, tensor=4), remat="block", num_microbatches=1))
    assert any(line.overlaps == "recomputed" for line in told.backward.lines)


@pytest.mark.parametrize(("remat", "again"), [("recompute-all", 31 / 2), ("recompute-4", 3 / 2)])
def test_layers_that_run_again_are_listed_as_often_as_they_run(remat, again):
    """On average 32 x 31 / 2 or 32 (4 - 1) / 2 forward passes for 32 layers."""
    told = explain(changed(planned(fsdp=4, tensor=4), remat=remat, num_microbatches=1))
    full = explain(changed(planned(fsdp=4, tensor=4), remat="full", num_microbatches=1))
    ups = [line.times for line in told.backward.lines if line.text.startswith("u[")]
    assert ups == [again, 1]
    assert told.backward.compute_s - full.backward.compute_s == pytest.approx(again * full.forward.compute_s)


def test_what_does_not_divide_is_refused_and_memory_is_not():
    one = planned(fsdp=4, tensor=4)
    with pytest.raises(CannotRunError, match="num_microbatches=5 does not divide"):
        explain(changed(one, num_microbatches=5))
    with pytest.raises(CannotRunError, match="needs 8 devices, but v5e:4x4 has 16"):
        explain(changed(one, mesh={"data": 1, "fsdp": 4, "context": 1, "tensor": 2}))
    full = explain(changed(one, remat="none", num_microbatches=1))
    memory = next(limit for limit in full.limits if limit.unit == "bytes")
    assert memory.holds is False
    assert memory.here == full.estimate.hbm_bytes_per_chip > memory.limit
