"""Reads published measurements of training steps: one JSON object a line; errors name file and line."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.fields import LARGEST
from meshwright.core.files import json_rows, read_text
from meshwright.spec.cluster_shapes import MAX_CHIPS
from meshwright.spec.model import MAX_LAYERS

Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST)]
RecordedSize = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHIPS)]


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a measured model, in layers n >= ``first_k_dense`` (from 0) where ``interleave`` divides n + 1."""

    experts: RecordedSize
    top_k: RecordedSize
    d_ff_expert: RecordedSize
    n_shared: RecordedSize = 0
    first_k_dense: RecordedSize = 0
    interleave: Annotated[int, msgspec.Meta(ge=1)] = 1


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a measured model."""

    name: str
    layers: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
    d_model: RecordedSize
    d_ff: RecordedSize
    n_heads: RecordedSize
    n_kv_heads: RecordedSize
    d_head: RecordedSize
    vocab: RecordedSize
    gated_mlp: bool
    moe: ExpertShape | None = None
    attention: str = ""
    q_lora_rank: RecordedSize = 0
    kv_lora_rank: RecordedSize = 0
    sliding_window: RecordedSize | None = None


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of each kind of parallelism; ``vpp`` are pipeline chunks per device, ``sp`` is sequence parallelism."""

    dp: Degree | None = None
    tp: Degree | None = None
    pp: Degree | None = None
    cp: Degree | None = None
    ep: Degree | None = None
    vpp: Degree | None = None
    moe_tp: RecordedSize | None = None
    zero_stage: Literal[0, 1, 2, 3] | None = None
    sp: bool | None = None


class RecordedPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of ``workers`` equal engines of a disaggregated service; each has ``attention_dp`` replicas of attention
    split over ``tp`` devices."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHIPS)]
    tp: Degree = 1
    attention_dp: Degree = 1
    ep: Degree = 1
    moe_tp: Degree = 1
    chips: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHIPS)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step or a rate from which they follow (``tokens_per_s`` is of all chips), or serving times."""

    step_s: Positive | None = None
    tokens_per_s: Positive | None = None
    tokens_per_s_per_chip: Positive | None = None
    tflops_per_chip: Positive | None = None
    mfu: Positive | None = None
    tpot_ms: Positive | None = None
    ttft_ms: Positive | None = None


class RecordedLora(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapters that were trained while the model was frozen."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    alpha: Positive
    targets: str


class PublishedRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Software settings of a published recipe: which kernels CUDA graphs capture, how tokens reach experts and whether
    that overlaps with compute, the capacity factor of experts (0: unbounded), whether attention is in fp8.

    Settings that are not priced are ignored: one kernel for all experts, recomputed modules, offloaded layers.
    """

    source: str
    graphs: Literal["none", "layers", "step"] = "none"
    dispatcher: Literal["alltoall", "one_hot", "hybridep", "deepep"] = "alltoall"
    capacity_factor: Annotated[float, msgspec.Meta(ge=0, le=LARGEST)] = 0.0
    exchange_overlap: bool = False
    narrow_attention: bool = False


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measured configuration; ``added`` is the date on which it joined the collection, "" for the first ones.

    Fields that are not listed here are ignored.
    """

    id: str
    kind: str
    source: str = ""
    group: str = ""
    core: bool = False
    added: str = ""
    model: ModelShape | None = None
    lora: RecordedLora | None = None
    hardware: str = ""
    n_chips: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHIPS)] = 0
    slices: Degree | None = None
    parallelism: Parallelism = Parallelism()
    seq_len: RecordedSize | None = None
    global_batch_seqs: Annotated[float, msgspec.Meta(ge=0, le=LARGEST)] | None = None
    micro_batch: Positive | None = None
    recompute: str | None = None
    remat_policy: str | None = None
    precision: str = "unstated"
    measured: Measured = Measured()
    isl: RecordedSize | None = None
    osl: RecordedSize | None = None
    concurrency: Annotated[float, msgspec.Meta(ge=0, le=LARGEST)] | None = None
    backend: str = ""
    prefill: RecordedPool | None = None
    decode: RecordedPool | None = None
    note: str = ""
    config: str = ""
    recipe: PublishedRecipe | None = None


_LINES = "Every line is one record as described in docs/accuracy.md."


def read_records(path: Path) -> tuple[Record, ...]:
    """Returns every record of a JSON-lines file. Raises InputError with file:line for a line that cannot be read."""
    advice = "Name a file of one JSON object a line."
    records = []
    for line_number, fields in json_rows(path, read_text(Path(path), advice), _LINES):
        if fields.get("kind") != "train" and "isl" not in fields:
            # other kinds of records have models of other shapes: they are counted, not predicted
            fields = {name: fields[name] for name in ("id", "kind", "group", "core") if fields.get(name) is not None}
        try:
            records.append(msgspec.convert(fields, Record))
        except msgspec.ValidationError as error:
            raise InputError(f"{path}:{line_number}: {error}. {_LINES}") from None
    if not records:
        raise InputError(f"{path} has no records. {advice}")
    return tuple(records)
