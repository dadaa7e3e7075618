"""A file of prompts: a line out for each line in, and a call that was stopped goes on."""

import json

import pytest
from msgspec.structs import replace

from meshwright.core.errors import InputError
from meshwright.core.progress import shown_by
from meshwright.serve.drawing.sampling import Sampling
from meshwright.serve.model_folder import ModelFolder, Text
from meshwright.serve.offline.bulk import USUAL, generate_file
from tests.parallel.generate_cases import LLAMA, float_params, likeliest
from tests.serve.test_engine import PROMPTS, engine_on, step_of

USUAL_FIVE = replace(USUAL, max_tokens=5)


@pytest.fixture(scope="module")
def params():
    return float_params(LLAMA)


@pytest.fixture(scope="module")
def opened(params):
    step = step_of()
    placed = step.place(params)
    source = ModelFolder(None, LLAMA, Text(), frozenset(), "fp32")
    return lambda: (source, engine_on(step, placed))


def write(path, prompts, **more):
    path.write_text("\n".join(json.dumps({"prompt": prompt, **more}) for prompt in prompts) + "\n\n")
    return path


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_prompt_has_its_line(opened, params, tmp_path):
    prompts = write(tmp_path / "in.jsonl", [*PROMPTS, "5 9 60"], id="a")
    seen = []
    with shown_by(seen.extend):
        done = generate_file(*opened(), (prompts, tmp_path / "new" / "out.jsonl"), USUAL_FIVE)
    assert (done.written, done.there) == (7, 0)
    assert [(work.what, work.done, work.total) for work in seen] == [("generating", 7, 7)]
    found = sorted(lines_of(tmp_path / "new" / "out.jsonl"), key=lambda line: line["line"])
    assert [line["line"] for line in found] == list(range(1, 8))
    for line, prompt in zip(found, [*PROMPTS, [5, 9, 60]], strict=True):
        assert line["tokens"] == likeliest(LLAMA, params, prompt, 5)
        assert (line["text"], line["finish"], line["id"]) == (" ".join(map(str, line["tokens"])), "length", "a")


def test_a_call_that_was_stopped_goes_on(opened, tmp_path):
    prompts, whole, out = write(tmp_path / "in.jsonl", PROMPTS), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    generate_file(*opened(), (prompts, whole), USUAL_FIVE)
    lines = whole.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:10])  # the fourth was cut
    done = generate_file(*opened(), (prompts, out), USUAL_FIVE)
    assert (done.written, done.there) == (3, 3)
    assert sorted(out.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    assert generate_file(*opened(), (prompts, out), USUAL_FIVE) == (0, 6)


def test_a_line_has_settings_of_its_own(opened, tmp_path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    sampling = {"temperature": 1.0, "seed": 3}
    path.write_text(json.dumps({"prompt": [3, 4], "max_tokens": 2, "sampling": sampling}) + "\n")
    generate_file(*opened(), (path, out), USUAL_FIVE)
    (line,) = lines_of(out)
    _, engine = opened()
    (expected,) = engine.run([replace(USUAL, prompt=(3, 4), max_tokens=2, sampling=Sampling(**sampling))])
    assert line["tokens"] == [one.token for one in expected]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": [1]}\n{"prompt": [999]}\n', r"in.jsonl:2: .*outside of V"),
        ('{"prompt": [1], "colour": 1}\n', r"in.jsonl:1: .*colour"),
        ('{"prompt": []}\n', r"in.jsonl:1: the prompt is empty"),
        ('{"prompt": [1], "adapter": "sql"}\n', r"in.jsonl:1: this engine has no adapter 'sql'"),
        ('{"prompt": [1], "max_tokens": 99}\n', r"in.jsonl:1: .*positions"),
        ("nothing\n", r"in.jsonl:1: .*malformed.* A line is like"),
        ('["a"]\n', r"in.jsonl:1: expected `object`"),
        ('{"prompt": "a", "sampling": {"temperature": -1}}\n', r"in.jsonl:1: .*temperature=-1"),
        ("\n", "has no prompts"),
    ],
)
def test_wrong_lines_are_named_before_anything_runs(opened, tmp_path, text, words):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        generate_file(*opened(), (path, out), USUAL_FIVE)
    assert not out.exists()


def test_a_file_of_something_else_is_left_alone(opened, tmp_path):
    prompts, out = write(tmp_path / "in.jsonl", PROMPTS[:2]), tmp_path / "out.jsonl"
    for text in ("a text\n", '{"line": 7}\n'):
        out.write_text(text)
        with pytest.raises(InputError, match="Name another file"):
            generate_file(*opened(), (prompts, out), USUAL_FIVE)
        assert out.read_text() == text


@pytest.mark.parametrize("change", ["prompt", "max_tokens", "temperature", "model"])
def test_answers_to_other_prompts_are_not_gone_on_with(opened, tmp_path, change):
    source, engine = opened()
    out = tmp_path / "out.jsonl"
    generate_file(source, engine, (write(tmp_path / "in.jsonl", PROMPTS[:2]), out), USUAL_FIVE)
    text, usual, prompts = out.read_text(), USUAL_FIVE, PROMPTS[:2]
    if change == "prompt":
        prompts = [*PROMPTS[:1], [*PROMPTS[1], 2]]
    elif change == "model":
        source = source._replace(model=replace(LLAMA, name="other"))
    elif change == "max_tokens":
        usual = replace(usual, max_tokens=4)
    else:
        usual = replace(usual, sampling=Sampling(temperature=0.5))
    with pytest.raises(InputError, match=r"line \d of the prompts was answered with another prompt, other settings or"):
        generate_file(source, engine, (write(tmp_path / "in.jsonl", prompts), out), usual)
    assert out.read_text() == text
