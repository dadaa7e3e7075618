import pytest

from meshwright.batching.limits import SchedulerLimits
from meshwright.core.errors import InputError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": "chunk"}, "policy 'chunk' is not known. Did you mean 'chunked'?"),
        ({"max_requests": 0}, "max_requests is 0. Give a positive number."),
        ({"num_pages": -3}, "num_pages is -3. Give a positive number."),
        ({"watermark": 1.5}, "watermark is 1.5. Give a share of the pages from 0 to below 1."),
        ({"token_budget": 100}, "token_budget=100 is less than max_requests=256, .* Give a budget of 256 or more"),
    ],
)
def test_bounds_that_cannot_be(given, said):
    with pytest.raises(InputError, match=said):
        SchedulerLimits(**{"num_pages": 10, **given}).check()


def test_pages_of_tokens():
    limits = SchedulerLimits(num_pages=10, page_len=16)
    assert [limits.pages(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]
