"""Constrained output: texts of a schema, an expression or a choice, beside requests that are free."""

import json
import re

import msgspec
import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.serve.drawing.drafts import ModelDrafter, NgramDrafter
from meshwright.serve.drawing.grammar import GrammarReader, MaskedRow, TokenMasks
from meshwright.serve.drawing.sampling import Sampling
from meshwright.serve.request import TokenRequest
from tests.parallel.generate_cases import LLAMA, float_params
from tests.serve.drawing.test_drafts import drafting_engine
from tests.serve.test_engine import engine_on, step_of, tokens_of
from tests.serve.test_model_folder import byte_tokenizer
from tests.tier import sampled

MODEL = msgspec.structs.replace(LLAMA, vocab_size=264)  # six tokens more than the tokenizer has
TOKENIZER, END = byte_tokenizer("<pad>", "</s>"), 1
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMS = {"json_schema": SCHEMA, "regex": "[a-c]{2,4}-[0-9]{3}", "choice": ["yes", 'a "no"', "maybe so"]}


@pytest.fixture(scope="module")
def params():
    return float_params(MODEL)


@pytest.fixture(scope="module")
def step():
    return step_of(MODEL)


@pytest.fixture(scope="module")
def reader():
    return GrammarReader(TOKENIZER, MODEL.vocab_size, [END])


def read(reader, kind, form):
    return reader.read(kind, form if isinstance(form, str) else json.dumps(form))


def asked(prompt: str, seed: int, grammar=None, **options) -> TokenRequest:
    return TokenRequest(
        prompt=tuple(TOKENIZER.encode(prompt).ids),
        max_tokens=28,
        sampling=Sampling(temperature=1.0, seed=seed),
        stop_tokens=frozenset([END]),
        grammar=grammar,
        **options,
    )


def follows(kind: str, text: str) -> bool:
    if kind == "json_schema":
        found = json.loads(text)
        return found.keys() == {"kind", "age"} and found["kind"] in ("cat", "dog") and 0 <= found["age"] <= 99
    return text in FORMS["choice"] if kind == "choice" else re.fullmatch(FORMS["regex"], text) is not None


@pytest.mark.parametrize("drafts", sampled(["", "ngram", "itself"], ""))
def test_outputs_follow_their_grammars_and_others_are_free(step, params, reader, drafts):
    placed = step.place(params)
    free = [asked(prompt, seed) for seed, prompt in enumerate(["a", "b c", "ddd"])]
    alone = list(map(tokens_of, engine_on(step, placed).run(free)))
    bound = [asked("x", seed, read(reader, kind, form)) for seed in range(3) for kind, form in FORMS.items()]
    mixed = [*bound[:5], *free, *bound[5:]]
    if drafts:
        drafter = NgramDrafter(2, shortest=1) if drafts == "ngram" else ModelDrafter(step, placed, 2)
        engine = drafting_engine(step, params, drafter)
    else:
        engine = engine_on(step, placed)
    found = engine.run(mixed)
    assert list(map(tokens_of, found[5:8])) == alone
    for number, outputs in enumerate([*found[:5], *found[8:]]):
        kind, text = list(FORMS)[number % 3], TOKENIZER.decode(tokens_of(outputs))
        assert follows(kind, text), (kind, text)
        assert outputs[-1].finish == "stop"
    assert engine.state().pages_used == 0


def test_drafts_change_nothing(step, params, reader):
    requests = [asked("x", seed, read(reader, *form)) for seed, form in enumerate(FORMS.items())]
    expected = engine_on(step, step.place(params)).run(requests)
    engine = drafting_engine(step, params, ModelDrafter(step, step.place(params), 3))
    assert list(map(tokens_of, engine.run(requests))) == list(map(tokens_of, expected))


def test_log_probabilities_are_the_models_own(step, params, reader):
    one = asked("x", 1, read(reader, "choice", ["yes", "no"]), logprobs=0)
    (found,) = engine_on(step, step.place(params)).run([one])
    scored = msgspec.structs.replace(
        one, prompt=one.prompt + tuple(tokens_of(found)), grammar=None, echo=True, max_tokens=0
    )
    (again,) = engine_on(step, step.place(params)).run([scored])
    own = [output.logprob.logprob for output in found if output.logprob]
    np.testing.assert_allclose(own, [each.logprob for each in again[0].prompt[-len(own) :]], atol=1e-5)


def test_a_text_that_is_cut_off_is_a_beginning(step, params, reader):
    one = msgspec.structs.replace(asked("x", 3, read(reader, "regex", "(ab){20}")), max_tokens=7)
    (found,) = engine_on(step, step.place(params)).run([one])
    assert (TOKENIZER.decode(tokens_of(found)), found[-1].finish) == ("abababa", "length")


def test_a_grammar_that_needs_too_much_ends_a_beginning_and_nobody_else(step, params, monkeypatch):
    monkeypatch.setattr("meshwright.serve.drawing.grammar.MOST_ITEMS", 20)
    reader = GrammarReader(TOKENIZER, MODEL.vocab_size, [END])
    free = asked("b c", 1)
    (alone,) = engine_on(step, step.place(params)).run([free])
    ambiguous = "start: s\ns: s s s | s s | /[a-z]/"
    found, beside = engine_on(step, step.place(params)).run([asked("x", 3, read(reader, "lark", ambiguous)), free])
    assert 1 < len(tokens_of(found)) < 28
    assert TOKENIZER.decode(tokens_of(found)).isalpha()
    assert found[-1].finish == "length"
    assert tokens_of(beside) == tokens_of(alone)


@pytest.mark.parametrize(
    ("kind", "form"), [("json_schema", {"const": "a</s>b<pad>"}), ("choice", ["</s>", "<pad>q"]), ("regex", "ab</s>cd")]
)
def test_the_name_of_a_special_token_is_text(step, params, reader, kind, form):
    one = asked("x", 1, read(reader, kind, form))
    (found,) = engine_on(step, step.place(params)).run([one])
    text = TOKENIZER.decode(tokens_of(found))
    assert text in {"json_schema": ['"a</s>b<pad>"'], "choice": form, "regex": ["ab</s>cd"]}[kind]
    assert found[-1].finish == "stop"


def test_masks_have_the_tokens_that_may_follow(reader):
    state = read(reader, "regex", "ab|cd").deep_copy()
    a, b, c = (TOKENIZER.token_to_id(letter) for letter in "abc")
    bits = TokenMasks(MODEL.vocab_size).of(4, [MaskedRow(1, state, [a, b])])
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : MODEL.vocab_size]
    assert allowed[0].all()
    assert [np.flatnonzero(row).tolist() for row in allowed[1:]] == [[a, c], [b], [END]]


@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        ("regex", "(a", "the regex is not valid"),
        ("json_schema", {"type": "strin"}, "the json schema is not valid"),
        ("json_schema", "{", "the json schema is not valid"),
        ("lark", "start: nobody", "the grammar is not valid"),
        ("lark", "start: start", "the grammar is not valid: no text matches"),
        ("regex", "[^\\s\\S]", "the regex is not valid"),
        ("regex", "(?=a)b", "look-around"),
    ],
)
def test_forms_that_are_not_valid(reader, kind, form, words):
    with pytest.raises(InputError, match=words):
        read(reader, kind, form)


def test_fewest_tokens_and_a_grammar_exclude_each_other(reader):
    with pytest.raises(InputError, match="min_tokens=3 and a grammar exclude each other"):
        asked("x", 1, read(reader, "regex", "a*"), min_tokens=3)
