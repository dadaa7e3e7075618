"""Matrix products in a text: which instructions are one, FLOPs, precision."""

import pytest

from meshwright.hlo.module import Instruction, parse_module
from meshwright.hlo.products import is_product, precision, product_flops

TEXT = """HloModule made

ENTRY %main (a: f32[8,16], b: f32[16,32]) -> f32[8,32] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,32]{1,0} parameter(1)
  %dot = f32[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, operand_precision={high,high}
  %called = f32[8,32]{1,0} custom-call(%a, %b), custom_call_target="TARGET"
  %half = f32[8,32]{1,0} dot(%a, %elsewhere), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = f32[8,32]{1,0} add(%dot, %half)
}
"""


def instructions(target: str = "") -> dict[str, Instruction]:
    return {one.name: one for one in parse_module(TEXT.replace("TARGET", target))}


@pytest.mark.parametrize(
    ("target", "multiplies"),
    [("__cublas$gemm", True), ("__cublas$lt$matmul$f8", True), ("__onednn$MatMul", True), ("TopK", False)],
)
def test_calls_of_a_library_are_products_by_their_names(target, multiplies):
    found = instructions(target)
    assert is_product(found["called"]) is multiplies
    assert [name for name in ("dot", "half", "sum", "a") if is_product(found[name])] == ["dot", "half"]


def test_flops_and_precision():
    found = instructions()
    assert product_flops(found["dot"], found) == 2 * 8 * 16 * 32
    assert product_flops(found["half"], found) == 0, "an operand is not in the text"
    assert (precision(found["dot"]), precision(found["half"])) == ("high", "default")
    config = '"precision_config":{"operand_precision":["HIGHEST","DEFAULT"]}'
    stated = TEXT.replace(
        'custom_call_target="TARGET"', f'custom_call_target="__cublas$gemm", backend_config={{{config}}}'
    )
    called = next(one for one in parse_module(stated) if one.name == "called")
    assert precision(called) == "highest", "a library's call states it in its backend config"
