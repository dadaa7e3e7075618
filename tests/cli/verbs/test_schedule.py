"""`meshwright schedule`: figures, units, tables of one's own, comparisons, pictures."""

import pytest

ONE = ("schedule", "1f1b", "--stages", "4", "--microbatches", "8")


def test_the_numbers(call):
    found = call(*ONE, "--json").json
    assert (found["unit"], found["step"], found["bubble"]) == ("units", 33, 9)
    assert found["bubble_share"] == pytest.approx(3 / 11)
    assert found["busy"] == [24] * 4
    assert found["idle"] == [9] * 4
    assert found["peak_stash"] == [4, 3, 2, 1]
    assert (found["weight_copies"], found["chunks"]) == (1, 1)
    assert found["fused"] == {"ticks": 14, "step": 33, "peak_stash": 7}


def test_the_text(call):
    said = call(*ONE)
    for fact in (
        "1f1b: 4 devices, 8 microbatches",
        "forward 1, backward 2, of it weight gradients 1; a send takes 0 units",
        "step 33 units: 24 of work and a bubble of 9 units; devices idle 27.3% of it",
        "peak stash activations of 4 microbatches of a whole stage, on the fullest device; one copy of the weights",
        "tick by tick 33 units in 14 ticks of up to one F, B and W a device, as compiled steps run; peak stash 7",
        "(F forward, B backward; with the number of the microbatch where it fits; dots: idle)",
    ):
        assert fact in said.words
    assert "0  F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--\n" in said.out
    assert max(map(len, said.out.splitlines())) <= 80


def test_a_bubble_that_differs_from_the_published_one_says_why(call):
    """DeepSeek-V3: (8/2 - 1) (F&B + B - 3W) = 3 (3 + 2 - 3) = 6 for F 1, B 2 and W 1."""
    given = ("schedule", "dualpipe", "--stages", "8", "--microbatches", "20")
    said, found = call(*given), call(*given, "--json").json
    assert "a bubble of 3 units" in said.words
    assert "published bubble of 6 units by (PP/2 - 1) (F&B + B - 3W): its F&B is one pass, F + B long" in said.words
    assert (found["bubble"], found["bubble_published"]) == (3, 6)
    assert "published" not in call(*ONE).words
    assert call(*ONE, "--json").json["bubble_published"] is None


def test_eight_of_many_devices_are_listed_without_all(call):
    args = ("schedule", "zb-h2", "--stages", "32", "--microbatches", "64")
    said = call(*args)
    for text, num_devices in ((said, 8), (call(*args, "--all"), 32)):
        numbers = [line.split()[0] for line in text.out.splitlines() if line[:6].strip().isdigit()]
        assert numbers == [*map(str, range(num_devices))]
    assert "bubble of 0 units without a barrier between steps" in said.words
    assert "draw it with --png FILE" in said.words


def test_seconds(call):
    found = call(*ONE, "--forward", "1.2ms", "--send", "100us", "--json").json
    assert found["unit"] == "s"
    assert found["backward"] == pytest.approx([2.4e-3])
    assert found["weight"] == pytest.approx([1.2e-3])
    assert found["step"] == pytest.approx(11 * 3.6e-3 + 16 * 1e-4)
    assert (
        "step 41.2 ms: 28.8 ms of work and a bubble of 12.4 ms"
        in call(*ONE, "--forward", "1.2ms", "--send", "100us").words
    )


def test_a_time_for_every_virtual_stage(call):
    """A head that adds half of a stage's work to the last one."""
    found = call(*ONE, "--forward", "1,1,1,1.5", "--json").json
    assert found["busy"] == [24, 24, 24, 36]
    assert found["step"] == 8 * 4.5 + 3 * 3
    halves = call("schedule", "interleaved", "--stages", "2", "--microbatches", "2", "--forward", "1,2,3,4", "--json")
    assert halves.json["busy"] == [2 * 3 * (1 + 3), 2 * 3 * (2 + 4)]


def test_the_whole_backward_pass_is_split(call):
    """F 1, B 3 with recomputation, of it W 1: (stages - 1)(F + (B - W) - W)."""
    args = ("schedule", "zb-h1", "--stages", "4", "--microbatches", "8", "--backward", "3", "--weight", "1", "--json")
    assert call(*args).json["bubble"] == 3 * (1 + 2 - 1)


def test_compare(call):
    rows = {row["schedule"]: row for row in call(*ONE, "--compare", "--json").json["compare"]}
    assert list(rows) == ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v"]
    assert [row["bubble"] for row in rows.values()] == [72, 9, 9, 4.5, 3, 3, 1, 1.5]
    assert [row["peak_stash"] for row in rows.values()] == [1, 8, 4, 5.5, 4, 7, 5, 4.5]
    assert [row["weight_copies"] for row in rows.values()] == [1, 1, 1, 1, 1, 1, 2, 1]
    assert rows["zb-h2"]["bubble_without_barrier"] == 0
    said = call("schedule", "--stages", "3", "--microbatches", "8", "--compare")
    assert "dualpipe: dualpipe needs an even number of stages, not 3." in said.words
    assert "interleaved: the interleaved schedule needs microbatches that stages=3 divides, not 8." in said.words


def test_more_stages_on_the_same_chips_hardly_change_the_bubble(call):
    """(K - 1) / (M + K - 1) with M = c K, as halving the replicas doubles the microbatches of each."""
    found = call("schedule", "1f1b", "--stages", "8", "--microbatches", "32", "--sweep-stages", "--json").json["sweep"]
    assert [(row["stages"], row["microbatches"]) for row in found] == [(2**n, 4 * 2**n) for n in range(1, 7)]
    for row in found:
        stages = row["stages"]
        assert row["bubble_share"] == pytest.approx((stages - 1) / (5 * stages - 1))
        assert row["peak_stash_of_model"] == 1
    text = call("schedule", "dualpipe", "--stages", "4", "--microbatches", "10", "--sweep-stages").words
    assert "2 stages: dualpipe needs an even number of microbatches, at least 4 for 2 stages, not 5. Use" in text


def test_a_table_of_ones_own(call, tmp_path):
    assert call(*ONE, "-o", "mine.txt").err == "wrote mine.txt\n"
    again = call("schedule", "--table", "mine.txt", "--json").json
    named = call(*ONE, "--json").json
    assert again.pop("schedule") == "mine"
    assert named.pop("schedule") == "1f1b"
    assert again == named
    text = (tmp_path / "mine.txt").read_text().replace("0: F0 F1 F2 F3 B0", "0: F0 F1 F2 B1 F3")
    (tmp_path / "mine.txt").write_text(text)
    said = call("schedule", "--table", "mine.txt")
    assert (said.code, said.out) == (2, "")
    assert said.err == "meshwright: mine.txt:3: B1 occurs twice (first at mine.txt:3). Leave one of them out.\n"


def test_the_picture(call, tmp_path):
    said = call(*ONE, "--png", "out.png")
    assert (said.code, said.err) == (0, "wrote out.png\n")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


SIZES = ("--stages", "4", "--microbatches", "8")
WRONG = [
    (("schedule",), "no schedule is named. Give one of naive, gpipe, 1f1b"),
    (("schedule", "1f1b"), "1f1b needs --stages and --microbatches. Write for example --stages 8 --microbatches 32."),
    (("schedule", "1f1c", *SIZES), "schedule '1f1c' is not known. Did you mean '1f1b'?"),
    ((*ONE, "--forward", "fast"), "--forward 'fast' is not a time. Write for example 1.2ms, 1.5 or 1,1,1.5."),
    ((*ONE, "--forward", "1ms", "--backward", "2"), "some times have a unit and some have none"),
    ((*ONE, "--forward", "0"), "--forward and --backward must be more than 0"),
    ((*ONE, "--weight", "3"), "--weight 3 is more than --backward 2, of which it is a part"),
    ((*ONE, "--forward", "1ms", "--weight", "3ms"), "--weight 3 ms is more than --backward 2 ms"),
    ((*ONE, "--forward", "1,2"), "--forward has 2 times; 1f1b has 4 virtual stages here"),
    ((*ONE, "--send", "1,2"), "--send '1,2' is more than one time"),
    ((*ONE, "--chunks", "2"), "chunks=2 is not for 1f1b"),
    ((*ONE, "--forward", "1,1,1,2", "--compare"), "with --compare give one time for all devices"),
    ((*ONE, "--table", "x.txt"), "x.txt has a whole schedule. Leave out its name"),
    (("schedule", "--table", "x.txt"), "x.txt cannot be read (No such file or directory)"),
    (("schedule", "gpipe", "--stages", "1000", "--microbatches", "1000"), "are more than 100,000 rows"),
    (("schedule", "--compare", "--sweep-stages", *SIZES), "--sweep-stages needs the name of a schedule"),
]


@pytest.mark.parametrize(("args", "message"), WRONG)
def test_what_can_be_wrong(call, args, message):
    call(*args).assert_refused(2, message)


def test_one_of_a_thing_is_not_several(call):
    words = call(
        "schedule", "1f1b", "--stages", "1", "--microbatches", "1", "--forward", "0.5", "--backward", "0.5"
    ).words
    assert words.startswith("1f1b: 1 device, 1 microbatch step 1 unit: 1 of work and a bubble of 0 units;")
    assert "peak stash activations of 1 microbatch of a whole stage" in words
    assert "forward 0.5, backward 0.5" in words
