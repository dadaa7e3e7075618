"""The documents a run learns from: Python's own documentation, or any text files."""

from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.train.settings import PYDOC

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
"""Files that are read from a folder; a file given by name may have any suffix."""


def read_documents(data: str) -> tuple[str, ...]:
    """The texts that ``TrainSettings.data`` names, in a fixed order.

    Raises InputError for a path that is missing, empty or not UTF-8.
    """
    if data == PYDOC:
        return _pydoc_topics()
    path = Path(data).expanduser()
    if not path.exists():
        raise InputError(f"data {data!r} is not there. Give a text file, a folder of them, or {PYDOC!r}.")
    documents = tuple(text for file in _files(path) if (text := _read(file)).strip())
    if not documents:
        raise InputError(f"data {data!r} holds no text. Give a text file, a folder of them, or {PYDOC!r}.")
    return documents


def _pydoc_topics() -> tuple[str, ...]:
    """The reference texts of Python's ``help()``, one document per topic: 465 kB in CPython 3.11."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("this Python comes without pydoc_data. Give a text file or a folder of them.") from None
    return tuple(topics[name] for name in sorted(topics))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file()]
    visible = [f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    if not visible:
        raise InputError(f"folder {str(path)!r} has no {', '.join(TEXT_SUFFIXES)} files. Name one that has.")
    return sorted(visible)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8 text (byte {error.start}). Convert it, or leave it out of the folder."
        ) from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
