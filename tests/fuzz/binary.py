"""Readers of binary files: traces, Parquet, corpora of tokens, pickled weights; and of files that a run leaves."""

import io
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.core.digests import read_sums, require_intact, summed_line
from meshwright.nn.hf.files import open_checkpoint
from meshwright.profile.events import STEP, load_trace
from meshwright.profile.hlo import parse_program
from meshwright.profile.times import measure_times
from meshwright.train.data.text import open_corpus
from meshwright.train.data.token_files import INDEX_MAGIC, open_tokens
from meshwright.train.data.token_store import split
from meshwright.train.record.run_folder import METRICS, RESOLVED, RunFolder, read_resolved
from tests.fuzz.mutations import json_bytes, mutated_bytes, mutated_tree, of_texts, of_trees
from tests.nn.hf.test_pickled import ARRAYS
from tests.nn.hf.test_pickled import write as write_pickled

Make = Callable[[random.Random], bytes]

# -- made ------------------------------------------------------------------------------------------------


def of_bytes(seeds: Sequence[bytes]) -> Make:
    """Makes files with changed bytes, and some with a whole number of their first kilobyte replaced."""

    def make(rng: random.Random) -> bytes:
        data = rng.choice(seeds)
        if rng.random() < 0.6:
            return mutated_bytes(data, rng)
        form = f"<{rng.choice('bhiq')}"
        size = struct.calcsize(form)
        at = rng.randrange(max(1, min(1024, len(data)) - size))
        limit = 2 ** (8 * size - 1)
        value = rng.choice((-1, 0, 1, 2, limit - 1, -limit, limit // 2, rng.randrange(-limit, limit)))
        return data[:at] + struct.pack(form, value) + data[at + size :]

    return make


def parquet() -> list[bytes]:
    """Tables of texts, of chats, and of texts with missing ones, compressed or not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 3
    tables = [
        pa.table({"text": ["one", "two", "three"], "id": [1, 2, 3]}),
        pa.table({"messages": chat}),
        pa.table({"text": ["one", None, "three"]}),
    ]
    found = []
    for table, compression in zip(tables, ("snappy", "none", "gzip"), strict=True):
        file = io.BytesIO()
        pq.write_table(table, file, compression=compression)
        found.append(file.getvalue())
    return found


def tokens() -> dict[str, bytes]:
    """Corpora of tokens by their suffix: NumPy's, Megatron's index, and .bin plain and with llm.c's header."""
    ids, file = np.arange(24, dtype=np.uint16), io.BytesIO()
    np.save(file, ids)
    lengths, firsts = np.array([8, 16], "<i4"), np.array([0, 1, 2], "<i8")
    places = np.array([0, 16], "<i8")
    head = INDEX_MAGIC + struct.pack("<BQQ", 8, len(lengths), len(firsts))
    header = np.zeros(256, "<i4")
    header[:3] = (20240520, 1, len(ids))
    return {
        "npy": file.getvalue(),
        "idx": head + lengths.tobytes() + places.tobytes() + firsts.tobytes(),
        "bin": ids.tobytes(),
        "llmc": header.tobytes() + ids.tobytes(),
    }


PROGRAM = parse_program(
    """HloModule made, is_scheduled=true

ENTRY %main (a: f32[256,256], b: f32[256,256]) -> f32[256,256] {
  %a = f32[256,256]{1,0} parameter(0)
  %b = f32[256,256]{1,0} parameter(1)
  %dot.1 = f32[256,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %all-gather.1 = f32[512,256]{1,0} all-gather(%dot.1), dimensions={0}
}
""",
    ridge=10.0,
)


def _event(name: str, start: int, length: int, **stats: Any) -> dict[str, Any]:
    return {"name": name, "start": start, "length": length, "stats": stats}


TRACES: list[Any] = [
    [
        {"name": "/device:GPU:0", "lines": [{"name": "Stream #1", "events": [
            _event("gemm", 1000, 500, hlo_op="dot.1"), _event("nccl", 1600, 50, hlo_op="all-gather.1")]}]},
        {"name": "/host:CPU", "lines": [{"name": "python", "events": [
            _event(STEP, 0, 5000, step=0), _event(STEP, 5000, 5000, step=1)]}]},
    ],
    [{"name": "/device:TPU:1", "lines": [{"name": "XLA Ops", "events": [
        _event("%dot.1 = f32[256,256] dot(...)", 100, 50), _event("all-gather.1", 150, 20)]}]}],
    [{"name": "/host:CPU", "lines": [{"name": "tf_XLAEigen/1", "events": [
        _event("dot.1", 10, 20, hlo_op="dot.1", device_ordinal=0), _event("wait", 30, 5)]}]}],
]  # fmt: skip
"""Planes of traces with their lines and events, times in nanoseconds."""


def _number(value: int) -> bytes:
    """A number of a protocol buffer; what does not fit 64 bits is cut."""
    value, found = value & (2**64 - 1), bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _field(number: int, value: Any) -> bytes:
    """A field of a protocol buffer: a number, or the length and bytes of a text or a message."""
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    data = value if isinstance(value, bytes) else str(value).encode(errors="replace")
    return _number(number << 3 | 2) + _number(len(data)) + data


def trace_bytes(planes: Any) -> bytes:
    """Returns planes as the profiler writes them (XSpace); anything that is not in its place is left out."""
    return b"".join(_field(1, _plane(plane)) for plane in _listed(planes))


def _plane(plane: dict[str, Any]) -> bytes:
    names: dict[str, int] = {}
    stats: dict[str, int] = {}

    def number(text: Any, table: dict[str, int]) -> int:
        return table.setdefault(str(text), len(table) + 1)

    def event(one: dict[str, Any]) -> bytes:
        times = ((2, one.get("start")), (3, one.get("length")))
        found = _field(1, number(one.get("name"), names))
        found += b"".join(_field(at, 1000 * int(time)) for at, time in times if isinstance(time, int))
        given = one.get("stats") if isinstance(one.get("stats"), dict) else {}
        for name, value in given.items():
            kind = 4 if isinstance(value, int) else 5
            found += _field(4, _field(1, number(name, stats)) + _field(kind, value))
        return found

    lines = b""
    for line in _listed(plane.get("lines")):
        events = b"".join(_field(4, event(one)) for one in _listed(line.get("events")))
        lines += _field(3, _field(2, line.get("name")) + events)
    tables = b"".join(
        _field(at, _field(1, count) + _field(2, _field(1, count) + _field(2, name)))
        for at, table in ((4, names), (5, stats))
        for name, count in table.items()
    )
    return _field(2, plane.get("name")) + lines + tables


def _listed(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def traces(rng: random.Random) -> bytes:
    """A trace with changed names, times and statistics, or with changed bytes."""
    data = trace_bytes(mutated_tree(rng.choice(TRACES), rng))
    return mutated_bytes(data, rng) if rng.random() < 0.3 else data


def metrics() -> list[str]:
    """Lines of metrics as a run writes them."""
    one = {"step": 1, "tokens": 8, "loss": 4.5, "step_s": 0.1, "tokens_per_s": 80.0, "extras": {}}
    return [summed_line({**one, "step": number}).decode() for number in range(1, 5)]


CHATS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         {"prompt": "a", "completion": "b"}]  # fmt: skip

# -- read ------------------------------------------------------------------------------------------------


def read_documents(path: Path) -> None:
    """Reads every piece of a corpus."""
    for piece in open_corpus(str(path)).pieces():
        _ = piece.text


def read_tokens(path: Path) -> None:
    """Reads a corpus of tokens, its parts and documents."""
    found = open_tokens(path, vocab_size=64)
    if found is not None:
        found.read(np.arange(min(len(found), 100)))
        split(found, 0.25)


def read_pair(path: Path) -> None:
    """Reads Megatron's index beside a file of tokens that is as it should be."""
    path.with_suffix(".bin").write_bytes(np.arange(24, dtype=np.uint16).tobytes())
    read_tokens(path)


def read_tensors(path: Path) -> None:
    """Reads the tensors beside a file: of PyTorch, or safetensors."""
    with open_checkpoint(path.parent) as tensors:
        for one in tensors.values():
            _ = one.shape, one.dtype


def read_profile(path: Path) -> None:
    """Reads a trace and sums up its steps."""
    measure_times(load_trace(path, PROGRAM), PROGRAM)


def read_run(path: Path) -> None:
    """Goes on with a run whose metrics are these."""
    with RunFolder(path.parent, {}, step=2):
        pass


def read_digests(path: Path) -> None:
    """Checks a folder against its digests."""
    read_sums(path.parent)
    require_intact(path.parent)


def pickled(folder: Path) -> bytes:
    """A file of arrays as PyTorch writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_pickled(folder / "seed.bin", ARRAYS).read_bytes()


BINARY: dict[str, tuple[str, Callable[[Path], Make], Callable[[Path], None]]] = {
    "parquet": ("p.parquet", lambda folder: of_bytes(parquet()), read_documents),
    "npy": ("n/t.npy", lambda folder: of_bytes([tokens()["npy"]]), read_tokens),
    "bin": ("b/t.bin", lambda folder: of_bytes([tokens()["bin"], tokens()["llmc"]]), read_tokens),
    "megatron": ("i/t.idx", lambda folder: of_bytes([tokens()["idx"]]), read_pair),
    "pickled": ("k/pytorch_model.bin", lambda folder: of_bytes([pickled(folder / "seed-k")]), read_tensors),
    "trace": ("t.xplane.pb", lambda folder: traces, read_profile),
    "chats": ("c.jsonl", lambda folder: of_trees(CHATS, json_bytes), read_documents),
    "metrics": (
        f"r/{METRICS}",
        lambda folder: of_texts(["".join(metrics()), '{"step": 1, "loss": 1.0, "step_s": 1.0}\n' * 2]),
        read_run,
    ),
    "sums": ("s/SHA256SUMS", lambda folder: of_texts([f"{'0' * 64}  a.bin\n{'1' * 64}  b/c.bin\n"]), read_digests),
    "resolved": (
        f"o/{RESOLVED}",
        lambda folder: of_texts(['[model]\nname = "tiny"\n\n[train]\nsteps = 3\ndata = "pydoc"\n']),
        lambda path: print(read_resolved(path.parent), end="", file=io.StringIO()),
    ),
}
"""Reader -> the file's name, how files are made, and how one is read."""
