"""Replica groups in all their forms, against groups written out by hand."""

import numpy as np
import pytest

from meshwright.hlo.groups import are_shifted, axes_of, group_size, permute_pairs, replica_groups, slice_groups


def as_sets(groups) -> set[frozenset[int]]:
    return {frozenset(int(n) for n in group) for block in groups for group in block}


ROWS = {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}
COLUMNS = {frozenset({n, n + 4}) for n in range(4)}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("{{0,4},{1,5},{2,6},{3,7}}", COLUMNS),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("mesh['a'=2,'b'=4] {'a'}", COLUMNS),
        ("mesh['b'=4,'a'=2], device_ids=([2,4]T(1,0)) {'b'}", ROWS),
        ("mesh['b'=4,'a'=2], device_ids=([2,4]T(1,0)) {'a'}", COLUMNS),
        ("mesh['b'=4,'a'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", COLUMNS),
        ("mesh['a'=8] {'a':(2)4}", ROWS),
        ("mesh['a'=8] {'a':(1)2}", COLUMNS),
        ("{}", {frozenset(range(8))}),
    ],
)
def test_forms(text, wanted):
    assert as_sets(replica_groups(f"replica_groups={text}, use_global_device_ids=true", 8)) == wanted


def test_groups_of_different_sizes():
    groups = replica_groups("replica_groups={{0,1,2},{3},{4,5,6}}", 8)
    assert as_sets(groups) == {frozenset({0, 1, 2}), frozenset({3}), frozenset({4, 5, 6})}
    assert group_size(groups) == 3


def test_thousands_of_devices():
    mesh = {"data": 35, "fsdp": 64, "tensor": 4}
    numbers = np.arange(8960).reshape(35, 64, 4)
    over_fsdp = np.moveaxis(numbers, 1, 2).reshape(-1, 64)
    written = ",".join("{" + ",".join(map(str, group)) + "}" for group in over_fsdp)
    for text in ("[140,64]<=[35,64,4]T(0,2,1)", f"{{{written}}}"):
        groups = replica_groups(f"replica_groups={text}, dimensions={{0}}", 8960)
        assert (axes_of(groups, mesh), group_size(groups)) == (("fsdp",), 64)


def test_pairs_and_slices():
    assert as_sets(permute_pairs("source_target_pairs={{0,4},{4,0},{1,5}}")) == {frozenset({0, 4}), frozenset({1, 5})}
    assert permute_pairs("replica_groups={}") == ()
    assert as_sets(slice_groups('_xla_megascale_target="{1,2}x{0:3}"')) == COLUMNS
    listed = "{" + ",".join(f"{{10000{n},20000{n}}}" for n in range(4)) + "}"
    assert as_sets(slice_groups(f"_xla_megascale_target={listed}")) == COLUMNS
    pairs = "{{100000->200000},{100001->200001},{100002->200002},{100003->200003}}"
    assert as_sets(slice_groups(f"_xla_megascale_target={pairs}")) == COLUMNS
    assert slice_groups("no target") == ()


def test_a_device_outside_the_mesh():
    with pytest.raises(ValueError, match="out of bounds"):
        axes_of(replica_groups("replica_groups={{0,8}}", 8), {"data": 2, "tensor": 4})


@pytest.mark.parametrize(
    "text",
    [
        "mesh['a'=8], device_ids=([2,2]T(1,0)) {'a'}",
        "mesh['a'=8], device_ids=(0,1) {'a'}",
        "mesh['a'=8] {'a':(3)2}",
        "@mesh {'a'}",
    ],
)
def test_unknown_forms_are_not_guessed(text):
    with pytest.raises(ValueError, match="replica groups in a form that is not known"):
        replica_groups(f"replica_groups={text}", 8)


@pytest.mark.parametrize(
    ("text", "shifted"),
    [
        ("replica_groups={{0,1},{2,3,4,5,6,7}}", False),
        ("replica_groups={{0,1},{2,5},{3,4},{6,7}}", False),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", True),
        ("replica_groups={{1,0},{2,3},{5,4},{6,7}}", True),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", True),
        ("replica_groups={}", True),
    ],
)
def test_groups_along_axes_are_one_group_shifted(text, shifted):
    assert are_shifted(replica_groups(text, 8), {"a": 2, "b": 4}) is shifted
