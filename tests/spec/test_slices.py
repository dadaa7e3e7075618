"""Shapes in which a number of chips can be had."""

import math

import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.chip import chip
from meshwright.spec.cluster import bisection_links, parse_cluster, parse_clusters, slice_note, slice_shapes


def names(text):
    return [cluster.short_name for cluster in parse_clusters(text)]


def test_cubes_joined_by_optical_switches():
    assert names("v5p:512chips") == ["v5p:8x8x8", "v5p:4x8x16", "v5p:4x4x32"]
    assert names("v4p:128chips") == ["v4p:4x4x8", "v4p:4x4x8_twisted"]
    found = parse_clusters("v5p:4096chips")
    assert found[0].short_name == "v5p:16x16x16"
    assert "v5p:8x16x32" in [one.short_name for one in found]
    assert len({one.short_name for one in found}) == len(found)
    for one in found:
        assert one.num_chips == 4096
        assert all(one.wraps)
        assert all(size % 4 == 0 for size in one.shape)


def test_every_shape_of_cubes_is_found():
    """Of 8960 chips: 140 = 2 x 2 x 5 x 7 cubes have as many shapes as ascending factorings in three."""
    triples = {
        tuple(sorted((4 * a, 4 * b, 560 // (a * b))))
        for a in range(1, 141)
        for b in range(1, 141)
        if 140 % a == 0 and (140 // a) % b == 0
    }
    assert {one.shape for one in parse_clusters("v5p:8960chips")} == triples
    assert (16, 20, 28) in triples
    assert names("v5p:8960chips")[0] == "v5p:16x20x28"


def test_best_first():
    """A cut across the longest axis: 8x8x8 has 2 x 64 links there, 4x4x32 2 x 16, a box without rings 16."""
    assert [bisection_links(parse_cluster(t)) for t in ("v5p:8x8x8", "v5p:4x4x32", "v5p:2x4x4")] == [128, 32, 8]
    links = [bisection_links(one) for one in parse_clusters("v5p:4096chips")]
    assert links == sorted(links, reverse=True)


def test_below_a_cube_and_on_two_axes():
    assert names("v5p:16chips") == ["v5p:2x2x4"]
    assert names("v5e:32chips") == ["v5e:4x8"]
    assert names("v5e:256chips") == ["v5e:16x16"]
    assert names("h100:1024chips") == ["h100:8x128"]
    assert names("gb200:576chips") == ["gb200:72x8"]
    assert names("cpu:8chips") == ["cpu:8"]
    assert names("v5e:4x4") == ["v5e:4x4"]


def test_more_than_a_pod_takes_slices():
    assert names("v5e:1024chips") == ["4*v5e:16x16"]
    many = parse_clusters("v5p:16384chips")
    assert {one.num_slices for one in many} == {2}
    assert many[0].short_name in ("2*v5p:16x16x32", "2*v5p:16x16x32_twisted")
    for one in many:
        assert one.num_slices * math.prod(one.shape) == 16384


def test_numbers_that_no_slice_has():
    with pytest.raises(CannotRunError, match="whole cubes of 64: take 4,096 or 4,160"):
        slice_shapes(chip("v5p"), 4100)
    with pytest.raises(CannotRunError, match="powers of two: take 8 or 16"):
        slice_shapes(chip("v5e"), 12)
    with pytest.raises(InputError, match="unknown chip"):
        parse_clusters("v9:64chips")


@pytest.mark.parametrize(
    "text", ["v5e:1x1", "v6e:2x4", "v5e:4x2", "v5p:2x2x1", "v4p:4x4x2", "tpu7x:8x4x12", "h100:8x3"]
)
def test_slices_that_are_offered(text):
    assert slice_note(parse_cluster(text)) == []


@pytest.mark.parametrize(
    ("text", "compiled"), [("v5e:3x5", True), ("v6e:2x6", True), ("v5p:1x2x4", False), ("v4p:6x6x6", True)]
)
def test_slices_that_are_not_offered(text, compiled):
    [note] = slice_note(parse_cluster(text))
    assert note.startswith(f"{text} is not a slice that is offered (1x")
    assert ("no program can be compiled" in note) == (not compiled)
