"""The two errors a person can cause, and the nearest-name hint they carry."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something given cannot be understood. The command line ends with exit code 2."""


class CannotRunError(ValueError):
    """What was asked for is understood but cannot fit or run. Exit code 3."""


EX_TEMPFAIL = 75
"""The exit code of ``sysexits.h`` that says: try again later."""


class StoppedError(Exception):
    """A run was asked to stop and did, with everything written. The command line ends with `EX_TEMPFAIL`."""


class ChangedFileWarning(UserWarning):
    """A file that meshwright wrote is not as it was written."""


def nearest(name: str, options: Iterable[str]) -> str:
    """Returns a suffix such as ``" Did you mean 'fsdp'?"``, or the sorted options when nothing is close."""
    known = sorted(set(options))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]!r}?"
    if len(known) <= 24:
        return f" Known: {', '.join(known)}."
    return ""


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says; the name of its class where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def as_sentence(text: str) -> str:
    """Returns the text as it follows a colon: lower-case first letter, one punctuation mark at the end."""
    ended = text if text.endswith("?") else f"{text.rstrip('.')}."
    return f"{ended[:1].lower()}{ended[1:]}"
