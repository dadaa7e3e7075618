"""Embeddings that each layer has besides: parts of one stored array, tables in int8 where matrices are in int4."""

import numpy as np
import pytest

from meshwright.algebra.generation.stored import quantised_weights
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.nn.hf.format import stored_parts
from meshwright.spec.hf.read import model_from_config
from tests.nn.families import CONFIGS, FAMILIES

MODEL = FAMILIES["gemma4-ple"]


def test_a_layers_table_is_a_part_of_one_array():
    parts = [part for part in stored_parts(MODEL) if part.variable.startswith("layer_embed")]
    width = MODEL.layer_embed_dim
    stored = np.arange(MODEL.vocab_size * 4 * width).reshape(MODEL.vocab_size, 4, width)
    flat = {parts[0].tensor: stored.reshape(MODEL.vocab_size, -1)}
    assert {part.tensor for part in parts} == {"model.embed_tokens_per_layer.weight"}
    assert [(part.variable, part.leading) for part in parts] == [
        *(("layer_embed_local", (row,)) for row in range(2)),
        *(("layer_embed", (row,)) for row in range(2)),
    ]
    box = (slice(0, MODEL.vocab_size), slice(0, width))
    for part, layer in zip(parts, (0, 2, 1, 3), strict=True):
        np.testing.assert_array_equal(part.read(flat, box), stored[:, layer])


def test_layers_read_the_embedding_that_the_first_block_shares():
    program = transformer(MODEL)
    assert program.blocks[0].shares == ("embedded", "shared_layer_norm")
    assert {program.shared_inputs(block.name) for block in program.blocks[1:-1]} == {program.blocks[0].shares}


def test_tables_are_in_int8_where_matrices_are_in_int4():
    dtypes = {name: (values.dtype, scales.dims) for name, (values, scales) in quantised_weights(MODEL, "int4").items()}
    assert dtypes["layer_embed"] == ("int8", ("V",))
    assert dtypes["layer_out"] == ("int4", ("Dlg", "D"))


def test_tables_of_fewer_tokens_are_refused():
    with pytest.raises(InputError, match="vocab_size_per_layer_input=60 is not vocab_size=64"):
        model_from_config(CONFIGS["gemma4-ple"] | {"vocab_size_per_layer_input": 60})
