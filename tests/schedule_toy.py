"""A pipeline schedule of one file with nothing but an order, put into the folder of schedules for a test."""

from contextlib import contextmanager
from unittest.mock import patch

import msgspec

from meshwright.algebra import schedules
from meshwright.algebra.schedules import registry

NAME = "last-in-first-out"

FILE = '''
"""GPipe with the backward passes of the last microbatches first."""

from meshwright.algebra.schedules.definition import ScheduleDefinition
from meshwright.algebra.schedules.table import StagePass


def order(device, *, stages, microbatches, chunks):
    yield from (StagePass("F", m) for m in range(microbatches))
    yield from (StagePass("B", m) for m in reversed(range(microbatches)))


SCHEDULE = ScheduleDefinition(name="last-in-first-out", year=2026, order=order)
'''


@contextmanager
def added_file(folder):
    """The toy's file in the package, as if it lay there."""
    (folder / "meshwright_toy_schedule.py").write_text(FILE)
    with patch.object(schedules, "__path__", [*schedules.__path__, str(folder)]):
        registry.definitions.cache_clear()
        try:
            yield NAME
        finally:
            registry.definitions.cache_clear()


@contextmanager
def without_forms(name):
    """A schedule as if its file had no closed forms."""
    given = registry.definitions()
    bare = msgspec.structs.replace(given[name], forms=None, lockstep=None)
    with patch.object(registry, "definitions", lambda: given | {name: bare}):
        yield
