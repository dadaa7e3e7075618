"""Every worked answer is given by a function of the package, or exempt with its reason; and the checks can fail."""

import importlib
import math

import pytest

from meshwright.cost.formulas.roofline import critical_intensity
from tests.oracles.worked import TOPICS, Answers, Called, called, check, row, rows

TABLES: dict[str, Answers] = {
    topic: importlib.import_module(f"tests.oracles.test_{topic.replace('-', '_')}").ANSWERS for topic in TOPICS
}

EXEMPT = {
    "book-2.1-madds": "half of a number of FLOPs",
    "book-2.1-mxu-int8": "the chip's rate over its number of MXUs",
    "s000-v6e-ici": "bits to bytes",
    "s004-nvlink-pod": "both directions of one link over one direction of another; the catalogue counts one way, 9",
    "book-6.2-perchip": "a number of bytes over a number of chips",
    "book-7.1.7-mem64": "the batch times a given size of cache, plus a given size of weights",
    "s004-ckpt": "recomputing from the last checkpoint for every layer: no remat policy here does that",
}
"""Arithmetic without a counterpart: not asserted."""

MAX_EXEMPT_SHARE = 0.15


@pytest.mark.parametrize(("topic", "identity"), [(topic, one) for topic, table in TABLES.items() for one in table])
def test_worked_answer(topic, identity):
    check(identity, TABLES[topic][identity])


def test_ids_and_topics():
    identities = [found.id for found in rows()]
    assert len(identities) == len(set(identities)) == 332
    assert {found.topic for found in rows()} == set(TOPICS)


def test_every_row_is_answered_once_or_exempt():
    answered = [identity for table in TABLES.values() for identity in table]
    assert sorted([*answered, *EXEMPT]) == sorted(found.id for found in rows())


@pytest.mark.parametrize("topic", TOPICS)
def test_answers_stand_in_the_file_of_their_topic(topic):
    assert {row(identity).topic for identity in TABLES[topic]} == {topic}


def test_few_are_exempt():
    assert len(EXEMPT) <= MAX_EXEMPT_SHARE * len(rows())
    assert all(EXEMPT.values())


def test_every_answer_calls_the_package():
    idle = [
        identity
        for table in TABLES.values()
        for identity, answer in table.items()
        if not called(answer, row(identity).inputs)
    ]
    assert idle == [], "these only do arithmetic: call a function of meshwright, or list them as exempt"


def test_an_answer_that_only_multiplies_is_found():
    given = {"peak": 6.0, "bw": 2.0}
    assert called(lambda i: math.prod(i.values()), given) == set()
    assert called(lambda i: critical_intensity(i["peak"], i["bw"]), given) == {
        Called("meshwright.cost.formulas.roofline", "critical_intensity")
    }


@pytest.mark.parametrize(
    ("identity", "wrong"),
    [
        ("book-3.2-case2", ["AllReduce_X(C)"]),
        ("book-3.2-out-x", "C[I, K_X]"),
        ("book-5.1.1-alpha", 2550.1),
        ("book-6.2-ffw", 56.3e9 * 1.003),
    ],
)
def test_a_wrong_answer_fails(identity, wrong):
    with pytest.raises(AssertionError, match=f"{identity}: "):
        check(identity, lambda i: wrong)
