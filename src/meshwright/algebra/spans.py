"""Layers in their order as runs of a repeated pattern: what a loop over layers needs, or over those of a stage."""

from collections.abc import Sequence

import msgspec

MAX_PATTERN = 16
"""Longest pattern that is written out in one turn of a loop: what is compiled grows with it."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """``pattern`` (names of blocks, one per layer) run ``repeats`` times.

    ``starts`` says for each block of the pattern how many layers of its kind come before the span.
    """

    pattern: tuple[str, ...]
    repeats: int
    starts: dict[str, int]

    @property
    def num_layers(self) -> int:
        """Layers of the whole span."""
        return len(self.pattern) * self.repeats

    def place(self, position: int) -> tuple[int, int]:
        """Which of its kind a layer of the pattern is, and how many of that kind a turn has."""
        kind = self.pattern[position]
        return self.pattern[:position].count(kind), self.pattern.count(kind)


def spans(names: Sequence[str], *, starts: dict[str, int] | None = None) -> tuple[Span, ...]:
    """Layers as spans, in order: the shortest pattern that repeats, then what is left; else runs of equal layers."""
    starts = dict(starts or dict.fromkeys(names, 0))
    found: list[Span] = []
    left = tuple(names)
    while left:
        pattern, repeats = _leading(left)
        here = {name: starts[name] for name in dict.fromkeys(pattern)}
        found.append(Span(pattern=pattern, repeats=repeats, starts=here))
        for name in pattern:
            starts[name] += repeats
        left = left[len(pattern) * repeats :]
    return tuple(found)


def _leading(names: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The pattern at the front that covers most layers, and its repeats; the shorter of two that cover as many."""
    best, covered = (names[:1], _repeats(names, 1)), 0
    for length in range(1, min(MAX_PATTERN, len(names)) + 1):
        repeats = _repeats(names, length)
        if (repeats > 1 or length == 1) and repeats * length > covered:
            best, covered = (names[:length], repeats), repeats * length
    return best


def _repeats(names: tuple[str, ...], length: int) -> int:
    """How often the first ``length`` names come one after the other."""
    count = 1
    while names[count * length : (count + 1) * length] == names[:length]:
        count += 1
    return count
