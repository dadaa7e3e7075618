"""Shows how far long work is: one line on standard error, on a terminal only, rewritten and erased at the end."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Lock, Thread
from time import perf_counter

from meshwright.core.progress import RunningWork, shown_by
from meshwright.core.units import format_seconds

AFTER_S, EVERY_S = 2.0, 0.25
"""Seconds of a wait after which the line is drawn, and between two lines."""
MOST_COUNTED = 100_000
"""Total above which the line has a percentage in place of counts."""


class ProgressLine:
    """The progress line of a verb. A thread draws it, so that the seconds of one long compilation are seen to pass."""

    def __init__(self) -> None:
        self._lock, self._ended, self._running, self._text = Lock(), Event(), list[RunningWork](), ""
        self._quiet_s, self._stream = perf_counter(), sys.stderr
        self._thread: Thread | None = None

    def follow(self, running: Sequence[RunningWork]) -> None:
        """Draws the line of this work from now on; erases the line if no work is running."""
        with self._lock:
            self._running = list(running)
            if not running:
                self._write("")
        if running and self._thread is None:
            self._thread = Thread(target=self._draw, name="progress", daemon=True)
            self._thread.start()

    def erase(self) -> None:
        """Erases the line before other text is printed, after which the wait counts anew."""
        with self._lock:
            self._write("")
            self._quiet_s = perf_counter()

    def close(self) -> None:
        """Erases the line for good."""
        self._ended.set()
        self.follow([])

    def _draw(self) -> None:
        while not self._ended.wait(EVERY_S):
            with self._lock:
                if self._running and perf_counter() - self._quiet_s >= AFTER_S:
                    work = next((work for work in self._running if work.total > 1), self._running[-1])
                    self._write(words_of(work, perf_counter())[: shutil.get_terminal_size((80, 24)).columns - 1])

    def _write(self, text: str) -> None:
        if text != self._text:
            self._stream.write(f"\r{text:<{len(self._text)}}" + "\r" * (not text))
            self._stream.flush()
            self._text = text


_lines: list[ProgressLine] = []


def erase_progress() -> None:
    """Erases the line that is shown, if there is one, before other text is printed."""
    if _lines:
        _lines[-1].erase()


@contextmanager
def progress_shown(is_wanted: bool) -> Iterator[None]:
    """Returns a context that shows running work by a `ProgressLine`, if ``is_wanted``.

    Shows nothing if standard error is no terminal, in a CI job (variable CI), and inside another such context.
    """
    if not is_wanted or _lines or os.environ.get("CI") or not sys.stderr.isatty():
        yield
        return
    _lines.append(line := ProgressLine())
    try:
        with shown_by(line.follow):
            yield
    finally:
        _lines.remove(line)
        line.close()


def words_of(work: RunningWork, now_s: float) -> str:
    """Returns ``"compiling programs: 2 of 4, 27 s, about 20 s more"``."""
    done, total = work.done, work.total
    count_text = f" {done:,} of {total:,}" if total <= MOST_COUNTED else f" {done / total:.0%}"
    left_s = (now_s - work.rated_s) / max(done, 1) * (total - done)
    parts = [f"{work.what}{f':{count_text}' * (total > 1)}", format_seconds(max(1, round(now_s - work.start_s)))]
    return ", ".join([*parts, *[f"about {format_seconds(max(1, round(left_s)))} more"] * (0 < done < total)])
