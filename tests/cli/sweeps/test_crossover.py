"""Communication against compute by batch size: the book's figures 15 and 16 from derived steps."""

import numpy as np
import pytest

from meshwright.cli.sweeps.crossover import (
    closed_forms,
    crossing,
    mlp_work,
    model_work,
    scheme_curves,
)
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas.limits import mixed_min_tokens_per_chip
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster, parse_clusters
from meshwright.spec.efficiency import fitted_calibration

CHIPS, WIDTH, F = 4096, 8192, 32768
ALPHA = 4.59e14 / 1.8e11
TOKENS = 2.0 ** np.arange(17, 27.01, 0.25)

BOOK_TOLERANCE = 0.10
"""Of figure 16's batch: the book lets X and Y be any real numbers, a mesh has whole ones (8 for Y = 6.4)."""


@pytest.fixture(scope="module")
def work():
    return mlp_work(f"mlp:{WIDTH}x{F}")


@pytest.fixture(scope="module")
def book(work):
    """Any shape of 4096 v5p, every torus axis given to one mesh axis, as the book counts M_X and M_Y."""
    found = scheme_curves(work, parse_clusters("v5p:4096chips"), TOKENS, whole_axes=True)
    return {curve.name: curve for curve in found}


def test_fsdp_alone_is_compute_bound_from_alpha_over_three_per_chip(book):
    """B / N > alpha / 3 on three axes: 850 tokens per chip."""
    assert crossing(book["FSDP alone"])["tokens"] == pytest.approx(CHIPS * ALPHA / 3, rel=1e-3)


def test_the_crossing_of_figure_16(book):
    """4096 x 2 x 2550^2 / 32768 = 1.6e6 tokens (the book prints 1.6e10)."""
    closed = float(mixed_min_tokens_per_chip(ALPHA, F, fsdp_axes=2, tensor_axes=1)) * CHIPS
    assert closed == pytest.approx(1.6e6, rel=0.02)
    assert crossing(book["best mesh"])["tokens"] == pytest.approx(closed, rel=BOOK_TOLERANCE)


def test_the_crossing_with_whole_numbers(book):
    """F / (Y M_X) + B / (X M_Y) = B F / (N alpha) solved for B with X = 512 on two axes and Y = 8 on one."""
    wanted = F / (8 * 2) / (F / (CHIPS * ALPHA) - 1 / 512)
    assert crossing(book["FSDP x tensor 8"])["tokens"] == pytest.approx(wanted, rel=0.01)
    assert crossing(book["best mesh"])["tokens"] == pytest.approx(wanted, rel=0.01)


def test_which_way_is_best_at_which_batch(book):
    """Two axes for FSDP and one of eight chips for tensor from 1 M tokens, FSDP alone from some 5 M on."""
    best = book["best mesh"]
    rows = zip(TOKENS, best.meshes, best.shapes, strict=True)
    at = {round(tokens): (mesh["tensor"], shape) for tokens, mesh, shape in rows}
    assert at[2**20] == at[2**21] == (8, "v5p:8x16x32")
    assert {at[2**power][0] for power in (23, 24, 25, 26, 27)} == {1}


def test_16_way_tensor_parallelism_on_one_axis_never_is(work):
    """Y < F / alpha = 12.9: on 16x16x16 the tensor axis is too long for any batch."""
    curves = scheme_curves(work, [parse_cluster("v5p:16x16x16")], TOKENS, whole_axes=True)
    tensor = next(curve for curve in curves if curve.name == "FSDP x tensor 16")
    assert crossing(tensor)["tokens"] is None
    assert tensor.ratio[-1] == pytest.approx(F / ALPHA / 16, rel=0.02)


def test_tensor_alone_has_a_fixed_ratio_where_flops_bind():
    """Figure 15: model parallelism over 64 chips, also of a width that 64 does not divide."""
    tokens = 2.0 ** np.arange(10, 22.01)
    curves = {one.name: one for one in scheme_curves(mlp_work("mlp:8192x30000"), parse_clusters("v5p:4x4x4"), tokens)}
    alone = curves["tensor alone"]
    assert alone.mesh["tensor"] == 64
    assert alone.ratio == pytest.approx(alone.ratio[-1], rel=0.05)
    assert alone.ratio[-1] < 1


def test_memory_binds_small_batches_of_fsdp_alone(work):
    """Each chip reads both gathered matrices: 2 x 2 x D F bytes at 2.765 TB/s, as long as the FLOPs 4 B D F / N of
    B / N = 166 tokens at 459 TFLOP/s. Below, compute does not shrink with the batch."""
    tokens = np.array([32.0, 83.0, 664.0, 2656.0]) * CHIPS
    (curve,) = scheme_curves(work, [parse_cluster("v5p:16x16x16")], tokens, axes={})
    assert curve.compute_s[0] == pytest.approx(4 * WIDTH * F / 2.765e12, rel=0.1)
    assert curve.memory_bound == 2
    assert curve.flops_s[3] == pytest.approx(4 * 2656 * WIDTH * F / 4.59e14, rel=1e-3)


def test_ratios_grow_as_the_book_says(book):
    """FSDP's with B, as long as products rather than reading the weights bind; tensor's hardly. Source: figure 15."""
    alone, tensor = book["FSDP alone"].ratio, book["FSDP x tensor 16"].ratio
    assert alone[-1] / alone[-5] == pytest.approx(2, rel=1e-3)
    assert tensor[-1] / tensor[-5] == pytest.approx(1, rel=0.02)


def test_parts_of_axes_are_never_worse_than_whole_ones(work, book):
    free = scheme_curves(work, parse_clusters("v5p:4096chips"), TOKENS)
    assert (free[-1].total_s <= book["best mesh"].total_s * (1 + 1e-9)).all()
    assert crossing(free[-1])["tokens"] < crossing(book["best mesh"])["tokens"]


def test_the_best_mesh_has_the_least_communication(book):
    others = [curve.total_s for name, curve in book.items() if name != "best mesh"]
    assert book["best mesh"].total_s == pytest.approx(np.min(others, axis=0))


def test_closed_forms_follow_the_rates(work):
    cluster = parse_cluster("v5p:16x16x16")
    told = closed_forms(work, cluster)
    assert told["FSDP alone"] == ("N alpha / 3", pytest.approx(CHIPS * ALPHA / 3))
    assert told["best mesh"] == ("4 N alpha^2 / (2 F)", pytest.approx(1.6256e6, rel=1e-3))
    fitted = fitted_calibration(cluster.chip)
    share = fitted.efficiency.compute / fitted.efficiency.ici
    assert closed_forms(work, cluster, fitted)["FSDP alone"][1] == pytest.approx(CHIPS * ALPHA / 3 * share)
    assert closed_forms(work, parse_cluster("h100:8x8")) == {}


def test_closed_forms_of_lines(work):
    """v5e: 197e12 / 45e9 over two lines; tensor on the ring of 16 and FSDP on a line that counts as half of it."""
    lines, mixed = (closed_forms(work, parse_cluster(text)) for text in ("v5e:8x8", "v5e:8x16"))
    assert lines["FSDP alone"] == ("N alpha / 2", pytest.approx(64 * 197e12 / 45e9 / 2))
    assert mixed["FSDP alone"] == ("N alpha / 1.5", pytest.approx(128 * 197e12 / 90e9 / 1.5))
    assert mixed["best mesh"] == ("4 N alpha^2 / (0.5 F)", pytest.approx(128 * 4 * (197e12 / 90e9) ** 2 / (0.5 * F)))


def test_a_model_on_a_given_mesh():
    """Tensor's communication grows with the batch, FSDP's does not; only their sum decides."""
    llama = model_work(load_model("llama3-70b"), seq_len=4096)
    (curve,) = scheme_curves(llama, [parse_cluster("v5p:8x16x32")], TOKENS, axes={"tensor": 8}, whole_axes=True)
    assert curve.mesh == {"pipeline": 1, "data": 1, "fsdp": 512, "expert": 1, "context": 1, "tensor": 8}
    assert curve.comms_s["tensor"][-1] == pytest.approx(2 * curve.comms_s["tensor"][-5], rel=0.01)
    assert curve.comms_s["fsdp"][-1] == pytest.approx(curve.comms_s["fsdp"][0])
    assert curve.total_s == pytest.approx(sum(curve.comms_s.values()))
    assert 0.7e6 < crossing(curve)["tokens"] < 3e6


def test_the_whole_step_does_more_of_both():
    cluster, tokens = [parse_cluster("v5p:4x4x4")], TOKENS[:5]
    forward, step = (
        scheme_curves(model_work(load_model("llama3-8b"), seq_len=4096, whole=whole), cluster, tokens, axes={})[0]
        for whole in (False, True)
    )
    assert (step.compute_s > 2.9 * forward.compute_s).all()
    assert (step.total_s > 2.9 * forward.total_s).all()


def test_what_is_refused(work):
    with pytest.raises(InputError, match="do not make up the 64 chips of v5p:4x4x4"):
        scheme_curves(work, [parse_cluster("v5p:4x4x4")], TOKENS, axes={"tensor": 3})
    with pytest.raises(CannotRunError, match="can be laid on v5p:4x4x4"):
        scheme_curves(work, [parse_cluster("v5p:4x4x4")], TOKENS, axes={"tensor": 8}, whole_axes=True)
    assert mlp_work("llama3-8b") is None
