import numpy as np
import pytest

from meshwright.batching.traffic import fixed, load_trace, lognormal, parse_lengths, poisson, traffic_of, uniform
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


@pytest.fixture
def trace(tmp_path):
    def write(text):
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return write


def test_jsonl_and_csv_are_the_same(trace):
    lines = '{"arrival_s": 1.5, "prompt": 7, "output": 3}\n\n{"arrival_s": 0, "prompt": 2, "output": 1}\n'
    rows = "prompt,output,arrival_s\n7,3,1.5\n2,1,0\n"
    for text in (lines, rows):
        found = load_trace(trace(text))
        assert found.arrival_s.tolist() == [0.0, 1.5]
        assert found.prompt.tolist() == [2, 7]
        assert found.output.tolist() == [1, 3]
        assert found.prefix.tolist() == [-1, -1]


def test_prefixes_are_read(trace):
    found = load_trace(trace("arrival_s,prompt,output,prefix,prefix_len\n0,9,1,5,4\n"))
    assert (found.prefix.tolist(), found.prefix_len.tolist()) == ([5], [4])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no request"),
        ("arrival_s,prompt,outptu\n0,1,1\n", r":2: outptu is not a field. Did you mean 'output'\?"),
        ("arrival_s,prompt\n0,1\n", ":2: output is missing. Give a whole number of at most"),
        ("arrival_s,prompt,output\n0,1.5,1\n", ":2: prompt is '1.5'. Give a whole number."),
        ("arrival_s,prompt,output\n0,1,1,8\n", ":2: more fields than columns"),
        ("arrival_s,prompt,output\nsoon,1,1\n", ":2: arrival_s is 'soon'. Give seconds."),
        ("arrival_s,prompt,output\n0,-4,1\n", "trace: request 0 has a prompt of -4 tokens"),
        ('{"arrival_s": 0, "prompt": 1, "output": 1}\n{"arrival_s":\n', ":2: input data was truncated. Give an object"),
        ('{"arrival_s": 0, "prompt": 1, "output": 1}\n[1]\n', ":2: expected `object`"),
        ('{"arrival_s": 0, "prompt": 1e999, "output": 1}\n', ":1: number out of range"),
        ('{"arrival_s": 0, "prompt": 1e300, "output": 1}\n', ":1: prompt is 1e[+]300. Give a whole number of at most"),
        ('[{"arrival_s": 0, "prompt": 1, "output": 1}]\n', "Give an object on every line"),
    ],
)
def test_traces_that_cannot_be(trace, text, said):
    with pytest.raises(InputError, match=said):
        load_trace(trace(text))


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="Name a trace in JSONL or CSV"):
        load_trace(tmp_path / "none")
