"""Published measurements of training steps: one JSON object a line, read with the line of every fault."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

from meshwright.core.errors import InputError

Positive = Annotated[float, msgspec.Meta(gt=0)]


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a measured model; every ``interleave``-th layer has them, after ``first_k_dense`` that do not."""

    experts: int
    top_k: int
    d_ff_expert: int
    n_shared: int = 0
    first_k_dense: int = 0
    interleave: Annotated[int, msgspec.Meta(ge=1)] = 1


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a measured model."""

    name: str
    layers: int
    d_model: int
    d_ff: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    vocab: int
    gated_mlp: bool
    moe: ExpertShape | None = None
    attention: str = ""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    sliding_window: int | None = None


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of each kind of parallelism as the source gives them; ``vpp`` are pipeline chunks per device."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    vpp: int | None = None
    zero_stage: int | None = None
    sp: bool | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a source gives of a step: its seconds, or a rate that they follow from; tokens per second of all chips."""

    step_s: Positive | None = None
    tokens_per_s: Positive | None = None
    tokens_per_s_per_chip: Positive | None = None
    tflops_per_chip: Positive | None = None
    mfu: Positive | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measured configuration. Fields that are not listed here are ignored."""

    id: str
    kind: str
    source: str = ""
    group: str = ""
    core: bool = False
    model: ModelShape | None = None
    hardware: str = ""
    n_chips: int = 0
    slices: int | None = None
    parallelism: Parallelism = Parallelism()
    seq_len: int | None = None
    global_batch_seqs: float | None = None
    micro_batch: float | None = None
    recompute: str | None = None
    remat_policy: str | None = None
    precision: str = "unstated"
    measured: Measured = Measured()
    note: str = ""


def read_records(path: Path) -> tuple[Record, ...]:
    """Reads every record of a JSON-lines file. Raises InputError with file:line for a line that cannot be read."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}. Name a file of one JSON object a line.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_record(line, f"{path}:{number}"))
    if not found:
        raise InputError(f"{path} holds no records. Name a file of one JSON object a line.")
    return tuple(found)


def _record(line: bytes, where: str) -> Record:
    try:
        head = msgspec.json.decode(line, type=dict[str, Any])
        if head.get("kind") != "train":
            # other kinds have models of other shapes: they are counted, not read
            head = {name: head.get(name) for name in ("id", "kind", "group", "core") if head.get(name) is not None}
        return msgspec.convert(head, Record)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: {error}. Every line is one record as described in docs/accuracy.md.") from None
