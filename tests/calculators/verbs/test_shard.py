"""`meshwright shard`: the steps of one sharded product, every way, its execution, its picture."""

import json

import pytest

from meshwright.spec.calibration import Calibration, CollectiveRate, save_calibration

PRODUCT = "In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]"
SHEET = ("--calibration", "datasheet")
ARGS = ("shard", PRODUCT, "--mesh", "X=4,Y=2", "--dims", "B=1024,D=4096,F=16384")
SMALL = ("shard", PRODUCT, "--mesh", "X=4,Y=2", "--dims", "B=16,D=8,F=32")


def test_the_steps(call):
    found = call(*ARGS, "--json").json
    assert [(s["op"], s["axis"], s["array"], s["result"], s["bytes"], s["critical"]) for s in found["steps"]] == [
        ("all_gather", "Y", "In[B_X, D_Y]", "In[B_X, D]", 2 * 256 * 4096, True),
        ("all_gather", "X", "Win[D_X, F_Y]", "Win[D, F_Y]", 2 * 4096 * 8192, True),
        ("einsum", "", "In[B_X, D] * Win[D, F_Y]", "Tmp[B_X, F_Y]",
         2 * (256 * 4096 + 4096 * 8192 + 256 * 8192), False),
    ]  # fmt: skip
    assert found["local_shapes"] == {"In": [256, 2048], "Win": [1024, 8192], "Tmp": [256, 8192]}
    assert found["bytes_total"]["Tmp"] == 2 * 1024 * 16384
    assert found["flops_per_device"] == 2 * 256 * 4096 * 8192
    assert found["time_s"] is None
    assert all(step["time_s"] is None for step in found["steps"])


def test_times_on_a_cluster(call):
    """v5e:4x4 has no wraparound: a gather over n chips of a line takes (n - 1) shards at the one-way rate."""
    found = call(*ARGS, "--on", "v5e:4x4", *SHEET, "--json").json
    gather_y, gather_x, multiply = found["steps"]
    assert gather_y["time_s"] == pytest.approx(2 * 256 * 4096 / 2 / 45e9)
    assert gather_x["time_s"] == pytest.approx(2 * 4096 * 8192 * 3 / 4 / 45e9)
    assert multiply["time_s"] == pytest.approx(max(multiply["bytes"] / 819e9, 2 * 256 * 4096 * 8192 / 197e12))
    assert found["time_s"] == pytest.approx(sum(step["time_s"] for step in found["steps"]))
    text = call(*ARGS, "--on", "v5e:4x4", *SHEET).words
    for fact in ("AllGather Y In[B_X, D] 2.1 MB 23.3 us", "Win 1024 x 8192 16.8 MB 134 MB", "17.2 GFLOP per device",
                 "1.23 ms without overlap of steps", "mesh: X on x (4), Y on 2 of y (4)"):  # fmt: skip
        assert fact in text


def test_every_way(call):
    found = call(*ARGS, "--on", "v5e:4x4", *SHEET, "--all", "--json").json
    times = [way["time_s"] for way in found["ways"]]
    assert times == sorted(times)
    by_name = {way["way"]: way["time_s"] for way in found["ways"]}
    assert by_name["gather D of In over Y; gather D of Win over X"] == pytest.approx(found["time_s"])
    assert found["slice_and_sum"].pop("width") == "one way, no ring"
    assert found["slice_and_sum"] == pytest.approx(
        {"dim": "D", "size": 4096, "min_size": 2 * 197e12 / 45e9, "max_shards": 4096 * 45e9 / 197e12 / 2}
    )
    least = found["ways"][0]["time_s"]
    assert [way["times_cheapest"] for way in found["ways"]] == [way["time_s"] / least for way in found["ways"]]
    assert "from D = 2 alpha = 8,756 (here 4,096)" in call(*ARGS, "--on", "v5e:4x4", *SHEET, "--all").words


def test_exercise_3_4_on_a_ring(call):
    """The 4 chips of X close into a ring of v5p although 4x4 chips beside them are free.

    AllGather of Y: 2 x 8192^2 / 1.8e11 = 746 us. AllReduce of Z: 2 x 2 x 1024 x 8192 / 1.8e11 = 186 us.
    """
    args = ("shard", "X[B,D] * Y[D_X,F] -> Z[B,F]", "--mesh", "X=4", "--dims", "B=1024,D=8192,F=8192")
    found = call(*args, "--on", "v5p-book:4x4x4", "--all", "--json").json
    gather, multiply = found["steps"]
    assert gather["time_s"] == pytest.approx(746e-6, rel=1e-3)
    assert multiply["time_s"] == pytest.approx(2 * 1024 * 8192**2 / 459e12)
    sliced = {way["way"]: way for way in found["ways"]}["slice D of X over X; sum Z over X"]
    assert sliced["time_s"] == pytest.approx(2 * 1024 * 8192**2 / 4 / 459e12 + 186.4e-6, rel=1e-3)
    assert found["slice_and_sum"]["min_size"] == pytest.approx(5100)


def test_a_cheaper_way_is_named(call):
    """Exercise 3.4: the gather takes 746 us and the product 299; slices and their sum 186 and 75 us."""
    args = ("shard", "X[B,D] * Y[D_X,F] -> Z[B,F]", "--mesh", "X=4", "--dims", "B=1024,D=8192,F=8192")
    found = call(*args, "--on", "v5p-book:4x4x4", "--json").json
    least = call(*args, "--on", "v5p-book:4x4x4", "--all", "--json").json["ways"][0]
    assert found["cheapest"] == {"way": least["way"], "time_s": least["time_s"]}
    assert found["cheapest"]["time_s"] == pytest.approx(186.4e-6 + 74.9e-6, rel=1e-3)
    words = call(*args, "--on", "v5p-book:4x4x4").words
    assert "cheapest 261 us, 4.00 times faster: slice D of X over X; sum Z over X (--all lists every" in words
    assert "cheapest" not in call("shard", "A[I,J] * B[J,K_X] -> C[I,K_X]", *args[2:4], "--dims",
                                      "I=8,J=8,K=8", "--on", "v5p-book:4x4x4").words  # fmt: skip


@pytest.mark.parametrize(("on", "turns"), [("v5p:4x4x4", 1), ("v5e:8x8", 1), ("v5p-book:4x4x4", 0), ("v5e:4x16", 0)])
def test_a_scatter_costs_what_transfer_says(call, on, turns):
    args = ("shard", "In[B,D]{U_Y} -> In[B,D_Y]", "--mesh", "Y=64", "--dims", "B=2048,D=8192", "--on", on)
    axes = "x,y,z" if on.startswith("v5p") else "x,y"
    asked = ("transfer", "bf16[2048,8192]", "--on", on, "--axis", axes, "--collective", "reduce_scatter", "--json")
    (sent,) = call(*asked).json["collectives"]
    found = call(*args, "--json").json
    assert found["time_s"] == pytest.approx(sent["time_s"], rel=1e-12)
    assert len(found["turns"]) == turns
    assert call(*args, "--notes").words.count("libtpu makes one over all axes an all_reduce") == turns


def test_one_answer_of_three_questions(call):
    """V / W = 4 MiB / 1.8e11 = 23.3 us: X alone, X beside Y and Z, and the physical axis by its name."""
    args = ("shard", "B[J,K_X] -> B[J,K]", "--dims", "J=1024,K=2048", "--on", "v5p:8x4x4", "--json", "--mesh")
    times = [call(*args, mesh).json["time_s"] for mesh in ("X=8", "X=8,Y=4,Z=4")]
    moved = call("transfer", "4MiB", "--on", "v5p:8x4x4", "--axis", "x", "--collective", "all_gather", "--json").json
    assert [*times, moved["collectives"][0]["time_s"]] == pytest.approx([2**22 / 1.8e11] * 3)


def test_ways_without_a_cluster_are_by_bytes(call):
    found = call(*ARGS, "--all", "--json").json
    moved = [way["bytes"] for way in found["ways"]]
    assert moved == sorted(moved)
    assert found["slice_and_sum"] is None


def test_all_ways_run_and_agree(call):
    found = call(*SMALL, "--all", "--run", "--json").json
    assert found["run"]["devices"] == 8
    assert found["run"]["ways"] == len(found["ways"]) > 4
    assert found["run"]["equal"] is True
    assert 0 < found["run"]["largest_error"] < 1e-5
    assert "steps on 8 emulated devices equal to the unsharded product" in call(*SMALL, "--run").words


def test_the_picture(call, tmp_path):
    said = call(*SMALL, "--png", "blocks.png")
    assert said.err == "wrote blocks.png\n"
    assert (tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_what_is_gathered_and_the_partial_sums(call, tmp_path):
    args = ("--mesh", "X=2,Y=2", "--dims", "B=8,D=8,F=8", "--png", "blocks.json")
    for product, titles in (
        ("In[B_X,D_Y] * W[D,F] -> Out[B_X,F]", ["In[B_X, D_Y]", "W[D, F]", "In[B_X, D]", "Out[B_X, F]"]),
        ("A[B,D_X] * C[D_X,F] -> Z[B,F]", ["A[B, D_X]", "C[D_X, F]", "Z[B, F]{U_X}", "Z[B, F]"]),
    ):
        assert call("shard", product, *args).code == 0
        found = json.loads((tmp_path / "blocks.json").read_text())["concat"]
        assert [panel["title"]["text"] for panel in found] == titles
    assert found[2]["title"]["subtitle"] == "after the product: 8 x 8 on each device, partial sums"
    assert found[3]["title"]["subtitle"] == "after AllReduce over X: 8 x 8 on each device"


def test_axes_of_any_name_and_sums(call):
    args = ("shard", "x[B_{data,fsdp},D_tensor] * W[D_tensor,F] -> y[B_{data,fsdp},F]")
    found = call(*args, "--mesh", "data=2,fsdp=2,tensor=2", "--dims", "B=8,D=4,F=2", "--json").json
    assert [(s["op"], s["axis"]) for s in found["steps"]] == [("einsum", ""), ("all_reduce", "tensor")]
    assert found["steps"][0]["result"] == "y[B_{data,fsdp}, F]{U_tensor}"


def test_on_the_devices_of_this_machine(call, tmp_path):
    """Measured rates are of fp32, so arrays without a dtype are fp32 there."""
    rate = CollectiveRate(kind="all_gather", group_size=4, latency_s=1e-4, bytes_per_s=1e9)
    rates = Calibration(
        name="test", chip="cpu", matmul_flops_per_s={"fp32": 1e9}, memory_bytes_per_s=1e9, collectives=(rate,)
    )
    save_calibration(rates, tmp_path / "rates.toml")
    found = call(*SMALL, "--on", "cpu:8", "--calibration", "rates.toml", "--json").json
    assert found["steps"][1]["bytes"] == 4 * 8 * 16
    assert found["steps"][1]["time_s"] == pytest.approx(1e-4 + 4 * 8 * 16 * 0.75 / 1e9)


def test_one_device(call):
    found = call("shard", "A[I_X] * B[I_X] -> C[]", "--mesh", "X=1", "--dims", "I=8", "--on", "v5e:1x1", "--json").json
    assert found["local_shapes"] == {"A": [8], "B": [8], "C": []}
    assert found["time_s"] > 0


def test_one_array(call):
    """The slides' quick exercise: bf16[256,2048] over X and Y of a mesh that also has Z."""
    args = ("shard", "A[I_XY,J]", "--mesh", "X=4,Y=8,Z=2", "--dims", "I=256,J=2048")
    found = call(*args, "--json").json
    assert found["steps"] == []
    assert found["local_shapes"] == {"A": [8, 2048]}
    assert found["bytes_per_device"]["A"] == 2 * 8 * 2048
    assert (found["bytes_total"]["A"], found["copies"]["A"]) == (2 * 2 * 256 * 2048, 2)
    text = call(*args).words
    assert "A 8 x 2048 32.8 kB 2.1 MB 2" in text
    assert "FLOPs" not in text


def test_one_array_in_another_sharding(call):
    """A sum over Z that is scattered into B, then a gather of D over Y, executed with addends that differ."""
    args = ("shard", "int8[B_X,D_Y]{U_Z} -> A[B_XZ,D]", "--mesh", "X=2,Y=2,Z=2", "--dims", "B=64,D=96")
    found = call(*args, "--run", "--json").json
    assert [(s["op"], s["axis"], s["bytes"]) for s in found["steps"]] == [
        ("reduce_scatter", "Z", 32 * 48), ("all_gather", "Y", 16 * 96)
    ]  # fmt: skip
    before, after = found["local_shapes"]
    assert (before, after) == ("A[B_X, D_Y]{U_Z}", "A[B_XZ, D]")
    assert (found["copies"][before], found["addends"][before]) == (1, 2)
    assert (found["copies"][after], found["addends"][after]) == (2, 1)
    assert found["run"]["equal"] is True
    assert found["run"]["largest_error"] > 0
    assert "1 of 2 addends" in call(*args).words


def test_an_array_that_stays_has_nothing_to_do(call):
    found = call("shard", "A[B_X,D] -> A[B_X,D]", "--mesh", "X=2", "--dims", "B=64,D=96", "--json").json
    assert (found["steps"], found["time_s"]) == ([], 0)


def test_flops_of_all_devices(call):
    """Exercise 4.2: Z holds copies, so that the devices do four times the product's own FLOPs."""
    args = ("shard", "A[B_X,D_Y] * W[D_Y,F] -> C[B_X,F]", "--mesh", "X=4,Y=8,Z=4", "--dims", "B=1024,D=4096,F=4096")
    found = call(*args, "--json").json
    assert found["flops_unsharded"] == 2 * 1024 * 4096 * 4096
    assert found["flops_total"] == 4 * found["flops_unsharded"] == 128 * found["flops_per_device"]
    assert "137 GFLOP on 128 devices: 4 times the 34.4 GFLOP of the unsharded product" in call(*args).words


@pytest.mark.parametrize(
    ("asked", "more", "message"),
    [
        ("A[B_X,D]", ("--all",), "--all lists the ways of a product"),
        ("A[B_X,D]", ("--run",), "no step to execute"),
        ("A[B_X,D] -> A[B_X,F]", (), "differ in their dims"),
        ("A[B,D_X] -> A[B,D]{U_X}", (), "nothing left to sum over X"),
        ("int8[B_X,D] -> bf16[B,D]", (), "two dtypes of one array"),
        ("A[B_X", (), "is not a sharded array"),
        ("A[B_X,D]", ("--dims", "B=64,D=96,Q=7"), "--dims Q: no array has this dim. Choose of B, D"),
    ],
)
def test_what_cannot_be_asked(call, asked, more, message):
    call("shard", asked, "--mesh", "X=2", "--dims", "B=64,D=96", *more).assert_refused(2, message)


def test_the_feed_forward_product_of_section_9(call):
    """Section 9.2.4: bf16[8,1024,8192] times bf16[8192,16384] on each core of 23 TFLOP/s is 95.6 ms."""
    found = call("shard", "X[B_X,T,D] * W[D,F_Y] -> Tmp[B_X,T,F_Y]", "--mesh", "X=4,Y=2", "--dims",
                 "B=32,T=1024,D=8192,F=32768", "--on", "v2-book:4x2", "--json").json  # fmt: skip
    assert found["time_s"] == pytest.approx(2 * 8 * 1024 * 8192 * 16384 / 23e12)
    assert found["flops_per_device"] == 2 * 8 * 1024 * 8192 * 16384
