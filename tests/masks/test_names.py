"""Masks and score rules by name: what is read, what is refused and why, and example arrays."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.masks import mods
from meshwright.masks.names import MASKS, SCORES, example_data, mask_named, score_named
from meshwright.masks.table import block_table

LENGTH = 24
ROWS = np.arange(LENGTH)
PARAMETERS = {
    "size": 4, "radius": 3, "reach": 2, "length": LENGTH, "kernel": 3, "width": 6, "height": 4, "tile": 2,
    "page_len": 4, "slope": 0.5, "cap": 30,
}  # fmt: skip


def pairs_of(text):
    rule = mask_named(text)
    mask = rule.make(*example_data(rule, length=LENGTH))
    return np.broadcast_to(mask(np.zeros((1, 1), int), 0, ROWS[:, None], ROWS), (LENGTH, LENGTH))


def written(name, entry):
    return f"{name}({', '.join(str(PARAMETERS[x]) for x in entry.parameters)})" if entry.parameters else name


@pytest.mark.parametrize("name", MASKS)
def test_each_mask_of_the_catalogue_is_made_from_its_example(name):
    rule = mask_named(written(name, MASKS[name]))
    assert rule.data == MASKS[name].data
    arrays = example_data(rule, length=LENGTH, batch=2, heads=2)
    assert len(arrays) == len(rule.data)
    assert all(len(array) == 2 for array in arrays)
    table = block_table(rule.make(*arrays), q_len=LENGTH, kv_len=LENGTH, batch=2, heads=2, block=4)
    assert (table.sparsity() > 0) == (name != "noop")
    assert table.sparsity() < 1


@pytest.mark.parametrize("name", SCORES)
def test_each_score_rule_of_the_catalogue_is_made_from_its_example(name):
    rule = score_named(written(name, SCORES[name]))
    scores = np.ones((1, 2, LENGTH, LENGTH))
    arrays = example_data(rule, length=LENGTH, heads=2)
    found = rule.make(*arrays)(scores, *np.ix_(*map(np.arange, scores.shape)))
    assert found.shape == scores.shape
    assert not np.array_equal(found, scores)


def test_examples_are_the_same_for_a_seed():
    rule = mask_named("document & tree")
    first, again, other = (example_data(rule, length=LENGTH, seed=seed) for seed in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_names_are_joined_as_python_does():
    causal, near = ROWS[:, None] >= ROWS, abs(ROWS[:, None] - ROWS) <= 2
    third = ROWS[:, None] - ROWS < 5
    assert np.array_equal(pairs_of("causal"), causal)
    assert np.array_equal(pairs_of("causal & local(2)"), causal & near)
    assert np.array_equal(pairs_of(" local(radius=2) | sliding_window(5) & causal "), near | (third & causal))
    assert np.array_equal(pairs_of("(local(2) | sliding_window(5)) & causal"), (near | third) & causal)


def test_score_rules_are_applied_from_left_to_right():
    scores = np.full((1, 1, LENGTH, LENGTH), 3.0)
    at = np.ix_(*map(np.arange, scores.shape))
    capped = score_named("relative(2) + softcap(5)").make()(scores, *at)
    np.testing.assert_allclose(capped, mods.softcap(5.0)(mods.relative(2.0)(scores, *at), *at))
    assert not np.allclose(capped, score_named("softcap(5) + relative(2)").make()(scores, *at))


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("noop", {"noop": ()}),
        ("causal & document", {"causal": (), "document": ()}),
        ("sliding_window(8) & document", {"causal": (), "window": (8,), "document": ()}),
        ("chunked(8) & sliding_window(3)", {"causal": (), "window": (3,), "chunk": (8,)}),
        ("local(4)", {"local": (4,)}),
        ("causal | document", {}),
        ("document & (causal | local(2))", {}),
        ("local(4) & local(3)", {}),
    ],
)
def test_terms_are_what_all_have_to_allow(text, terms):
    assert mask_named(text).terms == terms


def test_arrays_are_read_once_by_name():
    assert mask_named("document & shared_prefix & document").data == ("documents", "starts", "prefix_of")
    assert score_named("alibi + graph_bias + alibi").data == ("slopes", "table", "distances")


def test_pages_of_an_example_fit_its_slots():
    """A page length is known beside | too."""
    for text in ("paged(4)", "paged(4) | local(1)"):
        (owner,) = example_data(mask_named(text), length=LENGTH)
        assert sorted(owner[0]) == list(range(6))


BAD = [
    ("causl", r"a mask 'causl': there is no 'causl'. Did you mean 'causal'\? `meshwright mask` lists all"),
    ("xyzzy", r"there is no 'xyzzy'. Known: causal, chunked, document"),
    ("alibi", r"there is no 'alibi'. Known: "),
    ("", r"a mask '' cannot be read. Write names like 'causal & document' or 'sliding_window\(1024\)'"),
    ("causal &", "cannot be read"),
    ("causal and document", "cannot be read"),
    ("causal + document", "cannot be read"),
    ("~causal", "cannot be read"),
    ("causal()()", "cannot be read"),
    ("local(2)[0]", "cannot be read"),
    ("mods.causal", "cannot be read"),
    ("__import__('os').system('x')", "cannot be read"),
    ("lambda: causal", "cannot be read"),
    ("(" * 500 + "causal" + ")" * 500, "cannot be read"),
    ("causal\0", "cannot be read"),
    (" & ".join(["causal"] * 33), "has more than 32 names. Use fewer"),
    (" & ".join(["causal"] * 5000), "(more than 32 names|cannot be read)"),
    ("local", r"local has other parameters. Write local\(radius\)"),
    ("local()", r"local has other parameters. Write local\(radius\)"),
    ("local(1, 2)", r"local has other parameters"),
    ("local(size=2)", r"Write local\(radius\)"),
    ("local(2, radius=3)", r"Write local\(radius\)"),
    ("local(**{'radius': 2})", r"Write local\(radius\)"),
    ("causal(1)", r"causal has other parameters. Write causal\."),
    ("neighbourhood(8)", r"neighbourhood has other parameters. Write neighbourhood\(length, kernel\)"),
    ("local(0)", r"radius must be a whole number of at least 1. Write local\(radius\)"),
    ("local(-3)", r"radius must be a whole number of at least 1"),
    ("local(2.5)", r"radius must be a whole number"),
    ("local('2')", r"radius must be a whole number"),
    ("local(True)", r"radius must be a whole number"),
    ("local(x)", r"radius must be a whole number"),
    ("local(*[2])", r"radius must be a whole number"),
    ("local({[]: 1})", r"radius must be a whole number"),
    ("local(2j)", r"radius must be a whole number"),
    ("local(1e400)", r"radius must be a whole number"),
    ("local(4294967296)", r"radius must be a whole number"),
    ("local(" + "9" * 9999 + ")", "cannot be read"),
    ("local(" + "-" * 3000 + "1)", "(must be a whole number|cannot be read)"),
    ("local(2**99999999)", r"radius must be a whole number"),
    ("neighbourhood_2d(8, 8, 3, -1)", r"tile must be a whole number of at least 0"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_a_mask_that_is_none_is_refused_in_one_line(text, message):
    with pytest.raises(InputError, match=message) as found:
        mask_named(text)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causal", r"a score rule 'causal': there is no 'causal'. Known: alibi, edge_bias"),
        ("alibi & softcap(3)", r"cannot be read. Write names like 'alibi \+ softcap\(30\)'"),
        ("softcap", r"softcap has other parameters. Write softcap\(cap\)"),
        ("softcap(0)", r"cap=0 must be above 0"),
        ("softcap(-1.5)", r"cap=-1.5 must be above 0"),
        ("softcap('a')", r"cap must be a number"),
        ("relative(1e99)", r"slope must be a number"),
    ],
)
def test_a_score_rule_that_is_none_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        score_named(text)


def test_parameters_with_a_default_may_be_left_out():
    assert mask_named("neighbourhood_2d(6, 4, 3)").terms == {"neighbourhood_2d": (6, 4, 3)}
    assert np.array_equal(pairs_of("neighbourhood_2d(6, 4, 3)"), pairs_of("neighbourhood_2d(6, 4, 3, 0)"))
    score_named("relative + relative(-0.5)")
