"""Damages every file that meshwright writes, and looks whether whoever reads it gives other numbers without a word.

    python -m tests.corruption.trial [--cases 500] [--seed 0]

A case copies what was written, damages one file (a bit flipped, the end cut off, the file deleted, or swapped with
another of the same name) and runs the verb that reads it. Right is: the same numbers; or an error in one line that is
no internal error; or other numbers with a line on standard error that the undamaged files do not give.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.golden.product import call

DAMAGES = ("flip", "cut", "delete", "swap")
SMALL = (
    *("--set", "model.num_layers=2", "--set", "model.d_model=32", "--set", "model.d_ff=64"),
    *("--set", "model.head_dim=8", "--set", "model.vocab_size=300", "--batch", "8seq", "--seq", "32"),
)
STEPS = 6


class Outcome(NamedTuple):
    """Exit code, the numbers of the answer, and the lines of standard error that say more than progress."""

    code: int
    numbers: Any
    said: frozenset[str]


class Reader(NamedTuple):
    """Files that were written, below ``folder``, and what reads them in a copy: arguments, the numbers to compare."""

    name: str
    folder: str
    arguments: Callable[[Path], list[str]]
    numbers: Callable[[Path, Mapping[str, Any]], Any]
    env: str = ""


def readers() -> list[Reader]:
    """All kinds of files, each with the verb that reads it."""

    def trained(at: Path, answer: Mapping[str, Any]) -> Any:
        return [answer["losses"], answer["validation_loss"], _digest(next(at.rglob("model.safetensors")))]

    def weights(at: Path, answer: Mapping[str, Any]) -> Any:
        return [
            answer["num_params"],
            _digest(at / "out" / "model.safetensors"),
            (at / "out" / "config.json").read_text(),
        ]

    return [
        Reader("plan", "plan", lambda at: ["explain", f"{at}/plan.toml"], lambda at, answer: answer),
        Reader(
            "rates",
            "rates",
            lambda at: ["plan", "tiny", *SMALL, "--on", "cpu:8", "--calibration", f"{at}/rates.toml", "--top", "3"],
            lambda at, answer: answer["strategies"],
        ),
        Reader("run", "run", lambda at: ["train", "--resume", f"{at}/mini-001", "--steps", str(STEPS)], trained),
        Reader("checkpoint", "run", lambda at: ["convert", f"{at}/mini-001", f"{at}/out", "--step", "4"], weights),
        Reader("weights", "model", lambda at: ["convert", f"{at}/mini", f"{at}/out"], weights),
        Reader(
            "model",
            "model",
            lambda at: ["generate", f"{at}/mini", "--prompt", "The", "--max-tokens", "4", "--on", "cpu:1"],
            lambda at, answer: [one["text"] for one in answer["completions"]],
        ),
        Reader(
            "tokens",
            "cache",
            lambda at: [
                *("train", str(at.parent / "written" / "plan" / "plan.toml"), "--steps", "2", "--runs", f"{at}/runs"),
                *("--data", str(at.parent / "written" / "text.txt")),
            ],
            lambda at, answer: [answer["losses"], answer["validation_loss"]],
            env="MESHWRIGHT_CACHE",
        ),
    ]


def write_all(folder: Path) -> None:
    """Writes one of each: a plan, rates, a run of four steps with two checkpoints, weights, a store of tokens."""
    from tests.cli.made_rates import write_rates
    from tests.train.small import write_text

    written = folder / "written"
    written.mkdir()
    text = write_text(written)
    os.environ["MESHWRIGHT_CACHE"] = str(written / "cache")
    rates = write_rates(written)
    (written / "rates").mkdir()
    from meshwright.spec.calibration import load_calibration, save_calibration

    save_calibration(load_calibration(rates), written / "rates" / "rates.toml")
    plan = str(written / "plan" / "plan.toml")
    _must("plan", "tiny", *SMALL, "--on", "cpu:1", "--set", "model.name=mini", "--calibration", str(rates), "-o", plan)
    run = ["train", plan, "--steps", "4", "--data", text, "--set", "train.checkpoint_every=2"]
    _must(*run, "--runs", str(written / "run"), "--set", "train.evaluate_every=2")
    _must("convert", str(written / "run" / "mini-001"), str(written / "model" / "mini"))


def _must(*arguments: str) -> None:
    outcome = call(list(arguments))
    assert outcome[0] == 0, outcome


def outcome(reader: Reader, at: Path) -> Outcome:
    """What the reader makes of the files in ``at``."""
    before = os.environ.get(reader.env) if reader.env else None
    if reader.env:
        os.environ[reader.env] = str(at)
    try:
        code, out, err = call([*reader.arguments(at), "--json"])
    finally:
        if before is not None:
            os.environ[reader.env] = before
    said = frozenset(line for line in err.replace(str(at), "AT").splitlines() if not _PROGRESS.search(line))
    numbers = reader.numbers(at, json.loads(out)) if code == 0 else None
    return Outcome(code, json.loads(json.dumps(numbers).replace(str(at), "AT")), said)


_PROGRESS = re.compile(r"^step \d+|compiled in|^mini on|predicted|^mini:|goes on after|held-out|of weights on each")


def cases(folder: Path, count: int, seed: int) -> Iterator[tuple[Reader, str, str]]:
    """(reader, file, damage), so that every file of every reader comes with every damage before any comes again.

    The first is a plan that is not there, which is always refused; one that is cut off among its predictions is not.
    Which files a checkpoint has, and so what a seed draws, differs from run to run, and a few cases may all be ones
    that change nothing.
    """
    chosen = random.Random(seed)
    each = []
    for reader in readers():
        root = folder / "written" / reader.folder
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and _is_ours(path))
        each += [(reader, file, damage) for file in files for damage in DAMAGES]
    chosen.shuffle(each)
    each.sort(key=lambda case: (case[0].name, case[2]) != ("plan", "delete"))
    yield from itertools.islice(itertools.cycle(each), count)


def _is_ours(path: Path) -> bool:
    """Programs that JAX keeps are its own files; their compression has a checksum."""
    return "xla" not in path.parts and not path.name.startswith(".")


def damaged(path: Path, damage: str, chosen: random.Random) -> None:
    """Damages a file; a swap takes the content of the nearest other file of its name, or turns its halves around."""
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: chosen.randrange(len(data))] if data else b"")
    elif damage == "flip":
        changed = bytearray(data or b"\0")
        changed[chosen.randrange(len(changed))] ^= 1 << chosen.randrange(8)
        path.write_bytes(changed)
    else:
        # A plan or rates that stand alone may be any: another whole file of that kind is not damage.
        alone = path.parent.name == "at"
        others = [] if alone else [one for one in path.parents[2].rglob(path.name) if one != path and one.is_file()]
        half = len(data) // 2
        path.write_bytes(others[0].read_bytes() if others else data[half:] + data[:half])


def verdict(before: Outcome, after: Outcome) -> str:
    """``"same"``, ``"refused"``, ``"said"``, or what is wrong."""
    if after.code == 1 or any("internal error" in line or "Traceback" in line for line in after.said):
        return "WRONG: internal error"
    if after.code:
        return "refused" if any(line.startswith("meshwright:") for line in after.said) else "WRONG: no line"
    if after.numbers == before.numbers:
        return "same"
    return "said" if after.said - before.said else "WRONG: other numbers without a word"


def run_trial(count: int, seed: int, *, show: Callable[[str], object] = print) -> Counter[str]:
    """Runs cases; shows those that are wrong, and returns how many ended how."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ):
        folder = Path(name)
        write_all(folder)
        whole: dict[str, Outcome] = {}
        for number, (reader, file, damage) in enumerate(cases(folder, count, seed)):
            at = folder / "at"
            source = folder / "written" / reader.folder
            for copy in (False, True) if reader.name not in whole else (True,):
                shutil.rmtree(at, ignore_errors=True)
                shutil.copytree(source, at)
                if copy:
                    damaged(at / file, damage, random.Random(f"{seed} {number}"))
                else:
                    whole[reader.name] = outcome(reader, at)
                    assert whole[reader.name].code == 0, whole[reader.name]
            after = outcome(reader, at)
            ended = verdict(whole[reader.name], after)
            found[ended] += 1
            if ended.startswith("WRONG"):
                show(f"{number}: {reader.name}, {file}, {damage}: {ended} {after.code} {sorted(after.said)}")
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    import tests.conftest

    assert tests.conftest
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    ended = run_trial(given.cases, given.seed)
    print(", ".join(f"{count} {how}" for how, count in sorted(ended.items())))
    sys.exit(any(how.startswith("WRONG") for how in ended))
