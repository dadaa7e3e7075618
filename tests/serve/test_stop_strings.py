"""Stop strings end a text at the same character however it is cut into pieces."""

import random

import pytest

from meshwright.serve.stop_strings import StopScan


def scanned(pieces, *strings, keep=False):
    """The texts that come out after each piece, until a stop string ends them, and what is held at the end."""
    scan, found = StopScan(strings, keep=keep), []
    for piece in pieces:
        text, stopped = scan.push(piece)
        found.append(text)
        if stopped:
            return found, True
    return [*found, scan.finish()], False


def test_text_is_held_back_while_it_may_become_a_stop_string():
    assert scanned(["ab", "c", "d"], "bcx") == (["a", "", "bcd", ""], False)
    assert scanned(["ab", "c", "x", "y"], "bcx") == (["a", "", ""], True)
    assert scanned(["ab", "c", "x", "y"], "bcx", keep=True) == (["a", "", "bcx"], True)
    assert scanned(["ab", "c"], "bcx") == (["a", "", "bc"], False)


@pytest.mark.parametrize(
    ("text", "strings", "before"),
    [
        ("abcd", ("bcd", "c"), "ab"),  # complete first
        ("abcd", ("bc", "c"), "a"),  # complete together: the longest
        ("aaab", ("aab",), "a"),  # a string that overlaps its own prefix
        ("ababac", ("abac",), "ab"),
        ("é中é", ("中",), "é"),
        ("abc", ("x",), "abc"),
        ("abc", (), "abc"),
    ],
)
def test_the_string_that_is_complete_first_ends_the_text(text, strings, before):
    for pieces in ([text], list(text)):
        found, stopped = scanned(pieces, *strings)
        assert "".join(found) == before
        assert stopped == (before != text)


def test_hidden_pieces_count_for_stop_strings_alone():
    def scanned_so(*strings, keep=False):
        scan, found = StopScan(strings, keep=keep), []
        for piece, hidden in (("ab", False), ("<|e|>", True), ("cd", False)):
            text, stopped = scan.push(piece, hidden=hidden)
            found.append(text)
            if stopped:
                return found, True
        return [*found, scan.finish()], False

    assert scanned_so("<|e|>") == (["ab", ""], True)
    assert scanned_so("<|e|>", keep=True) == (["ab", "<|e|>"], True)
    assert scanned_so("b<|e|>c") == (["a", "", ""], True)
    assert scanned_so("b<|e|>c", keep=True) == (["a", "", "b<|e|>c"], True)
    assert scanned_so("b<|e|>x") == (["a", "", "bcd", ""], False)
    assert scanned_so("abc") == (["", "ab", "cd", ""], False)
    assert scanned_so() == (["ab", "", "cd", ""], False)


def test_the_result_does_not_depend_on_pieces():
    chance = random.Random(0)
    for _ in range(300):
        text = "".join(chance.choices("ab", k=30))
        strings = tuple("".join(chance.choices("ab", k=chance.randint(2, 6))) for _ in range(chance.randint(1, 3)))
        cuts = sorted(chance.sample(range(31), 8))
        pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, None], strict=True)]
        ends = [text.find(one) + len(one) for one in strings if one in text]
        found, stopped = scanned(pieces, *strings)
        assert stopped == bool(ends)
        longest = max((len(one) for one in strings if ends and text[: min(ends)].endswith(one)), default=0)
        assert "".join(found) == (text[: min(ends) - longest] if ends else text)
