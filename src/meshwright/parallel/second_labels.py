"""Inputs of predictions of the token after the next, from the arrays of the first prediction."""

from collections.abc import Mapping

import numpy as np


def second_labels(here: Mapping[str, np.ndarray], following: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns ``mtp_tokens``, the next token of each position, and ``mtp_labels``, the label of the next position.

    ``following`` has the arrays of the position after each of ``here``; at the end of a row it repeats that position.
    There, and where the next position is of another document, the label is -1.
    """
    goes_on = following["positions"] == here["positions"] + 1
    if "documents" in here:
        goes_on &= following["documents"] == here["documents"]
    return {"mtp_tokens": following["tokens"], "mtp_labels": np.where(goes_on, following["labels"], np.int32(-1))}
