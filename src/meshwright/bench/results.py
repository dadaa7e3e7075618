"""The results of a benchmark: measurements, the parts that hold them, and the report of a run."""

from typing import Literal

import msgspec

from meshwright.bench.fit import FittedLine, Knee
from meshwright.core.dims import CollectiveKind
from meshwright.spec.calibration import CollectiveRate

Contents = Literal["zeros", "ones", "uniform", "normal"]
CopyKind = Literal["copy", "silu"]
ELEMENT_BYTES = 4
"""Bytes of an element in copies, multiply-add chains and collectives: float32."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one part, and a line for each thing that was not measured, with the reason."""

    left_out: tuple[str, ...] = ()


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one round: the median over repeats, and both quartiles."""

    median_s: float
    low_s: float
    high_s: float
    repeats: int

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a share of the median."""
        return (self.high_s - self.low_s) / self.median_s


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """One product [m,k] x [k,n] per device. ``share_of_peak`` is the HFU: the share of the data sheet's dense peak."""

    dtype: str
    m: int
    k: int
    n: int
    contents: Contents
    seconds: Timing
    flops_per_s: float
    share_of_peak: float | None


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A product whose side is a multiple of the tile, or one more or less. ``relative`` is its FLOP/s over the
    multiple's, ``predicted`` that ratio if partial tiles cost as much as whole ones."""

    product: Product
    tile: int
    relative: float
    predicted: float


class MatmulPart(Part, frozen=True):
    """Square products of each element type, and the effect of partial tiles."""

    sweep: tuple[Product, ...] = ()
    edges: tuple[Edge, ...] = ()

    def best(self, dtype: str) -> Product | None:
        """Returns the fastest product of an element type; None without any."""
        return max((p for p in self.sweep if p.dtype == dtype), key=lambda p: p.flops_per_s, default=None)


class Mlp(msgspec.Struct, frozen=True, kw_only=True):
    """An MLP per device. ``mfu`` is its FLOP/s over the data sheet's peak, ``of_matmul`` over the best product's."""

    dtype: str
    tokens: int
    d_model: int
    d_ff: int
    seconds: Timing
    flops_per_s: float
    mfu: float | None
    of_matmul: float | None


class MlpPart(Part, frozen=True):
    """Gated MLPs forward and backward: the rate of products inside a layer of a training step."""

    mlps: tuple[Mlp, ...] = ()


class ChainTime(msgspec.Struct, frozen=True, kw_only=True):
    """``repeats`` multiply-adds of every element: fused into one kernel, or one kernel each."""

    repeats: int
    fused: bool
    seconds: Timing
    flops_per_s: float
    bytes_per_s: float


class ElementwisePart(Part, frozen=True):
    """Chains of multiply-adds, and the length at which a fused chain takes twice the time of one multiply-add.

    Predicted under perfect overlap as 2 x 8 bytes x (FLOP/s / 2) / (bytes/s), from the vector FLOP/s of
    ``vector_source`` and the bytes/s of the shortest chain.
    """

    elements: int
    cache_bytes: float
    chains: tuple[ChainTime, ...] = ()
    doubles_at: float | None = None
    predicted_at: float | None = None
    vector_flops_per_s: float | None = None
    vector_source: str = ""


class ContentsPart(Part, frozen=True):
    """The same product of zeros, ones, uniform and normal numbers, drawn for every repeat, in alternation."""

    products: tuple[Product, ...] = ()


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """One of `DISTANCES` of [m,k] and [k,n]. ``flops_per_s`` counts 2 m k n for each; ``ratio`` is its time over the
    product's. Predictions come from the matrix and vector rates and are None if these are unknown."""

    what: str
    m: int
    k: int
    n: int
    seconds: Timing
    flops_per_s: float
    ratio: float | None
    predicted_s: float | None
    predicted_ratio: float | None


class DistancePart(Part, frozen=True):
    """A product, a log-space product and L1 distances of the same sizes."""

    distances: tuple[Distance, ...] = ()


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """An array read and written once per device; ``bytes_per_s`` counts both. "silu" also computes an exponential."""

    kind: CopyKind
    array_bytes: int
    seconds: Timing
    bytes_per_s: float


class CopyPart(Part, frozen=True):
    """Copies of arrays of increasing size, and one silu."""

    copies: tuple[Copy, ...] = ()

    def largest(self, kind: CopyKind = "copy") -> Copy | None:
        """Returns the copy of the largest array of a kind; None without any."""
        return max((c for c in self.copies if c.kind == kind), key=lambda c: c.array_bytes, default=None)

    def of_size(self, num_bytes: float) -> Copy | None:
        """Returns the copy of the smallest array of ``num_bytes`` or more, else of the largest; None without any."""
        large_copies = [c for c in self.copies if c.kind == "copy" and c.array_bytes >= num_bytes]
        return min(large_copies, key=lambda c: c.array_bytes, default=self.largest())


class LayerTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one layer forward with ``tokens`` tokens per device."""

    tokens: int
    seconds: Timing
    tokens_per_us: float
    flops_per_s: float


class BatchPart(Part, frozen=True):
    """Layer times by batch; the fitted knee; the predicted critical batch: (FLOP/s) / (bytes/s) x weight bytes / 2.

    The bytes/s are measured on a copy as large as the weights, since smaller arrays may stay in a cache.
    """

    sizes: dict[str, int]
    dtype: str
    layers: tuple[LayerTime, ...] = ()
    knee: Knee | None = None
    predicted_knee: float | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one collective: a mesh axis; along other axes the same collective runs concurrently."""

    axis: str
    size: int
    mesh: dict[str, int]


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a collective on an array: measured, by the fitted line, and by the data sheet if there is one."""

    array_bytes: int
    seconds: Timing
    fitted_s: float
    datasheet_s: float | None


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over one group: times by size, and the rate from the line fitted to them."""

    kind: CollectiveKind
    group: Group
    times: tuple[CollectiveTime, ...]
    rate: CollectiveRate
    fit_error: float


class CollectivesPart(Part, frozen=True):
    """Every kind of collective over every group of devices."""

    collectives: tuple[Collective, ...] = ()


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one shape. FLOPs are counted as `cost` does: without masked keys on accelerators, with them on
    emulated devices, whose attention is priced with its scores in memory."""

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    forward: Timing
    both: Timing
    forward_flops_per_s: float
    both_flops_per_s: float
    share_of_peak: float | None


class AttentionPart(Part, frozen=True):
    """The attention that training runs, by sequence length."""

    dtype: str
    times: tuple[AttentionTime, ...] = ()


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Host seconds of a launch: until the next can start (``launch``), and until its result is ready (``wait``)."""

    num_arguments: int
    launch: Timing
    wait: Timing


class OverheadPart(Part, frozen=True):
    """Launches by number of arguments, and the line fitted to them."""

    launches: tuple[Launch, ...] = ()
    line: FittedLine | None = None


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """All parts measured, with device, date and versions. A part that was not requested is None.

    ``seconds`` is the budget, ``took_s`` what the run took, ``load`` the load average of the minute before it.
    """

    machine: str
    device_kind: str
    platform: str
    num_devices: int
    chip: str
    date: str
    versions: dict[str, str]
    seconds: float
    took_s: float
    load: float = 0.0
    memory_bytes: float
    mesh: dict[str, int] = {}
    matmul: MatmulPart | None = None
    mlp: MlpPart | None = None
    elementwise: ElementwisePart | None = None
    contents: ContentsPart | None = None
    distance: DistancePart | None = None
    copy: CopyPart | None = None
    batch: BatchPart | None = None
    collectives: CollectivesPart | None = None
    attention: AttentionPart | None = None
    overhead: OverheadPart | None = None
