import pytest

from meshwright.batching.trace import load_trace
from meshwright.core.errors import InputError


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
        ("arrival_s,prompt,outptu\n0,1,1\n", r":2: the column 'outptu' is not known. Did you mean 'output'\?"),
        ("arrival_s,prompt\n0,1\n", ":2: output is missing. Give a whole number of at most"),
        ("arrival_s,prompt,output\n0,1.5,1\n", ":2: prompt is '1.5'. Give a whole number."),
        ("arrival_s,prompt,output\n0,1,1,8\n", ":2: more fields than columns"),
        ("arrival_s,prompt,output\nsoon,1,1\n", ":2: arrival_s is 'soon'. Give seconds."),
        ("arrival_s,prompt,output\n0,-4,1\n", "trace: request 0 has a prompt of -4 tokens"),
        ('{"arrival_s": 0, "prompt": 1, "output": 1}\n{"arrival_s":\n', ":2: broken JSON"),
        ('{"arrival_s": 0, "prompt": 1, "output": 1}\n[1]\n', r":2: '\[1\]' is not an object"),
        ('{"arrival_s": 0, "prompt": 1e999, "output": 1}\n', ":1: prompt is inf. Give a whole number of at most"),
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
