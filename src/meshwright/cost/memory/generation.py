"""Memory that only prefill and decode need: caches in a chip's tiles, and what XLA copies of a layer.

Engines that are not compiled by XLA copy nothing (`OpSizes.on_gpus` is False for them).
"""

import numpy as np

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.generation.program import caches_of
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of
from meshwright.algebra.rewrites.split_backward import weights_of
from meshwright.algebra.sizes import LANES, SUBLANES, Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.arrays import largest, total

WORD_BYTES = 4
"""Bytes of one lane in a row of a TPU's tile; numbers of several rows are packed into a lane if they are narrower."""


def stored_bytes(array: ShardedArray, sizes: OpSizes) -> Number:
    """Returns the bytes of a weight that no step updates; TPUs put the dim into the lanes that needs least padding."""
    num_bytes = sizes.elements(array) * (DTYPE_BYTES[array.dtype] if array.dtype else sizes.width)
    if not sizes.tile_rows or len(array.dims) < 2:
        return num_bytes
    padding_factors = [np.ceil(size / LANES) * LANES / size for size in map(np.asarray, sizes.local(array).values())]
    return num_bytes * np.minimum.reduce(np.broadcast_arrays(*padding_factors))


def cache_bytes(derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes of keys and values of all layers; a step updates them in place."""
    repeat_of = {name: block.repeat for block in derived.blocks for name in caches_of(block.block)}
    cache_arrays = [(derived.declared[name], repeat) for name, repeat in repeat_of.items()]
    return total(repeat * sizes.bytes(array) * _tiles(array, sizes) for array, repeat in cache_arrays)


def _tiles(array: ShardedArray, sizes: OpSizes) -> Number:
    """Returns the factor by which TPUs pad the heads of a cache slot to whole tiles (`cache_layout`); else 1."""
    if not sizes.tile_rows or len(array.dims) < 4:
        return 1.0
    n_heads, heads_per_word = sizes.local(array)[array.dims[2]], WORD_BYTES / DTYPE_BYTES[array.dtype]
    tile_heads = np.clip(2 ** np.ceil(np.log2(n_heads)), heads_per_word, SUBLANES)
    # heads that do not fill a word are stored apart from slots, without padding
    return np.where(n_heads >= np.maximum(heads_per_word, 2), np.ceil(n_heads / tile_heads) * tile_heads / n_heads, 1.0)


def _copied_pool(array: ShardedArray, sizes: OpSizes) -> Number:
    """Returns the bytes of a layer's pool that TPUs copy into tiles of 8 rows to write it: several heads that do not
    fill a word, each wider than a tile (`nn.cache.page_parts`); else 0."""
    if len(array.dims) < 4:
        return 0.0
    n_heads, width = (sizes.local(array)[dim] for dim in array.dims[2:])
    is_copied = (n_heads > 1) & (n_heads < WORD_BYTES / DTYPE_BYTES[array.dtype]) & (width > LANES)
    return np.where(is_copied, sizes.bytes(array), 0.0)


def copied_bytes(block: BlockSteps, derived: Derived, sizes: OpSizes) -> Number:
    """Returns the bytes that XLA copies of the weights and caches of one layer.

    GPUs copy the layer's matrices out of the arrays of all layers. TPUs copy matrices of experts if sequences have
    several rows, else int8 latents of all layers, whose tiles differ for writing; and biases of first products of
    experts, once for each row. Matrices in int4, and of experts in int8 and fp8, are widened one at a time. Results of
    experts on gathered rows are made a shard at a time and joined. GPUs transpose matrices that are gathered along
    another dim than their first, of all layers at once.
    """
    has_few_rows = np.asarray(sizes.rows_each) <= 1
    weight_names = weights_of(derived, block) if block.is_layer else ()
    matrices = [derived.declared[name] for name in weight_names]
    expert_arrays = [array for array in matrices if array.dims[:1] == ("E",)]
    narrow_matrices = [a for a in matrices if a.dtype == "int4" or (a in expert_arrays and a.dtype in ("int8", "fp8"))]
    # a matrix is widened when its product runs, so one at a time
    widened_bytes = largest(sizes.elements(array) * sizes.width for array in narrow_matrices)
    num_bytes: Number = 0.0
    if sizes.on_gpus:
        num_bytes = widened_bytes + sizes.total(*matrices)
    elif sizes.tile_rows:
        num_bytes = widened_bytes + np.where(has_few_rows, 0.0, sizes.total(*expert_arrays))
    if sizes.tile_rows:
        # writes of int8 latents and the kernel that reads them use different tiles
        caches = (derived.declared[name] for name in caches_of(block.block))
        int8_bytes = total(sizes.bytes(array) for array in caches if array.dtype == "int8" and len(array.dims) == 3)
        num_bytes = num_bytes + np.where(has_few_rows, block.repeat * int8_bytes, 0.0)
        pools = [derived.declared[name] for name in caches_of(block.block)]
        num_bytes = num_bytes + block.repeat * total(_copied_pool(array, sizes) for array in pools)
    gather_steps = [s for s in block.forward if s.is_collective and s.op == "all_gather"]
    if slot_gathers := [step for step in gather_steps if step.dim == "C"]:
        result_arrays = (s.result for s in block.forward if not s.is_collective and kind_of(s).is_einsum)
        joined_bytes = largest(sizes.bytes(array) for array in result_arrays if "C" in array.dims)
        num_bytes = num_bytes + joined_bytes * moves(slot_gathers[0], sizes)
    if sizes.tile_rows:
        steps = (s for s in block.forward if not s.is_collective and not kind_of(s).is_einsum)
        biased_results = [
            s.result for s in steps if any(a.dims[:1] == ("E",) and "C" not in a.dims for a in s.inputs[1:])
        ]
        num_bytes = num_bytes + sizes.total(*biased_results[:-1])
    if sizes.on_gpus:
        # XLA does this before the loop over layers
        transposes = (s for s in gather_steps if s.result.name in weight_names and s.result.dims[:1] != (s.dim,))
        num_bytes = num_bytes + block.repeat * total(sizes.bytes(s.inputs[0]) * moves(s, sizes) for s in transposes)
    return num_bytes


def moves(step: Step, sizes: OpSizes) -> Number:
    """True if the step's mesh axes have several devices; over one device its result is its input."""
    return product(sizes.mesh[axis] for axis in step.axes) > 1


def scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of temporary memory of a step: its scratch memory; on TPUs also a second copy of rows exchanged
    with expert devices, for the loop of further rounds."""
    if not step.is_collective:
        return kind_of(step).scratch_bytes(step, sizes)
    return sizes.bytes(step.result) * moves(step, sizes) * bool(sizes.tile_rows and step.op == "all_to_all")


def widened_results(steps: tuple[Step, ...], sizes: OpSizes) -> dict[ShardedArray, float]:
    """Maps results of products with quantised weights to how many times wider GPUs hold them: float32 until they are
    scaled where they are read. Inputs of attention are scaled before it."""
    local_steps = [step for step in steps if not step.is_collective]
    attended = {array for s in local_steps if kind_of(s).group == "attention" for array in s.inputs}
    scaled_steps = (s for s in local_steps if kind_of(s).is_einsum and s.inputs[2:]) if sizes.on_gpus else ()
    results = {step.result for step in scaled_steps} - attended
    return {array: DTYPE_BYTES["fp32"] / sizes.width for array in results if not array.dtype}
