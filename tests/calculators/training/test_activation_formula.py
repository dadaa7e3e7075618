"""The closed form of activation memory, with the published figures."""

import pytest

from meshwright.calculators.training.activation_formula import attention_term, layer_activations, layer_units
from meshwright.core.errors import InputError
from meshwright.spec.catalogue import load_model


def test_selective_recomputation_saves_what_the_paper_says():
    # Korthikanti et al. 2022, section 5: 70% for GPT-3 and 65% for MT-NLG at 2048 positions.
    for heads, d_model, saved in ((96, 12288, 0.70), (128, 20480, 0.65)):
        attention = attention_term(heads, 2048, d_model)
        assert round(attention / (34 + attention), 2) == saved
    assert attention_term(96, 2048, 12288) == 80


def test_the_rows_of_the_papers_table():
    assert layer_units(80) == 34 + 80
    assert layer_units(80, tensor=8) == 10 + 24 / 8 + 80 / 8
    assert layer_units(80, tensor=8, sequence_parallel=True) == (34 + 80) / 8
    assert layer_units(80, tensor=8, recompute="selective") == 10 + 24 / 8
    assert layer_units(80, tensor=8, sequence_parallel=True, recompute="selective") == 34 / 8
    assert layer_units(80, tensor=8, recompute="full") == 2


def test_bytes_of_a_layer_are_linear_in_the_batch_and_quadratic_in_the_length():
    gpt3 = load_model("gpt3-175b")
    one = layer_activations(gpt3, seq_len=2048)
    assert one.num_bytes == 2048 * 12288 * 114
    assert layer_activations(gpt3, seq_len=2048, microbatch_seqs=3).num_bytes == 3 * one.num_bytes
    assert layer_activations(gpt3, seq_len=4096).num_bytes == 2 * 2048 * 12288 * (34 + 160)


def test_an_unknown_recomputation():
    with pytest.raises(InputError, match="none, selective or full"):
        layer_units(80, recompute="some")
