import numpy as np
import pytest

from meshwright.batching.traffic import fixed, lognormal, parse_lengths, poisson, traffic_of, uniform
from meshwright.core.errors import InputError


def draw(sampler, count=20_000):
    return sampler(np.random.default_rng(0), count)


def test_lengths():
    assert set(draw(fixed(5)).tolist()) == {5}
    assert (draw(uniform(2, 4)).min(), draw(uniform(2, 4)).max()) == (2, 4)
    assert draw(lognormal(500)).mean() == pytest.approx(500, rel=0.03)
    assert np.log(draw(lognormal(500, sigma=0.8))).std() == pytest.approx(0.8, rel=0.02)
    assert draw(lognormal(500, most=900)).max() == 900


def test_lengths_are_read():
    assert set(draw(parse_lengths("7")).tolist()) == {7}
    assert draw(parse_lengths("1..999")).tolist() == draw(uniform(1, 999)).tolist()
    assert draw(parse_lengths("lognormal:500")).tolist() == draw(lognormal(500)).tolist()
    assert draw(parse_lengths("lognormal:500:0.8")).tolist() == draw(lognormal(500, sigma=0.8)).tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-5", "not understood"),
        ("9..3", "lengths from 9 to 3 tokens"),
        ("x", "lengths 'x' are not understood. Give 500, 1..999 or lognormal:500:0.8."),
        ("lognorm:5", "not understood"),
        ("lognormal:nan", "lengths of mean nan"),
        ("lognormal:5:x", "not understood"),
    ],
)
def test_lengths_that_cannot_be(text, said):
    with pytest.raises(InputError, match=said):
        parse_lengths(text)


def test_poisson_arrivals():
    made = poisson(50.0, duration_s=200.0, prompt=fixed(5), output=uniform(1, 9), seed=3)
    gaps = np.diff(made.arrival_s)
    assert len(made) == pytest.approx(10_000, abs=300)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    again = poisson(50.0, duration_s=200.0, prompt=fixed(5), output=uniform(1, 9), seed=3)
    assert made.arrival_s.tolist() == again.arrival_s.tolist()


def test_requests_are_sorted_by_arrival():
    made = traffic_of([2.0, 0.5], [7, 8], 1, [-1, 4], [0, 3])
    (first_s, first), (_, second) = made.requests()
    assert (first_s, first.number, first.prompt, first.prefix, first.prefix_len) == (0.5, 0, 8, 4, 3)
    assert second.prefix is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: traffic_of([], [], []), "there is no request"),
        (lambda: traffic_of([-1.0], 1, 1), "from 0 to"),
        (lambda: traffic_of([1e30], 1, 1), "from 0 to"),
        (lambda: traffic_of([0.0, 1.0], [4, -2], 1), "request 1 has a prompt of -2 tokens"),
        (lambda: poisson(-1.0, duration_s=1.0, prompt=fixed(1), output=fixed(1)), "a rate of -1 requests/s"),
    ],
)
def test_traffic_that_cannot_be(make, said):
    with pytest.raises(InputError, match=said):
        make()
