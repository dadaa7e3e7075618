"""A sample of the trial of kills."""

import pytest

from tests.kills.trial import main


@pytest.mark.slow
def test_killed_runs_go_on_to_the_same_bits():
    assert main(20, seed=1, say=lambda line: None).total() == 20
