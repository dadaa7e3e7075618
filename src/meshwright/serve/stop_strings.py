"""Ends a text at the first complete stop string, and holds back characters that may become one."""

from collections.abc import Sequence


class StopScan:
    """Scans the text of one sequence, piece by piece, for stop strings; ``keep`` leaves the stop string in the text.
    The stop string completed first ends the text; of several completed by one character, the longest. The result does
    not depend on how the text is cut into pieces."""

    def __init__(self, strings: Sequence[str], *, keep: bool = False) -> None:
        self._strings, self._keep = strings, keep
        self._fallbacks = [_fallbacks(string) for string in strings]
        self._matched = [0] * len(strings)
        self._held = list[str]()

    def push(self, piece: str, *, hidden: bool = False) -> tuple[str, bool]:
        """Returns the text that can be shown now, and whether a stop string ended it. A ``hidden`` piece (a special
        token) is matched against stop strings and never shown."""
        if not self._matched:
            return "" if hidden else piece, False
        characters = self._held
        for character in piece:
            characters.append("" if hidden else character)
            if string := self._advance(character):
                return "".join(characters[: -len(string)]) + (string if self._keep else ""), True
        num_certain = len(characters) - max(self._matched)  # the longest match may still become its string
        self._held = characters[num_certain:]
        return "".join(characters[:num_certain]), False

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the sequence."""
        characters, self._held = self._held, []
        return "".join(characters)

    def _advance(self, character: str) -> str:
        """Returns the longest stop string that the character completes, else ""."""
        longest_match = ""
        for string_index, (string, fallbacks) in enumerate(zip(self._strings, self._fallbacks, strict=True)):
            num_matched = self._matched[string_index]
            while num_matched and string[num_matched] != character:
                num_matched = fallbacks[num_matched - 1]
            num_matched += string[num_matched] == character
            self._matched[string_index] = num_matched
            if num_matched == len(string):
                longest_match = max(longest_match, string, key=len)
        return longest_match


def _fallbacks(string: Sequence[str]) -> list[int]:
    """Returns for each prefix the length of its longest proper prefix that is also its suffix (Knuth-Morris-Pratt)."""
    prefix_lens = [0]
    for end in range(1, len(string)):
        prefix_len = prefix_lens[-1]
        while prefix_len and string[end] != string[prefix_len]:
            prefix_len = prefix_lens[prefix_len - 1]
        prefix_lens.append(prefix_len + (string[end] == string[prefix_len]))
    return prefix_lens
