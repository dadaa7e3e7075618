"""Plans of services: bytes and bounds worked out by hand, prices as of one step alone, targets, pools, loads."""

import math

import msgspec
import numpy as np
import pytest

from meshwright.api.planning import make_setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.serving.engines import BOUNDS, phase_setting, price_fleet
from meshwright.plan.serving.fleet import engine_parts, fleet_of
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.search import all_services, frontier, ranked, together
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes, stored_dtypes
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from tests.speed import took
from tests.tier import sampled

INT8, BF16 = StoredDtypes("int8", "int8"), StoredDtypes("bf16", "bf16")
CHAT = Service(prompt_len=8192, output_len=512)


def setting(model, cluster, *, fitted=False):
    found = parse_cluster(cluster)
    return service_setting(load_model(model), found, fitted_calibration(found.chip) if fitted else None)


def priced(model, cluster, service=CHAT, stored=(INT8,), **axes):
    given = setting(model, cluster)
    return price_fleet(given, service, fleet_of(given.model, given.cluster, axes), stored)


def at_batch(steps, batch):
    return int(np.flatnonzero(steps.batch == batch)[0])


def test_llama3_70b_in_int8_by_hand():
    """8 of the chips of a v5e, batch 32, 8k of context: How to Scale Your Model, sections 7 and 8."""
    # the mean step is at 7,936 + 256 = 8,192 positions, the last at 8,448
    found = priced("llama3-70b", "v5e:4x4", Service(prompt_len=7936, output_len=512), tensor=8)
    one = at_batch(found.decode, 32)
    of_token = 2 * 8 * 128 * 80
    assert of_token == 163_840
    # int8, and a scale of four bytes for each head of 128 numbers
    cache = 32 * 8448 * of_token * (1 + 4 / 128) / 8
    weights = (80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 2 * 8192 * 128_256) / 8
    assert found.decode.memory["kv_cache"][one] == pytest.approx(cache)
    # beside int8 numbers there are their scales and the vectors of norms
    assert found.decode.memory["weights"][one] == pytest.approx(weights, rel=2e-3)
    bandwidth = 8 * parse_cluster("v5e:4x4").chip.hbm_bytes_per_s
    read = 8 * weights - 8192 * 128_256  # the table is not read whole
    bound = (32 * 8192 * of_token * (1 + 4 / 128) + read) / bandwidth
    assert bound < found.decode.step_s[one] < 1.25 * bound
    parts = found.decode.bounds_s
    # products read and write 32 rows of activations beside
    assert read / bandwidth < parts["parameters"][one] < 1.05 * read / bandwidth
    assert parts["KV"][one] == pytest.approx(32 * 8192 * of_token * (1 + 4 / 128) / bandwidth, rel=0.02)
    assert found.decode.need[one] <= found.room < found.decode.need[one] * 2


def test_more_devices_than_kv_heads_hold_these_twice():
    whole, repeated = (priced("llama3-70b", "v5e:4x4", tensor=size) for size in (8, 16))
    caches = [found.decode.memory["kv_cache"][at_batch(found.decode, 16)] for found in (whole, repeated)]
    assert caches[1] == pytest.approx(caches[0])


@pytest.mark.parametrize(
    ("model", "cluster"),
    sampled(
        [
            *(("llama3-70b", "v5e:4x8"), ("deepseek-v3", "h200:8x4")),
            *(("gemma3-27b", "h100:8x1"), ("gpt-oss-20b", "2*v5e:4x4")),
        ],
        *(("deepseek-v3", "h200:8x4"), ("gpt-oss-20b", "2*v5e:4x4")),
    ),
)
def test_steps_are_priced_as_alone(model, cluster):
    given = setting(model, cluster, fitted=True)
    stored = stored_dtypes(("bf16", "int8"), ("bf16", "int8"))
    fleet = fleet_of(given.model, given.cluster)
    found = price_fleet(given, CHAT, fleet, stored)
    rng = np.random.default_rng(0)
    for phase, steps, times in (("decode", found.decode, CHAT.mean_len), ("prefill", found.prefill, CHAT.prompt_len)):
        usable = np.flatnonzero(np.isfinite(steps.step_s))
        for number in rng.choice(usable, size=min(12, len(usable)), replace=False):
            engine, dtypes, batch = int(steps.engine[number]), stored[steps.dtypes[number]], int(steps.batch[number])
            own = msgspec.structs.replace(given, cluster=fleet.parts[engine])
            strategy = msgspec.structs.replace(fleet.strategy(engine, dtypes.precision), placement={})
            places = fleet.placements[engine].describe()
            if phase == "decode":
                room = price_strategy(phase_setting(own, phase, dtypes, CHAT.max_len, batch), strategy)
                assert steps.need[number] == pytest.approx(room.estimate.hbm_bytes_per_chip)
            alone = price_strategy(phase_setting(own, phase, dtypes, times, batch), strategy)
            # the search keeps some placements, and one step alone takes the fastest
            if alone.placement.describe() == {axis: places[axis] for axis in alone.placement.mesh}:
                assert steps.step_s[number] == pytest.approx(alone.estimate.step_s)
            else:
                assert steps.step_s[number] >= 0.999 * alone.estimate.step_s


def test_an_engine_that_does_both():
    """Each of B - 1 other sequences is replaced once while one makes its output."""
    given = setting("llama3-70b", "v5e:4x4")
    found = plan_service(given, CHAT, stored=(INT8,), axes={"tensor": 16})
    both = [one for one in found.plans if not one.has_pools]
    assert both
    assert len(both) == len(found.plans)  # both pools would need chips
    for plan in both:
        batch, step_s = plan.generate.batch_seqs, plan.generate.step_s
        prompt_s = plan.prefill.step_s / plan.prefill.batch_seqs
        assert plan.predicted.tpot_s == pytest.approx(step_s + (batch - 1) / 512 * prompt_s)
        # as many prompts at once as sequences end in a step
        assert plan.prefill.batch_seqs == 1 or plan.prefill.batch_seqs < 2 * batch / 512
        assert plan.predicted.requests_per_s == pytest.approx(batch / (512 * step_s + batch * prompt_s))
        assert plan.predicted.tokens_per_s_per_chip == pytest.approx(plan.predicted.requests_per_s * 512 / 16)
        spent = plan.predicted.usd_per_m_input * 8192 / 1e6 + plan.predicted.usd_per_m_output * 512 / 1e6
        assert spent == pytest.approx(1.2 * 16 / 3600 / plan.predicted.requests_per_s)
        assert plan.predicted.ttft_s == plan.prefill.step_s


def test_pools_balance():
    """How to Scale Your Model, section 7: P / t_prefill = B G / (t_step output)."""
    found = plan_service(setting("llama3-70b", "v5e:16x16"), msgspec.structs.replace(CHAT, ttft_s=5.0))
    plan = next(one for one in found.plans if one.has_pools)
    prompts = plan.prefill.num_engines * plan.prefill.batch_seqs / plan.prefill.step_s
    ends = plan.generate.num_engines * plan.generate.batch_seqs / (512 * plan.generate.step_s)
    assert plan.predicted.requests_per_s == pytest.approx(min(prompts, ends))
    # one engine more or less of either would be further off
    assert prompts == pytest.approx(ends, rel=0.3)
    assert plan.generate.num_chips + plan.prefill.num_chips <= 256
    assert plan.predicted.tpot_s == plan.generate.step_s
    link = parse_cluster("v5e:16x16").chip.ici_link_bytes_per_s
    senders = min(plan.generate.part.num_chips, plan.prefill.part.num_chips) / plan.prefill.batch_seqs
    width = {"int8": 1 + 4 / 128, "bf16": 2}[plan.cache]
    assert plan.predicted.transfer_s == pytest.approx(8192 * 163_840 * width / link / senders)
    assert plan.predicted.ttft_s == pytest.approx(plan.prefill.step_s + plan.predicted.transfer_s)


def test_targets_are_met_or_missed_and_memory_is_something_else():
    given = setting("llama3-70b", "v5e:16x16", fitted=True)
    tight = msgspec.structs.replace(CHAT, ttft_s=2.0, tpot_s=0.05)
    found = plan_service(given, tight)
    assert not found.is_frontier
    assert all(
        one.predicted.ttft_s <= 2 and one.predicted.tpot_s <= 0.05 and one.predicted.free_bytes >= 0
        for one in found.plans
    )
    made = [one.predicted.tokens_per_s_per_chip for one in found.plans]
    assert made == sorted(made, reverse=True)
    assert 0 < found.num_meeting < found.num_services
    assert (found.as_written.weights, found.as_written.cache) == ("bf16", "bf16")
    assert found.as_written.predicted.tokens_per_s_per_chip < made[0]
    with pytest.raises(ValueError, match=r"fit the memory of v5e:16x16, but none meets TTFT 1 ms \(the shortest is"):
        plan_service(given, msgspec.structs.replace(CHAT, ttft_s=1e-3))
    with pytest.raises(ValueError, match=r"Within TTFT 2 s the shortest TPOT is"):
        plan_service(given, msgspec.structs.replace(CHAT, ttft_s=2.0, tpot_s=1e-3))
    with pytest.raises(ValueError, match=r"does not fit v5e:2x2: .* needs 36 GB per chip, but a chip has 16\.1 GB"):
        plan_service(setting("llama3-70b", "v5e:2x2"), tight, stored=(BF16,))


def test_without_targets_nothing_on_the_frontier_is_beaten():
    given = setting("llama3-70b", "v5e:4x8")
    found = plan_service(given, CHAT)
    points = [(one.predicted.tpot_s, one.predicted.tokens_per_s_per_chip) for one in found.plans]
    assert found.is_frontier
    assert len(points) > 3
    assert points == sorted(points, reverse=True)
    every = priced("llama3-70b", "v5e:4x8", stored=stored_dtypes(("bf16", "int8"), ("bf16", "int8")))
    services = all_services(every)
    order = ranked(services, CHAT)
    assert len(frontier(services, order)) == len(points)
    for tpot, made in points:
        beats = (services.tpot_s < tpot) & (services.tokens_per_s_per_chip > made)
        assert not beats.any()
    assert [len(found.listed(top)) for top in (1, 3, 1000)] == [1, 3, len(points)]
    assert found.listed(3)[-1] == found.plans[-1]
    # along the frontier the parts are those of each plan's own step, and what is left of TPOT are prefills
    for number, plan in enumerate(found.plans):
        own = plan.generate
        assert {name: points[number][1] for name, points in found.split.items() if name in BOUNDS} == own.bounds_s
        assert found.split["prefills of others"][number] == (plan.predicted.tpot_s, plan.predicted.tpot_s - own.step_s)


def test_a_load_gives_the_chips():
    given = setting("llama3-70b", "v5e:16x16")
    loaded = msgspec.structs.replace(CHAT, tpot_s=0.05, requests_per_s=3.0)
    best = plan_service(given, loaded).plans[0]
    assert best.predicted.served_per_s == 3.0 <= best.predicted.requests_per_s
    used = best.generate.num_chips + best.has_pools * best.prefill.num_chips
    assert best.predicted.num_chips == used <= 256
    twice = plan_service(given, msgspec.structs.replace(loaded, requests_per_s=6.0)).plans[0]
    assert best.predicted.num_chips < twice.predicted.num_chips <= 2 * best.predicted.num_chips
    message = (
        r"1,000 requests/s need at least [\d,]+ chips in engines of up to 256 within the targets, but v5e:16x16 has"
    )
    with pytest.raises(ValueError, match=message):
        plan_service(given, msgspec.structs.replace(loaded, requests_per_s=1000.0))


def test_cached_prompts_are_not_computed():
    """A half of the prompt costs more than half: its tokens attend to the other half too."""
    whole, half = (
        priced("llama3-70b", "v5e:4x4", msgspec.structs.replace(CHAT, prefix_share=share), tensor=16)
        for share in (0.0, 0.5)
    )
    assert 0.5 < half.prefill.step_s[0] / whole.prefill.step_s[0] < 0.6
    assert half.prefill.memory["kv_cache"][0] == pytest.approx(whole.prefill.memory["kv_cache"][0])
    assert half.decode.step_s.tolist() == whole.decode.step_s.tolist()


def test_experts_with_data_parallel_attention():
    """deepseek-v3 on 16 chips: each has a sixteenth of the experts, and all other weights."""
    found = priced("deepseek-v3", "h200:8x2", expert=16, tensor=1)
    model = load_model("deepseek-v3")
    experts = (model.num_layers - 3) * 256 * 3 * 7168 * 2048
    total = 671.0e9  # without the layer for a second token
    weights = found.decode.memory["weights"][0]
    assert weights == pytest.approx(experts / 16 + (total - experts), rel=0.02)
    assert np.all(found.decode.batch % 16 == 0)
    # latents and rotated keys of 61 layers, for a sixteenth of the sequences
    one = at_batch(found.decode, 64)
    assert found.decode.memory["kv_cache"][one] == pytest.approx(4 * 8704 * 61 * (512 + 64 + 2 * 4), rel=1e-6)


def test_the_largest_batch_fits_and_no_larger_one():
    found = priced("llama3-70b", "v5e:4x4", tensor=16)
    most = int(found.decode.batch.max())
    given = setting("llama3-70b", "v5e:4x4")
    strategy = found.fleet.strategy(0, "")
    need = [
        price_strategy(phase_setting(given, "decode", INT8, CHAT.max_len, batch), strategy).estimate.hbm_bytes_per_chip
        for batch in (most, most + 1)
    ]
    assert need[0] <= given.memory_room < need[1]


def test_engines_fill_the_domains_first():
    cluster = parse_cluster("h100:8x8")
    assert [engine_parts(cluster, count)[0].short_name for count in (2, 8, 16)] == ["h100:2x1", "h100:8x1", "h100:8x2"]


def test_bounds_add_up_on_a_data_sheet():
    """One chip, no network: by the data sheet each op takes the longer of its bytes and its FLOPs."""
    found = priced("llama3-8b", "h100:1x1", stored=(BF16,))
    first = at_batch(found.decode, 1)
    parts = {name: found.decode.bounds_s[name][first] for name in BOUNDS}
    assert max(parts, key=parts.get) == "parameters"
    assert found.decode.step_s[first] == pytest.approx(parts["parameters"] + parts["KV"] + parts["other"], rel=0.01)


def test_refusals():
    given = setting("llama3-70b", "v5e:4x4")
    message = (
        r"a prompt of 9,000 tokens is longer than the 8,192 positions of llama3-70b\. Use at most 8,192 with "
        r"its output, or --set model\.max_positions=9032\."
    )
    with pytest.raises(ValueError, match=message):
        plan_service(given, Service(prompt_len=9000, output_len=32))
    with pytest.raises(ValueError, match=r"a prompt with its output of 1,025 tokens is longer"):
        plan_service(setting("gpt2", "v5e:2x2"), Service(prompt_len=1000, output_len=25))
    with pytest.raises(ValueError, match=r"no engine of llama3-70b on v5e:4x4 has tensor=3"):
        plan_service(given, CHAT, axes={"tensor": 3})
    with pytest.raises(ValueError, match=r"mesh axis 'pipeline' splits no engine"):
        plan_service(given, CHAT, axes={"pipeline": 2})
    with pytest.raises(ValueError, match=r"'int3' is no dtype in which weights are served"):
        stored_dtypes(("int3",))


@pytest.mark.parametrize(
    ("model", "cluster"),
    sampled(
        [("llama3-405b", "h100:8x8"), ("deepseek-v3", "h200:8x16"), ("llama3-70b", "v5e:16x16")],
        ("llama3-70b", "v5e:16x16"),
    ),
)
def test_the_search_is_quick(model, cluster):
    given = setting(model, cluster, fitted=True)
    with took() as cpu:
        found = plan_service(given, CHAT)
    assert cpu.yardsticks < 40
    assert found.num_services > 500
    assert all(math.isfinite(one.predicted.tpot_s) and one.predicted.ttft_s > 0 for one in found.plans)


def test_numbers_of_training_steps_give_way():
    """Settings of training, as `make_setting` returns them, are served by the numbers of `service_setting`."""
    trained = make_setting("llama3-8b", "h100:1x1", batch="1seq", seq_len=1)
    assert trained.rates.name == "fitted"
    service = Service(prompt_len=2048, output_len=128, tpot_s=0.1)
    served = plan_service(service_setting(trained.model, trained.cluster, trained.calibration), service)
    found = plan_service(trained, service)
    assert found.setting == served.setting
    assert found.plans == served.plans
    assert (found.setting.rates.name, found.setting.assumptions.engine) == ("served", "vLLM")


def test_prompts_of_devices_that_wait_for_each_other():
    """Of 2 prompts at random on 8 devices 1 - e^-2 of the steps prefill; 100 fill all of them."""
    found = together(np.array([2.0, 100.0, 2.0, 0.0]), np.array([8, 8, 1, 8]))
    assert found == pytest.approx([(1 - math.exp(-2)) / 2, 1 / 8, 1, 1])
    given = setting("qwen3-30b-a3b", "h100:8x1", fitted=True)
    [plan] = plan_service(given, CHAT, stored=(INT8,), axes={"expert": 8, "tensor": 1, "context": 1}).plans[:1]
    ending = (plan.generate.batch_seqs - 1) / 512
    prompt_s = plan.prefill.step_s * max((1 - math.exp(-ending)) / ending, 1 / 8)
    assert (plan.has_pools, plan.prefill.batch_seqs) == (False, 8)
    assert plan.predicted.tpot_s == pytest.approx(plan.generate.step_s + ending * prompt_s)
