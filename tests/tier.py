"""How a tier of tests runs: the order of its files, the memory of its workers, and what each file cost.

`conftest.py` loads it. Files come in a random order, whose seed is printed (``--order SEED`` repeats it); tests of one
file stay together, so that they share fixtures. ``--part K/N`` runs the tests whose ids' hash is K modulo N.
"""

import ctypes
import gc
import hashlib
import random
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Linux's files of a process's memory; elsewhere the table has no peaks."""

LARGE, GROWN = 2**30, 2**28
"""Bytes of a worker from which on it drops compiled programs between files, and by which it grows before it does so
again: to drop and to make them anew takes a second and more, and a worker gets 2 GB."""

TIER = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tier")
    group.addoption("--order", type=int, metavar="SEED", help="seed of the order of files; 0 sorts them")
    group.addoption("--part", metavar="K/N", help="run tests whose ids' hash is K modulo N; `day` is a K of each day")


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given:  # all workers must collect the same tests in the same order, also at midnight
        config.stash[TIER] = given["tier"]
        return
    order, part = config.getoption("order"), config.getoption("part")
    if part and not re.fullmatch(r"(day|\d+)/[1-9]\d*", part):
        raise pytest.UsageError(f"--part {part} is not K/N, such as 3/20, or day/N")
    config.stash[TIER] = {
        "order": random.randrange(1, 10**6) if order is None else order,
        "part": part and part.replace("day", str(date.today().toordinal())),
    }
    config.pluginmanager.register(Usage(config.stash[TIER]))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["tier"] = node.config.stash[TIER]


def in_part(identity: str, part: str) -> bool:
    """Returns whether the hash of a test's id is K modulo N, with ``part`` = "K/N"."""
    which, _, count = part.partition("/")
    digest = hashlib.sha256(identity.encode()).digest()
    return (int.from_bytes(digest[:8], "big") - int(which)) % int(count) == 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.stash[TIER]
    if tier["part"]:
        config.hook.pytest_deselected(items=[item for item in items if not in_part(item.nodeid, tier["part"])])
        items[:] = [item for item in items if in_part(item.nodeid, tier["part"])]
    if tier["order"]:
        files = list(dict.fromkeys(item.path for item in items))
        random.Random(tier["order"]).shuffle(files)
        place = {path: number for number, path in enumerate(files)}
        items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    # tests and modules stay to the end: garbage collections need not visit them
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.peak_bytes = _memory("VmHWM")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
    before = set(sys.modules)
    done = yield
    for name in set(sys.modules) - before:
        # a module that a test wrote and imported would be found by the next test that writes one of its name
        if "pytest-of-" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
    if nextitem is None or nextitem.path != item.path:
        _drop_programs(item.config)
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")  # the peak starts anew
    return done


def _drop_programs(config: pytest.Config) -> None:
    """Gives memory of finished tests back to the system where a worker is large."""
    tier = config.stash[TIER]
    most = tier.get("kept", LARGE - GROWN) + GROWN
    if _memory("VmRSS") > most:
        ctypes.CDLL(None).malloc_trim(0)
    if _memory("VmRSS") > most and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        tier["kept"] = max(_memory("VmRSS"), LARGE - GROWN)


def _memory(name: str) -> int:
    """Returns bytes of a line of the process's status; 0 where the system has none."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def sampled(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns cases for `parametrize`, those that are not ``kept`` for the slow tier; a tuple has a value a name."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.slow)
        for case in cases
    ]


class Usage:
    """Seconds of each file's tests, and the peak of the worker that ran them, printed at the end."""

    def __init__(self, tier: dict[str, Any]) -> None:
        self.tier = tier
        self.seconds: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        self.seconds[path] += report.duration
        self.peaks[path] = max(self.peaks[path], getattr(report, "peak_bytes", 0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("files: seconds, and peak memory of the worker")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> Iterator[str]:
        listed = dict(self.seconds.most_common(10)) | dict(self.peaks.most_common(5))
        for path in listed:
            yield f"{self.seconds[path]:8.1f} s {self.peaks[path] / 1e9:6.2f} GB  {path}"
        largest = max(self.peaks.values(), default=0)
        yield f"{self.seconds.total():8.1f} s {largest / 1e9:6.2f} GB  all; --order {self.tier['order']}"
