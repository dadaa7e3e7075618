"""Ends a text where a stop string is complete, and holds back what may still become one."""

from collections.abc import Sequence

import msgspec


class StopStrings(msgspec.Struct, frozen=True):
    """Stop strings; ``keep``: whether one is part of the text that it ends."""

    strings: tuple[str, ...]
    keep: bool = False


class StopScan:
    """Scans the text of one sequence, piece by piece. The string that is complete first ends the text; of several that
    end with the same character, the longest. So the result does not depend on where pieces begin."""

    def __init__(self, stops: StopStrings) -> None:
        self.stops = stops
        self._fallbacks = [_fallbacks(one) for one in stops.strings]
        self._matched = [0] * len(stops.strings)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Returns the text that is certain, and whether a stop string ended it."""
        if not self._matched:
            return piece, False
        text = self._held + piece
        for at, character in enumerate(piece, len(self._held) + 1):
            longest = self._advance(character)
            if longest:
                return text[: at if self.stops.keep else at - longest], True
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """Returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Returns the length of the longest string that the character completes, else 0."""
        longest = 0
        for number, (string, fallbacks) in enumerate(zip(self.stops.strings, self._fallbacks, strict=True)):
            matched = self._matched[number]
            while matched and string[matched] != character:
                matched = fallbacks[matched - 1]
            matched += string[matched] == character
            self._matched[number] = matched
            if matched == len(string):
                longest = max(longest, matched)
        return longest


def _fallbacks(string: Sequence[str]) -> list[int]:
    """Returns for each prefix the length of its longest proper prefix that is also its suffix (Knuth-Morris-Pratt)."""
    found = [0]
    for at in range(1, len(string)):
        length = found[-1]
        while length and string[at] != string[length]:
            length = found[length - 1]
        found.append(length + (string[at] == string[length]))
    return found
