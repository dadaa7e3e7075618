"""What a service is, and how loads and times are written."""

import pytest

from meshwright.core.units import parse_seconds
from meshwright.plan.serving.service import Service, parse_load


def test_lengths():
    found = Service(prompt_len=8192, output_len=512, prefix_share=0.75)
    assert (found.max_len, found.mean_len, found.new_prompt_tokens) == (8704, 8448, 2048)
    assert Service(prompt_len=1, output_len=1, prefix_share=0.99).new_prompt_tokens == 1


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1.5 s", 1.5), ("800us", 8e-4), ("2", 2.0)])
def test_seconds(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["20m", "1h", "ms", "-1s", "nan"])
def test_no_seconds(text):
    with pytest.raises(ValueError, match=r"time '"):
        parse_seconds(text)


@pytest.mark.parametrize(("text", "rate"), [("20/s", 20.0), ("600/min", 10.0), ("7200/h", 2.0), ("3", 3.0)])
def test_loads(text, rate):
    assert parse_load(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["0/s", "20/day", "x", "inf/s", "nan"])
def test_no_loads(text):
    with pytest.raises(ValueError, match=r"Write for example 20/s, 600/min or 5000/h"):
        parse_load(text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_len", 0, r"service.prompt_len=0 must be from 1 to"),
        ("tpot_s", 0.0, r"service.tpot_s=0 must be above 0"),
        ("requests_per_s", -1.0, r"service.requests_per_s=-1 must be above 0"),
        ("prefix_share", 1.0, r"service.prefix_share=1 must be a share"),
        ("ttft_s", "soon", r"Service.ttft_s is 'soon'. Give a finite number"),
    ],
)
def test_what_no_service_has(field, value, message):
    with pytest.raises(ValueError, match=message):
        Service(**{"prompt_len": 8, "output_len": 8, field: value})
