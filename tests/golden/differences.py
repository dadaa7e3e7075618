"""What differs between two trees of plain data, and which of it somebody has accepted."""

import difflib
import fnmatch
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

MISSING = "(missing)"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One place where a golden file and what is found now differ.

    ``where`` is kind/case/path. ``old`` and ``new`` are the values; of a list of lines, one of them is a line and the
    other is None. ``text`` is how it is printed after the place.
    """

    where: str
    old: Any
    new: Any
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def compare(old: Any, new: Any, where: str) -> Iterator[Difference]:
    """Every difference below ``where``. A key that only the new data have is none: keys may be added.

    Lists of texts are compared as lines, rows that have names by these, others place by place. NaN equals NaN.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            if key in new:
                yield from compare(value, new[key], f"{where}/{key}")
            else:
                yield _changed(f"{where}/{key}", value, MISSING)
    elif _are_lines(old) and _are_lines(new) and (old or new):
        yield from _compare_lines(old, new, where)
    elif (named_old := _by_name(old)) and (named_new := _by_name(new)):
        yield from compare(named_old, named_new, where)
        order_old, order_new = (
            [name for name in rows if name in {*named_old} & {*named_new}] for rows in (named_old, named_new)
        )
        if order_old != order_new:
            yield _changed(f"{where}/order", order_old, order_new)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield _changed(f"{where}/length", len(old), len(new))
        for number, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from compare(one, other, f"{where}/{number}")
    elif not _same(old, new):
        yield _changed(where, old, new)


def _by_name(value: Any) -> dict[str, Any] | None:
    """The rows of a list by what tells each from all others, None for what is no such list."""
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        for key in ("name", "chip"):
            if len(names := {str(row.get(key)) for row in value} - {"None"}) == len(value):
                return dict(zip((str(row[key]) for row in value), value, strict=True)) if names else None
    return None


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    return bool(old == new) or (old != old and new != new)


def _changed(where: str, old: Any, new: Any) -> Difference:
    return Difference(where=where, old=old, new=new, text=f"{_short(old)} -> {_short(new)}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"


def _are_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _compare_lines(old: Sequence[str], new: Sequence[str], where: str) -> Iterator[Difference]:
    """Lines taken away and lines added, each by its number in the file that has it."""
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        for number in range(a, b):
            yield Difference(where=f"{where}/-{number + 1}", old=old[number], new=None, text=f"- {old[number]}")
        for number in range(c, d):
            yield Difference(where=f"{where}/+{number + 1}", old=None, new=new[number], text=f"+ {new[number]}")


# -- what is accepted ----------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the list of accepted differences.

    ``where`` are patterns over kind/case/path, in which ``*`` stands for any text. A difference must match one of them
    and every further condition: ``within``, the largest change of a number relative to the old one; ``text``, a
    regular expression that is searched in ``- line``, ``+ line`` or ``old -> new``. With a ``digest`` the entry stands
    for exactly the differences that were looked at: of any others it takes none. ``reason`` is a sentence.
    """

    where: tuple[str, ...]
    reason: str
    within: float | None = None
    text: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        if len(self.reason.split()) < 3:
            raise ValueError(f"the reason of {', '.join(self.where)} is not a sentence")
        re.compile(self.text)

    def takes(self, difference: Difference) -> bool:
        """Whether the entry accepts a difference."""
        if not any(fnmatch.fnmatchcase(difference.where, pattern) for pattern in self.where):
            return False
        if self.text and not re.search(self.text, difference.text):
            return False
        return self.within is None or _relative(difference.old, difference.new) <= self.within


NOISE = 1e-12


def digest_of(differences: Sequence[Difference]) -> str:
    """Sixteen digits that stand for these differences: the places and what is found there now, numbers to nine digits.

    What is below ``NOISE`` is what a difference of equal numbers leaves, which another processor leaves differently.
    """
    lines = sorted(f"{one.where}: {_rounded(one.new)}" for one in differences)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _rounded(value: Any) -> str:
    if not isinstance(value, float):
        return repr(value)
    return f"{0.0 if abs(value) < NOISE else value:.9g}"


def _relative(old: Any, new: Any) -> float:
    """How far a number has moved, relative to what it was; infinity for what is no number."""
    before, after = _number(old), _number(new)
    if before is None or after is None:
        return float("inf")
    if before == after:
        return 0.0
    return abs(after - before) / abs(before) if before else float("inf")


def _number(value: Any) -> float | None:
    """A number as such; float hex too, as losses are kept."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"-?0x[01]\.[0-9a-f]+p[+-]\d+", value):
        return float.fromhex(value)
    return None


def read_accepted(path: Path) -> tuple[Accepted, ...]:
    """The entries ``[[accepted]]`` of a TOML file."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, tuple[Accepted, ...]]).get("accepted", ())


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Differences that nobody has accepted, how many each entry takes, entries that take none, and those whose digest
    is another one now."""

    refused: tuple[Difference, ...]
    counts: tuple[tuple[Accepted, int], ...]
    stale: tuple[Accepted, ...]
    moved: tuple[tuple[Accepted, str], ...]


def judge(differences: Sequence[Difference], accepted: Sequence[Accepted], kinds: Sequence[str]) -> Verdict:
    """Each difference goes to the first entry that takes it. An entry is stale where it takes none and one of its
    patterns speaks of a kind that was compared."""
    taken: list[list[Difference]] = [[] for _ in accepted]
    refused = []
    for difference in differences:
        number = next((n for n, entry in enumerate(accepted) if entry.takes(difference)), None)
        (refused if number is None else taken[number]).append(difference)
    asked = [pair for pair in zip(accepted, taken, strict=True) if _speaks_of(pair[0], kinds)]
    moved = [(entry, found) for entry, found in asked if found and entry.digest not in ("", digest_of(found))]
    refused.extend(difference for _, found in moved for difference in found)
    return Verdict(
        refused=tuple(refused),
        counts=tuple((entry, len(found)) for entry, found in asked if found),
        stale=tuple(entry for entry, found in asked if not found),
        moved=tuple((entry, digest_of(found)) for entry, found in moved),
    )


def _speaks_of(entry: Accepted, kinds: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(kind, pattern.split("/")[0]) for pattern in entry.where for kind in kinds)
