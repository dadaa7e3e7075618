"""Grouped products by the platform's kernels: rows sorted by expert, each multiplied by its expert's matrix.

For `jax.lax.ragged_dot` the TPU compiler has a kernel that computes each expert's rows only, but the gradient of the
matrices becomes a product of all rows for every expert (compiled for v5e, v5p, v6e): JAX's `tgmm` computes that
gradient. Hopper runs JAX's Mosaic kernels. Other platforms use the blocks of `nn.experts.products`.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshwright.nn.attention.platform import compute_capability, default_device, default_platform
from meshwright.nn.experts.slots import Ragged

TILE = 128
"""Rows and columns of a tile of Mosaic kernels; they sum `TILE_DEPTH` entries of the contracted dim at a time."""

TILE_DEPTH = 64

HOPPER = 9.0
"""The compute capability whose tensor cores the Mosaic kernels use."""

TGMM_TILES = 512, 256, 128
"""Tile sizes of `tgmm`; each dim is cut into the largest that divides it."""

_Rows = Float[Array, "R _"]
_Sizes = Int[Array, " E"]


def takes(slots: Ragged, *arrays: Array) -> bool:
    """True if the platform has kernels for rows and arrays of these widths: 16 bits, multiples of `TILE`."""
    arrays = (slots.rows, *arrays)
    is_tiled = all(array.dtype.itemsize == 2 and not any(n % TILE for n in array.shape[1:]) for array in arrays)
    is_in_tiles = len(slots.rows) // len(slots.sizes) % TILE == 0
    return is_tiled and (compute_capability() == HOPPER or (default_platform() == "tpu" and is_in_tiles))


def product(slots: Ragged, weights: Float[Array, "E _ _"], *, transposed: bool) -> _Rows:
    """Returns each row times its expert's matrix; rows without an expert, which kernels leave unwritten, are zero."""
    kernel = _tpu_product if default_platform() == "tpu" else _mosaic_product

    def of_piece(rows: _Rows, sizes: _Sizes) -> _Rows:
        products = kernel(rows, weights, sizes, transposed)
        return jnp.where((jnp.arange(len(rows), dtype=jnp.int32) < jnp.sum(sizes))[:, None], products, 0)

    return jnp.concatenate(_of_pieces(of_piece, slots, slots.rows))


def weight_gradient(left: Ragged, right: Ragged) -> Float[Array, "E _ _"]:
    """Returns left^T right over each expert's rows; several pieces are added in float32, then cast to left's dtype."""
    kernel = _tpu_gradient if default_platform() == "tpu" else _mosaic_gradient
    grads = _of_pieces(kernel, left, left.rows, right.rows)
    return grads[0] if len(grads) == 1 else sum(grad.astype(jnp.float32) for grad in grads).astype(left.rows.dtype)


def _of_pieces(run: Callable[..., Array], slots: Ragged, *rows: _Rows) -> list[Any]:
    pieces = zip(*(jnp.split(array, len(slots.sizes)) for array in rows), slots.sizes, strict=True)
    return [run(*piece) for piece in pieces]


def _tpu_product(rows: _Rows, weights: Array, sizes: _Sizes, transposed: bool) -> _Rows:
    contracted_dims = (((1,), (2 if transposed else 1,)), ((), ()))
    dim_numbers = lax.RaggedDotDimensionNumbers(contracted_dims, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
    return lax.ragged_dot_general(rows, weights, sizes, dim_numbers, preferred_element_type=rows.dtype)


def _tpu_gradient(left: _Rows, right: _Rows, sizes: _Sizes, *, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # Pallas takes time to import

    tile_sizes = (next(t for t in TGMM_TILES if size % t == 0) for size in (*left.shape, right.shape[1]))
    return tgmm(left.T, right, sizes, left.dtype, tuple(tile_sizes), interpret=interpret)


_MOSAIC: dict[str, Any] = {
    **{"block_m": TILE, "block_n": TILE, "block_k": TILE_DEPTH},
    **{"max_concurrent_steps": 4, "grid_block_n": 4},
}


def _mosaic_product(rows: _Rows, weights: Array, sizes: _Sizes, transposed: bool) -> _Rows:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return ragged_dot(rows, weights, group_sizes=sizes, transpose_rhs=transposed, **_MOSAIC)


def _mosaic_gradient(left: _Rows, right: _Rows, sizes: _Sizes) -> Array:
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    # the kernel asks JAX's first device for its processors, which is a CPU where programs are compiled for absent GPUs
    with patch.object(jax, "devices", return_value=[default_device()]):
        return transposed_ragged_dot(left, right, group_sizes=sizes, **_MOSAIC)
