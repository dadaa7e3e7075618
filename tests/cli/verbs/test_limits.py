"""`meshwright limits`: closed forms without a plan."""

import pytest

ARGS = ("limits", "llama3-70b", "--on", "v5p:16x20x28", "--batch", "4Mi", "--seq", "4096")


def test_the_table(call):
    text = call(*ARGS).words
    for fact in ("tokens/chip, with tensor > 4 alpha^2 / (Mx My F) 453.6 468.1 near",
                 "chips, FSDP alone < 3 B / alpha 4,934 8,960 broken", "X_opt: in powers of two: 2,048 x tensor 4",
                 "chips, FSDP of whole sequences <= sequences 1,024 8,960 broken"):  # fmt: skip
        assert fact in text
    assert "X, upper root < Mx(BF/alpha + root)/2F 1,935 2,240 broken" in call(*ARGS, "--tensor", "4").words


def test_json(call):
    found = call(*ARGS, "--json").json
    assert found["symbols"]["alpha"] == pytest.approx(2550)
    by_name = {limit["name"]: limit for limit in found["limits"]}
    assert by_name["X_opt"]["here"] is None
    assert by_name["tensor"]["limit"] == pytest.approx(28672 / 2550)


@pytest.mark.parametrize(
    ("cluster", "alpha", "least", "width", "words"),
    [
        # 459e12 / 1.8e11 = 2,550 over 3 rings; boxes below a cube are lines: 459e12 / 9e10 over 3
        ("v5p:4x4x4", 2550, 850, "with W both ways, X", "> alpha / 3 850"),
        ("v5p:2x2x4", 5100, 1700, "with W one way, no axis wraps around, X", "> alpha / 3 1,700"),
        # 197e12 / 45e9 = 4,378 over 2 lines; a line of 8 beside a ring of 16 is 1.5 rings: 2,189 / 1.5
        ("v5e:8x8", 4377.8, 2188.9, "with W one way, no axis wraps around, X", "> alpha / 2 2,189"),
        (
            "v5e:8x16",
            2188.9,
            1459.3,
            "with W both ways, a line counts as half an axis",
            "> alpha / 1.5 1,459",
        ),
    ],
)
def test_lines_have_one_way(call, cluster, alpha, least, width, words):
    args = ("limits", "llama3-8b", "--on", cluster, "--batch", "64Ki", "--seq", "4096")
    found = call(*args, "--json").json
    assert found["symbols"]["alpha"] == pytest.approx(alpha, rel=1e-4)
    assert found["limits"][0]["limit"] == pytest.approx(least, rel=1e-4)
    text = call(*args).words
    assert width in text
    assert words in text


def test_experts_are_as_wide_as_a_token_passes(call):
    found = call("limits", "mixtral-8x7b", *ARGS[2:], "--json").json
    assert found["symbols"]["d_ff"] == 2 * 14336


def test_it_fits(call):
    for width in (80, 120):
        assert max(map(len, call(*ARGS, width=width).out.splitlines())) <= width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--on": "h100:1"}, "no links in the catalogue"),
        ({"--batch": "4M"}, "Use 4Mi"),
        ({"--seq": "0"}, "--seq '0' is below 1"),
    ],
)
def test_refused(call, change, message):
    args = [*ARGS]
    for option, value in change.items():
        args[args.index(option) + 1] = value
    call(*args).assert_refused(2, message)


@pytest.mark.parametrize(
    ("cluster", "tensor", "words"),
    [
        ("h100:8x512", 8, []),
        ("h100:8x512", 16, ["tensor: groups of 16 leave a domain of 8"]),
        ("h100:8x512", 3, ["tensor: groups of 3 leave a domain of 8", "3 does not divide 4,096 chips"]),
        ("h100:8x1", 3, ["tensor: 3 does not divide 8 chips: X is no whole number"]),
        ("v5p:16x16x16", 3, ["tensor: 3 does not divide 4,096 chips"]),
    ],
)
def test_groups_of_tensor_that_do_not_fit(call, cluster, tensor, words):
    args = (*ARGS[:2], "--on", cluster, *ARGS[4:], "--tensor", str(tensor))
    text = call(*args, width=200).words
    assert all(said in text for said in words)
    assert ("leave a domain" in text, "no whole number" in text) == ("leave" in str(words), "divide" in str(words))


def test_both_assumptions_are_named_where_a_root_is_broken(call):
    """2240 chips of data are above the upper root, where weights and activations one after the other no longer hide;
    at the same time the longer of both does: 4 D F / (Y W Mx) = 746 us below 4 B D F / (X Y C)."""
    text = call(*ARGS, "--tensor", "4").words
    assert "X, upper root < Mx(BF/alpha + root)/2F 1,935 2,240 broken" in text
    assert "the longer of weights (Mx axes) and activations (My axes), which overlap" in text
    assert "the roots and X_opt take the sum of both, so that all may be hidden where a root is broken" in text
    layer = call(*ARGS, "--tensor", "4", "--json").json["layer"]
    assert layer["comms_s"] == pytest.approx(4 * 8192 * 28672 / (4 * 1.8e11 * 2))
    assert layer["comms_s"] < layer["math_s"]
