"""Records as a file has them, made in tests: a llama-like model on two H100 nodes unless told otherwise."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.accuracy.cases import Case, training_case
from meshwright.accuracy.records import Record, read_records

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "data" / "published_training.jsonl"

LLAMA: dict[str, Any] = {
    "name": "llama-8b",
    "layers": 32,
    "d_model": 4096,
    "d_ff": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "d_head": 128,
    "vocab": 128256,
    "gated_mlp": True,
}
GPT: dict[str, Any] = LLAMA | {"name": "gpt", "n_kv_heads": 32, "d_ff": 16384, "vocab": 50304, "gated_mlp": False}


def row(**fields: Any) -> dict[str, Any]:
    """One line of a file, before it is written: the fields given, over those of a plain run."""
    return {
        "id": "one",
        "kind": "train",
        "source": "made up",
        "group": "made-up",
        "core": True,
        "model": LLAMA,
        "hardware": "H100-SXM-80GB",
        "n_chips": 16,
        "parallelism": {"dp": 16, "zero_stage": 3},
        "seq_len": 2048,
        "global_batch_seqs": 64,
        "micro_batch": 2,
        "recompute": "none",
        "precision": "bf16",
        "measured": {"step_s": 2.0},
        "note": "",
    } | fields


def record(**fields: Any) -> Record:
    return msgspec.convert(row(**fields), Record)


def case(**fields: Any) -> Case:
    """The record as a case; it must be one."""
    return training_case(record(**fields))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


@cache
def published() -> tuple[Record, ...]:
    """The records that come with the project."""
    return read_records(PUBLISHED)


def one_of_each() -> tuple[Record, ...]:
    """The first published record of every combination of source, model, chip, recipe and way to recompute."""
    kinds = {
        (one.group, one.model, one.hardware, one.recompute, one.remat_policy, one.recipe and one.recipe.graphs): one
        for one in published()[::-1]
    }
    return tuple(one for one in published() if one in kinds.values())
