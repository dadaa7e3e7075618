"""Four steps and sixteen steps of DiLoCo whose numbers others published."""

TORCHFT = [
    (0, 0.0, "1 1, -1 -1, -3 -3, -11 -5, -13 -7, -15 -9, -17 -23, -19 -25, -21 -27, -35 -29, -37 -31, -39 -33"),
    (0, 0.5, "1 1, -1 -1, -3 -3, -8 -5, -10 -7, -12 -9, -14 -17, -16 -19, -18 -21, -24.5 -23, -26.5 -25, -28.5 -27, "
             "-30.5 -32, -32.5 -34, -34.5 -36, -40.25 -38"),
    (0, 1.0, "1 1, -1 -1, -3 -3, -5 -5, -7 -7, -9 -9, -11 -11, -13 -13, -15 -15, -17 -17, -19 -19, -21 -21, -23 -23"),
    (1, 0.0, "1 1, -1 -1, -3 -3, -7 -5, -9 -7, -11 -9, -13 -19, -15 -21, -17 -23, -27 -25, -29 -27, -31 -29, -33 -39"),
    (1, 0.5, "1 1, -1 -1, -3 -3, -6 -5, -8 -7, -10 -9, -12 -15, -14 -17, -16 -19, -21.5 -21, -23.5 -23, -25.5 -25, "
             "-27.5 -29, -29.5 -31, -31.5 -33, -35.75 -35"),
    (1, 1.0, "1 1, -1 -1, -3 -3, -5 -5, -7 -7, -9 -9, -11 -11, -13 -13, -15 -15, -17 -17, -19 -19, -21 -21, -23 -23"),
]  # fmt: skip
"""Overlap, mixing, and the two weights of an island after 0, 1, ... inner steps of -2: H = 6, two fragments, outer rate
2, no momentum. Source: pytorch/torchft, test_fixtures/*.test_diloco_mocked_updates_0 to 5.json."""

TORCHFT_OUTER = {
    (0, 0.0): {0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-35, -23), 12: (-35, -47)},
    (0, 0.5): {0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-29, -23), 12: (-29, -35)},
    (0, 1.0): {0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-23, -23), 12: (-23, -23)},
    (1, 0.0): {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-27, -19), 12: (-27, -39)},
    (1, 0.5): {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-25, -19), 12: (-25, -31)},
    (1, 1.0): {0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-23, -19), 12: (-23, -23)},
}
"""The outer weights of the same runs, from the step that is named."""

MAXTEXT_INPUTS = ([[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]])
MAXTEXT_LABELS = ([[1.0], [2.0]], [[2.0], [3.0]])
MAXTEXT_LOSSES = ([1.0, 0.49, 0.2401, 0.207545], [1.0, 0.81, 0.6561, 0.94])
"""A linear layer from weights (2, 1) and bias 1: what each of two islands reads, and its losses of four steps of SGD at
0.1 with H = 3, outer rate 1, momentum 0.9. Source: AI-Hypercomputer/maxtext, tests/integration/diloco_test.py; the last
loss of the second island is from its comments."""


def pairs(text: str) -> list[tuple[float, ...]]:
    """The numbers of a line of `TORCHFT`."""
    return [tuple(float(word) for word in words.split()) for words in text.split(",")]
