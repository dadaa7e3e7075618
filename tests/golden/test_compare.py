"""The comparison itself: what counts as a difference, what accepts one, and what is printed."""

import pytest

from tests.golden.cases_file import cases, table
from tests.golden.compare import report
from tests.golden.differences import Accepted, Difference, compare, digest_of, judge
from tests.golden.files import read, write

OLD = {
    "small": {"step_s": 2.0, "terms": {"matmul": 1.0, "latency": 0.5}, "steps": ["a = AllGather", "b = x", "c = y"]},
    "large": {"rows": [{"bytes": 1}, {"bytes": 2}], "loss": "0x1.8000000000000p+1"},
}


def changed(**small):
    return {**OLD, "small": {**OLD["small"], **small}}


def found(new, old=OLD):
    return [str(one) for one in compare(old, new, "plans")]


def told(new, accepted="", *, tmp_path, kinds=("plans",)):
    path, lines = tmp_path / "accepted.toml", []
    path.write_text(accepted)
    code = report(list(compare(OLD, new, "plans")), path, kinds, lines.append)
    return code, lines


def test_the_same_differs_nowhere(tmp_path):
    assert told(OLD, tmp_path=tmp_path) == (0, ["0 differences from the golden files of plans: 0 accepted, 0 not"])


def test_a_number_that_changed_is_named(tmp_path):
    code, lines = told(changed(step_s=2.5), tmp_path=tmp_path)
    assert (code, lines[0]) == (1, "plans/small/step_s: 2.0 -> 2.5")


def test_a_key_that_is_missing_is_named_and_a_new_one_is_not():
    assert found(changed(terms={"matmul": 1.0, "bubble": 0.1})) == ["plans/small/terms/latency: 0.5 -> (missing)"]
    assert found({**OLD, "more": 1}) == []
    assert found({"small": OLD["small"]}) == ["plans/large: {'rows': [{'bytes': 1}, {'bytes': 2}], 'loss': "
                                              "'0x1.8000000000000p+1'} -> (missing)"]  # fmt: skip


def test_steps_that_went_and_came_are_lines():
    assert found(changed(steps=["a = AllGather", "c = y", "d = z"])) == [
        "plans/small/steps/-2: - b = x",
        "plans/small/steps/+3: + d = z",
    ]
    assert found(changed(steps=[])) == [
        f"plans/small/steps/-{n}: - {line}" for n, line in enumerate(OLD["small"]["steps"], 1)
    ]


def test_lists_that_are_shorter_say_so():
    new = {**OLD, "large": {**OLD["large"], "rows": [{"bytes": 3}]}}
    assert found(new) == ["plans/large/rows/length: 2 -> 1", "plans/large/rows/0/bytes: 1 -> 3"]


def test_rows_with_names_are_compared_by_these():
    rows = [{"name": "a", "x": 1}, {"name": "b", "x": 2}]
    assert found({"new": [{"name": "c", "x": 3}, *rows]}, {"new": rows}) == []
    assert found({"new": rows[::-1]}, {"new": rows}) == ["plans/new/order: ['a', 'b'] -> ['b', 'a']"]
    assert found({"new": rows[:1]}, {"new": rows}) == ["plans/new/b: {'name': 'b', 'x': 2} -> (missing)"]


@pytest.mark.parametrize(("old", "new"), [(1, True), (None, 0), ("1", 1), (0.1, 0.1 + 2**-56), ([], {})])
def test_what_only_looks_alike_differs(old, new):
    assert len(list(compare({"x": old}, {"x": new}, "k"))) == (old != new or type(old) is not type(new))


def test_an_entry_takes_what_it_names_and_no_more(tmp_path):
    entry = '[[accepted]]\nwhere = ["plans/*/step_s"]\nwithin = 0.05\nreason = "Sums have another order."\n'
    code, lines = told(changed(step_s=2.05), entry, tmp_path=tmp_path)
    assert (code, lines[0]) == (0, "accepted     1  plans/*/step_s: Sums have another order.")
    code, lines = told(changed(step_s=2.2), entry, tmp_path=tmp_path)
    assert (code, lines[:2]) == (
        1,
        ["stale: nothing differs at plans/*/step_s (Sums have another order.)", "plans/small/step_s: 2.0 -> 2.2"],
    )


def test_an_entry_may_ask_for_the_text_of_a_line(tmp_path):
    entry = '[[accepted]]\nwhere = ["*/steps/*"]\ntext = "^- b"\nreason = "Nobody reads b any more."\n'
    code, lines = told(changed(steps=["a = AllGather", "c = z"]), entry, tmp_path=tmp_path)
    assert code == 1
    assert lines[0].startswith("accepted     1")
    assert lines[1:3] == ["plans/small/steps/-3: - c = y", "plans/small/steps/+2: + c = z"]


def test_an_entry_with_a_digest_takes_exactly_what_was_looked_at(tmp_path):
    entry = '[[accepted]]\nwhere = ["plans/*"]\ndigest = "{}"\nreason = "The head is priced as it runs."\n'
    code, lines = told(changed(step_s=2.2), entry.format("0" * 16), tmp_path=tmp_path)
    assert code == 1
    assert lines[2] == "plans/small/step_s: 2.0 -> 2.2"
    digest = lines[1].removesuffix(" now").split()[-1]
    assert told(changed(step_s=2.2), entry.format(digest), tmp_path=tmp_path)[0] == 0
    assert told(changed(step_s=2.3), entry.format(digest), tmp_path=tmp_path)[0] == 1


def test_a_digest_is_the_same_on_another_processor():
    """What equal numbers leave of their difference depends on the order of a sum."""
    found = [Difference(where="plans/share", old=0.5, new=value, text="") for value in (0.0, 3.45e-15, -1e-16)]
    assert len({digest_of([one]) for one in found}) == 1
    assert digest_of(found[:1]) != digest_of([Difference(where="plans/share", old=0.5, new=1e-9, text="")])


def test_an_entry_that_takes_nothing_is_stale_where_its_kind_was_compared(tmp_path):
    entry = '[[accepted]]\nwhere = ["plans/none/*"]\nreason = "It was so once."\n'
    assert told(OLD, entry, tmp_path=tmp_path)[1][0] == "stale: nothing differs at plans/none/* (It was so once.)"
    assert len(told(OLD, entry, tmp_path=tmp_path, kinds=("steps",))[1]) == 1


def test_losses_move_within_a_share_too():
    entry = Accepted(where=("*",), within=1e-3, reason="Another order of sums.")
    near, far = (list(compare({"loss": "0x1.8000000000000p+1"}, {"loss": value.hex()}, "k")) for value in (3.0003, 3.3))
    assert [judge(one, [entry], ["k"]).refused == () for one in (near, far)] == [True, False]


def test_an_entry_without_a_sentence_is_refused():
    with pytest.raises(ValueError, match="not a sentence"):
        Accepted(where=("*",), reason="noise")


@pytest.mark.parametrize("rows", [2, 90_000])
def test_files_come_back_and_are_the_same_bytes(rows, tmp_path):
    data = {"case": {"rows": list(range(rows)), "text": "é", "none": None}}
    path = write("made", data, tmp_path)
    before = path.read_bytes()
    assert read("made", tmp_path) == data
    assert write("made", data, tmp_path).read_bytes() == before
    assert path.suffix == (".json" if rows == 2 else ".gz")


def test_choices_are_read():
    asked = table("fsdp=2 prefetch=true imbalance=1.25 remat=x1,g offload=optimizer schedule=zb-h1")
    assert asked == {"fsdp": 2, "prefetch": True, "imbalance": 1.25, "remat": ("x1", "g"), "offload": ("optimizer",),
                     "schedule": "zb-h1"}  # fmt: skip
    assert table("-") == {}


@pytest.mark.parametrize(
    ("file", "kind", "parts"),
    [("commands.txt", "commands", 1), ("proofs.txt", "proofs", 1), ("steps.txt", "steps", 4), ("plans.txt", "plans", 6),
     ("losses.txt", "losses", 4)],
)  # fmt: skip
def test_every_case_has_its_golden_value(file, kind, parts):
    listed = list(cases(file))
    assert {case.name for case in listed} == set(read(kind))
    assert {len(case.parts) for case in listed} == {parts}
