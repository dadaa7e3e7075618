"""`meshwright chain`: shardings of a chain of products for least time in a given memory."""

import pytest

BLOCK = ("chain", "Win[D,F] * x[B,D] -> Tmp[B,F]", "Wout[F,D] * Tmp[B,F] -> Out[B,D]")
SIZES = ("--mesh", "X=2,Y=2", "--dims", "B=128,D=8192,F=32768", "--on", "v5e:2x2")


def test_the_best_and_the_next_best(call):
    found = call(*BLOCK, *SIZES, "--memory", "300MB", "--top", "2", "--json").json
    best, second = found["assignments"]
    assert {name: a["sharding"] for name, a in best["arrays"].items()} == {
        "Win": "Win[D, F_XY]", "x": "x[B, D]", "Tmp": "Tmp[B, F_XY]", "Wout": "Wout[F_XY, D]", "Out": "Out[B_XY, D]",
    }  # fmt: skip
    assert best["arrays"]["Wout"]["block"] == [8192, 8192]
    assert best["time_s"] == pytest.approx(sum(step["time_s"] for step in best["steps"]))
    assert [step["bound_by"] for step in best["steps"]] == ["hbm", "hbm", "ici"]
    assert best["memory_bytes"] <= found["memory_limit_bytes"] == 300e6
    assert second["time_s"] >= best["time_s"]
    assert second["arrays"] != best["arrays"]


def test_a_fixed_sharding_is_kept(call):
    found = call(*BLOCK, *SIZES, "--fixed", "x[B_X,D_Y]", "--fixed", "Out[B_X,D_Y]", "--top", "1", "--json").json
    arrays = found["assignments"][0]["arrays"]
    assert arrays["x"] == {"sharding": "x[B_X, D_Y]", "role": "input", "fixed": True, "block": [64, 4096]}
    assert arrays["Out"]["sharding"] == "Out[B_X, D_Y]"
    assert not arrays["Win"]["fixed"]
    assert found["memory_limit_bytes"] == pytest.approx(15.75 * 2**30)


def test_the_page(call):
    words = call(*BLOCK, *SIZES, "--memory", "300MB").words
    for fact in (
        "least time on v5e:2x2 within 300 MB of a device",
        "3 ReduceScatter Out[B_XY, D] 2.1 MB 17.5 us ici",
        "355 us without overlap: products 338 us, communication 17.5 us; hbm takes most of it",
        "275 MB of a device at the peak, 271 MB of it inputs",
        "Win[D,F_XY] x[B,D] Tmp[B,F_XY] Wout[F_XY,D] Out[B,D_XY] 355 us 275 MB",
    ):
        assert fact in words


def test_int8_halves_the_bytes(call):
    half = call(*BLOCK, *SIZES, "--dtype", "int8", "--top", "1", "--json").json["assignments"][0]
    full = call(*BLOCK, *SIZES, "--top", "1", "--json").json["assignments"][0]
    assert half["input_bytes"] * 2 == full["input_bytes"]
    assert half["communication_s"] * 2 == pytest.approx(full["communication_s"])


def test_what_does_not_fit(call):
    said = call(*BLOCK, *SIZES, "--memory", "250MB")
    assert said.code == 3
    least = said.err.split("the least is ")[1].split(". Give")[0]
    assert call(*BLOCK, *SIZES, "--memory", least.replace(" ", ""), "--json").code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--memory", "20GB"), "at most the 16.9 GB of a device"),
        (("--fixed", "Wup[D,F]"), "is no array of the chain. Did you mean"),
    ],
)
def test_bad_input(call, args, message):
    call(*BLOCK, *SIZES, *args).assert_refused(2, message)


def test_a_dim_of_no_array_is_refused(call):
    sizes = [f"{word},Q=7" if word.startswith("B=") else word for word in SIZES]
    found = call(*BLOCK, *sizes)
    assert (found.code, "--dims Q: no array has this dim. Choose of D, F, B" in found.err) == (2, True)
