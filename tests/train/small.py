"""One very small llama, its job, and a text of a few kilobytes for the tests of this folder."""

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.data.text import open_corpus
from meshwright.train.data.token_store import TokenStore
from meshwright.train.record.metrics import StepRecord
from meshwright.train.settings import TrainSettings

MODEL = Model(
    name="mini",
    family="llama",
    num_layers=2,
    d_model=32,
    d_ff=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=300,
    max_positions=64,
    norm_eps=1e-5,
)
JOB = Job(batch_seqs=8, seq_len=32)


def strategy(state: str = "fp32", **axes: int) -> Strategy:
    return Strategy(mesh=make_mesh(axes), state=state)


def read_documents(data: str) -> tuple[str, ...]:
    """All texts that ``data`` names, whole and in memory: for small ones."""
    documents = [""]
    for piece in open_corpus(data).pieces():
        documents[-1] += piece.text
        if piece.ends_document:
            documents.append("")
    return tuple(documents[:-1])


def store_of(lengths: Sequence[int], *, records: bool = False) -> TokenStore:
    """Documents of these lengths; token i of all is i, so that it says where it comes from. Of records every
    third token has no loss."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
    tokens = np.arange(int(starts[-1]), dtype=np.int32 if records else np.uint32)
    return TokenStore(np.where(tokens % 3, tokens, ~tokens) if records else tokens, starts)


def lines_of(run: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    with open(f"{run}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def write_text(folder: Path, num_topics: int = 8) -> str:
    """Real prose in one file: the first topics of Python's documentation."""
    path = folder / "text.txt"
    path.write_text("\n".join(read_documents("pydoc")[:num_topics]), encoding="utf-8")
    return str(path)


def stop_at(step: int, number: signal.Signals | None = None) -> Callable[[StepRecord], None]:
    """What stops a run after a step: Ctrl-C, or a signal."""

    def on_step(record: StepRecord) -> None:
        if record.step == step and number is None:
            raise KeyboardInterrupt
        if record.step == step:
            # not os.kill: another thread could take the signal, some steps later
            signal.raise_signal(number)

    return on_step


def settings(data: str, **changes: object) -> TrainSettings:
    return TrainSettings(**{"steps": 6, "data": data, "warmup_steps": 2, "learning_rate": 1e-2, **changes})
