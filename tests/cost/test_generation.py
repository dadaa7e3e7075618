"""Prefill and decode steps priced: numbers worked out by hand, the book's, and what every estimate must hold."""

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.cache import cache_table
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.ops import kind_of
from meshwright.core.errors import CannotRunError
from meshwright.cost.formulas.accounting import attention_work
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.cost.work.kernel_times import collective_s, small_reduce_s
from meshwright.cost.work.kernels import serving_kernels
from meshwright.cost.work.ops import model_flops, op_flops, op_hbm_bytes
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip as catalogue_chip
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration, generation_calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

LLAMA = load_model("llama3-8b")
INT8 = Storage(cache_dtype="int8", weights="int8")


def strategy_of(axes) -> Strategy:
    return Strategy(mesh=make_mesh(axes), state="bf16-adam")


def priced(given, on, job, axes, **options):
    return price_strategy(Setting(given, parse_cluster(on), job, **options), strategy_of(axes))


def decode(batch_seqs, seq_len) -> Job:
    return Job(kind="decode", batch_seqs=batch_seqs, seq_len=seq_len)


def counted(result, *, storage=None, given=LLAMA, job=None, on="v5e:4x4", assumptions=AS_RUN):
    """(FLOPs, bytes) of the step that makes a result in the decode step of 4 sequences on one device."""
    job, storage = job or decode(4, 1000), storage or Storage()
    setting = Setting(given, parse_cluster(on), job, storage=storage, assumptions=assumptions)
    derived = setting.derived(strategy_of({}))
    sizes = setting.sizes(strategy_of({}))
    step = next(s for b in derived.blocks for s in b.forward if s.result.name == result)
    return op_flops(step, sizes), op_hbm_bytes(step, sizes)


# -- one op at a time: B=4, N=32, K=8, H=128, D=4096 and 1000 positions in the cache --------------------------

CACHE = 4 * 1000 * 8 * 128
"""Elements of keys, or of values, of a layer."""
QUERIES = 4 * 32 * 128 * 2
"""Bytes of the queries, and of the result."""


def ints(length):
    """Bytes of what attention reads of 4 sequences: their first rows, rows, positions and pages."""
    return 4 * (3 * 4 + 4 * length / 128)


def test_a_cache_is_read_once():
    flops, moved = counted("o")
    assert flops == 2 * 4 * 32 * 1000 * (128 + 128) == 65_536_000
    assert moved == 2 * QUERIES + 2 * 2 * CACHE + ints(1000) == 16_449_709


def test_the_closed_form_counts_the_same():
    """`roofline --attention` at one query; without the whole numbers."""
    form = attention_work(queries=1, keys=1000, heads=32, kv_heads=8, head_dim=128, batch_seqs=4)
    flops, moved = counted("o")
    assert form.flops == flops
    assert form.num_bytes == moved - ints(1000)


def test_only_new_positions_are_written():
    assert counted("cache_k'") == (0.0, 2 * 4 * 8 * 128 * 2 + 4 * 4)
    # a prompt: every position of its own
    job = Job(kind="prefill", batch_seqs=4, seq_len=1000)
    assert counted("cache_k'", job=job) == (0.0, 2 * 2 * CACHE + 4 * 4 * 1000)


def test_an_int8_cache_has_a_byte_an_element_and_its_scales():
    flops, moved = counted("o", storage=Storage(cache_dtype="int8"))
    assert flops == 65_536_000
    assert moved == 2 * QUERIES + 2 * CACHE + 2 * 4 * (4 * 1000 * 8) + ints(1000)


def test_an_int8_weight_has_a_byte_an_element_and_its_scales():
    flops, moved = counted("q", storage=Storage(weights="int8"))
    assert flops == 2 * 4 * 4096 * 4096
    assert moved == 4 * 4096 * 2 + 4096 * 4096 + 4 * 4096 + QUERIES == 16_859_136
    assert counted("q") == (flops, 4 * 4096 * 2 + 2 * 4096 * 4096 + QUERIES)


def test_an_int4_weight_has_half_a_byte_an_element_and_scales_of_groups():
    """On GPUs XLA writes the matrix once more in bf16 and reads it; engines with kernels do not."""
    flops, moved = counted("q", storage=Storage(weights="int4"))
    assert flops == 2 * 4 * 4096 * 4096
    assert moved == 4 * 4096 * 2 + 4096 * 4096 // 2 + 4 * 4096 * 4096 // 64 + QUERIES
    for assumed, more in ((AS_RUN, 2 * 2 * 4096 * 4096), (Assumptions(software="served", engine="vLLM"), 0)):
        found = counted("q", storage=Storage(weights="int4"), on="h100:1x1", assumptions=assumed)
        assert found == (flops, moved + more)


def test_a_query_reads_its_window():
    """mistral-7b: windows of 4096 in 32 Ki positions; with fewer positions than that there are as many slots."""
    given = load_model("mistral-7b")
    for length, slots in ((32768, 4096), (1000, 1000)):
        flops, moved = counted("o", given=given, job=decode(4, length))
        assert flops == 2 * 4 * 32 * slots * 256
        assert moved == 2 * QUERIES + 2 * 2 * 4 * slots * 8 * 128 + ints(length)


def test_a_query_reads_its_chunk():
    """llama4-scout: the first chunk up to the query, and of later ones, which texts are anywhere in, half."""
    given = load_model("llama4-scout")
    for length, slots in ((32768, 8193 / 2), (8192, 8192), (1000, 1000)):
        flops, moved = counted("o", given=given, job=decode(4, length))
        assert flops == 2 * 4 * 40 * slots * 256
        assert moved == 2 * 4 * 40 * 128 * 2 + 2 * 2 * 4 * slots * 8 * 128 + ints(length)


def test_latents_are_read_once():
    """deepseek-v3: 128 heads on latents of 512 and shared parts of 64."""
    flops, moved = counted("oc", given=load_model("deepseek-v3"))
    assert flops == 2 * 4 * 128 * 1000 * (512 + 64 + 512)
    queries = 4 * 128 * (512 + 192 + 512) * 2  # against latents, rotated and not, and the mixed latents
    assert moved == queries + 2 * 4 * 1000 * (512 + 64) + ints(1000)


# -- whole steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_seqs", "book_s"), [(1, 0.00498), (8, 0.01213), (16, 0.0203), (32, 0.03665)])
def test_decode_steps_of_the_book(batch_seqs, book_s):
    """LLaMA-2 13B at 8192 positions on 8 v5e (section 7.1): 26e9 bytes of weights and 6.7e9 of each cache at 8.2e11."""
    found = priced(load_model("llama2-13b"), "v5e:2x4", decode(batch_seqs, 8192), {"tensor": 8}).estimate
    assert found.bound_by == "hbm"
    # of the table of tokens (1% of the weights) a few rows are read; activations pass through memory besides
    assert book_s * 0.99 < found.step_s_lower < book_s * 1.02
    assert found.step_s_lower <= found.step_s <= found.step_s_upper


def test_the_least_time_is_weights_and_cache_over_the_bandwidth():
    cluster = parse_cluster("v5e:2x4")
    for storage in (Storage(), INT8):
        found = priced(LLAMA, "v5e:2x4", decode(16, 8192), {"tensor": 8}, storage=storage)
        memory = found.estimate.memory
        table = LLAMA.vocab_size * (LLAMA.d_model + 4 if storage.weights else 2 * LLAMA.d_model) / 8
        read = memory["weights"] - table + memory["kv_cache"]  # a few rows of the table are looked up
        groups = {"contraction": 0.0, "attention": 0.0}
        for cost in (cost for cost in found.costs.all if not cost.step.is_collective):
            group = kind_of(cost.step).group
            groups[group] = groups.get(group, 0.0) + float(cost.hbm_bytes * cost.here)
        assert groups.pop("attention") == pytest.approx(memory["kv_cache"], rel=0.003)  # and the lists of pages
        assert groups.pop("contraction") == pytest.approx(memory["weights"] - table, rel=0.05)
        assert sum(groups.values()) < 0.05 * read  # activations
        least = read / cluster.chip.hbm_bytes_per_s
        assert least < found.estimate.step_s_lower < 1.05 * least


def test_serving_of_the_book():
    """LLaMA-3 70B in int8 on 8 v5e (section 8.1): 43 caches of 8192 tokens fill the chips, a step takes 19 ms."""
    found = priced(load_model("llama3-70b"), "v5e:2x4", decode(43, 8192), {"tensor": 8}, storage=INT8).estimate
    caches = 43 * 8192 * 2 * 80 * 8 * 128
    assert 8 * found.memory["kv_cache"] == caches * (1 + 4 / 128)
    weights, read = 8 * found.memory["weights"], 8 * (found.memory["weights"] + found.memory["kv_cache"])
    assert weights == pytest.approx(70.6e9, rel=0.01)
    assert read / 8 / 8.19e11 == pytest.approx(0.0195, rel=0.03)
    # steps stream activations of 43 sequences too: 0.7 MB a result, 80 layers
    assert found.step_s_lower == pytest.approx(0.0205, rel=0.05)
    # 8192 tokens take 0.91 s on 16 chips at 40% of 1.97e14 FLOP/s: 2 FLOPs a parameter and token
    prompt = Job(kind="prefill", batch_seqs=1, seq_len=8192)
    found = priced(load_model("llama3-70b"), "v5e:4x4", prompt, {"tensor": 16}, storage=INT8).estimate
    attention, table = 2 * 8192 * 8192 * 64 * 256 * 80, 128256 * 8192
    flops = 2 * (70.55e9 - 2 * table) * 8192 + 2 * table + attention  # logits of the last position alone
    assert model_flops(load_model("llama3-70b"), prompt) == pytest.approx(flops, rel=0.001)
    assert flops - attention == pytest.approx(2 * 70e9 * 8192, rel=0.03)
    assert found.mfu * found.step_s * 16 * 1.97e14 == pytest.approx(model_flops(load_model("llama3-70b"), prompt))


def test_training_alone_has_gradients_and_an_optimizer():
    for kind in ("prefill", "decode"):
        job = Job(kind=kind, batch_seqs=16, seq_len=1024)
        found = priced(LLAMA, "v5p:2x2x2", job, {"fsdp": 4, "tensor": 2})
        memory, terms = found.estimate.memory, found.estimate.terms
        assert memory["gradients"] == memory["optimizer"] == memory["activations"] == terms["optimizer"] == 0
        assert {cost.step.phase for cost in found.costs.all} == {"forward"}
        assert 8 * memory["kv_cache"] == sum(r.num_bytes for r in cache_table(LLAMA, batch_seqs=16, max_len=1024))


@pytest.mark.parametrize("name", ["llama3-8b", "gemma2-9b", "mistral-7b", "gpt-oss-20b", "deepseek-v3"])
@pytest.mark.parametrize("storage", [Storage(), Storage(cache_dtype="int8")])
def test_the_cache_of_an_estimate_is_that_of_the_table(name, storage):
    given = load_model(name)
    for kind in ("prefill", "decode"):
        job = Job(kind=kind, batch_seqs=4, seq_len=20_000)
        found = priced(given, "h100:4x1", job, {"data": 4}, storage=storage).estimate.memory
        stored = Setting(given, parse_cluster("h100:4x1"), job, storage=storage).step_storage
        table = cache_table(given, batch_seqs=4, max_len=20_000, storage=stored)
        assert 4 * found["kv_cache"] == pytest.approx(sum(row.num_bytes for row in table))


def test_experts_that_tokens_go_to_are_read():
    """mixtral: every expert's weights are read where 64 tokens choose among 8."""
    given = load_model("mixtral-8x7b")
    found = priced(given, "v5p:2x2x1", decode(64, 1024), {"expert": 4}).estimate
    assert found.bound_by in ("hbm", "ici", "latency")
    experts = given.num_layers * given.num_experts * 3 * given.d_model * given.d_ff_expert * 2 / 4
    assert found.step_s_lower > experts / parse_cluster("v5p:2x2x1").chip.hbm_bytes_per_s


# -- what is refused ----------------------------------------------------------------------------------------


def test_stages_do_not_generate():
    with pytest.raises(CannotRunError, match="pipeline=2 trains but does not generate"):
        priced(LLAMA, "v5p:2x2x2", decode(8, 1024), {"pipeline": 2, "tensor": 4})


def test_microbatches_and_offload_are_of_training():
    given = replace(strategy_of({"tensor": 8}), num_microbatches=4, offload=("optimizer",))
    plain, other = (
        price_strategy(Setting(LLAMA, parse_cluster("v5p:2x2x2"), decode(8, 1024)), s).estimate
        for s in (strategy_of({"tensor": 8}), given)
    )
    assert plain == other


@pytest.mark.parametrize("tensor", [2, 8])
def test_engines_add_up_by_measured_kernels(tensor):
    """Sums of an engine's steps are the sooner of a kernel that reads peers' memory and NCCL's, one after the other."""
    chip = catalogue_chip("h100")
    rates, kernels = generation_calibration(chip), serving_kernels(chip)
    assert rates is not None
    assert kernels is not None
    assumed = Assumptions(software="served", engine="vLLM", empty_slots=False)
    job, cluster = Job(kind="decode", batch_seqs=16, seq_len=2048), parse_cluster(f"h100:{tensor}x1")
    strategy = Strategy(mesh=make_mesh({"tensor": tensor}), assignment=standard_assignment(zero=0))
    found = price_strategy(Setting(LLAMA, cluster, job, rates, assumptions=assumed), strategy)
    sums = [cost for cost in found.costs.all if cost.step.op == "all_reduce" and "D" in cost.step.full.dims]
    shape = {"n": tensor, "bytes": 16 * LLAMA.d_model * 2, "op": "all_reduce"}
    by_hand = min(small_reduce_s(shape, kernels), collective_s(shape, kernels))
    assert len(sums) >= 2
    assert all(cost.network_s == pytest.approx(by_hand) for cost in sums)
    in_turn = sum(float(cost.time_s * cost.count) for cost in found.costs.all)
    assert found.estimate.step_s == pytest.approx(in_turn + rates.efficiency.engine_s["vLLM"])


def test_a_host_starts_the_kernels_of_a_prefill():
    """llama3-8b: 17 kernels in each of 32 layers, partly hidden by what they do, and a few in the ends; graphs hold
    those of decode."""
    chip = catalogue_chip("h100")
    rates = generation_calibration(chip)
    assert rates is not None
    at_once = replace(rates, efficiency=replace(rates.efficiency, host_kernel_s=0.0))
    assumed = Assumptions(software="served", engine="vLLM", empty_slots=False)
    strategy = Strategy(mesh=make_mesh({}), assignment=standard_assignment(zero=0))

    def step_of(kind, given):
        job = Job(kind=kind, batch_seqs=1, seq_len=512)
        return price_strategy(Setting(LLAMA, parse_cluster("h100:1x1"), job, given, assumptions=assumed), strategy)

    starts_s = rates.efficiency.host_kernel_s * (17 * LLAMA.num_layers + 4)
    found, device = (step_of("prefill", one) for one in (rates, at_once))
    assert found.times.starts_s == pytest.approx(starts_s)
    engine_s = rates.efficiency.engine_s["vLLM"]
    by_hand = np.hypot(device.estimate.step_s - engine_s, starts_s) + engine_s
    assert found.estimate.step_s == pytest.approx(by_hand, rel=0.02)
    assert step_of("decode", rates).estimate.step_s == step_of("decode", at_once).estimate.step_s


def test_hosts_of_generation_do_not_wait_as_those_of_training():
    strategy = Strategy(mesh=make_mesh({"tensor": 16}), assignment=standard_assignment(zero=0))
    cluster = parse_cluster("v5e:4x4")
    rates = fitted_calibration(cluster.chip)
    assert rates is not None
    assert rates.efficiency.straggler_s > 0
    job = Job(kind="decode", batch_seqs=16, seq_len=2048)
    found = price_strategy(Setting(load_model("llama3-70b"), cluster, job, rates), strategy)
    assert cluster.num_hosts > 1
    assert found.times.straggler_s == 0
