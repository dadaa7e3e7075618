"""Slots of experts: how many a program computes and holds, against the blocks that it really works through."""

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops.dispatch import BLOCK_ROWS, FEW_SLOTS
from meshwright.algebra.steps import Step
from meshwright.api.rates import rates_for
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.cost.work.slots import (
    SlotSizes,
    block_bytes,
    computed_share,
    num_slot_calls,
    num_slot_products,
    places_of_token,
    slot_sizes,
    unread_bytes,
)
from meshwright.nn.experts.products import blocks_of
from meshwright.spec import catalogue
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_numbers
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

XE, WEIGHT, GE = (parse_array(text) for text in ("xe[E,C,D]", "w[E,D,Fe]", "ge[E,C,Fe]"))
PRODUCT = Step(op="einsum", inputs=(XE, WEIGHT), result=GE)
GRADIENT = Step(op="einsum", inputs=(XE, GE), result=WEIGHT.replace(name="dw"))
SILU = Step(op="silu_mul", inputs=(GE, GE.replace(name="ue")), result=GE.replace(name="me"))


def sizes(filled, *, spare=4.0, experts=8, scores="in_memory", **more):
    """Of a device with so many filled slots in each expert; a CPU, whose scores of attention are in memory."""
    dims = {"E": experts, "C": filled, "D": 64, "Fe": 32}
    return SlotSizes(**{"dims": dims, "mesh": {}, "state": "bf16-adam", "spare_slots": spare, "scores": scores} | more)


def test_without_slots_to_spare_nothing_changes():
    at = sizes(1000, spare=1.0)
    for step in (PRODUCT, GRADIENT, SILU):
        assert slot_sizes(step, at) is at
        assert computed_share(step, at) == num_slot_calls(step, at) == 1
        assert block_bytes(step, at) == 0


def test_few_slots_are_computed_all_at_once():
    at = sizes(FEW_SLOTS / 8 / 4)
    assert computed_share(PRODUCT, at) == 4
    assert num_slot_calls(PRODUCT, at) == 1
    assert block_bytes(PRODUCT, at) == 0
    assert slot_sizes(PRODUCT, at).dims["C"] == 4 * at.dims["C"]


def test_many_slots_are_computed_in_the_blocks_that_have_any():
    """For loads of every size up to all slots, in the mean, the rows of the blocks that the program finds filled."""
    capacity, rows, computed = 4 * BLOCK_ROWS, [], []
    for load in range(1, capacity + 1, 3):
        slots = jnp.asarray(np.arange(capacity)[None, :, None] < load, jnp.float32)
        rows.append(int(blocks_of(slots, catalogue.load_model("mixtral-8x7b")).num[0]) * BLOCK_ROWS)
        computed.append(float(load * computed_share(PRODUCT, sizes(load, spare=1e9, experts=1))))
    many = [number for number, load in enumerate(range(1, capacity + 1, 3)) if load * 1e9 > FEW_SLOTS]
    assert np.mean([computed[n] for n in many]) == pytest.approx(np.mean([rows[n] for n in many]), rel=0.02)


def test_no_more_than_all_slots_are_computed():
    assert computed_share(PRODUCT, sizes(40)) == 1 + 64 / 40
    assert computed_share(PRODUCT, sizes(33, spare=2.0, experts=16)) == 2


def test_devices_of_experts_have_room_and_own_tokens_have_none_to_spare():
    own, there = parse_array("xe[E,C_expert,D]"), parse_array("xe[E_expert,C,D]")
    at = sizes(512, mesh={"expert": 4}, room=1.5, load=1.25)
    assert at.elements(own) == 8 * 512 * 64 / 4
    assert at.elements(there) == 1.5 * at.elements(own)
    assert at.local(own)["C"] == 512 / 4
    assert at.local(there)["C"] == 1.25 * 512
    alone = msgspec.structs.replace(at, mesh={"expert": 1}, cache={})
    assert alone.elements(there) == 8 * 512 * 64
    assert alone.local(there)["C"] == 512
    few = slot_sizes(SILU, sizes(16, mesh={"expert": 4}, room=1.5, load=1.25))
    assert few.elements(there) == 8 * 4 * 16 * 64 / 4


def test_bytes_of_blocks_by_hand():
    at = sizes(448)  # and 64 of padding: four blocks of each of 8 experts
    assert num_slot_products(PRODUCT, at) == 32
    assert block_bytes(PRODUCT, at) == 2 * 8 * 448 * 32 * 2
    assert block_bytes(GRADIENT, at) == 4 * 32 * (64 * 32 * 4)


def test_an_accelerator_gathers_as_many_blocks_as_an_expert_has_in_the_mean():
    at = sizes(2048, scores="on_chip")
    rows = 2048 + BLOCK_ROWS / 2 + 15 * BLOCK_ROWS / 2
    assert computed_share(PRODUCT, at) == rows / 2048
    assert num_slot_products(PRODUCT, at) == 12  # of 2048 rows, for eight experts of 3072 in the mean
    slots, results = 8 * 2048 * 64 * 2, 8 * 2048 * 32 * 2
    assert block_bytes(PRODUCT, at) == 2 * results + 2 * (slots + results)
    assert block_bytes(GRADIENT, at) == 4 * 12 * (64 * 32 * 4) + 2 * (slots + results)


def test_a_kernel_for_grouped_products_computes_a_tile_more_for_each_expert():
    """Its result is cleared past the last row, and it sums gradients itself; widths that are no tiles are in blocks."""
    dims = {"E": 8, "C": 960, "D": 256, "Fe": 128}
    at = sizes(960, scores="on_chip", grouped=True, dims=dims)
    assert computed_share(PRODUCT, at) == computed_share(GRADIENT, at) == (960 + 128) / 960
    assert num_slot_products(PRODUCT, at) == num_slot_calls(GRADIENT, at) == 1
    assert block_bytes(PRODUCT, at) == 2 * 8 * 960 * 128 * 2
    assert block_bytes(GRADIENT, at) == 0
    narrow, plain = (
        msgspec.structs.replace(one, dims={**dims, "Fe": 96}, cache={})
        for one in (at, msgspec.structs.replace(at, grouped=False, cache={}))
    )
    assert computed_share(PRODUCT, narrow) == computed_share(PRODUCT, plain) > 1.4
    bounded = msgspec.structs.replace(at, spare_slots=1.0, cache={})
    assert computed_share(PRODUCT, bounded) == 1


@pytest.mark.parametrize(("on", "grouped"), [("h100:8x1", True), ("v5p:2x2x1", True), ("b200:8x1", False)])
def test_chips_with_kernels_for_grouped_products(on, grouped):
    setting = Setting(catalogue.load_model("mixtral-8x7b"), parse_cluster(on), Job(batch_seqs=8, seq_len=2048))
    assert setting.sizes(Strategy(mesh=make_mesh({"expert": 4}))).grouped == grouped


def test_a_step_that_moves_slots_computes_more_than_its_filled_slots():
    """Mixtral with an expert on each of 8 devices: half a block, and half of what a product takes."""
    model, cluster, job = (
        catalogue.load_model("mixtral-8x7b"),
        parse_cluster("b200:8x1"),
        Job(batch_seqs=8, seq_len=8192),
    )
    strategy = Strategy(mesh=make_mesh({"expert": 8}))
    room, none = (
        price_strategy(Setting(model, cluster, job, assumptions=Assumptions(empty_slots=empty)), strategy)
        for empty in (True, False)
    )
    pairs = [
        (a, b)
        for a, b in zip(room.costs.all, none.costs.all, strict=True)
        if a.step.op == "einsum" and any("C" in x.dims for x in a.step.inputs)
    ]
    assert pairs
    for a, b in pairs:
        assert a.flops / b.flops == pytest.approx(1 + 64 * BLOCK_ROWS / 2 / 16384)
        assert a.hbm_bytes > b.hbm_bytes


# -- tokens sent to nodes -----------------------------------------------------------------------------------


def test_nodes_that_have_an_expert_of_a_token():
    """Eight experts of a token in four of eight groups: on 8 nodes 4 have them, each missed with (3/4)^8."""
    at = SlotSizes(dims={"Ea": 8}, mesh={}, state="bf16-adam", groups=(8, 4))
    assert places_of_token(at, 8) == pytest.approx(4 * (1 - 0.75**8))
    assert places_of_token(at, 16) == pytest.approx(8 * (1 - 0.875**8))
    assert places_of_token(at, 1) == pytest.approx(1.0)
    free = SlotSizes(dims={"Ea": 2}, mesh={}, state="bf16-adam")
    assert places_of_token(free, np.array([2, 4])) == pytest.approx([1.5, 4 * (1 - 0.75**2)])


DEEPSEEK_KEEPS = ("cq", "ckv", "o", "x1", "r", "xe", "ge", "ue", "gs", "us", "g", "u", "logits")
"""All but norms, the products after the latents, and activations. Source: DeepSeek-V3 (2024), section 3.2.3."""


def deepseek_run(**assumed):
    """DeepSeek-V3 as published, section 3: 15,360 sequences of 4,096 on 2,048 H800, 16 stages, experts over 64."""
    strategy = Strategy(
        mesh=make_mesh({"pipeline": 16, "fsdp": 2, "expert": 64}),
        assignment=standard_assignment(zero=1),
        state="bf16-master-fp32-grads",
        precision="fp8",
        schedule="dualpipe",
        num_microbatches=120,
        remat=DEEPSEEK_KEEPS,
    )
    cluster = parse_cluster("h800:8x256")
    setting = Setting(
        catalogue.load_model("deepseek-v3"),
        cluster,
        Job(batch_seqs=15_360, seq_len=4096),
        rates_for(cluster, None, fitted=True),
        assumptions=Assumptions(software="eager", empty_slots=False, **assumed),
    )
    return price_strategy(setting, strategy)


def test_the_published_run_of_deepseek_v3():
    """3.7 days per trillion tokens, a run that no number is fitted on; without its way to send tokens, far slower."""
    days = deepseek_run(dispatch="nodes").estimate.step_s * 1e12 / (15_360 * 4096) / 86_400
    assert days == pytest.approx(3.7, rel=0.15)
    assert deepseek_run().estimate.step_s > 1.25 * days * 86_400 * 15_360 * 4096 / 1e12


def test_a_token_is_sent_to_each_node_once():
    """Over 8 nodes 3.6 rows of 8, those to experts in 8 bits with a scale of 32 for 128 in place of 16."""
    by_expert, by_node = (
        {
            (cost.step.phase, cost.step.result.name): cost.network_s - cost.latency_s
            for block in deepseek_run(dispatch=way).costs.blocks
            for cost in (*block.forward, *block.backward)
            if cost.step.op == "all_to_all" and "D" in cost.step.full.dims
        }
        for way in ("experts", "nodes")
    )
    rows = 4 * (1 - 0.75**8) / 8
    for key, seconds in by_expert.items():
        narrow = (1 + 4 / 128) / 2 if key[1] in ("xe", "dye") else 1
        assert by_node[key] == pytest.approx(seconds * rows * narrow, rel=1e-3)


def moe_costs(**assumed):
    """Costs of a step of mixtral whose experts are on the eight devices of a node, without slots to spare."""
    strategy = Strategy(mesh=make_mesh({"expert": 8}), num_microbatches=2, state="bf16-master")
    cluster, job = parse_cluster("h100:8x1"), Job(batch_seqs=16, seq_len=2048)
    setting = Setting(
        catalogue.load_model("mixtral-8x7b"),
        cluster,
        job,
        rates_for(cluster, None, fitted=True),
        assumptions=Assumptions(empty_slots=False, **assumed),
    )
    return price_strategy(setting, strategy).costs


def by_result(costs, op):
    return {
        (cost.step.block, cost.step.phase, cost.step.result.name): cost
        for cost in costs.all
        if cost.step.op == op and any("C" in array.dims for array in (*cost.step.inputs, *cost.step.results))
    }


def test_a_token_is_sent_once_to_each_device():
    """In one node of eight devices a token has 8 (1 - (7/8)^2) of them in the mean, not two rows."""
    rows, devices = (
        by_result(moe_costs(software="eager", dispatch=way), "all_to_all") for way in ("experts", "devices")
    )
    wide = [key for key, cost in rows.items() if "D" in cost.step.full.dims]
    assert wide
    for key in wide:
        assert devices[key].network_bytes / rows[key].network_bytes == pytest.approx(8 * (1 - (7 / 8) ** 2) / 2)


def test_a_host_starts_a_kernel_for_each_expert_of_a_device():
    """One kernel where a CUDA graph or a compiled program holds all of them."""
    one, alone = (by_result(moe_costs(software=way), "einsum") for way in ("captured", "eager"))
    assert one
    assert {float(c.num_kernels) for c in (*one.values(), *alone.values())} == {1.0}
    two = Strategy(mesh=make_mesh({"expert": 4}), num_microbatches=2, state="bf16-master")
    setting = Setting(
        catalogue.load_model("mixtral-8x7b"),
        parse_cluster("h100:4x1"),
        Job(batch_seqs=16, seq_len=2048),
        assumptions=Assumptions(empty_slots=False, software="eager"),
    )
    assert {float(c.num_kernels) for c in by_result(price_strategy(setting, two).costs, "einsum").values()} == {2.0}


def test_one_hot_products_bring_tokens_to_their_slots():
    """2 T FLOPs for each entry of a slot, once forward and once back, twice for the weighted sum."""
    plain, one_hot = (moe_costs(software="captured", dispatch=way) for way in ("experts", "one_hot"))
    for op, times in (("dispatch", 1), ("dispatch_backward", 1), ("combine", 1), ("combine_backward", 2)):
        found, before = by_result(one_hot, op), by_result(plain, op)
        assert found, op
        for key, cost in found.items():
            slots = 16 * 2048 / 2 / 8 * 2 * 4096
            rate = 989.4e12 * fitted_numbers().numbers["compute.h100"]
            assert cost.math_s == pytest.approx(times * 2 * slots * 2048 / rate)
            assert before[key].math_s == 0


def test_experts_that_no_token_chose_are_not_read():
    """4 tokens that choose two of 8 experts, a slot for each in the mean, leave (6/8)^4 of them without a token."""
    at = sizes(1.0)
    at = msgspec.structs.replace(at, dims={**at.dims, "C": 1.0, "Ea": 2.0})
    assert unread_bytes(PRODUCT, at) == pytest.approx(0.75**4 * at.bytes(WEIGHT))
    assert unread_bytes(SILU, at) == unread_bytes(GRADIENT, at) == 0
