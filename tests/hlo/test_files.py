"""Finding and telling apart compiled programs."""

import pytest

from meshwright.core.errors import InputError
from meshwright.hlo.files import StableHlo, hlo_file, read_hlo
from meshwright.hlo.module import Module
from tests.hlo.programs import DATA

STABLE = """module @jit_step attributes {mhlo.num_partitions = 8 : i32} {
  sdy.mesh @mesh = <["fsdp"=4, "tensor"=2]>
  func.func public @main(%arg0: tensor<8xf32>) -> tensor<8xf32> {
    %0 = "stablehlo.all_gather"(%arg0) <{all_gather_dim = 0 : i64}> : (tensor<8xf32>) -> tensor<8xf32>
    %1 = "stablehlo.all_gather"(%0) <{all_gather_dim = 0 : i64}> : (tensor<8xf32>) -> tensor<8xf32>
    return %1 : tensor<8xf32>
  }
}
"""


def test_a_dump_is_read_by_its_largest_optimised_module(tmp_path):
    for name, text in (
        ("module_0001.jit_f.cpu_after_optimizations.txt", "HloModule small"),
        ("module_0002.jit_step.after_optimizations.txt", "HloModule step" + " " * 99),
        ("module_0002.jit_step.after_optimizations-buffer-assignment.txt", "x" * 999),
        ("module_0002.jit_step.before_optimizations.txt", "x" * 999),
    ):
        (tmp_path / name).write_text(text)
    assert hlo_file(tmp_path).name == "module_0002.jit_step.after_optimizations.txt"
    assert hlo_file(tmp_path / "module_0002.jit_step.before_optimizations.txt").name.endswith(
        "before_optimizations.txt"
    )


def test_a_folder_of_hlo_files():
    assert hlo_file(DATA).suffix == ".hlo"
    assert isinstance(read_hlo(DATA / "h200_each.hlo"), Module)


def test_stablehlo_says_what_it_is(tmp_path):
    (tmp_path / "step.mlir").write_text(STABLE)
    read = read_hlo(tmp_path / "step.mlir")
    assert read == StableHlo("jit_step", 8, 1, "fsdp=4, tensor=2", {"all_gather": 2})
    (tmp_path / "step.txt").write_text(STABLE)
    assert read_hlo(tmp_path / "step.txt") == read


def test_refused(tmp_path):
    with pytest.raises(InputError, match="there is no file or folder"):
        hlo_file(tmp_path / "none")
    with pytest.raises(InputError, match="has no"):
        hlo_file(tmp_path)
    (tmp_path / "a.txt").write_text("nothing of the kind")
    with pytest.raises(InputError, match="is not a complete HLO text"):
        read_hlo(tmp_path / "a.txt")
    with pytest.raises(InputError, match="is not StableHLO"):
        read_hlo(tmp_path / "a.txt", stablehlo=True)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        read_hlo(tmp_path / "b.txt")


ADD = "%add {\n  %a = f32[] parameter(0)\n  ROOT %b = f32[] negate(%a)\n}\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("%f = f32[] fusion(%p), kind=kLoop",), "fusion f lacks an attribute that it needs"),
        (("%w = f32[] while(%p), body=%add",), "while w lacks an attribute that it needs"),
        (("%f = f32[] fusion(%p), calls=%main",), "cycle"),
        (("%c = f32[2] copy(%d)", "%d = f32[2] copy(%c)"), "copy c reads a result that does not come before it"),
        (("%c = f32[2] copy()",), "copy c has no operand"),
        (("%g = f32[2] get-tuple-element(%p)",), "get-tuple-element g lacks an attribute that it needs"),
        (("%q = f32[2] parameter(x)",), "parameter q has no whole number as its index"),
        (("%c = f32[2,2]{1,0:T(0,128)} copy(%p)",), "copy c has a layout that does not fit its dims"),
        (("%c = f32[2,2]{2,0} copy(%p)",), "copy c has a layout that does not fit its dims"),
        (("%c = f32[] all-reduce(%p), replica_groups={{0,99999999999999999999}}",), "names a device of nine digits"),
        (("%c = f32[" + "9" * 5000 + "] copy(%p)",), "a number of hundreds of digits"),
    ],
)
def test_damaged_programs_are_named(tmp_path, lines, message):
    body = "\n".join(f"  {line}" for line in ("%p = f32[] parameter(0)", *lines, "ROOT %r = f32[] negate(%p)"))
    (tmp_path / "a.txt").write_text(f"HloModule m\n\n{ADD}\nENTRY %main {{\n{body}\n}}\n")
    with pytest.raises(InputError, match=f"a.txt is not a complete HLO text: .*{message}"):
        read_hlo(tmp_path / "a.txt")


def test_a_program_without_a_name(tmp_path):
    (tmp_path / "a.txt").write_text(f"HloModule\n\n{ADD}")
    assert read_hlo(tmp_path / "a.txt").name == "?"


def test_a_program_of_too_many_computations_inside_each_other(tmp_path):
    links = [f"%c{n} {{\n  ROOT %x{n} = f32[] call(), to_apply=%c{n - 1}\n}}\n" for n in range(1, 3000)]
    (tmp_path / "a.txt").write_text("%c0 {\n  ROOT %x0 = f32[] constant(1)\n}\n" + "".join(links))
    with pytest.raises(InputError, match="has computations nested 101 deep"):
        read_hlo(tmp_path / "a.txt")
