"""The pipeline schedules by name: every module of this folder with a ``SCHEDULE``, and the files that persons write."""

import functools
import importlib
import pkgutil
from pathlib import Path

from meshwright.algebra import schedules
from meshwright.algebra.schedules.definition import ScheduleDefinition
from meshwright.algebra.schedules.file import schedule_of_file
from meshwright.algebra.schedules.table import Schedule
from meshwright.core.errors import InputError, nearest


@functools.cache
def definitions() -> dict[str, ScheduleDefinition]:
    """Returns the schedules of this folder by name, oldest first."""
    modules = (
        importlib.import_module(f"{schedules.__name__}.{m.name}") for m in pkgutil.iter_modules(schedules.__path__)
    )
    listed_schedules = [module.SCHEDULE for module in modules if hasattr(module, "SCHEDULE")]
    return {each.name: each for each in sorted(listed_schedules, key=lambda each: (each.year, each.name))}


def schedule_names() -> tuple[str, ...]:
    """Returns the names of all schedules, oldest first."""
    return tuple(definitions())


def searched_schedules(*, every: bool) -> tuple[str, ...]:
    """Returns the schedules that a search tries: first the oldest "usual" one, which screens meshes, then the rest by
    age.

    They have ``search="usual"``, or with ``every`` also ``search="full"``."""
    searches = ("usual", "full") if every else ("usual",)
    searched_names = [schedule.name for schedule in definitions().values() if schedule.search in searches]
    first_name = next(schedule.name for schedule in definitions().values() if schedule.search == "usual")
    return first_name, *(name for name in searched_names if name != first_name)


def definition(name: str) -> ScheduleDefinition:
    """Returns the schedule called ``name``, or of the file at that path. Raises InputError if there is neither."""
    schedule = definitions().get(name)
    if schedule is not None:
        return schedule
    if Path(name).is_file():
        return schedule_of_file(name)
    raise InputError(f"schedule {name!r} is not known.{nearest(name, schedule_names())}")


def build(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the rows of a schedule over ``stages`` devices, each holding ``chunks`` virtual stages.

    Raises InputError for sizes that the schedule does not exist for.
    """
    return definition(name).build(stages, microbatches, chunks)


def default_chunks(name: str) -> int:
    """Returns the fewest chunks per device that a schedule exists for."""
    return definition(name).chunks
