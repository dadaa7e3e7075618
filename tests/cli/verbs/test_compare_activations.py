"""The closed form of activation memory, with the published figures."""

from meshwright.cli.verbs.compare_memory import attention_term, layer_units


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


def test_bytes_of_a_layer_are_linear_in_the_batch_and_quadratic_in_the_length(call):
    def layer(*options):
        said = call("compare", "gpt3-175b", "--activations", *options, "--json")
        return said.json["models"][0]["closed_form"][0]["num_bytes"]

    assert layer("--seq", "2048") == 2048 * 12288 * 114
    assert layer("--seq", "2048", "--micro", "3") == 3 * layer("--seq", "2048")
    assert layer("--seq", "4096") == 2 * 2048 * 12288 * (34 + 160)
