"""The errors that a person can cause, and how their messages are worded."""

import difflib
import errno
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

OF_PATHS = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
"""Error numbers of a file or folder that is missing or not writable, and of names that no file can have."""


MOST_PIECE, MOST_MESSAGE = 200, 4_000
"""Most characters of one word or quotation in a message, and of the whole message."""
_PIECE = re.compile(r"""(?<!\w)(['"])(?:(?!\1).)+\1|[^\s'"]+""")


def one_line(text: str) -> str:
    """Returns a message without line breaks and other control characters, and with long words and quotes cut."""

    def cut(piece: str, max_len: int) -> str:
        return piece if len(piece) <= max_len else f"{piece[: max_len - 60]}... ({len(piece):,} characters)"

    plain_text = "".join(" " if char.isspace() else char if char.isprintable() else ascii(char)[1:-1] for char in text)
    plain_text = re.sub(" {9,}", " ", plain_text)
    return cut(_PIECE.sub(lambda match: cut(match[0], MOST_PIECE), plain_text), MOST_MESSAGE)


class UserError(ValueError):
    """An error whose text is one line of limited length, whatever input it quotes."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class InputError(UserError):
    """An input is not valid. The command line ends with exit code 2."""


class CannotRunError(UserError):
    """A valid request cannot fit in memory or cannot run. The command line ends with exit code 3."""


EX_TEMPFAIL = 75
"""The exit code of ``sysexits.h`` that says: try again later."""


class StoppedError(Exception):
    """A run was asked to stop and did, with everything written. The command line ends with `EX_TEMPFAIL`."""


class FileWarning(UserWarning):
    """A file was changed after meshwright wrote it, or has parts that are not read."""


def nearest(name: str, options: Iterable[str]) -> str:
    """Returns ``" Did you mean 'fsdp'?"`` with the closest option; if none is close, up to 30 options, else ""."""
    sorted_names = sorted(set(options))
    close_names = difflib.get_close_matches(name, sorted_names, n=1, cutoff=0.5)
    if close_names:
        return f" Did you mean {close_names[0]!r}?"
    if len(sorted_names) <= 30:
        return f" Known: {', '.join(sorted_names)}."
    return ""


def require_known(what: str, name: str, options: Collection[str]) -> None:
    """Raises InputError, which suggests the `nearest` option, if a name is not among the options."""
    if name not in options:
        raise InputError(f"{what} {name!r} is not known.{nearest(name, options)}")


@contextmanager
def path_errors() -> Iterator[None]:
    """Turns an OSError about a file or folder that cannot be read or written into an InputError."""
    try:
        yield
    except OSError as error:
        path_text = error.filename2 or error.filename
        if error.errno not in OF_PATHS or not path_text:
            raise
        raise InputError(f"{path_text}: {error.strerror}. Name another file or folder.") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text; the name of its class if the text is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def as_sentence(text: str) -> str:
    """Returns a text to follow a colon: its first letter in lower case, but for acronyms (OOM), and one final mark."""
    sentence = text if text.endswith("?") else f"{text.rstrip('.')}."
    return sentence if sentence[1:2].isupper() else f"{sentence[:1].lower()}{sentence[1:]}"
