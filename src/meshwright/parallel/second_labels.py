"""Makes the tokens and labels for predicting the token after the next (multi-token prediction)."""

from collections.abc import Mapping

import numpy as np


def second_labels(here: Mapping[str, np.ndarray], following: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns ``mtp_tokens``, the next token of each position, and ``mtp_labels``, the label of the next position.

    ``following`` has the arrays of ``here`` at the next position; at the end of a row it repeats the last position.
    At the end of a row, and where the next position is in another document, the label is -1.
    """
    goes_on = following["positions"] == here["positions"] + 1
    if "documents" in here:
        goes_on &= following["documents"] == here["documents"]
    return {"mtp_tokens": following["tokens"], "mtp_labels": np.where(goes_on, following["labels"], np.int32(-1))}
