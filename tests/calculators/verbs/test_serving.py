"""`meshwright serving`, and the points of the book's interactive figures."""

import numpy as np
import pytest

from meshwright.cost.formulas.limits import MixedLayer

ARGS = ("serving", "llama3-70b", "--on", "v5e-book:4x2", "--context", "8192", "--weights", "int8", "--kv", "int8")
FIGURES = ("serving", "--params", "70B", "--kv-per-token", "163840", "--weights", "int8",
           "--on", "v5e-book-section1:4x4", "--contexts", "2048..65536")  # fmt: skip
DIGITS = 1e-12


@pytest.fixture
def contexts(call):
    return {one["context"]: one["points"] for one in call(*FIGURES, "--json").json["contexts"]}


# -- figures of the book: points read off the files of its page (pareto.html, latency_breakdown_log.html) ----------

LATENCY = {1: 5.3609408780487815, 2: 5.386515902439025, 120: 8.404368780487806, 121: 8.468943433453015,
           511: 35.76553797102885}  # fmt: skip
THROUGHPUT = {1: 0.011658401280998288, 2: 0.023206095046224548, 120: 0.8923930155721564, 121: 0.8929685337284826,
              511: 0.8929685337284827}  # fmt: skip
FLOPS = {1: 0.044416243654822336, 32: 1.4213197969543148, 197: 8.75, 334: 14.83502538071066}
KV = {410: 10.48576, 492: 12.582912, 511: 13.068837463414635}
LAST = {2048: 511, 4096: 276, 8192: 137, 16384: 68, 32768: 33, 65536: 16}
"""Context -> the largest batch of the figure. The first is cut; the others leave out the largest that fits."""


def test_latency_against_throughput(contexts):
    at = contexts[2048]
    for batch, ms in LATENCY.items():
        assert at["time_s"][batch - 1] * 1e3 == pytest.approx(ms, rel=DIGITS)
        assert at["tokens_per_s_per_chip"][batch - 1] / 1e3 == pytest.approx(THROUGHPUT[batch], rel=DIGITS)
    for context, last in LAST.items():
        assert contexts[context]["batch"][-1] == {2048: 554}.get(context, last + 1)


def test_time_split_into_weights_caches_and_flops(contexts):
    at = contexts[2048]
    assert at["weights_s"] == pytest.approx([5.335365853658537e-3] * 554, rel=DIGITS)
    for name, points in (("flops_s", FLOPS), ("kv_s", KV)):
        for batch, ms in points.items():
            assert at[name][batch - 1] * 1e3 == pytest.approx(ms, rel=DIGITS)


TRAINING = {
    (4096, 1, 3): (0.001988410785185185, 0.001988410785185185, 3_481_600),
    (2048, 2, 3): (0.0009942053925925925, 0.008888888888888889, 1_740_800),
    (1024, 4, 3): (0.0004971026962962963, 0.017777777777777778, 870_400),
    (512, 8, 3): (0.0002485513481481481, 0.035555555555555556, 435_200),
}
"""FSDP, tensor and the axes of FSDP -> seconds sent at 10 and at 1e8 tokens, and where compute is longer."""


@pytest.mark.parametrize(("mesh", "points"), TRAINING.items())
def test_mlp_roofline_of_figures_15_and_16(mesh, points):
    fsdp, tensor, axes = mesh
    low, high, crossing = points
    layer = MixedLayer(
        batch_tokens=np.array([10.0, 1e8, crossing * (1 - DIGITS), crossing * (1 + DIGITS)]),
        d_model=8192, d_ff=32768, fsdp=fsdp, tensor=tensor,
    )  # fmt: skip
    comms, math = layer.comms_s(1.8e11, fsdp_axes=axes, tensor_axes=1), layer.math_s(4.59e14)
    assert comms[:2] == pytest.approx([low, high], rel=DIGITS)
    assert list(math[2:] > comms[2:]) == [False, True]


def test_limits_shows_the_layer(call):
    found = call("limits", "mlp:8192x32768", "--on", "v5p:16x16x16", "--batch", "4Mi", "--seq", "4096", "--tensor", "8",
                 "--json").json  # fmt: skip
    layer = MixedLayer(batch_tokens=4 * 2**20, d_model=8192, d_ff=32768, fsdp=512, tensor=8)
    assert found["layer"]["math_s"] == pytest.approx(layer.math_s(4.59e14))
    assert found["layer"]["comms_s"] == pytest.approx(layer.comms_s(1.8e11, fsdp_axes=2, tensor_axes=1))


# -- the verb ------------------------------------------------------------------------------------------------------


def test_the_text(call):
    words = call(*ARGS, "--batch", "32", "--all").words
    for fact in ("weights 70.6 GB 4.41 2x4", "42 caches of 8,192 tokens in the 57.4 GB beside weights",
                 "32 10.9 ms 6.63 ms 2.87 ms 17.5 ms 228.4 weights yes", "from a batch of 121.6",
                 "with its largest batch v5e-book:4x2 v5e-book:4x4", "free for caches 57.4 GB 185 GB",
                 "largest batch 42 138", "$/M input"):  # fmt: skip
        assert fact in words


def test_a_slice_and_one_of_twice_the_chips(call):
    """llama3-70b in bf16 on 16 and 32 v5e: weights leave 16 x 16.9 - 141 GB, caches of 8,704 tokens take 2.85 GB."""
    found = call("serving", "llama3-70b", "--on", "v5e:4x4", "--price", "1.2", "--json").json
    once, twice = found["slices"]
    for one, chips in ((once, 16), (twice, 32)):
        batch, step_s = one["largest_batch"], one["tpot_s"]
        assert batch == one["free_bytes"] // (8704 * 327_680)
        assert one["finished_per_step"] == pytest.approx(batch / 512)
        assert one["tokens_per_s_per_chip"] == pytest.approx(batch / step_s / chips)
        assert one["per_s_per_chip"] == pytest.approx(batch / (512 * step_s) / chips)
        assert one["usd_per_million_output"] == pytest.approx(1.2 / 3600 * 1e6 / (batch / step_s / chips))
        # a million tokens of 2 FLOPs a parameter at 40% of 197 TFLOP/s, on any number of chips
        assert one["usd_per_million_input"] == pytest.approx(2 * found["params"] * 1e6 / (0.4 * 197e12) * 1.2 / 3600)
    assert (once["largest_batch"], twice["largest_batch"]) == (45, 140)


def test_a_chip_alone_gives_its_smallest_slice(call):
    found = call("serving", "llama3-70b", "--on", "v5e-book", "--weights", "int4", "--kv", "int4", "--json").json
    assert found["cluster"] == "v5e-book:2x2"
    assert found["steps"][-1]["batch"] == found["largest_batch"]
    assert call(*ARGS, "--batch", "64").words.count("64") > 1


def test_batches_that_do_not_fit_are_marked(call):
    steps = call(*ARGS, "--batch", "16..64", "--json").json["steps"]
    assert [(row["batch"], row["fits"]) for row in steps] == [(16, True), (32, True), (64, False)]


def test_what_follows_from_a_batch_that_does_not_fit_is_marked(call):
    """Of 64 sequences each waits for the prefills of the other 63 while it makes its 512 tokens."""
    said, fits = call(*ARGS, "--batch", "64"), call(*ARGS, "--batch", "32")
    assert "does not fit a batch of 64: what follows is as if it did" in said.words
    assert "does not fit" not in fits.words
    asked = call(*ARGS, "--batch", "64", "--json").json["requests"]
    assert not asked["fits"]
    assert asked["tpot_interleaved_s"] == pytest.approx(asked["tpot_s"] + 63 / 512 * asked["ttft_s"])


def test_letters_of_the_bounds_are_explained(call):
    """llama3-70b in int8 on 8 v5e of the book, which are lines: alpha 1.97e14 / 4.5e10, beta 8.1e11 / 4.5e10."""
    words = call(*ARGS, "--batch", "32", "--all").words
    for letter in ("M axes of links (2)", "N chips (8)", "D width of the model (8,192)", "w bytes of a weight (1)",
                   "B batch (32)", "alpha FLOP/s of a chip / W (4,378)", "hop latency of a hop (1 us)"):  # fmt: skip
        assert letter in words
    assert "G" not in {one for bound in call(*ARGS, "--json").json["sharding"]["bounds"] for one in bound["formula"]}


def test_batches_beyond_use_are_called_so(call):
    tiny = ("serving", "--params", "600M", "--kv-per-token", "1", "--context", "1", "--on", "v5e-book-section1:2x2")
    assert "a larger batch takes longer and gives hardly more tokens/s" in call(*tiny).words
    assert "hardly more" not in call(*tiny, "--batch", "1..4").words


def test_experts_are_read_as_they_are_reached(call):
    one, many = call("serving", "deepseek-v3", "--on", "h200:8x2", "--batch", "1,4096", "--json").json["steps"]
    assert one["weights_s"] < 0.1 * many["weights_s"]


def test_speculation_and_prefixes(call):
    found = call(*ARGS, "--batch", "8", "--accept", "0.8", "--prefixes", "100", "--cache", "67GB", "--json").json
    spec = found["speculation"]
    assert spec["speedup"][spec["best"]] == max(spec["speedup"])
    assert spec["tokens"][:3] == pytest.approx([1, 1.8, 2.44])
    room = 67e9 / (163840 * 8192)
    assert found["prefixes"]["hit_share"] == pytest.approx(room / 100)
    assert found["prefixes"]["prefill_left"] == pytest.approx(1 - room / 100)


def test_pictures(call, tmp_path):
    for more in ((), ("--contexts", "2048,8192")):
        picture = tmp_path / f"{len(more)}.svg"
        assert call(*ARGS, *more, "--png", str(picture)).code == 0
        assert picture.exists()
    # parts of milliseconds are in milliseconds, not in 0.0001 of a second
    assert "time of a step (ms)" in (tmp_path / "0.svg").read_text()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--on", "v5e:4x4"), 2, "there is no model. Name one, or give --params 30B and --kv-per-token 100kB."),
        (("llama3-70b", "--on", "v5e-book:2x2"), 3, "do not fit v5e-book:2x2. Use v5e-book:4x4, fewer positions"),
        (("llama3-8b", "--on", "v5e:4x4", "--batch", "0"), 2, "--batch 0: each must be at least 1."),
        (("llama3-8b", "--on", "v5e:4x4", "--kv-per-token", "1kB", "--kv", "int8"), 2, "for caches without --kv-per-"),
        (("--params", "600M", "--kv-per-token", "0", "--on", "v5e-book-section1:2x2", "--context", "1"),
         2, "caches of 0 bytes fit without end. Give --kv-per-token of at least 1 byte."),
        (("llama3-8b", "--on", "v5e:4x4", "--zipf", "1"), 2, "--zipf changes nothing here: it is for --prefixes"),
    ],
)  # fmt: skip
def test_refusals(call, args, code, message):
    call("serving", *args).assert_refused(code, message)
