"""The letters of array dims, the mesh axes, collectives and dtypes: one meaning in the whole project.

B sequences in the batch, T query positions, S key positions, D model width, F feed-forward width, N query heads, K key
and value heads, G query heads per kv head (N / K), H head width, V vocabulary, L layers, E experts.
"""

from typing import Literal, get_args

MESH_AXES: tuple[str, ...] = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes of the product, major to minor. ``pipeline`` splits layers, never a dim of an array."""

EMULATED_AXES: tuple[str, ...] = ("data", "fsdp", "context", "tensor")
"""Axes that a plan for emulated devices tries by itself; the others are used there where they are asked for."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

DTYPE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "int32": 4,
    "bf16": 2,
    "fp16": 2,
    "int16": 2,
    "fp8": 1,
    "int8": 1,
    "fp4": 0.5,
    "int4": 0.5,
}
"""Bytes of one stored element; tf32 is stored as fp32."""
