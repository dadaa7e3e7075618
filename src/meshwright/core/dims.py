"""The letters of array dims, the mesh axes, collectives and dtypes: one meaning in the whole project."""

from typing import Literal, get_args

LETTERS: dict[str, str] = {
    "B": "sequences of the batch", "T": "positions of a sequence", "S": "positions of keys",
    "D": "width of the model", "F": "width of the MLP", "N": "heads of queries", "K": "heads of keys and values",
    "G": "query heads for each of keys", "H": "width of a head", "V": "vocabulary", "L": "layers",
    "P": "rows of the position table", "R": "buckets of relative positions", "E": "experts",
    "Ea": "experts of one token", "C": "slots of an expert", "Fe": "width of an expert",
    "Fs": "width of all shared experts", "Er": "rows of the router's counts", "Rq": "rank of query latents",
    "Rkv": "rank of key and value latents", "Hn": "width of a head's unrotated part",
    "Hr": "width of a head's rotated part", "Hv": "width of a head's values",
    "Kf": "heads of keys in layers without a window", "Hf": "width of a head in layers without a window",
    "Kt": "heads of keys and values, repeated", "Kct": "heads of keys and values of cross-attention, repeated",
    "Fw": "width of the MLP of wide layers", "Ps": "rows of the encoder's position table",
    "Nx": "heads of the encoder", "Kx": "heads of keys in the encoder", "Hx": "width of a head in the encoder",
    "Fx": "width of the encoder's MLP", "M": "features of a frame", "Sf": "frames of the encoder's input",
    "Ct": "taps of a convolution", "Dc": "width between two convolutions", "Lmoe": "layers with experts",
    "Llocal": "layers with a window", "LE": "layers times experts", "Q": "sequences of a packed step",
    "O": "rows with logits", "Pg": "pages of the cache", "Pl": "positions of a page", "Bp": "pages of a sequence",
    "Ra": "rank of adapters", "Dl": "width of a layer's own embeddings", "Vl": "rows of a layer's own embeddings",
    "A": "residual streams", "Am": "residual streams", "Ao": "residual streams",
    "An": "residual streams without the first", "Do": "width of the projections of residual streams",
    "Dj": "twice the width of the model", "Rl": "rank of a product beside attention",
}  # fmt: skip
"""Dim of an array -> its meaning. A letter with g after it, such as Dg, counts groups of inputs with one scale."""

ISLANDS = "islands"
ISLAND_AXES: tuple[str, ...] = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes of one runtime, major to minor. ``pipeline`` splits layers, never a dim of an array."""
MESH_AXES: tuple[str, ...] = (ISLANDS, *ISLAND_AXES)
"""All mesh axes. ``islands``, the outermost, splits the batch over equal replicas with separate runtimes; a mesh has
that axis only if there are several."""

EMULATED_AXES: tuple[str, ...] = ("data", "fsdp", "context", "tensor")
"""Axes that the search tries on emulated devices; sizes of all other axes must be given."""

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
