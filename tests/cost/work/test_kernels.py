"""Seconds of local ops on one chip, every factor by hand, and the data sheet as it stands without any."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import transformer
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.cost.work import kernels
from meshwright.cost.work.ops import op_flops, op_hbm_bytes
from meshwright.cost.work.slots import SlotSizes
from meshwright.spec import catalogue
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.calibration import Calibration, Efficiency, datasheet_calibration
from meshwright.spec.chip import chip
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

H100, V5E = chip("h100"), chip("v5e")
DIMS = {"B": 8.0, "T": 512.0, "D": 1024.0, "F": 4096.0, "N": 8.0, "K": 8.0, "H": 64.0, "V": 32000.0, "E": 16.0}
MESH = {"data": 2, "fsdp": 2, "context": 1, "tensor": 4, "expert": 2}
SHAPES = {"contraction_half": 100.0, "tile_tail": 0.25}


def sizes(**changes):
    return SlotSizes(**{"dims": DIMS, "mesh": MESH, "state": "bf16-adam", **changes})


def step(op, inputs, result, **fields):
    return Step(op=op, inputs=tuple(map(parse_array, inputs)), result=parse_array(result), **fields)


def rates(*, dtype="bf16", software="compiled", kernel="tuned", of=H100, **efficiency):
    found = Calibration(name="x", chip=of.name, efficiency=Efficiency(**efficiency))
    assumed = Assumptions(software=software, attention_kernel=kernel)
    return kernels.chip_rates(of, found, dtype=dtype, state_dtype="bf16", assumptions=assumed)


UP = step("einsum", ["h[B_{data,fsdp}, T, D]", "w[D, F_tensor]"], "u[B_{data,fsdp}, T, F_tensor]", block="layer")
HEAD = step("einsum", ["h[B, T, D]", "w[D, V]"], "z[B, T, V]", block="head", role="head")
ROUTER = step("einsum", ["h[B, T, D]", "w[D, E]"], "g[B, T, E]", block="layer")
ROUTER_BACK = step("einsum", ["dg[B, T, E]", "w[D, E]"], "dh[B, T, D]", block="layer")
EXPERT = step("einsum", ["x[E_expert, B, D]", "w[E_expert, D, F]"], "y[E_expert, B, F]", block="layer")
NORM = step("rms_norm", ["x[B, T, D]", "w[D]"], "h[B, T, D]", block="layer", phase="forward")
ATTENTION = step(
    "attention",
    ["q[B, T, N, H]", "k[B, T, K, H]", "v[B, T, K, H]", "p[B, T]", "p[B, T]"],
    "a[B, T, N, H]",
    block="layer",
    details=Attention(),
)
ADAMW = step("adamw", ["dw[D, F]", "w[D, F]"], "w[D, F]", phase="update")


# -- products -------------------------------------------------------------------------------------------


def test_the_local_shape_of_a_product():
    """2 of 8 sequences of 512 tokens, a quarter of 4096 columns; a sum over 1024."""
    assert kernels.product_shape(UP, sizes()) == (2 * 512 * 1024, 1024)
    assert kernels.product_shape(EXPERT, sizes()) == (8 * 8 * 4096, 1024)


def test_seconds_of_a_product_by_hand():
    work = kernels.local_cost(UP, sizes(), rates(compute=0.8, hbm=0.5, kernel_s=3e-6, **SHAPES))
    flops = 2 * (2 * 512) * 1024 * 1024
    tail = 1 + 0.25 * 132 * 128 * 256 / (2 * 512 * 1024)
    assert work.flops == flops
    assert work.math_s == pytest.approx(flops / (0.8 * 989.4e12) * (1 + 100 / 1024) * tail)
    moved = 2 * (2 * 512 * 1024 + 1024 * 1024 + 2 * 512 * 1024)
    assert work.hbm_s == pytest.approx(moved / (0.5 * H100.hbm_bytes_per_s))
    assert (work.launch_s, work.num_kernels) == (3e-6, 1)


def test_a_tpu_has_no_tiles_to_share_out():
    """Its one large array takes a product whole: only the contraction counts."""
    work = kernels.local_cost(UP, sizes(), rates(of=V5E, **SHAPES))
    assert work.math_s == pytest.approx(work.flops / V5E.peak_flops["bf16"] * (1 + 100 / 1024))


def test_narrow_products():
    """Their own rate, the same shape factors, and a byte for each of two casts of each element read."""
    found = rates(dtype="fp8", compute=0.8, narrow={"fp8": 0.9}, **SHAPES)
    work = kernels.local_cost(UP, sizes(), found)
    tail = 1 + 0.25 * 132 * kernels.TILE / (2 * 512 * 1024)
    assert work.math_s == pytest.approx(work.flops / (0.8 * 0.9 * 1979e12) * (1 + 100 / 1024) * tail)
    assert work.hbm_bytes == op_hbm_bytes(UP, sizes()) + 2 * (2 * 512 * 1024)


@pytest.mark.parametrize("wide", [HEAD, ROUTER, ROUTER_BACK])
def test_the_loss_head_and_the_router_keep_16_bits(wide):
    """At the rate of bf16, without casts and with its contraction."""
    narrow, plain = (kernels.local_cost(wide, sizes(), rates(dtype=dtype, **SHAPES)) for dtype in ("fp8", "bf16"))
    assert narrow == plain
    assert narrow.hbm_bytes == op_hbm_bytes(wide, sizes())


def test_experts_are_narrow():
    """E of an expert's weight is a batch of products, not a router."""
    narrow, plain = (kernels.local_cost(EXPERT, sizes(), rates(dtype=dtype)) for dtype in ("fp8", "bf16"))
    assert plain.math_s / narrow.math_s == pytest.approx(2, rel=1e-3)


# -- attention ------------------------------------------------------------------------------------------


def test_seconds_of_fused_attention_by_hand():
    """4 B T S N H with S half of the keys where masked blocks are skipped; narrower heads take longer."""
    whole, skipping = (
        kernels.local_cost(ATTENTION, sizes(causal=causal), rates(compute=0.8, attention=0.5, head_half=32.0))
        for causal in (False, True)
    )
    flops = 4 * 8 * 512 * 512 * 8 * 64
    assert whole.math_s == pytest.approx(flops / (0.5 * 989.4e12) * (1 + 32 / 64))
    assert skipping.math_s == pytest.approx(whole.math_s / 2)


def test_attention_of_2021_runs_as_products_do():
    """Not one kernel but four, and at the rate of other products."""
    found = rates(software="eager-2021", compute=0.8, attention=0.5, kernel_s=1e-6)
    work = kernels.local_cost(ATTENTION, sizes(scores="in_memory_16"), found)
    assert work.math_s == pytest.approx(work.flops / (0.8 * 989.4e12))
    assert (work.num_kernels, work.launch_s) == (kernels.UNFUSED_KERNELS, pytest.approx(4e-6))


def test_matrices_of_scores_in_fours():
    """One kernel masks and makes the softmax of 4, 8, ... matrices of scores; of 6 they are five kernels."""
    for heads, extra in ((2.0, 0), (3.0, kernels.SOFTMAX_KERNELS), (0.5, 0)):
        dims = DIMS | {"N": heads, "B": 2.0 if heads > 1 else 8.0}
        assert (
            kernels.num_kernels(ATTENTION, sizes(scores="in_memory_16", dims=dims)) == kernels.UNFUSED_KERNELS + extra
        )
        assert kernels.num_kernels(ATTENTION, sizes(scores="in_memory", dims=dims)) == kernels.UNFUSED_KERNELS


def test_a_mask_s_edge_counts_more_in_short_sequences():
    """Tiles on the diagonal are computed whole: of T positions (1 + rows_half / T) as long, and only with a mask."""
    plain, masked = (
        [kernels.local_cost(ATTENTION, sizes(causal=causal), rates(rows_half=half)).math_s for half in (0.0, 256.0)]
        for causal in (False, True)
    )
    assert plain[1] == plain[0]
    assert masked[1] == pytest.approx(masked[0] * (1 + 256 / 512))
    longer = sizes(causal=True, dims=DIMS | {"T": 2048.0})
    ratio = [kernels.local_cost(ATTENTION, longer, rates(rows_half=half)).math_s for half in (0.0, 256.0)]
    assert ratio[1] == pytest.approx(ratio[0] * (1 + 256 / 2048))


def test_portable_attention():
    """A share of the tuned kernel's rate; products stay as they are."""
    tuned, portable = (rates(kernel=kernel, attention=0.5, portable=0.6) for kernel in ("tuned", "portable"))
    assert portable.attention_flops_per_s == pytest.approx(0.6 * 0.5 * 989.4e12)
    assert tuned.attention_flops_per_s == pytest.approx(0.5 * 989.4e12)
    seconds = [kernels.local_cost(ATTENTION, sizes(), found).math_s for found in (tuned, portable)]
    assert seconds[1] == pytest.approx(seconds[0] / 0.6)
    assert kernels.local_cost(UP, sizes(), tuned) == kernels.local_cost(UP, sizes(), portable)


def test_attention_keeps_16_bits():
    narrow, plain = (kernels.local_cost(ATTENTION, sizes(), rates(dtype=d, attention=0.5)) for d in ("fp8", "bf16"))
    assert narrow.math_s == plain.math_s


# -- elementwise ----------------------------------------------------------------------------------------


def test_elementwise_ops_go_through_memory_more_often_without_a_compiler():
    moved = op_hbm_bytes(NORM, sizes())
    assert kernels.local_cost(NORM, sizes(), rates(eager_traffic=1.5)).hbm_bytes == moved
    for software in ("eager", "eager-in-turn", "eager-2021"):
        assert kernels.local_cost(NORM, sizes(), rates(software=software, eager_traffic=1.5)).hbm_bytes == 1.5 * moved
        # products are kernels of their own either way, and the optimizer is one kernel for all weights
        for other in (UP, ADAMW, ATTENTION):
            work = kernels.local_cost(other, sizes(), rates(software=software, eager_traffic=1.5))
            assert work.hbm_bytes == op_hbm_bytes(other, sizes())


def test_kernels():
    """One for each op, none for renaming, for vectors added on the way out, or for the optimizer."""
    assert [kernels.num_kernels(one, sizes()) for one in (UP, NORM, ATTENTION, ADAMW)] == [1, 1, 1, 0]
    assert kernels.num_kernels(ATTENTION, sizes(scores="in_memory")) == kernels.UNFUSED_KERNELS
    assert kernels.num_kernels(NORM, sizes(scores="in_memory")) == 1
    for op in ("copy", "slice", "bias_add"):
        assert kernels.num_kernels(step(op, ["x[B, T, D]"], "y[B, T, D]"), sizes()) == 0


def test_products_of_a_gpu_that_has_only_fp16():
    """A V100 keeps its 16-bit rate where the state says bf16, which is not in its table."""
    v100 = chip("v100")
    assumed = Assumptions(software="eager-2021")
    found = kernels.chip_rates(v100, datasheet_calibration(v100), dtype="fp16", state_dtype="bf16", assumptions=assumed)
    assert found.matmul_flops_per_s == found.wide_flops_per_s == v100.peak_flops["fp16"]
    assert not found.narrow


# -- what hides what ------------------------------------------------------------------------------------


def test_partly_hidden_by_hand():
    """3 and 4: together 7, as the sides of a right angle 5, the longer of the two 4."""
    assert [kernels.partly_hidden(3.0, 4.0, p) for p in (1.0, 2.0, None)] == pytest.approx([7.0, 5.0, 4.0])
    assert kernels.partly_hidden(3.0, 0.0, 1.5) == pytest.approx(3.0)
    assert kernels.partly_hidden(0.0, 0.0, 1.5) == 0.0
    assert kernels.partly_hidden(np.array([3.0, 0.0]), np.array([4.0, 2.0]), 2.0).tolist() == pytest.approx([5.0, 2.0])
    assert kernels.partly_hidden(np.array([3.0, 5.0]), 4.0, None).tolist() == [4.0, 5.0]


# -- the data sheet -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["h100:8x2", "v5e:4x4"])
def test_without_efficiencies_every_op_is_its_roofline(cluster):
    """The defaults are exactly the data sheet: what the book works out stays as it is."""
    model, laid = catalogue.load_model("llama3-8b"), parse_cluster(cluster)
    strategy = Strategy(mesh=make_mesh({"fsdp": 8, "tensor": 2}))
    at = Setting(model, laid, Job(batch_seqs=16, seq_len=2048)).sizes(strategy)
    found = kernels.chip_rates(laid.chip, datasheet_calibration(laid.chip), dtype="bf16", state_dtype="bf16")
    local = [one for one, _ in derive(transformer(model), strategy).steps() if not one.is_collective]
    for one in local:
        work = kernels.local_cost(one, at, found)
        assert work.math_s == op_flops(one, at) / laid.chip.peak_flops["bf16"]
        assert work.hbm_s == op_hbm_bytes(one, at) / laid.chip.hbm_bytes_per_s
        assert work.launch_s == 0


def test_a_default_efficiency_changes_nothing():
    """Bit for bit the same estimate as without a calibration, communication included."""
    model, cluster, job = catalogue.load_model("llama3-8b"), parse_cluster("h100:8x2"), Job(batch_seqs=64, seq_len=2048)
    for fields in ({}, {"num_microbatches": 4}, {"precision": "fp8"}):
        strategy = Strategy(mesh=make_mesh({"fsdp": 8, "tensor": 2}), **fields)
        sheet = estimate_step(Setting(model, cluster, job), strategy)
        same = estimate_step(
            Setting(model, cluster, job, Calibration(name="x", chip="h100", efficiency=Efficiency())), strategy
        )
        assert msgspec.to_builtins(same) == msgspec.to_builtins(sheet)
