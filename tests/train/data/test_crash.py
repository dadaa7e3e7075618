"""No sample twice and none left out, whatever is killed: processes that die with SIGKILL, and others that go on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from meshwright.train.data.batches import Batches, Source
from meshwright.train.data.token_store import TokenStore

SEQ_LEN, NUM_DOCUMENTS = 16, 60

STARTER = """
import json, os, signal, sys
from pathlib import Path
from meshwright.train.data.batches import Ahead, Batches, Source
from meshwright.train.data.token_store import TokenStore

def work(rank, size, first, batch_seqs):
    source = Source(TokenStore.open(folder, dtype="uint32"))
    batches = Batches((source,), batch_seqs=batch_seqs, seq_len=16, seed=3)
    mine = slice(rank * batch_seqs // size, (rank + 1) * batch_seqs // size)
    with Ahead(lambda first: batches.rows(first, mine), start=first, stride=batch_seqs) as ahead:
        for first, rows in ahead:
            # A commit as a checkpoint makes it: written aside, then renamed; whole once each process has its part.
            aside = folder / f".{first}.{rank}"
            aside.write_text(json.dumps(rows["tokens"].tolist()))
            os.rename(aside, folder / f"commit-{first}-{batch_seqs}-{rank}-of-{size}")

folder = Path(sys.argv[1])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    # Forked, because importing JAX once is what takes the time here.
    pid = os.fork()
    if not pid:
        work(*map(int, line.split()))
    print(pid, flush=True)
"""


def write_store(folder: Path) -> TokenStore:
    """Documents of random lengths; token i is i, so that a token names its place."""
    lengths = np.random.default_rng(0).integers(2, 40, NUM_DOCUMENTS)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
    np.arange(int(starts[-1]), dtype=np.uint32).tofile(folder / "tokens")
    starts.tofile(folder / "starts")
    return TokenStore.open(folder, dtype="uint32")


def committed(folder: Path) -> tuple[int, list[list[int]]]:
    """Samples in all whole commits, and the tokens of their rows in order; a commit without all parts is none."""
    parts: dict[tuple[int, int, int], dict[int, Path]] = {}
    for path in folder.glob("commit-*"):
        first, batch_seqs, rank, _, size = (int(w) if w.isdigit() else 0 for w in path.name.split("-")[1:])
        parts.setdefault((first, batch_seqs, size), {})[rank] = path
    count, rows = 0, []
    for (first, batch_seqs, size), found in sorted(parts.items()):
        if first == count and len(found) == size:
            count += batch_seqs
            rows += [row for rank in range(size) for row in json.loads(found[rank].read_text())]
    return count, rows


def run_until_killed(starter: subprocess.Popen, folder: Path, *, processes: int, batch_seqs: int, more: int) -> None:
    """Go on from the last whole commit with so many processes; kill them after ``more`` whole commits."""
    start, _ = committed(folder)
    for path in folder.glob("commit-*"):
        # What was not whole is no commit, and is removed as a checkpointer does at its start.
        if int(path.name.split("-")[1]) >= start:
            path.unlink()
    pids = []
    try:
        for rank in range(processes):
            starter.stdin.write(f"{rank} {processes} {start} {batch_seqs}\n")
            starter.stdin.flush()
            pids.append(int(starter.stdout.readline()))
        until = time.monotonic() + 60
        while any(len([*folder.glob(f"commit-*-{rank}-of-{processes}")]) < more for rank in range(processes)):
            assert time.monotonic() < until
            time.sleep(random.uniform(0, 0.003))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            time.sleep(0.001)


def test_no_sample_is_repeated_or_skipped_when_processes_are_killed(tmp_path):
    source = Source(write_store(tmp_path))
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    counts = [0]
    try:
        for processes, batch_seqs, more in ((2, 8, 5), (1, 8, 3), (3, 6, 5)):
            run_until_killed(starter, tmp_path, processes=processes, batch_seqs=batch_seqs, more=more)
            counts.append(committed(tmp_path)[0])
            assert counts[-1] >= counts[-2] + more * batch_seqs
    finally:
        starter.communicate()
    count, rows = committed(tmp_path)
    reader = Batches((source,), batch_seqs=1, seq_len=SEQ_LEN, seed=3)
    size = len(reader.samples[0].rows)
    assert len(rows) == count > size
    # Just what one process without a crash reads.
    assert rows == [reader.rows(sample)["tokens"][0].tolist() for sample in range(count)]
    # And on its own: in every epoch each row once. A row is named by its first token.
    for start in range(0, count, size):
        epoch = Counter(row[0] for row in rows[start : start + size])
        assert set(epoch.values()) == {1}
        assert len(epoch) == min(size, count - start)
