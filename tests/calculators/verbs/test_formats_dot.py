"""Dot products: the slides' FLOPs and bytes, and instructions counted by hand."""

import pytest

from meshwright.calculators.chips.number_formats import number_format
from meshwright.calculators.verbs.formats import dot_product_ways, dot_product_work
from meshwright.core.errors import InputError

BF16 = number_format("bf16")


def test_the_slides_intensity():
    work = dot_product_work(BF16, 1000)
    assert (work.flops, work.num_bytes) == (1999, 4000)
    assert work.intensity == pytest.approx(0.5, rel=1e-3)
    assert dot_product_work(number_format("int8"), 1000).intensity == pytest.approx(1, rel=1e-3)


def test_instructions_by_hand():
    plain, fused, vector, matrix = dot_product_ways(BF16, 1024, load_cycles=10, vector_bits=512)
    assert (plain["loads"], plain["arithmetic"], plain["stores"]) == (2048, 1024 + 1023, 1)
    assert fused["arithmetic"] == 1024
    # 32 lanes: 32 fused instructions, then 5 shuffles and 5 adds
    assert (vector["loads"], vector["arithmetic"]) == (64, 32 + 10)
    # [16,16] x [16,8]: 64 instructions for 128 dot products
    assert matrix["arithmetic"] == 64 / 128


def test_cycles_are_the_larger_part_or_the_sum():
    plain = dot_product_ways(BF16, 4, load_cycles=10)[0]
    assert (plain["cycles_lower"], plain["cycles_upper"]) == (90, 97)
    assert dot_product_ways(BF16, 4, load_cycles=0)[0]["cycles_lower"] == 7


def test_what_cannot_be():
    with pytest.raises(InputError, match="at least 1"):
        dot_product_work(BF16, 0)
    with pytest.raises(InputError, match="holds no bf16"):
        dot_product_ways(BF16, 4, vector_bits=8)
