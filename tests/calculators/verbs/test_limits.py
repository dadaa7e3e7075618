"""`meshwright limits`: closed forms without a plan."""

import pytest

ARGS = ("limits", "llama3-70b", "--on", "v5p:16x20x28", "--batch", "4Mi", "--seq", "4096")


def test_the_table(call):
    text = call(*ARGS).words
    for fact in ("tokens/chip, with tensor > 4 alpha^2 / (Mx My F) 453.6 468.1 met",
                 "chips, FSDP alone < 3 B / alpha 4,934 8,960 not met", "X_opt: in powers of two: 2,048 x tensor 4",
                 "chips, FSDP of whole sequences <= sequences 1,024 8,960 not met"):  # fmt: skip
        assert fact in text
    assert "X, upper root < Mx(BF/alpha + root)/2F 1,935 2,240 not met" in call(*ARGS, "--tensor", "4").words


def test_json(call):
    found = call(*ARGS, "--json").json
    assert found["symbols"]["alpha"] == pytest.approx(2550)
    by_name = {limit["name"]: limit for limit in found["limits"]}
    assert by_name["X_opt"]["here"] is None
    assert by_name["tensor"]["limit"] == pytest.approx(28672 / 2550)


def test_experts_are_as_wide_as_a_token_passes(call):
    found = call("limits", "mixtral-8x7b", *ARGS[2:], "--json").json
    assert found["symbols"]["d_ff"] == 2 * 14336


def test_it_fits(call):
    for width in (80, 120):
        assert max(map(len, call(*ARGS, width=width).out.splitlines())) <= width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--on": "h100:8x4"}, "torus axes"),
        ({"--batch": "4M"}, "Use 4Mi"),
        ({"--seq": "0"}, "--seq 0 must be at least 1"),
    ],
)
def test_refused(call, change, message):
    args = [*ARGS]
    for option, value in change.items():
        args[args.index(option) + 1] = value
    said = call(*args)
    assert (said.code, message in said.err) == (2, True), said.err
