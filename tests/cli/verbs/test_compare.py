"""`meshwright compare`: models side by side, and the views of memory."""

import csv
from io import StringIO

import pytest

from meshwright.spec.catalogue import models


def test_two_models(call):
    found = call("compare", "llama3-8b", "gemma-7b", "--json").json
    llama, gemma = found["models"]
    assert (llama["num_kv_heads"], gemma["num_kv_heads"]) == (8, 16)
    assert (llama["ff_ratio"], gemma["ff_ratio"]) == (3.5, 8)
    assert llama["kv_bytes_per_token"] == 2 * 2 * 8 * 128 * 32
    assert "llama3-8b 32 4,096 14,336 32 8 128 128,256" in call("compare", "llama3-8b", "gemma-7b").words


def test_all_models_in_every_form(call):
    rows = list(csv.DictReader(StringIO(call("compare", "--all", "--format", "csv").out)))
    assert [row["name"] for row in rows] == list(models())
    assert next(row for row in rows if row["name"] == "llama3-70b")["num_params"] == "70553706496"
    lines = call("compare", "--all", "--format", "markdown").out.splitlines()
    first = lines[: lines.index("")]
    assert len(first) == len(models()) + 2
    assert len({line.count("|") for line in first}) == 1
    assert "| llama3-70b" in "".join(first)
    assert call("compare", "--all", "--format", "json").json == call("compare", "--all", "--json").json
    assert max(map(len, call("compare", "--all").out.splitlines())) <= 80


def test_attention_grows_with_the_length(call):
    shares = [
        call("compare", "llama3-8b", "--seq", seq, "--json").json["models"][0]["attention_share"]
        for seq in ("1Ki", "8Ki", "128Ki")
    ]
    assert shares == sorted(shares)
    assert shares[-1] > 0.75


def test_zero_stages(call):
    (found,) = call("compare", "--zero", "llama3-70b", "--shards", "64", "--json").json["models"]
    count = found["params"]
    dp, one, two, three = found["bytes_per_device"]["bf16-master"]
    assert (dp, three) == (16 * count, 16 * count / 64)
    assert one == pytest.approx((4 + 12 / 64) * count)
    assert two == pytest.approx((2 + 14 / 64) * count)
    # an average of 4 bytes a parameter, split from ZeRO-1 on
    args = ("compare", "--zero", "llama3-70b", "--shards", "64", "--average", "fp32")
    (with_average,) = call(*args, "--json").json["models"]
    more = [a - b for a, b in zip(with_average["bytes_per_device"]["bf16-master"], (dp, one, two, three), strict=True)]
    assert more == pytest.approx([4 * count, *[4 * count / 64] * 3])
    assert "a running average in fp32 is split as the optimizer is" in call(*args).words
    text = call("compare", "--zero", "llama3-70b", "--shards", "64", "--state", "bf16-master").words
    assert "bf16-master 1.13 TB 295 GB 157 GB 17.6 GB" in text


def test_bytes_of_every_state(call):
    found = call("compare", "llama3-8b", "--bytes", "--on", "h100", "--json").json
    each = {row["state"]: row["bytes_per_param"] for row in found["states"]}
    assert {row["none"] for row in each.values()} == {8, 10, 16, 18, 20}
    assert each["bf16-adam"]["fp32"] == 14
    (h100,) = found["largest_models"]
    assert h100["max_params"]["bf16-adam"] == pytest.approx(8e9)
    assert "h100 80 GB 10 B 8 B 5 B 4.44 B 4 B" in call("compare", "llama3-8b", "--bytes", "--on", "h100").words


def test_chips_that_hold_a_run(call):
    args = ("compare", "llama3-70b", "--hold", "--batch", "4M", "--on", "v5p-book")
    (held,) = call(*args, "--json").json["chips"]
    # How to Scale Your Model, section 6.3: 21.6 TB on 96 GB, 225 chips
    assert held["min_chips"]["llama3-70b"] in (225, 226)
    alone = call("compare", "llama3-70b", "--hold", "--on", "v5p-book", "--json").json["chips"][0]
    assert alone["min_chips"]["llama3-70b"] == 8
    assert call("compare", "llama3-70b", "--hold", "--on", "cpu", "--json").json["chips"][0]["min_chips"] == {
        "llama3-70b": None
    }


def test_what_one_of_so_many_chips_holds(call):
    args = ("compare", "llama3-70b", "--hold", "--batch", "4M", "--on", "v5p-book", "--chips", "8960")
    found = call(*args, "--json").json
    # section 6.3: 21.6 TB over 8960 chips are about 2.4 GB each
    assert found["bytes_per_chip"]["llama3-70b"] == pytest.approx(2.4e9, rel=0.02)
    assert found["bytes_per_chip"]["llama3-70b"] * 8960 == found["training_bytes"]["llama3-70b"]
    assert "One of 8,960 chips holds llama3-70b 2.4" in call(*args).words
    assert "v5p-book 96 GB 2.5%" in call(*args).words
    assert call("compare", "tiny", "--hold", "--chips", "0").code == 2


def test_activations_beside_the_derived_count(call):
    found = call("compare", "gpt3-175b", "--activations", "--seq", "2048", "--tensor", "8", "--json").json
    (gpt3,) = found["models"]
    units = [(row["recompute"], row["sequence_parallel"], row["per_sbh"]) for row in gpt3["closed_form"]]
    assert units[:4] == [
        ("none", False, 23),
        ("none", True, 114 / 8),
        ("selective", False, 13),
        ("selective", True, 34 / 8),
    ]
    derived = gpt3["derived_bytes_per_layer"]
    # full: the layer's input alone, s b h in 16 bits, split over 8 devices by sequence parallelism
    assert derived[4:] == [2 * 2048 * 12288, 2 * 2048 * 12288 / 8]
    # none: an eighth of every result but the two inputs of the products, which are kept gathered
    (whole,) = call("compare", "gpt3-175b", "--activations", "--seq", "2048", "--json").json["models"]
    assert 8 * derived[1] == whole["derived_bytes_per_layer"][0] + 7 * 2 * 2 * 2048 * 12288
    # without sequence parallelism x and x1 are whole too
    assert derived[0] == derived[1] + 7 / 8 * 2 * 2 * 2048 * 12288
    # 16 devices and 8 kv heads: four results of width D, two of F and the sums of 32 heads are split, and two of K H
    # over positions
    llama = call("compare", "llama3-8b", "--activations", "--seq", "2048", "--tensor", "16", "--json").json["models"][0]
    assert llama["derived_bytes_per_layer"][3] == 2 * 2048 * (4 * 4096 + 2 * 14336 + 2 * 1024 + 32) / 16
    assert "none 8 + sequence 14.25" in call("compare", "gpt3-175b", "--activations", "--seq", "2048", "--tensor",
                                             "8").words  # fmt: skip


@pytest.mark.parametrize(
    "view", [("--zero",), ("--bytes", "--on", "h100"), ("--hold", "--on", "h100", "--chips", "64"), ("--activations",)]
)
def test_views_as_tables_for_others(call, view):
    made = call("compare", "llama3-8b", *view, "--format", "csv").out
    head, *rows = [row for row in csv.reader(StringIO(made)) if row]
    assert rows
    assert len(rows[0]) == len(head)
    assert call("compare", "llama3-8b", *view, "--format", "markdown").out.count("\n| ---") >= 1
    assert max(map(len, call("compare", "llama3-8b", *view).out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no model is named"),
        (("--all", "tiny"), "do not go together"),
        (("lama3-8b",), "Did you mean 'llama3-8b'"),
        (("tiny", "--zero", "--hold"), "two views"),
        (("tiny", "--zero", "--shards", "0"), "at least 1"),
        (("tiny", "--zero", "--state", "bf16-adm"), "Did you mean 'bf16-adam'"),
        (("tiny", "--bytes", "--on", "cpu"), "memory of cpu is not known"),
        (("gpt3-175b", "--activations", "--tensor", "7"), "does not divide the 96 heads"),
    ],
)
def test_refused(call, args, message):
    call("compare", *args).assert_refused(2, message)


def test_sizes_in_the_proportions_of_llama(call):
    """As `sweep` takes them; 10 bytes a parameter of bf16-adam."""
    words = call("compare", "1B", "7B", "70B", "405B", "--bytes").words
    for name in ("llama-1B", "llama-7B", "llama-70B", "llama-405B"):
        assert name in words
    assert "bf16-adam 2 2 8 10" in words
