"""`meshwright hlo`: the summary, one instruction, pictures, what is refused."""

import csv
from io import StringIO
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "data" / "hlo"


def file(name: str) -> str:
    return str(DATA / f"{name}.hlo")


def test_a_tpu_program(call):
    found = call("hlo", file("v5e_forward"), "--mesh", "fsdp=4,tensor=4", "--json").json
    assert (found["module"], found["num_partitions"], found["num_instructions"]) == ("jit_step", 16, 278)
    rows = {(row["kind"], *row["axes"]): row for row in found["collectives"]}
    assert rows["permute", "fsdp"]["times"] == 15
    assert rows["permute", "fsdp"]["notes"] == ["cut matmul"]
    assert rows["reduce_scatter", "tensor"]["total_bytes"] == 5 * 16 * 512 * 1024 * 2 // 4
    assert [(loop["trips"], loop["depth"]) for loop in found["loops"]] == [(5, 0)]
    assert found["paddings"]
    words = call("hlo", file("v5e_forward"), "--mesh", "fsdp=4,tensor=4").words
    assert "HLO for 16 partitions: 22 computations, 278 instructions" in words
    assert "permute fsdp 0.524 15 7.86 async; cut matmul" in words


def test_tables_for_other_programs(call):
    """Bytes stand below names that say so, a row for each of --json."""
    args = ("hlo", file("v5e_forward"), "--mesh", "fsdp=4,tensor=4")
    found, told = call(*args, "--json").json, call(*args, "--format", "csv").out
    tables = [list(csv.DictReader(StringIO(text))) for text in told.split("\n\n")]
    names = ("collectives", "loops", "largest", "relayouts", "paddings")
    for rows, name in zip(tables, filter(found.get, names), strict=True):
        assert [list(row) for row in rows] == [list(row) for row in found[name]]
    assert [int(row["full_bytes"]) for row in tables[0]] == [row["full_bytes"] for row in found["collectives"]]
    assert tables[0][0]["axes"] == "+".join(found["collectives"][0]["axes"])
    assert "| MB each |" in call(*args, "--format", "markdown").out


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit(call, width):
    for name in ("v5e_forward", "cpu_layer", "two_slices", "h200_step"):
        said = call("hlo", file(name), width=width)
        assert said.code == 0
        assert max(map(len, said.out.splitlines())) <= width


def test_without_a_mesh_and_with_labels(call):
    words = call("hlo", file("cpu_layer")).words
    assert "collective devices" in words
    assert "layer forward h, h1" in words


def test_one_instruction(call, tmp_path):
    found = call("hlo", file("cpu_layer"), "--op", "all_gather.149", "--json").json
    assert (found["opcode"], found["step"]) == ("all-gather", "layer:forward:h1=all_gather")
    assert found["shapes"][0]["bytes"] == 8 * 128 * 256 * 4
    said = call("hlo", file("v5e_forward"), "--op", "all-gather.24", "--png", "tiles.png")
    assert "T(8,128): 8 x 128 elements of dim 1 x dim 2 are contiguous" in said.words
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")


def test_the_graph_of_a_layer(call, tmp_path):
    found = call("hlo", file("cpu_layer"), "--png", "layer.png", "--step-block", "layer", "--json").json
    assert found["num_nodes"] == 26
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_stablehlo(call, tmp_path):
    (tmp_path / "a.mlir").write_text("module @jit_f {\n func.func @main() {\n stablehlo.all_reduce\n } }")
    assert "1 all_reduce written in the program" in call("hlo", "a.mlir").words
    assert call("hlo", "a.mlir", "--json").json["collectives"] == {"all_reduce": 1}
    assert "has no layouts yet" in call("hlo", "a.mlir", "--op", "x").err


def test_a_loop_that_depends_on_data(call, tmp_path):
    text = (
        Path(file("h200_step"))
        .read_text()
        .replace('"known_trip_count"', '"unknown"')
        .replace("constant(5)", "constant({...})")
    )
    (tmp_path / "a.hlo").write_text(text)
    found = call("hlo", "a.hlo", "--json").json
    assert found["collectives"] is None
    assert "states no readable trip count" in found["why"]
    assert "by data" in call("hlo", "a.hlo").words


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("none.hlo",), "there is no file or folder none.hlo"),
        ((file("v5e_forward"), "--mesh", "fsdp=3"), "--mesh has 3 devices and jit_step is for 16"),
        ((file("v5e_forward"), "--op", "all-gather.2"), "no instruction 'all-gather.2'. Did you mean 'all-gather.24'"),
        ((file("v5e_forward"), "--step-block", "layer"), "it is for --png"),
        ((file("h200_step"), "--op", "all-gather-start", "--png", "a.png"), "no tiles to draw"),
        ((file("cpu_layer"), "--png", "a.png", "--step-block", "head"), "block 'head'"),
    ],
)
def test_refused(call, args, message):
    call("hlo", *args).assert_refused(2, message)


LONG = """HloModule jit_long, num_partitions=64

%region_1.very_long_name_spmd.sunk.clone.clone.clone.sunk.of_a_loop (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8] parameter(0)
}

ENTRY %main () -> (bf16[126,1,2,2048,1,128], bf16[126,1,2,2048,1,128]) {
  %all_experts = bf16[8,4096,14336]{2,1,0:T(8,128)(2,1)} parameter(0)
  %gathered_async.1 = bf16[64,4096,14336]{2,1,0:T(8,128)(2,1)} all-gather(%all_experts), dimensions={0}, channel_id=1, replica_groups=[8,8]<=[64], use_global_device_ids=true, metadata={op_name="layer_moe:backward:dexperts_w_gate=all_gather"}
  %bitcast_dynamic_update_slice_convert_fusion.1 = bf16[126,1,2,2048,1,64]{3,5,2,4,1,0:T(8,128)(2,1)} add(%all_experts, %all_experts), metadata={op_name="layer_moe:backward:dexperts_w_gate=einsum"}
  %copy_of_a_long_name_of_an_array.287 = bf16[126,1,2,2048,1,64]{5,3,2,4,1,0:T(8,128)(2,1)} copy(%bitcast_dynamic_update_slice_convert_fusion.1), metadata={op_name="layer_moe:backward:dexperts_w_gate=einsum"}
  ROOT %two = (bf16[126,1,2,2048,1,128]{5,4,3,2,1,0}, bf16[126,1,2,2048,1,128]{5,4,3,2,1,0}) custom-call(), custom_call_target="Pair"
}
"""  # noqa: E501


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_fit(call, width):
    Path("long.hlo").write_text(LONG)
    said = call("hlo", "long.hlo", "--all", width=width)
    assert max(map(len, said.out.splitlines())) <= width
    assert "layer_moe backward dexperts_w_gate" in said.words
    assert "-> {5,3,2,4,1,0:T(8,128)(2,1)}" in said.words
    # a tuple of two arrays alike is one row
    assert "two bf16[126,1,2,2048,1,128] 132 2 1" in said.words


def test_a_text_that_is_cut_off(call):
    Path("part.hlo").write_text(LONG.split("ENTRY")[0])
    assert "no ENTRY computation" in call("hlo", "part.hlo").words
    assert call("hlo", "part.hlo", "--json").json["whole"] is False
    Path("cut.hlo").write_text(LONG.removesuffix("}\n"))
    call("hlo", "cut.hlo").assert_refused(2, "breaks off inside its ENTRY")


def test_an_instruction_given_as_text(call):
    line = "%fusion.3 = bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)} fusion(...), kind=kCustom"
    words = call("hlo", line).words
    assert words.startswith("fusion.3 does fusion: several operations as one kernel")
    assert "(2,1): inside, 2 rows share 32-bit words" in words
    Path("line.txt").write_text(line + "\n")
    assert call("hlo", "line.txt").words == words
    assert call("hlo", line, "--json").json["instructions"][0]["name"] == "fusion.3"


UNEVEN = """HloModule sums, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (h: f32[256]) -> f32[256] {
  %h = f32[256]{0} parameter(0)
  %rows = f32[256]{0} all-reduce(%h), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  ROOT %mixed = f32[256]{0} all-reduce(%rows), channel_id=2, replica_groups={{0,1},{2,3,4,5,6,7}}, to_apply=%add
}
"""


def test_groups_of_unequal_sizes_are_no_mesh_axes(call):
    Path("uneven.hlo").write_text(UNEVEN)
    rows = call("hlo", "uneven.hlo", "--mesh", "a=2,b=4", "--json").json["collectives"]
    found = {(tuple(row["axes"]), row["group_size"], *row["notes"]) for row in rows}
    assert found == {(("a",), 2), ((), 6, "groups of 2 and 6")}


def test_a_layout_that_cannot_be_is_refused(call):
    call("hlo", "%f = bf16[32,4096]{2,1,0:T(8,128)} fusion(...), kind=kLoop").assert_refused(2, "does not fit its dims")
