"""Grouped products by kernels, interpreted on CPUs and compiled for chips, against products in blocks."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.attention.platform import traced_for
from meshwright.nn.experts import grouped
from meshwright.nn.experts import products as experts_products
from meshwright.nn.experts.slots import Ragged
from tests.nn.arrays import draw
from tests.verify.compiled import compiled_for

ROWS, WIDTH, OUT, EXPERTS = 512, 256, 128, 4
ONE_PIECE, TWO_PIECES = [[100, 0, 150, 60]], [[30, 0, 90, 8], [0, 0, 0, 65]]
HOPPER = SimpleNamespace(compute_capability="9.0", core_count=4)


def packed(width, sizes, *, seed):
    """Rows in bf16 for sizes of each expert in each piece; spare rows are large, so that any use of them shows."""
    length, rows = ROWS // len(sizes), np.array(draw(ROWS, width, seed=seed))
    spare = np.concatenate([np.arange(length) >= sum(piece) for piece in sizes])
    rows[spare] = 1e4
    return Ragged(jnp.asarray(rows, jnp.bfloat16), jnp.array(sizes, jnp.int32))


def in_blocks(x, dy, w):
    blocks = experts_products.blocks_of(x, SimpleNamespace(num_experts=EXPERTS, experts_per_token=2))
    return (
        experts_products.slot_product(x, w, blocks).rows,
        experts_products.slot_product(dy, w, blocks, transposed=True).rows,
        experts_products.slot_weight_gradient(x, dy, blocks),
    )


def by_kernels(x, dy, w):
    return (
        grouped.product(x, w, transposed=False),
        grouped.product(dy, w, transposed=True),
        grouped.weight_gradient(x, dy),
    )


def check_values(sizes):
    """Both products and the gradient of the matrices, with an expert without rows and spare rows behind the last."""
    x, dy = packed(WIDTH, sizes, seed=1), packed(OUT, sizes, seed=2)
    w = jnp.asarray(draw(EXPERTS, WIDTH, OUT, seed=3), jnp.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "takes", lambda *arrays: False)
        wanted = in_blocks(x, dy, w)
    assert grouped.takes(x, w)
    assert grouped.takes(x, dy.rows)
    for made, blocks in zip(by_kernels(x, dy, w), wanted, strict=True):
        a, b = (np.asarray(array, np.float32) for array in (made, blocks))
        assert np.abs(b).max() > 1
        np.testing.assert_allclose(a, b, atol=2**-7 * np.abs(b).max())
        # of no expert, and an expert without rows: zero, not what memory held
        np.testing.assert_array_equal(a[b == 0], 0)


@pytest.mark.parametrize("sizes", [ONE_PIECE, TWO_PIECES], ids=["one piece", "two pieces"])
def test_tpu_kernels_give_what_blocks_give(monkeypatch, sizes):
    monkeypatch.setattr(grouped, "_tpu_gradient", functools.partial(grouped._tpu_gradient, interpret=True))
    monkeypatch.setattr(grouped, "default_platform", lambda: "tpu")
    check_values(sizes)


class Turned(tuple):
    """The range of a reference that is read transposed."""


@pytest.fixture
def mosaic(monkeypatch):
    """Mosaic's kernels interpreted, with what JAX's interpreter lacks: transposed operands, casts of layouts."""
    from jax._src.interpreters import mlir
    from jax._src.pallas.mosaic.interpret import utils
    from jax._src.pallas.mosaic_gpu import core
    from jax._src.pallas.mosaic_gpu.interpret import params, shared_memory
    from jax._src.state.types import TransposeTransform

    to_range, memory = utils.to_range, shared_memory.GPUSharedMemory
    content = memory.get_buffer_content

    def ranges(transforms):
        kept = [one for one in transforms if not isinstance(one, TransposeTransform)]
        return (Turned if len(kept) < len(transforms) else tuple)(to_range(kept))

    def read(self, key, where, *args, **kwargs):
        value, *more = content(self, key, tuple(where), *args, **kwargs)
        return value.T if isinstance(where, Turned) else value, *more

    monkeypatch.setattr(utils, "to_range", ranges)
    monkeypatch.setattr(memory, "get_buffer_content", read)
    mlir.register_lowering(core.layout_cast_p, lambda ctx, x, **layout: [x], platform="cpu")
    with params.force_gpu_interpret_mode(params.InterpretGPUParams()), traced_for("cuda", HOPPER):
        yield


@pytest.mark.parametrize(
    "sizes", [pytest.param(ONE_PIECE, marks=pytest.mark.slow), TWO_PIECES], ids=["one piece", "two pieces"]
)
def test_hopper_kernels_give_what_blocks_give(mosaic, sizes):
    check_values(sizes)


@pytest.mark.parametrize(
    ("platform", "device", "shape", "dtype", "taken"),
    [
        ("tpu", None, (256, 128), jnp.bfloat16, True),
        ("tpu", None, (250, 128), jnp.bfloat16, False),
        ("tpu", None, (256, 128), jnp.float32, False),
        ("tpu", None, (256, 96), jnp.bfloat16, False),
        ("cuda", HOPPER, (250, 128), jnp.bfloat16, True),
        ("cuda", SimpleNamespace(compute_capability="10.0"), (256, 128), jnp.bfloat16, False),
        ("cuda", SimpleNamespace(compute_capability="8.0"), (256, 128), jnp.bfloat16, False),
        ("cpu", None, (256, 128), jnp.bfloat16, False),
    ],
)
def test_what_kernels_take(platform, device, shape, dtype, taken):
    with traced_for(platform, device):
        assert grouped.takes(Ragged(jnp.zeros(shape, dtype), jnp.zeros((1, 4), jnp.int32))) == taken


# -- compiled for chips -----------------------------------------------------------------------------------

NUM_ROWS, NUM_EXPERTS = 4096, 16


def in_order(function, rows, *others, gradient):
    """The function on packed rows of one piece: on rows and matrices, or on two arrays of rows."""
    *arrays, sizes = others
    packed = [Ragged(array, sizes[None]) for array in ((rows, *arrays) if gradient else (rows,))]
    return function(*packed, *(() if gradient else arrays))


@pytest.mark.aot
@pytest.mark.parametrize("on", ["v5p:2x2x1", "v6e:2x2", "h100:8x1"])
def test_compiled_products_are_kernels_over_rows_alone(on):
    """On TPUs with the FLOPs of the rows; Mosaic's kernels state none. XLA's own gradient has those of all experts."""
    x, dy, w, sizes = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((NUM_ROWS, 1024), jnp.bfloat16),
            ((NUM_ROWS, 512), jnp.bfloat16),
            ((NUM_EXPERTS, 1024, 512), jnp.bfloat16),
            ((NUM_EXPERTS,), jnp.int32),
        )
    )
    call = "mosaic_gpu_v2" if on.startswith("h100") else "tpu_custom_call"
    forward = functools.partial(in_order, functools.partial(grouped.product, transposed=False), gradient=False)
    back = functools.partial(in_order, functools.partial(grouped.product, transposed=True), gradient=False)
    weights = functools.partial(in_order, grouped.weight_gradient, gradient=True)
    needed = 2 * NUM_ROWS * 1024 * 512
    for function, arguments in ((forward, (x, w, sizes)), (back, (dy, w, sizes)), (weights, (x, dy, sizes))):
        found = compiled_for(on, function, *arguments)
        assert call in re.findall(r'custom_call_target="([^"]+)"', found.as_text())
        assert not re.search(r" (dot|convolution)\(", found.as_text())
        if call == "tpu_custom_call":
            assert found.cost_analysis()["flops"] == pytest.approx(needed, rel=0.02)
    if call == "tpu_custom_call":
        dims = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        plain = compiled_for(on, lambda x, dy, sizes: jax.lax.ragged_dot_general(x, dy, sizes, dims), x, dy, sizes)
        assert plain.cost_analysis()["flops"] > 0.9 * NUM_EXPERTS * needed
