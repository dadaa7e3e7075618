import pytest

from meshwright.batching.request import ActiveRequest, GenerationRequest
from meshwright.core.errors import InputError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": -1, "output": 5}, "request 7 has a prompt of -1 tokens and an output of 5."),
        ({"prompt": 1, "output": 0}, "Give at least 1 token of prompt and 1 of output."),
        ({"prompt": 1, "output": 1, "prefilled": True}, "Give at least 1 token of prompt and 2 of output."),
        ({"prompt": 4, "output": 1, "prefix": 0, "prefix_len": 5}, "shares 5 tokens of a prompt of 4."),
    ],
)
def test_lengths_that_cannot_be(given, said):
    with pytest.raises(InputError, match=said):
        GenerationRequest(number=7, **given).check()


def test_the_last_token_is_never_cached():
    request = GenerationRequest(number=0, prompt=10, output=3)
    assert request.most_cached == 12
    assert ActiveRequest(request).uncached == 10


def test_a_prefilled_request_has_nothing_to_prefill():
    active = ActiveRequest(GenerationRequest(number=0, prompt=10, output=3, prefilled=True))
    assert (active.uncached, active.cached, active.produced) == (0, 10, 1)
