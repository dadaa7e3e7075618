"""The letters of array dims, the mesh axes, collectives and dtypes: one meaning in the whole project.

B sequences in the batch, T query positions, S key positions (of an encoder, or slots of a cache), D model width, F
feed-forward width (Fw: of wide layers), N query heads, K key and value heads (Kt, Kct:
repeated), G query heads per kv head (N / K), H head width (Kf, Hf: of layers without a window where theirs differ), V
vocabulary, L layers (Lmoe, Llocal: of one kind; LE: layers times experts), P rows of the position table (Ps: the
encoder's), R buckets of relative positions. Nx, Kx, Hx, Fx: sizes of an encoder that are not the decoder's; M features,
Sf frames of its convolutions of Ct taps, Dc the width between them. Experts: E experts, Ea experts of one token, C
slots of one expert, Fe width of a routed expert, Fs of all shared experts, Er rows of the router's counts. Latent
attention: Rq, Rkv ranks of latents, Hn, Hr widths of a head's unrotated and rotated part, Hv of its values. Pages of a
cache: Pg pages in all, Pl positions of a page, Bp pages of a sequence. Packed rows: Q their sequences, O rows with
logits. Adapters: Ra rank. Dg (Fg, Hg, ...): groups of inputs D with one scale. Dj is 2 D. Dl is the width of layers'
own embeddings, Vl the rows of their tables. A residual streams (Am, Ao: as many; An: but the first), Do is D of their
projections, Rl the rank of a product beside attention.
"""

from typing import Literal, get_args

ISLANDS = "islands"
ISLAND_AXES: tuple[str, ...] = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes of one runtime, major to minor. ``pipeline`` splits layers, never a dim of an array."""
MESH_AXES: tuple[str, ...] = (ISLANDS, *ISLAND_AXES)
"""All mesh axes: ``islands`` are equal replicas, each a runtime of its own, that split the batch first of all. A mesh
has that axis only where there are several."""

EMULATED_AXES: tuple[str, ...] = ("data", "fsdp", "context", "tensor")
"""Axes that the search tries on emulated devices; the others must be asked for."""

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
