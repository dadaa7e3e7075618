"""Instructions of a program's text, their FLOPs, bytes, steps and kinds; temporaries of its schedule."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.core.errors import InputError
from meshwright.hlo.products import precision
from meshwright.profile.classes import class_of_op
from meshwright.profile.hlo import load_program, parse_program
from meshwright.profile.memory import temporary_owners

TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={()->()}

%fused (p0: f32[8,16], p1: f32[16,32]) -> f32[8,32] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16,32]{1,0} parameter(1)
  %dot.2 = f32[8,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/layer:forward:q=einsum/dot"}
  ROOT %neg.2 = f32[8,32]{1,0} negate(%dot.2)
}

%moved (p2: f32[8,32], i: s32[]) -> f32[1,32] {
  %p2 = f32[8,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %sum = s32[] add(%i, %zero)
  ROOT %slice = f32[1,32]{1,0} dynamic-slice(%p2, %sum, %zero), dynamic_slice_sizes={1,32}
}

%summed (p3: f32[8,16], p4: f32[8,16]) -> f32[8] {
  %p3 = f32[8,16]{1,0} parameter(0)
  %p4 = f32[8,16]{1,0} parameter(1)
  %both = f32[8,16]{1,0} multiply(%p3, %p4)
  %none = f32[] constant(0)
  ROOT %sums = f32[8]{0} reduce(%both, %none), dimensions={1}, to_apply=%add
}

ENTRY %main (a: f32[8,16], b: f32[16,32], n: s32[]) -> f32[1,32] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,32]{1,0:T(8,128)} parameter(1)
  %n = s32[] parameter(2)
  %fusion.1 = f32[8,32]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
  %gemm = (f32[8,32]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", metadata={op_name="layer:backward:dq=einsum/dot" source_file="x.py" source_line=3}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %conv = f32[8,32]{1,0} convolution(%a, %b), dim_labels=bf_io->bf, operand_precision={highest,highest}
  %row = f32[8]{0} fusion(%a, %a), kind=kCustom, calls=%summed, metadata={op_name="layer:forward:k=einsum/reduce_sum"}
  %norm = f32[8,32]{1,0} multiply(%fusion.1, %conv), metadata={op_name="layer:forward:h=rms_norm/mul"}
  %reduce-scatter.1 = f32[1,32]{1,0} reduce-scatter(%norm), dimensions={0}, metadata={op_name="layer:backward:dw=reduce_scatter/x"}
  %all-gather-start.1 = (f32[1,32], /*index=1*/f32[8,32]) all-gather-start(%reduce-scatter.1), dimensions={0}
  ROOT %cut = f32[1,32]{1,0} fusion(%norm, %n), kind=kLoop, calls=%moved, metadata={op_name="jit(f)/while/dynamic_slice"}
}
"""  # noqa: E501
PROGRAM = parse_program(TEXT)
PRODUCT_FLOPS = 2.0 * 8 * 16 * 32


def test_products_of_every_form_have_their_flops():
    for name in ("fusion.1", "gemm", "conv"):
        assert PROGRAM.flops(name) == PRODUCT_FLOPS, name
    assert PROGRAM.flops("norm") == 0
    assert precision(PROGRAM.instructions["conv"]) == "highest"
    assert set(PROGRAM.products) == {"fusion.1", "gemm", "conv"}


def test_batches_that_a_convolution_dilates_are_no_sum():
    line = "%c = f32[4,8,32] convolution(%x, %y), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf"
    text = TEXT.replace(
        "  ROOT %cut", f"  %x = f32[4,8,16] copy(%a)\n  %y = f32[4,16,32] copy(%b)\n  {line}\n  ROOT %cut"
    )
    assert parse_program(text).flops("c") == 4 * PRODUCT_FLOPS


def test_bytes_are_those_of_operands_and_result():
    assert PROGRAM.hbm_bytes("fusion.1") == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    # a slice reads what it gives
    assert PROGRAM.hbm_bytes("cut") == 4 * (32 + 32 + 1)
    assert PROGRAM.hbm_bytes("a") == 0


def test_steps_and_kinds():
    kinds = {name: PROGRAM.fact(name).kind for name in ("fusion.1", "gemm", "row", "norm", "reduce-scatter.1", "cut")}
    assert kinds == {
        "fusion.1": "contraction",
        "gemm": "contraction",
        "row": "contraction",  # as products of one row are computed on CPUs
        "norm": "normalisation",
        "reduce-scatter.1": "collective",
        "cut": "copy",
    }
    assert PROGRAM.fact("fusion.1").step == "layer:forward:q=einsum"  # by what was fused: the fusion has no name
    assert PROGRAM.fact("gemm").part == "layer backward"
    assert PROGRAM.fact("cut").step == "outside the steps: dynamic_slice"
    assert PROGRAM.fact("all-gather-start.1").bound == "communication"
    assert (PROGRAM.fact("fusion.1").bound, PROGRAM.fact("norm").bound) == ("compute", "memory")


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("einsum", "contraction"),
        ("quantised_einsum", "contraction"),
        ("chunked_logits_backward", "contraction"),
        ("attention_backward", "attention"),
        ("cached_latent_attention", "attention"),
        ("layer_norm_backward", "normalisation"),
        ("embed_backward", "embedding"),
        ("dispatch", "embedding"),
        ("silu_mul", "elementwise"),
        ("adamw", "optimizer"),
        ("all_to_all", "collective"),
        ("slice", "copy"),
    ],
)
def test_derived_steps_have_the_same_classes(op, kind):
    assert class_of_op(op) == kind


def test_temporaries_at_the_fullest_place():
    owners, live = temporary_owners(PROGRAM)
    # the fused product and the library's, which has scratch beside its result
    assert live == 2 * 4 * 8 * 32 + 1024
    found = {owner.name: owner.num_bytes for owner in owners}
    assert found == {"layer:forward:q=einsum": 4 * 8 * 32, "layer:backward:dq=einsum": 4 * 8 * 32 + 1024}


@pytest.mark.parametrize("text", ["", "module @jit_f {\n}", "HloModule jit_f\n"])
def test_other_text_is_refused(text, tmp_path):
    file = tmp_path / "program.txt"
    file.write_text(text)
    with pytest.raises(InputError, match=r"is not the text of a compiled program.*compiled\.as_text"):
        load_program(file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.txt cannot be read \(No such file"):
        load_program(tmp_path / "none.txt")


def test_a_program_of_this_compiler():
    def step(a, b):
        with jax.named_scope("layer:forward:q=einsum"):
            return jnp.tanh(a @ b).sum()

    compiled = jax.jit(step).lower(jnp.ones((8, 16)), jnp.ones((16, 32))).compile()
    program = parse_program(compiled.as_text())
    assert program.module.name == "jit_step"
    products = program.products
    assert sum(program.flops(name) for name in products) == PRODUCT_FLOPS
    assert {str(program.label(name)) for name in products} == {"layer:forward:q=einsum"}
