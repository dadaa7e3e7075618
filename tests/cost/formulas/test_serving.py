"""Closed forms that plans of services are priced with."""

import numpy as np
import pytest

from meshwright.cost.formulas.serving import expected_tokens, experts_read


def test_experts_that_a_batch_reaches():
    assert experts_read(1, num_experts=256, active_experts=8) == pytest.approx(8)
    assert experts_read(10_000, num_experts=256, active_experts=8) == pytest.approx(256)


def test_tokens_of_drafts():
    assert expected_tokens(0.8, 4) == pytest.approx(sum(0.8**n for n in range(5)))
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(np.array([0.0, 0.5, 1.0]), 3).tolist() == [1.0, 1.875, 4.0]
