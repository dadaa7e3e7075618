"""Gives mutated inputs to every reader and reports those that end in anything but a message.

    python -m tests.fuzz.fuzz --count 100000 --shell 500 --seed 1 --minutes 60

Input N of a seed is the same in every run: ``--only N`` gives it again, with its traceback.
"""

import argparse
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import click

from meshwright.core.errors import CannotRunError, InputError
from tests.fuzz.readers import ROOT, Reader, readers

MOST_S, MOST_BYTES = 10, 2 * 2**30
MESSAGES = (InputError, CannotRunError, click.ClickException, click.exceptions.Exit)
"""What an input may end in, besides an answer."""
MOST_MESSAGE = 5_000
CHOSEN = "FUZZED_READERS"


class Find(NamedTuple):
    """An input that ended in something else."""

    number: int
    reader: str
    what: str


def chosen(folder: Path) -> dict[str, Reader]:
    """Returns the readers that ``--readers`` names, all if it names none."""
    found, names = readers(folder), os.environ.get(CHOSEN, "")
    return {name: found[name] for name in names.split(",")} if names else found


def made(found: dict[str, Reader], seed: int, number: int) -> tuple[str, Any]:
    """Returns the reader and the input of a number."""
    rng = random.Random(f"{seed} {number}")
    name = rng.choices(list(found), [reader.share for reader in found.values()])[0]
    return name, found[name].make(rng)


def fault(reader: Reader, given: Any, folder: Path) -> str:
    """Returns how reading failed, empty if it did not: an error that is no message, or a message of many lines."""
    try:
        reader.read(given, folder)
    except MESSAGES as error:
        text = str(error)
        if not isinstance(error, click.ClickException) and ("\n" in text or len(text) > MOST_MESSAGE):
            return f"a message of {len(text)} characters: {text[:80]!r}"
    except BaseException as error:
        where = [f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)[-3:]]
        return f"{type(error).__name__}: {str(error)[:120]!r} at {' < '.join(reversed(where))}"
    return ""


def work(seed: int, numbers: range, at: Any, queue: Any) -> None:
    """Reads the inputs of these numbers; ``at`` is the one at work."""
    warnings.simplefilter("ignore")
    os.environ["MESHWRIGHT_CACHE"] = tempfile.mkdtemp()

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {MOST_S} s")

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        found = chosen(folder)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
        for number in numbers:
            at.value = number
            reader, given = made(found, seed, number)
            signal.alarm(MOST_S)
            what = fault(found[reader], given, folder)
            signal.alarm(0)
            if what:
                queue.put(Find(number, reader, what))
    at.value = numbers.stop


def in_process(seed: int, count: int, until: float) -> tuple[int, list[Find]]:
    """Returns how many inputs were read in a process of its own, and the finds; one that dies is started again."""
    context, first, finds = multiprocessing.get_context("fork"), 0, list[Find]()
    while first < count and time.monotonic() < until:
        at, queue = context.Value("q", first), context.SimpleQueue()
        child = context.Process(target=work, args=(seed, range(first, count), at, queue))
        child.start()
        seen, since = first, time.monotonic()
        while child.is_alive() and time.monotonic() < until:
            child.join(0.2)
            while not queue.empty():
                finds.append(queue.get())
            if at.value != seen:
                seen, since = at.value, time.monotonic()
            elif time.monotonic() - since > 3 * MOST_S:
                child.kill()
        child.kill()
        child.join()
        while not queue.empty():
            finds.append(queue.get())
        first = at.value
        if first < count and time.monotonic() < until:
            finds.append(Find(first, made(chosen(Path(tempfile.mkdtemp())), seed, first)[0], "it stuck, or died"))
            first += 1
    return first, finds


def through_the_shell(seed: int, count: int, until: float) -> tuple[int, list[Find]]:
    """The same for whole processes of the command line: exit codes, and one line on standard error."""
    finds, rng = [], random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MESHWRIGHT_CACHE": tempfile.mkdtemp()}
    with tempfile.TemporaryDirectory() as name:
        found = chosen(Path(name))
        for number in range(count):
            if time.monotonic() > until:
                return number, finds
            if not (known := [one for one in VERBS if one in found]):
                return 0, finds
            reader = rng.choice(known)
            given = found[reader].make(rng)
            words = given if reader == "command" else [*VERBS[reader].split(), _written(given, Path(name), reader)]
            start = time.monotonic()
            try:
                done = subprocess.run(
                    [sys.executable, "-c", "from meshwright.cli.main import main; main()", *words],
                    cwd=name, env=environment, capture_output=True, timeout=3 * MOST_S, check=False,
                )  # fmt: skip
            except (subprocess.TimeoutExpired, ValueError, OSError) as error:
                if isinstance(error, subprocess.TimeoutExpired):
                    finds.append(Find(number, reader, f"{time.monotonic() - start:.0f} s: {words}"[:300]))
                continue  # a word with a zero byte cannot be given to a process
            said = done.stderr.decode(errors="replace")
            lines = [line for line in said.splitlines() if line.startswith("meshwright: ")]
            lines = [line for line in lines if not line.endswith(", and is not read.")]  # of unknown keys of a config
            if done.returncode not in (0, 2, 3) or "Traceback" in said or "internal error" in said:
                finds.append(Find(number, reader, f"exit {done.returncode}: {said[:300]!r} of {words}"[:600]))
            elif done.returncode and (len(lines) != 1 or len(lines[0]) > MOST_MESSAGE):
                finds.append(Find(number, reader, f"{len(lines)} lines: {said[:300]!r}"))
    return count, finds


VERBS = {
    "show config": "show", "show cluster": "show", "explain": "explain", "hlo": "hlo",
    "show schedule": "schedule --table", "command": "", "records": "accuracy",
    "planned": "plan tiny --on v5e:2x2 --batch 8seq --seq 64 --set",
}  # fmt: skip
"""Reader -> the words before its input on a command line."""
_SUFFIX = {"show config": ".json", "hlo": ".hlo", "show schedule": ".txt", "records": ".jsonl"}


def _written(given: Any, folder: Path, reader: str) -> str:
    if isinstance(given, str):
        return given.replace("\0", "")
    path = folder / f"given{_SUFFIX.get(reader, '.toml')}"
    path.write_bytes(given)
    return str(path)


def main() -> int:
    """Prints each kind of find once; the exit code is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag, default in (("count", 100_000), ("shell", 500), ("seed", 1), ("minutes", 60), ("only", -1)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--readers", default="", help="names, by commas; all by default")
    asked = parser.parse_args()
    os.environ[CHOSEN] = asked.readers
    if asked.only >= 0:
        folder = Path(tempfile.mkdtemp())
        os.chdir(folder)
        found = chosen(folder)
        name, given = made(found, asked.seed, asked.only)
        print(name, repr(given)[-3000:])
        found[name].read(given, folder)
        return 0
    until = time.monotonic() + 60 * asked.minutes
    read, finds = in_process(asked.seed, asked.count, until)
    run, more = through_the_shell(asked.seed, asked.shell, until)
    kinds = Counter((find.reader, find.what.partition(" at ")[2] or find.what) for find in finds)
    for (reader, where), count in kinds.most_common():
        first = next(find for find in finds if find.reader == reader and where in find.what)
        print(f"{count:6} x {reader} (--only {first.number}): {first.what}")
    for find in more:
        print(f"   shell {find.reader}: {find.what}")
    print(
        f"seed {asked.seed}: {read:,} inputs in process, {len(finds)} finds; {run} through the shell, {len(more)} finds"
    )
    return 1 if finds or more else 0


if __name__ == "__main__":
    sys.exit(main())
