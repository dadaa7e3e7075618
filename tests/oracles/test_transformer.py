"""Worked answers on transformers: parameters by part."""

import pytest

from meshwright.spec.catalogue import load_model
from meshwright.spec.weights import num_params, params_by_part
from tests.oracles.shapes import dense
from tests.oracles.worked import Answers, Inputs, row


def of_the_row(i: Inputs) -> int:
    """Parameters of the dense transformer with the row's letters."""
    return num_params(dense(**{letter: size for letter, size in i.items() if letter != "NH"}))


ANSWERS: Answers = {
    "book-6.2-attn": lambda i: params_by_part(load_model("llama3-70b"))["attention"],
    "book-6.2-ffw": lambda i: params_by_part(load_model("llama3-70b"))["mlp"],
    "book-6.2-total": lambda i: num_params(load_model("llama3-70b")),
    "book-7.1.6-13b": lambda i: num_params(load_model("llama2-13b")),
    "book-ex4.1-params": of_the_row,
    "book-ex5.1-ffw": lambda i: params_by_part(load_model("llama2-13b"))["mlp"],
    "book-ex7.1-params": of_the_row,
}


@pytest.mark.parametrize(("identity", "name"), [("book-6.2-total", "llama3-70b"), ("book-7.1.6-13b", "llama2-13b")])
def test_the_catalogue_has_the_letters_of_the_row(identity, name):
    given = row(identity).inputs
    assert {letter: load_model(name).dims[letter] for letter in given} == given
