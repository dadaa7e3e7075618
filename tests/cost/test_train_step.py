"""The step time against counts by hand, the book's closed forms, and the bounds that always hold."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.core.dims import ISLAND_AXES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.arrays import select
from meshwright.cost.formulas import limits
from meshwright.cost.network.placement import place_axes
from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.setting import Setting
from meshwright.cost.step_costs import collective_groups
from meshwright.cost.step_rates import step_rates, strategy_placements
from meshwright.cost.train_step import PricedStep, estimate_step, predict, price_strategy
from meshwright.cost.work.ops import model_flops
from meshwright.report.answer import utilisation_rows
from meshwright.spec import catalogue
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.calibration import Calibration, CollectiveRate, Efficiency
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.prediction import unmasked
from meshwright.spec.strategy import REMAT_POLICIES, STATE_BYTES, Strategy, make_mesh, standard_assignment
from meshwright.spec.weights import num_params, params_by_part

TINY, LLAMA8B, LLAMA70B = (catalogue.load_model(name) for name in ("tiny", "llama3-8b", "llama3-70b"))
MACHINE = Calibration(
    name="made up",
    chip="cpu",
    matmul_flops_per_s={"fp32": 1e10},
    memory_bytes_per_s=2e9,
    collectives=tuple(
        CollectiveRate(kind=kind, group_size=size, latency_s=5e-5 * size, bytes_per_s=1e9)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
        for size in (2, 4, 8)
    ),
)
CLUSTERS = {"v5p:4x4x4": None, "v5e:4x4": None, "2*v5e:4x4": None, "h100:8x4": None, "cpu:8": MACHINE}


def price(model, cluster, axes, *, batch_seqs, seq_len, calibration=None, software="compiled", **fields):
    strategy = Strategy(mesh=make_mesh(axes), **fields)
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    assumed = Assumptions(software=software)
    return price_strategy(Setting(model, parse_cluster(cluster), job, calibration, assumptions=assumed), strategy)


def random_candidate(cluster, rng):
    """Axis sizes that divide tiny, a number of microbatches and a remat policy."""
    sizes = dict.fromkeys(("data", "fsdp", "context", "tensor"), 1)
    for _ in range(int(np.log2(parse_cluster(cluster).num_chips))):
        sizes[str(rng.choice([axis for axis in sizes if axis != "tensor" or sizes[axis] < 4]))] *= 2
    return sizes, int(rng.choice([1, 2, 4])), str(rng.choice(REMAT_POLICIES))


def random_choices(cluster, rng):
    """Any strategy for tiny: stages and their schedule, ZeRO, attention, offload."""
    axes, count, remat = random_candidate(cluster, rng)
    if cluster == "cpu:8":
        return axes, {"num_microbatches": count, "remat": remat, "state": "fp32"}
    axes["pipeline"] = int(rng.choice([1, *(n for n in (2, 4) if axes["data"] % n == 0)]))
    axes["data"] //= axes["pipeline"]
    schedule = str(rng.choice(["1f1b", "gpipe", "interleaved", "zb-h1", "dualpipe", "dualpipe-v"]))
    chunks = {"interleaved": 2, "dualpipe-v": 2}.get(schedule, 1) if axes["pipeline"] > 1 else 1
    fields = {
        "num_microbatches": count if axes["pipeline"] == 1 else 8,
        "remat": remat,
        "schedule": schedule,
        "chunks": chunks,
        "assignment": standard_assignment(zero=int(rng.integers(4)), sequence_parallel=bool(rng.integers(2))),
        "context_attention": str(rng.choice(["gather", "ring"])),
        "offload": tuple(name for name in ("optimizer", "activations") if rng.integers(2)),
        "state": str(rng.choice(list(STATE_BYTES))) if cluster.startswith("h100") else "bf16-master",
    }
    return axes, fields


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_expected_lies_between_the_bounds(cluster, seed):
    axes, fields = random_choices(cluster, np.random.default_rng(seed))
    found = price(
        TINY, cluster, axes, batch_seqs=512, seq_len=512, calibration=CLUSTERS[cluster], **fields
    ).estimate  # fmt: skip
    assert 0 < found.step_s_lower <= found.step_s * (1 + 1e-12)
    assert found.step_s <= found.step_s_upper * (1 + 1e-12)
    assert found.bound_by in {"compute", "hbm", "ici", "nvlink", "network", "dcn", "latency", "host", "bubble"}
    assert sum(found.terms.values()) <= found.step_s_upper * (1 + 1e-12)
    # accelerators skip the keys after a query: what they execute holds no less than the model's causal FLOPs
    job = Job(batch_seqs=512, seq_len=512)
    share = 1.0 if cluster == "cpu:8" else model_flops(TINY, job, causal=True) / model_flops(TINY, job)
    assert 0 < share * found.mfu < found.hfu <= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("software", ["compiled", "eager", "eager-in-turn", "eager-2021"])
@pytest.mark.parametrize("cluster", ["v5p:4x4x4", "2*v5e:4x4", "h100:8x4"])
def test_fitted_seconds_lie_between_the_bounds(cluster, software, seed):
    """What overlap leaves standing is never more than the work itself: see the sum below, made here anew.

    Beside it there are only stragglers, and with eager dispatch the seconds of a host.
    """
    laid = parse_cluster(cluster)
    axes, fields = random_choices(cluster, np.random.default_rng(seed))
    calibration = fitted_calibration(laid.chip)
    fields |= {"batch_seqs": 512, "seq_len": 512, "calibration": calibration}
    priced = price(TINY, cluster, axes, software=software, **fields)
    found, at = priced.estimate, calibration.efficiency
    assert 0 < found.step_s_lower <= found.step_s * (1 + 1e-12)
    assert found.step_s <= found.step_s_upper * (1 + 1e-12)
    assert sum(found.terms.values()) <= found.step_s_upper * (1 + 1e-12)
    work = sum(float((c.math_s + c.hbm_s + c.launch_s + c.network_s) * c.here) for c in priced.costs.all)
    work += sum(found.terms.get(name, 0.0) for name in ("bubble", "pipeline", "pcie"))
    kernels = sum(float((c.num_kernels + c.step.is_collective) * c.here) for c in priced.costs.all)
    host = fields["num_microbatches"] * at.host_microbatch_s + kernels * at.host_kernel_s
    stragglers_s = at.straggler_s * np.log2(laid.num_hosts)
    assert found.step_s <= work + stragglers_s + (host if software != "compiled" else 0.0)
    # without overlap the same work takes no less
    if software == "eager":
        turns = price(TINY, cluster, axes, software="eager-in-turn", **fields)
        assert found.step_s <= turns.estimate.step_s * (1 + 1e-12)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("remat", ["none", "block", "full"])
def test_scalar_equals_array(cluster, remat):
    """Every figure of every candidate, priced alone (without axes of one device) and all at once."""
    rng = np.random.default_rng(7)
    every = [random_candidate(cluster, rng) for _ in range(12)]
    # a chunked loss head takes another form where the vocabulary is whole
    for split in (True, False):
        _compare_scalars(cluster, remat, [one for one in every if (one[0].get("tensor", 1) > 1) == split])


def test_the_price_is_continuous_where_loads_begin_to_differ():
    """An imbalance fills more of the slots that are there; only a bound leaves slots out, and no load is above all."""
    model, cluster = catalogue.load_model("mixtral-8x7b"), parse_cluster("h100:8x8")
    mesh = make_mesh({"expert": 8, "fsdp": 8})

    def price(imbalance, bound=0.0):
        assumed = Assumptions(imbalance=imbalance)
        setting = Setting(model, cluster, Job(batch_seqs=256, seq_len=4096), assumptions=assumed)
        return estimate_step(setting, Strategy(mesh=mesh, capacity_factor=bound))

    even, tilted, twice = (price(imbalance) for imbalance in (1.0, 1.001, 2.0))
    assert even.step_s < tilted.step_s == pytest.approx(even.step_s, rel=2e-3)
    assert tilted.step_s < twice.step_s < 2 * even.step_s
    assert even.memory == pytest.approx(twice.memory)
    assert price(4.0).step_s == pytest.approx(price(9.0).step_s)
    for one in (tilted, twice, price(9.0)):
        assert one.flops == pytest.approx(even.flops)
        assert one.hfu / one.mfu == pytest.approx(even.hfu / even.mfu)
    bounded = price(1.0, 1.25)
    assert bounded.hbm_bytes_per_chip < even.hbm_bytes_per_chip
    assert price(1.25, 1.25) == bounded


def _compare_scalars(cluster, remat, found):
    laid, state = parse_cluster(cluster), "fp32" if cluster == "cpu:8" else "bf16-adam"
    split = found[0][0].get("tensor", 1) > 1
    placements = [place_axes(laid, make_mesh(axes))[0] for axes, *_ in found]
    counts = np.array([count for _, count, _ in found])
    strategy = Strategy(mesh=make_mesh({}), remat=remat, state=state)
    derived = derive(transformer(TINY), strategy, symbolic=True, without=() if split else ("tensor",))
    rates = step_rates(laid, placements, collective_groups(derived), strategy, calibration=CLUSTERS[cluster])
    mesh = {axis: np.array([float(axes.get(axis, 1)) for axes, *_ in found]) for axis in ISLAND_AXES}
    job = Job(batch_seqs=256, seq_len=512)
    sizes = Setting(TINY, laid, job).sizes(strategy, mesh=mesh, microbatch_seqs=256 / counts)
    many = PricedStep(derived=derived, sizes=sizes, rates=rates, pipeline=PipelineCost(microbatches=counts))
    estimates = predict(many, Setting(TINY, laid, job, CLUSTERS[cluster]), batch_seqs=256.0)
    for index, (axes, count, _) in enumerate(found):
        strategy = Strategy(
            mesh=make_mesh(axes),
            placement=placements[index].describe(),
            remat=remat,
            num_microbatches=count,
            state=state,
        )
        one = estimate_step(Setting(TINY, laid, job, CLUSTERS[cluster]), strategy)
        here = select(estimates, index)
        for field in ("step_s", "step_s_lower", "step_s_upper", "mfu", "hfu", "hbm_bytes_per_chip", "flops"):
            assert getattr(here, field) == pytest.approx(getattr(one, field), rel=1e-9), (field, axes)
        assert here.bound_by == one.bound_by
        assert here.memory == pytest.approx(one.memory)


def test_bytes_on_the_wire_of_a_compiled_step():
    """llama3-8b, fsdp 4 x tensor 4, 16 sequences of 4096, bf16, block remat: GB a device sends inside the layers.

    The compiled steps for v5e:4x4 and for 16 H100s hold 5.235, 2.62 and 19.327; 16.106 is the ring's theory.
    """
    found = price(LLAMA8B, "v5e:4x4", {"fsdp": 4, "tensor": 4}, batch_seqs=16, seq_len=4096)
    sent = {}
    for cost in found.costs.all:
        if cost.step.is_collective and cost.step.block == "layer":
            key = cost.step.op, *cost.step.axes
            sent[key] = sent.get(key, 0) + 3 / 4 * cost.network_bytes * cost.count / 1e9
    assert sent["all_gather", "tensor"] == pytest.approx(19.327, abs=5e-4)
    assert sent["reduce_scatter", "tensor"] == pytest.approx(16.106, abs=5e-4)
    assert sent["all_gather", "fsdp"] == pytest.approx(5.234, abs=1e-3)
    assert sent["reduce_scatter", "fsdp"] == pytest.approx(2.617, abs=1e-3)


def seconds(costs, *, phase, names=None):
    """(matmul seconds, seconds of the collectives' bytes) of one pass over one layer."""
    chosen = [c for c in costs if c.step.block == "layer" and c.step.phase == phase]
    chosen = [c for c in chosen if names is None or {a.name for a in (*c.step.inputs, c.step.result)} & set(names)]
    math = sum(c.math_s for c in chosen if c.step.op == "einsum")
    return math, sum(c.network_s - c.latency_s for c in chosen)


def test_fsdp_is_compute_bound_from_the_book_s_batch():
    """B/X > C/W over 3 axes, 850 tokens a chip on a v5p: the gathers of a layer take as long as its products."""
    chip = parse_cluster("v5p:16x16x16").chip
    alpha = limits.ici_intensity(chip.peak_flops["bf16"], chip.ici_axis_bytes_per_s)
    found = price(LLAMA70B, "v5p:16x16x16", {"fsdp": 4096}, batch_seqs=4096, seq_len=1024)
    weights = {a.name for c in found.costs.all if not c.step.critical and c.step.is_collective for a in c.step.inputs}
    math, comms = seconds(found.costs.all, phase="forward", names=weights)
    wanted = limits.data_parallel_min_tokens_per_chip(alpha, 3)
    assert wanted == pytest.approx(850)
    assert comms / math == pytest.approx(wanted / 1024, rel=1e-3)


def test_tensor_parallelism_is_compute_bound_up_to_the_book_s_size():
    """Y < F / alpha for two matrices; a gated layer has three for the same gather and scatter."""
    model, cluster = catalogue.load_model("llama2-7b"), parse_cluster("v5e:16x1")
    alpha = limits.ici_intensity(cluster.chip.peak_flops["bf16"], cluster.chip.ici_axis_bytes_per_s)
    found = price(model, "v5e:16x1", {"tensor": 16}, batch_seqs=1, seq_len=4096)
    layer = [c for c in found.costs.all if c.step.phase == "forward" and c.step.block == "layer"]
    names = {"w_gate", "w_up", "w_down"}
    math = sum(c.math_s for c in layer if c.step.op == "einsum" and c.step.inputs[1].name in names)
    comms = sum(c.network_s - c.latency_s for c in layer if c.step.critical and c.step.result.name in ("h1", "y"))
    largest = limits.tensor_max_size(model.d_ff, alpha)
    assert largest == pytest.approx(11008 / 2189, rel=1e-3)
    assert comms / math == pytest.approx(2 / 3 * 16 / largest, rel=1e-3)


def test_one_device_does_its_ops_one_after_the_other():
    found = price(TINY, "v5e:1x1", {}, batch_seqs=4, seq_len=512)
    assert not any(c.step.is_collective for c in found.costs.all)
    assert found.estimate.step_s == pytest.approx(sum(max(c.math_s, c.hbm_s) * c.count for c in found.costs.all))
    assert found.estimate.terms["latency"] == 0


@pytest.mark.parametrize("remat", ["sqrt", "every-2", "every-1"])
def test_segments_run_again_cost_one_more_forward_pass(remat):
    """Of the layers, whatever the length of a segment: the seconds and FLOPs of their forward steps."""
    again, none = (
        price(TINY, "v5e:1x1", {}, batch_seqs=8, seq_len=512, num_microbatches=2, remat=r) for r in (remat, "none")
    )
    forward = [c for c in none.costs.all if c.step.block == "layer" and c.step.phase == "forward"]
    assert again.estimate.step_s - none.estimate.step_s == pytest.approx(sum(c.local_s * c.count for c in forward))
    assert again.estimate.flops - none.estimate.flops == pytest.approx(sum(c.flops * c.count for c in forward))
    assert again.estimate.mfu < none.estimate.mfu
    block = price(TINY, "v5e:1x1", {}, batch_seqs=8, seq_len=512, num_microbatches=2, remat="block").estimate
    assert none.estimate.step_s < block.step_s < again.estimate.step_s


@pytest.mark.parametrize(("remat", "again"), [("recompute-all", 28), ("recompute-4", 12), ("recompute-2", 4)])
def test_each_layer_that_runs_again_costs_one_forward_pass(remat, again):
    """Of 8 layers 8 x 7 / 2, or 8 (C - 1) / 2: the seconds and FLOPs of so many forward passes of one layer."""
    more, full = (
        price(TINY, "v5e:1x1", {}, batch_seqs=8, seq_len=512, num_microbatches=2, remat=r) for r in (remat, "full")
    )
    forward = [c for c in full.costs.all if c.step.block == "layer" and c.step.phase == "forward"]
    share = again / 8
    assert more.estimate.step_s - full.estimate.step_s == pytest.approx(
        share * sum(c.local_s * c.count for c in forward)
    )
    assert more.estimate.flops - full.estimate.flops == pytest.approx(share * sum(c.flops * c.count for c in forward))


@pytest.mark.parametrize(("stages", "chunks", "again"), [(1, 1, 28), (2, 1, 12), (2, 2, 4), (4, 2, 0)])
def test_layers_of_a_stage_run_again_in_their_run(stages, chunks, again):
    """8 layers in runs of n: n (n - 1) / 2 of each run. The schedule has its bubble of the longer passes."""
    mesh, fields = {"pipeline": stages}, {"batch_seqs": 8, "seq_len": 512, "num_microbatches": 8, "chunks": chunks}
    fields["schedule"] = "interleaved" if chunks > 1 else "1f1b"
    more, full = (price(TINY, f"v5e:1x{stages}", mesh, remat=r, **fields) for r in ("recompute-all", "full"))
    a_layer = (
        sum(c.flops * c.count for c in full.costs.all if c.step.block == "layer" and c.step.phase == "forward") / 8
    )
    assert more.estimate.flops - full.estimate.flops == pytest.approx(again * a_layer)
    of_layers = (of.times.layer_passes(of.pipeline).backward_s for of in (more, full))
    forward = full.times.layer_passes(full.pipeline).forward_s
    assert next(of_layers) - next(of_layers) == pytest.approx(again / 8 * forward)
    assert (more.estimate.step_s > full.estimate.step_s) == (again > 0)


def test_seconds_of_the_stages_of_zero_are_those_of_what_they_move():
    """Data-parallel over 8, four microbatches: terms of the links by hand, once a step in float32 or each time in bf16.

    An all-reduce is a scatter and a gather; (n-1)/n of a weight over a line, the ring's two ways otherwise.
    """
    fields = {"batch_seqs": 64, "seq_len": 512, "num_microbatches": 4, "remat": "none"}
    norms = params_by_part(TINY)["norm"]
    matrices = num_params(TINY) - norms
    found = {
        zero: price(TINY, "h100:8", {"fsdp": 8}, assignment=standard_assignment(zero=zero), **fields)
        for zero in range(4)
    }
    rate = {op: found[0].rates.groups[frozenset({"fsdp"})][op].seconds_per_byte for op in ("all_gather", "all_reduce")}
    assert rate["all_reduce"] == pytest.approx(2 * rate["all_gather"])
    once = rate["all_reduce"] * 4 * norms
    gather, scatter = rate["all_gather"] * 2 * matrices, rate["all_gather"] * 4 * matrices
    wanted = {
        0: rate["all_reduce"] * 4 * matrices,
        1: scatter + gather,
        2: 4 * rate["all_gather"] * 2 * matrices + gather,
        3: 4 * rate["all_gather"] * 2 * matrices + 8 * gather,
    }
    # embedding and head gather their tables once for both of their passes
    tables = 4 * rate["all_gather"] * 2 * (params_by_part(TINY)["embedding"] + params_by_part(TINY)["unembedding"])
    for zero, seconds in wanted.items():
        told = found[zero].estimate.terms["fsdp"] - once
        assert told == pytest.approx(seconds - (tables if zero == 3 else 0.0), rel=1e-4), zero


def test_emulated_devices_overlap_nothing():
    """Their collectives run on the cores that compute: the expected value is the sum of all steps."""
    found = price(
        TINY, "cpu:8", {"fsdp": 4, "tensor": 2}, batch_seqs=32, seq_len=512, calibration=MACHINE, state="fp32"
    )
    assert found.estimate.step_s == pytest.approx(sum(c.time_s * c.count for c in found.costs.all))
    gathers = [c for c in found.costs.all if c.step.op == "all_gather" and c.step.result.name == "wq"]
    whole = 256 * 256 / 2 * 4
    assert gathers[0].network_s == pytest.approx(4 * 5e-5 + 3 / 4 * whole / 1e9)


def test_hidden_collectives_cost_nothing_until_they_outlast_the_compute():
    """The same steps with slower and slower links: flat at first, then as the links."""
    times = []
    for share in (1.0, 0.5, 0.02, 0.01):
        slow = Calibration(name="slow links", chip="v5p", efficiency=Efficiency(ici=share))
        times.append(price(LLAMA8B, "v5p:4x4x4", {"fsdp": 64}, batch_seqs=128, seq_len=4096, calibration=slow).estimate)
    assert times[1].step_s == pytest.approx(times[0].step_s, rel=0.05)
    assert times[3].step_s == pytest.approx(2 * times[2].step_s, rel=0.05)
    assert times[0].bound_by == "compute"
    assert times[3].bound_by == "ici"
    assert times[3].step_s_lower == pytest.approx(times[3].step_s, rel=0.05)


def test_critical_collectives_are_exposed_in_full():
    found = price(LLAMA8B, "v5p:2x2x1", {"tensor": 4}, batch_seqs=4, seq_len=2048)
    waited = sum(c.network_s * c.count for c in found.costs.all if c.step.critical or c.step.phase == "update")
    local = sum(c.local_s * c.count for c in found.costs.all if not c.step.is_collective)
    assert waited > 0.1 * local
    assert found.estimate.step_s == pytest.approx(local + waited, rel=1e-6)


def test_gradients_are_summed_over_replicas_once_a_step_whatever_the_microbatches():
    axes = {"data": 4, "fsdp": 4}
    one, four = (
        price(LLAMA8B, "v5e:4x4", axes, batch_seqs=64, seq_len=1024, num_microbatches=n).estimate.terms for n in (1, 4)
    )
    assert four["fsdp"] == pytest.approx(4 * one["fsdp"])
    # the sum over microbatches is float32
    assert four["data"] == pytest.approx(2 * one["data"])


def test_utilisation_is_of_the_data_sheet_peak():
    job = Job(batch_seqs=64, seq_len=2048)
    found = price(LLAMA8B, "v5p:4x4x4", {"fsdp": 64}, batch_seqs=64, seq_len=2048).estimate
    assert found.mfu == pytest.approx(model_flops(LLAMA8B, job) / (found.step_s * 64 * 4.59e14))
    slow = Calibration(name="half", chip="v5p", efficiency=Efficiency(compute=0.5))
    halved = price(LLAMA8B, "v5p:4x4x4", {"fsdp": 64}, batch_seqs=64, seq_len=2048, calibration=slow).estimate
    assert found.mfu / 2 < halved.mfu < found.mfu
    assert halved.flops == found.flops


def test_terms_are_the_step_without_any_overlap():
    found = price(LLAMA8B, "v5e:4x4", {"fsdp": 4, "tensor": 4}, batch_seqs=16, seq_len=4096)
    serial = sum(c.time_s * c.count for c in found.costs.all)
    assert sum(found.estimate.terms.values()) == pytest.approx(serial)
    assert set(found.estimate.terms) >= {
        "matmul",
        "attention",
        "elementwise",
        "loss_head",
        "optimizer",
        "fsdp",
        "tensor",
    }


def test_the_placement_of_a_strategy_is_used_and_must_exist():
    cluster, mesh = parse_cluster("v5p:16x20x28"), make_mesh({"data": 35, "fsdp": 32, "context": 2, "tensor": 4})
    candidates = place_axes(cluster, mesh)
    strategy = Strategy(mesh=mesh, placement=candidates[1].describe())
    assert strategy_placements(cluster, strategy) == (candidates[1],)
    times = [
        estimate_step(
            Setting(LLAMA70B, cluster, Job(batch_seqs=1120, seq_len=4096)), Strategy(mesh=mesh, placement=p.describe())
        )
        for p in candidates
    ]
    best = estimate_step(Setting(LLAMA70B, cluster, Job(batch_seqs=1120, seq_len=4096)), Strategy(mesh=mesh))
    assert best.step_s == pytest.approx(min(t.step_s for t in times))
    with pytest.raises(CannotRunError, match="tensor: w \\(9\\)"):
        strategy_placements(cluster, Strategy(mesh=mesh, placement={"tensor": "w (9)"}))


def test_what_is_not_known_is_said():
    with pytest.raises(InputError, match="give a calibration"):
        price(TINY, "cpu:8", {"fsdp": 8}, batch_seqs=8, seq_len=64, state="fp32")
    with pytest.raises(InputError, match="no fp32 matrix rate"):
        price(TINY, "v5e:4x4", {"fsdp": 16}, batch_seqs=16, seq_len=64, state="fp32")


def test_sizes_of_a_microbatch():
    sizes = Setting(TINY, parse_cluster("v5e:1x1"), Job(batch_seqs=8, seq_len=64)).sizes(
        Strategy(mesh=make_mesh({}), num_microbatches=4)
    )
    assert (sizes.dims["B"], sizes.dims["T"], sizes.dims["D"], sizes.width) == (2, 64, 256, 2)


def test_mfu_without_masked_scores_is_that_of_what_is_computed():
    """On a chip of 300 TFLOP/s the convention passes 100% at 131,072 positions; half of the scores are masked."""
    cluster = parse_cluster("v5p:4x4x4")
    chip = msgspec.structs.replace(cluster.chip, peak_flops={"bf16": 3e14})
    job = Job(batch_seqs=64, seq_len=131_072)
    setting = Setting(LLAMA8B, msgspec.structs.replace(cluster, chip=chip), job)
    found = estimate_step(setting, Strategy(mesh=make_mesh({"fsdp": 8, "context": 8}), context_attention="ring"))
    assert found.mfu > 1 > found.mfu_causal
    assert found.mfu_causal / found.mfu == pytest.approx(
        model_flops(LLAMA8B, job, causal=True) / model_flops(LLAMA8B, job)
    )
    assert unmasked(found) == found.mfu_causal
    slow = found.measured(2 * found.step_s)
    assert slow["mfu_causal"] == pytest.approx(found.mfu_causal / 2)
    assert [row[0] for row in utilisation_rows(found, found)] == ["MFU", "MFU without masked scores", "HFU"]
    usual = estimate_step(
        Setting(LLAMA8B, cluster, Job(batch_seqs=64, seq_len=2048)), Strategy(mesh=make_mesh({"fsdp": 64}))
    )
    assert unmasked(usual) is None
    assert [row[0] for row in utilisation_rows(usual, usual)] == ["MFU", "HFU"]
