"""`meshwright transfer`: exercises 2.5 and 2.6 of the book, collectives over levels, refusals."""

import json

import pytest

SHEET = ("--calibration", "datasheet")
EX_2_6 = ["transfer", "int8[128Ki,128Ki]", "--on", "v5e-book:4x4", "--from", "hosts", "--to", "0,0"]


def test_exercise_2_5(call):
    args = ("transfer", "bf16[8,128,8192]", "--on", "v5e:4x4", "--from", "0,0", "--to", "3,3")
    found = call(*args, "--json").json
    assert found["first_byte_s"] == pytest.approx(6e-6)
    assert found["slowest_leg_s"] == pytest.approx(188e-6, rel=0.01)
    assert found["time_s_pipelined"] == pytest.approx(found["slowest_leg_s"] + 6e-6)
    text = call(*args).words
    for fact in ("2 paths, 6 hops ici 16.8 MB 2 x 45 GB/s", "first byte after 6 us", "time 192 us with legs pipelined"):
        assert fact in text


def test_exercise_2_6(call):
    found = call(*EX_2_6, "--leg", "hbm", "--leg", "275GFLOP@compute", "--json").json
    assert [leg["channel"] for leg in found["legs"]] == ["pcie", "ici", "hbm", "compute"]
    # the text counts 16 GB for 2^34 bytes: 66, 167, 19 and 1.3 ms
    expected = [scale * 2**34 / 16e9 for scale in (0.0667, 0.1667, 0.01975)]
    assert [leg["send_s"] for leg in found["legs"][:3]] == pytest.approx(expected, rel=1e-3)
    assert found["legs"][3]["send_s"] == pytest.approx(1.4e-3, rel=0.01)
    assert found["bound_by"] == "ici"
    assert 0.15 < found["time_s_pipelined"] < 0.2 < found["time_s_in_turn"]
    slow = call(*EX_2_6, "--via", "dcn", "--json").json
    assert slow["bound_by"] == "pcie"
    assert slow["time_s_pipelined"] > 6 * found["time_s_pipelined"]
    assert "slowest leg 15 chips into one over its 2 links (ici)" in call(*EX_2_6).words


def test_collectives_over_an_axis(call):
    found = call("transfer", "34MB", "--axis", "y", "--on", "v5e:4x4", *SHEET, "--json").json
    assert found["group_size"] == 4
    by_kind = {one["kind"]: one for one in found["collectives"]}
    assert by_kind["all_gather"]["time_s"] == pytest.approx(0.75 * 34e6 / 45e9)
    assert by_kind["all_gather"]["latency_bound_below_bytes"] == pytest.approx(3e-6 * 45e9 / 0.75)
    assert by_kind["all_reduce"]["time_s"] == pytest.approx(2 * by_kind["all_gather"]["time_s"])
    assert found["latency_forms"] is None
    (small,) = call(
        "transfer", "1kB", "--axis", "y", "--collective", "all_gather", "--on", "v5e:4x4", *SHEET, "--json"
    ).json["collectives"]
    assert (small["bound_by"], small["time_s"]) == ("latency", pytest.approx(3e-6))


def test_collectives_over_levels(call):
    found = call("transfer", "1GB", "--axis", "domain,nodes", "--on", "h100:8x256", "--json").json
    assert found["group_size"] == 2048
    forms = found["latency_forms"]
    assert (forms["ring_hops"], forms["tree_hops"]) == (255, 8)
    assert forms["ring_s"] == pytest.approx(255 * 5e-6)
    text = call("transfer", "1GB", "--axis", "domain,nodes", "--on", "h100:8x256", "--notes").words
    assert "tree, 8 hops, 40 us" in text
    twisted = call("transfer", "1GB", "--axis", "x,y,z", "--on", "v4p:4x4x8_twisted", "--json").json
    plain = call("transfer", "1GB", "--axis", "x,y,z", "--on", "v4p:4x4x8", "--json").json
    exchange = [one["collectives"][3]["time_s"] for one in (plain, twisted)]
    assert exchange[0] / exchange[1] == pytest.approx(1.63)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--from", "0,0"), "--from and --to go together"),
        ((), "needs a leg"),
        (("--axis", "w"), "'w' is not an axis of the mesh"),
        (("--collective", "all_gather"), "--collective needs --axis, one or several of x, y"),
        (("--axis", "x", "--leg", "hbm"), "Give one or the other"),
        (("--leg", "hbm", "--calibration", "c.toml"), "give --axis"),
        (("--from", "0,0", "--to", "1,1", "--one-way"), "--one-way is for a collective on a ring"),
        (("--leg", "hbm", "--frames", "a.png"), "--frames is for a collective on a ring"),
        (("--axis", "x", "--one-way"), "needs a ring"),
        (
            ("--axis", "x", "--frames", "a.png"),
            "give --collective all_gather, reduce_scatter, all_reduce or all_to_all",
        ),
        (("--axis", "x,y", "--collective", "all_gather", "--frames", "a.png"), "draws one axis"),
    ],
)
def test_refusals(call, args, message):
    call("transfer", "1GB", "--on", "v5e:4x4", *args).assert_refused(2, message)


def test_tables_fit(call):
    for width in (80, 120):
        for args in (EX_2_6, ["transfer", "1GB", "--axis", "domain,nodes", "--on", "h100:8x256"]):
            assert max(map(len, call(*args, width=width).out.splitlines())) <= width


RING = ("transfer", "bf16[8192,8192]", "--on", "v5e-book:16x16", "--axis", "x")


def test_a_ring_in_one_direction(call):
    """Exercise 3.10: an AllToAll is half of an AllGather one way, and a quarter of it both ways."""
    both, one = (
        {c["kind"]: c for c in call(*RING, *more, "--json").json["collectives"]} for more in ((), ("--one-way",))
    )
    assert both["all_to_all"]["bandwidth_s"] == pytest.approx(both["all_gather"]["bandwidth_s"] / 4)
    assert one["all_to_all"]["bandwidth_s"] == pytest.approx(one["all_gather"]["bandwidth_s"] / 2)
    assert one["all_gather"]["bandwidth_s"] == pytest.approx(2 * both["all_gather"]["bandwidth_s"])
    assert one["all_gather"]["latency_s"] == pytest.approx(15e-6)
    array = 2 * 8192**2
    assert one["all_gather"]["link_bytes"] == pytest.approx(array * 15 / 16)
    assert one["all_to_all"]["link_bytes"] == pytest.approx(array * 15 / 32)
    assert both["all_to_all"]["link_bytes"] == pytest.approx(array / 8)
    assert "one way round" in call(*RING, "--one-way").words


def test_only_a_ring_has_links_to_count(call):
    found = call("transfer", "1MB", "--on", "v5e:4x4", "--axis", "x", "--json").json
    assert {one["link_bytes"] for one in found["collectives"]} == {None}
    assert "over a link" not in call("transfer", "1MB", "--on", "v5e:4x4", "--axis", "x").out


def test_frames_in_one_picture_and_in_a_folder(call, tmp_path):
    args = ("transfer", "1MB", "--on", "v5e:4x4", "--axis", "x", "--collective")
    assert call(*args, "all_reduce", "--frames", "ring.json").err == "wrote ring.json\n"
    spec = json.loads((tmp_path / "ring.json").read_text())
    # a line of 4: 3 hops to add, 3 hops to gather, and the start
    assert len(spec["concat"]) == 7
    assert "AllReduce on a line of 4: 6 steps" in spec["title"]["text"]
    said = call(*args, "all_gather", "--frames", "steps", "--json")
    assert said.json["frames"] == [f"steps/step-0{n}.png" for n in range(4)]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in said.json["frames"])


@pytest.mark.parametrize(
    ("on", "axis", "kind", "title"),
    [
        ("v5p:4x8x4", "y", "all_to_all", "AllToAll on a ring of 8: 4 steps"),
        ("h100:8x4", "domain", "all_to_all", "AllToAll on a switch of 8: 1 step"),
        ("h100:8x4", "domain", "all_reduce", "AllReduce on a switch of 8: 2 steps"),
        ("h100:8x8", "nodes", "all_gather", "AllGather on trees of 8: 3 steps"),
    ],
)
def test_frames_of_switches_trees_and_exchanges(call, tmp_path, on, axis, kind, title):
    args = ("transfer", "1MB", "--on", on, "--axis", axis, "--collective", kind, "--frames", "steps.json")
    assert call(*args).err == "wrote steps.json\n"
    assert json.loads((tmp_path / "steps.json").read_text())["title"]["text"] == title


def test_one_hop_takes_what_a_permute_takes(call):
    """A hop of 1 us, then 33 kB at 45 GB/s: 1.73 us."""
    (sent,) = call("transfer", "33kB", "--on", "v5e:4x4", "--axis", "x", "--collective", "permute", "--json").json[
        "collectives"
    ]
    moved = call("transfer", "33kB", "--on", "v5e:4x4", "--from", "0,0", "--to", "1,0", "--json").json
    assert sent["time_s"] == pytest.approx(1e-6 + 33e3 / 45e9, rel=1e-12)
    assert moved["time_s_pipelined"] == pytest.approx(sent["time_s"], rel=1e-12)
    assert moved["bound_by"] == sent["bound_by"] == "latency"


def test_what_is_taken_between_slices_may_be_named(call):
    args = ("transfer", "15GB", "--on", "2*v5e:4x4", "--from", "0:0,0", "--to")
    named, unnamed = (call(*args, "1:0,0", *via, "--json").json for via in (("--via", "dcn"), ()))
    assert named == unnamed
    assert [leg["channel"] for leg in named["legs"]] == ["pcie", "dcn", "pcie"]
    assert call(*args, "host:1:0,0", "--via", "dcn").code == 0
    assert "--via changes nothing here" in call(*args, "0:1,0", "--via", "dcn").err


def test_a_whole_slice_scatters_in_two_turns_and_says_so(call):
    """2^25 bytes over rings of 1.8e11: all three, and two and then a 16th over the third."""
    args = ("transfer", "bf16[2048,8192]", "--axis", "x,y,z")
    found = call(*args, "--on", "v5p:4x4x4", "--json").json
    times = {one["kind"]: one["time_s"] for one in found["collectives"]}
    assert times["all_gather"] == pytest.approx(2**25 / 1.8e11 / 3)
    assert times["reduce_scatter"] == pytest.approx(2**25 / 1.8e11 * (1 / 2 + 1 / 16))
    assert times["all_reduce"] == pytest.approx(2 * times["all_gather"])
    assert (
        "reduce_scatter in two steps, x last: libtpu makes one over all axes an all_reduce"
        in call(*args, "--on", "v5p:4x4x4").words
    )
    assert "2 neighbours on x last" in call("transfer", "1GB", "--axis", "x,y", "--on", "v5e:8x8").words
    assert "2 neighbours on x last" in call("transfer", "1GB", "--axis", "x,y", "--on", "v5p:4x4x1").words
    # as the book counts, and where libtpu scatters at once
    book = {one["kind"]: one["time_s"] for one in call(*args, "--on", "v5p-book:4x4x4", "--json").json["collectives"]}
    assert book["reduce_scatter"] == book["all_gather"] == pytest.approx(62.1e-6, rel=1e-3)
    assert call("transfer", "1GB", "--axis", "x,y", "--on", "v5e:8x16", "--json").json["turns"] == ""


def test_the_rates_are_named(call, tmp_path):
    line = call("transfer", "1GB", "--axis", "domain", "--on", "h100:8x2").words
    assert "rates: line rates of the data sheet; plans take the fitted 79% of nvlink" in line
    own = tmp_path / "own.toml"
    own.write_text('name = "seen"\nchip = "h100"\n[efficiency]\nnvlink = 0.5\n')
    seen = call("transfer", "1GB", "--axis", "domain", "--on", "h100:8x2", "--calibration", str(own))
    assert "rates: calibration 'seen'" in seen.words
