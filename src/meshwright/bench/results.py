"""What a benchmark measured: rows of figures, the parts that hold them, and the record of a run."""

from typing import Literal

import msgspec

from meshwright.bench.fit import Knee, Line
from meshwright.spec.calibration import CollectiveKind, CollectiveRate

Contents = Literal["zeros", "ones", "uniform", "normal"]
CopyKind = Literal["copy", "silu"]
ELEMENT_BYTES = 4
"""Of the arrays that are copied, and of those of chains and collectives."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured thing."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one part, and what was left out and why."""

    left_out: tuple[str, ...] = ()


class Timing(Row, frozen=True):
    """Seconds: the median of some repeats, and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float
    repeats: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        return (self.high_s - self.low_s) / self.median_s


class Product(Row, frozen=True):
    """One product [m,k] x [k,n] of a device. ``share_of_peak`` is the HFU: of the data sheet's dense peak."""

    dtype: str
    m: int
    k: int
    n: int
    contents: Contents
    seconds: Timing
    flops_per_s: float
    share_of_peak: float | None


class Edge(Row, frozen=True):
    """A product at or beside a multiple of the tile; ``predicted`` is what filling up to whole tiles leaves of its
    rate."""

    product: Product
    tile: int
    relative: float
    predicted: float


class MatmulPart(Part, frozen=True):
    """The sweep of each element type, and what lies beside whole tiles."""

    sweep: tuple[Product, ...] = ()
    edges: tuple[Edge, ...] = ()

    def best(self, dtype: str) -> Product | None:
        """The fastest product of an element type."""
        return max((p for p in self.sweep if p.dtype == dtype), key=lambda p: p.flops_per_s, default=None)


class Mlp(Row, frozen=True):
    """An MLP of a device. ``mfu`` counts its model FLOPs against the data sheet's peak, ``of_matmul`` against the
    fastest square product."""

    dtype: str
    tokens: int
    d_model: int
    d_ff: int
    seconds: Timing
    flops_per_s: float
    mfu: float | None
    of_matmul: float | None


class MlpPart(Part, frozen=True):
    """A gated MLP forward and backward: what of the rate of plain products is left in a layer of a training step."""

    mlps: tuple[Mlp, ...] = ()


class Chain(Row, frozen=True):
    """``repeats`` multiply-adds of every element: as one kernel, or as one kernel each."""

    repeats: int
    fused: bool
    seconds: Timing
    flops_per_s: float
    bytes_per_s: float


class ElementwisePart(Part, frozen=True):
    """Chains of growing length, and how long they may be before one takes twice the time of a single multiply-add.

    Predicted as 2 x C x bytes / (W x FLOPs) under perfect overlap, with C the vector FLOP/s of ``vector_source`` and W
    the bytes/s of the shortest chain.
    """

    elements: int
    cache_bytes: float
    chains: tuple[Chain, ...] = ()
    doubles_at: float | None = None
    predicted_at: float | None = None
    vector_flops_per_s: float | None = None
    vector_source: str = ""


class ContentsPart(Part, frozen=True):
    """The same product of zeros, ones, uniform and normal numbers, new ones in every repeat, measured in turns."""

    products: tuple[Product, ...] = ()


class Distance(Row, frozen=True):
    """One way to combine [m,k] and [k,n]. ``flops_per_s`` counts 2 m k n for all of them; ``ratio`` is the time over
    that of the product. Predicted from the matrix and the vector rates, None where they are not known."""

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
    """Product, log-space product and L1 distance."""

    distances: tuple[Distance, ...] = ()


class Copy(Row, frozen=True):
    """An array of a device read and written once; ``bytes_per_s`` counts both. "silu" has an exponential on the way."""

    kind: CopyKind
    array_bytes: int
    seconds: Timing
    bytes_per_s: float


class CopyPart(Part, frozen=True):
    """Arrays of growing size."""

    copies: tuple[Copy, ...] = ()

    def largest(self, kind: CopyKind = "copy") -> Copy | None:
        """The copy of the largest array."""
        return max((c for c in self.copies if c.kind == kind), key=lambda c: c.array_bytes, default=None)


class LayerTime(Row, frozen=True):
    """One layer forward with so many tokens on a device."""

    tokens: int
    seconds: Timing
    tokens_per_us: float
    flops_per_s: float


class BatchPart(Part, frozen=True):
    """Times over batches; the fitted knee, and the critical batch that the measured rates predict: C/W x bytes/2."""

    sizes: dict[str, int]
    dtype: str
    layers: tuple[LayerTime, ...] = ()
    knee: Knee | None = None
    predicted_knee: float | None = None


class Group(Row, frozen=True):
    """Devices that one collective joins: an axis of a mesh whose other axes all run the same at the same time."""

    axis: str
    size: int
    mesh: dict[str, int]


class CollectiveTime(Row, frozen=True):
    """Seconds of an array of so many bytes, as the fitted line has it, and as the data sheet has it where there is
    one."""

    array_bytes: int
    seconds: Timing
    fitted_s: float
    datasheet_s: float | None


class Collective(Row, frozen=True):
    """One kind over one group: times per size, and the line through them."""

    kind: CollectiveKind
    group: Group
    times: tuple[CollectiveTime, ...]
    rate: CollectiveRate
    fit_error: float


class CollectivesPart(Part, frozen=True):
    """Every kind of collective over every group of devices."""

    collectives: tuple[Collective, ...] = ()


class AttentionTime(Row, frozen=True):
    """Attention of one shape. FLOPs are those that `cost` counts: on accelerators without the keys that are masked, on
    emulated devices, whose attention is priced with its scores in memory, with them."""

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
    """The attention that programs run, over sequence lengths."""

    dtype: str
    times: tuple[AttentionTime, ...] = ()


class Launch(Row, frozen=True):
    """Host seconds of a launch: until the next one can follow (``launch``), until its result is there (``wait``)."""

    num_arguments: int
    launch: Timing
    wait: Timing


class OverheadPart(Part, frozen=True):
    """Launches by the number of arrays that the program takes, and the line through them."""

    launches: tuple[Launch, ...] = ()
    line: Line | None = None


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, on what, and when. A part that was not asked for is None.

    ``load`` is the mean number of threads that wanted to run in the minute before (Unix's load average).
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
