"""Bytes of tiled arrays against the compiler's own buffers, and places in a tile against NumPy."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.hlo.layout import tile_offset
from meshwright.hlo.shapes import parse_shapes, shape_bytes

BUFFERS = Path(__file__).parents[1] / "data" / "hlo" / "v5e_buffers.txt"


def test_padded_bytes_are_those_that_the_compiler_set_aside():
    lines = [line.split(" ", 1) for line in BUFFERS.read_text().splitlines()]
    assert len(lines) > 70
    wrong = [(size, text) for size, text in lines if parse_shapes(text)[0].padded_bytes != int(size)]
    assert wrong == []
    assert sum(parse_shapes(text)[0].num_bytes < int(size) for size, text in lines) > 10


@pytest.mark.parametrize(
    ("text", "num_bytes", "padded_bytes"),
    [
        ("f32[10,130]{1,0:T(8,128)}", 10 * 130 * 4, 16 * 256 * 4),
        ("f32[10,130]{0,1:T(8,128)}", 10 * 130 * 4, 136 * 128 * 4),
        ("bf16[3,10,64]{2,1,0:T(8,128)(2,1)}", 3 * 10 * 64 * 2, 3 * 16 * 128 * 2),
        ("bf16[1000]{0:T(1024)(128)(2,1)}", 2000, 2048),
        ("s4[8,128]{1,0:T(8,128)(8,1)E(4)}", 512, 512),
        ("s4[8,128]{1,0}", 1024, 1024),
        ("u32[5]{0:L(8)}", 20, 32),
        ("f32[7,3]{1,0}", 84, 84),
        ("token[]", 0, 0),
        ("pred[]", 1, 1),
    ],
)
def test_bytes_of_layouts(text, num_bytes, padded_bytes):
    (shape,) = parse_shapes(text)
    assert (shape.num_bytes, shape.padded_bytes, shape_bytes(text)) == (num_bytes, padded_bytes, num_bytes)


def test_parts_of_a_layout():
    (shape,) = parse_shapes("bf16[4,4096,8,64]{3,1,2,0:T(8,128)(2,1)S(1)}")
    assert (shape.minor_to_major, shape.order, shape.physical) == ((3, 1, 2, 0), (0, 2, 1, 3), (4, 8, 4096, 64))
    assert (shape.tiles, shape.memory_space, shape.padded_dims) == (((8, 128), (2, 1)), 1, (4, 8, 4096, 128))
    assert [str(one) for one in parse_shapes("(f32[2]{0}, /*index=1*/(s32[], u8[<=4]))")] == [
        "f32[2]",
        "s32[]",
        "u8[4]",
    ]


def test_places_in_a_tile():
    """Rows in pairs, and in fours, as NumPy would move them."""
    for rows in (2, 4):
        moved = np.arange(8 * 128).reshape(8 // rows, rows, 128, 1).transpose(0, 2, 1, 3).ravel()
        offsets = [tile_offset(((8, 128), (rows, 1)), (row, column)) for row in range(8) for column in range(128)]
        assert (moved[offsets] == np.arange(8 * 128)).all()
    assert tile_offset(((8, 128),), (3, 5)) == 3 * 128 + 5
    assert tile_offset(((1024,), (128,), (2, 1)), (128,)) == 1
