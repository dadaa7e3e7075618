"""Clusters from strings and files: sizes, wraparound, refusals, and the shapes that chips can be had in."""

import math
import re

import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.network.placement import place_axes
from meshwright.spec.chip import chip, chips
from meshwright.spec.cluster import bisection_links, parse_cluster, parse_clusters, slice_note, slice_shapes
from meshwright.spec.cluster_shapes import balanced_shape


@pytest.mark.parametrize(
    ("text", "num_chips", "num_hosts", "wraps"),
    [
        ("v5p:16x20x28", 8960, 2240, (True, True, True)),
        ("v5p:16x16x32", 8192, 2048, (True, True, True)),
        ("v5p:2x2x4", 16, 4, (False, False, False)),
        ("v4p:4x4x4", 64, 16, (True, True, True)),
        ("v5e:4x4", 16, 2, (False, False)),
        ("v5e:8x16", 128, 16, (False, True)),
        ("4*v5e:16x16", 1024, 128, (True, True)),
        ("h100:8x256", 2048, 256, (False, False)),
        ("gb200:72x8", 576, 144, (False, False)),
        ("h100:8x2x192x8", 24576, 3072, (False,) * 4),
        ("v4p:4x4x8_twisted", 128, 32, (True, True, True)),
        ("2*v5p:8x16x16_twisted", 4096, 1024, (True, True, True)),
        ("cpu:8", 8, 1, (False,)),
        ("4*h100:8x32@1Gbit/s", 1024, 128, (False, False)),
        ("3*2*v5e:16x16@200Gbit/s", 1536, 192, (True, True)),
        ("4*cpu:2@10Mbit/s", 8, 4, (False,)),
    ],
)
def test_sizes_and_wraparound(text, num_chips, num_hosts, wraps):
    cluster = parse_cluster(text)
    assert (cluster.num_chips, cluster.num_hosts, cluster.wraps) == (num_chips, num_hosts, wraps)
    assert cluster.short_name == text
    assert parse_cluster(cluster.short_name) == cluster


def test_short_forms_are_completed():
    assert parse_cluster("h100:8").shape == (8, 1)
    assert parse_cluster("v5p:2x2").shape == (2, 2, 1)
    assert (parse_cluster("h100:8x4").domain, parse_cluster("h100:8x4").nodes) == (8, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e:4x4x4", "has 3 torus axes; v5e has 2"),
        ("v5e:8", "v5e:2x4"),
        ("v5e:32x16", "larger than a pod of v5e, 256 chips, 16x16.*2[*]v5e:16x16"),
        ("v5p:32x32x32", "larger than a pod of v5p, 8,960 chips, 16x20x28.*35,840 chips are 4[*]v5p:16x20x28"),
        ("v5p:18823", "17,920 chips are 2[*]v5p:16x20x28"),
        ("v5e:15", "16 chips are for example v5e:4x4"),
        ("v5e:17", "32 chips are for example v5e:4x8"),
        ("v5p:4100", "4,160 chips are for example v5p:4x20x52"),
        ("tpu7x:40x40x40", "64,512 chips are 7[*]tpu7x:16x24x24"),
        ("v3:40x40", "The largest slice is v3:32x32"),
        ("h100:64", "Write domain x nodes: h100:8x8"),
        ("2*h100:8", "slices are for TPUs"),
        ("h100:8x2x2x2x2x2", "6 sizes; at most 5 are read"),
        ("v5e:8x16_twisted", "this torus cannot be twisted.*v4p:4x4x8_twisted"),
        ("v5p:4x4x4_twisted", "k x k x 2k"),
        ("v5p:4x4x12_twisted", "k x k x 2k"),
        ("v5p:2x2x4_twisted", "k x k x 2k"),
        ("v5p:4096chips", "leaves the shape open"),
        ("h101:8", "unknown chip 'h101'. Did you mean 'h100'"),
        ("v5e:0x4", "below 1"),
        ("cpu:2x4", "a number of devices"),
        ("nonsense", "is not chip:shape. Write for example v5p:16x20x28"),
        ("4*h100:8x32@1", "4[*]h100:8x32@1': the link '1' is not a rate"),
        (
            "h100:8x32@1Gbit/s",
            "has a link but not two or more islands before a [*]. Write for example 4[*]h100:8x32@1Gbit/s",
        ),
        ("3*cpu:1", "hosts are islands, and need the rate of a link: 3[*]cpu:1@10Gbit/s"),
        ("1*h100:8x32@1Gbit/s", "has a link but not two or more islands"),
        ("4*h100:8x32@1Gbit/s@1Gbit/s", "has a link but not two or more islands"),
        ("99999999*h100:8@1Gbit/s", "more than 10,000,000 chips"),
        ("2*h100:8", "or islands with the rate between them: 2[*]h100:8@1Gbit/s"),
        ("absent.toml", r"absent.toml cannot be read \(No such file"),
    ],
)
def test_refusals_are_one_clear_line(text, message):
    with pytest.raises(InputError, match=message) as caught:
        parse_cluster(text)
    assert "\n" not in str(caught.value)


def test_cluster_file_with_its_own_chip(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('shape = [4, 8]\n[chip]\nbase = "v5e"\nname = "mine"\nhbm_bytes_per_s = 1e12\n')
    cluster = parse_cluster(str(path))
    assert (cluster.num_chips, cluster.chip.name, cluster.chip.hbm_bytes_per_s) == (32, "mine", 1e12)
    path.write_text('chip = "v5p"\nshape = [4, 4, 8]\nnum_slices = 2\n')
    assert parse_cluster(str(path)).short_name == "2*v5p:4x4x8"


def test_islands_are_equal_clusters_with_an_uplink_each(tmp_path):
    """The rate is of an island's whole uplink, one way."""
    cluster = parse_cluster("4*h100:8x32@1Gbit/s")
    assert (cluster.num_islands, cluster.island_bytes_per_s) == (4, 125e6)
    assert cluster.island == parse_cluster("h100:8x32")
    assert cluster.part((8, 2)) == parse_cluster("h100:8x2")
    assert [found.short_name for found in parse_clusters("2*v5p:64chips@25GB/s")] == ["2*v5p:4x4x4@200Gbit/s"]
    path = tmp_path / "mine.toml"
    path.write_text('chip = "h100"\nshape = [8, 32]\nnum_islands = 4\nisland_bytes_per_s = 125e6\n')
    assert parse_cluster(str(path)) == cluster
    path.write_text('chip = "h100"\nshape = [8, 32]\nnum_islands = 4\n')
    with pytest.raises(InputError, match=r"mine.toml:3: num_islands=4 with island_bytes_per_s=None: give .*@1Gbit/s"):
        parse_cluster(str(path))


def test_no_link_for_a_program_joins_islands():
    with pytest.raises(CannotRunError, match=r"is several islands.*Name one of them here: cpu:2"):
        place_axes(parse_cluster("4*cpu:2@10Mbit/s"), {"data": 8})


LEVELS = """
chip = "h100"
[[levels]]
size = 8
[[levels]]
name = "rack"
size = 2
[[levels]]
size = 16
hop_s = 8e-6
[[levels]]
size = 8
oversubscription = 7
"""


def test_levels_of_a_cluster_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(LEVELS)
    cluster = parse_cluster(str(path))
    assert cluster.shape == (8, 2, 16, 8)
    assert cluster.level_names == ("domain", "rack", "racks", "pods")
    assert (cluster.nodes, cluster.num_hosts, cluster.num_chips) == (256, 256, 2048)
    assert [level.oversubscription for level in cluster.levels] == [1, 1, 1, 7]
    part = cluster.part((8, 2))
    assert (part.shape, part.levels) == ((8, 2, 1, 1), cluster.levels)
    assert parse_cluster("h100:8x2x16").level_names == ("domain", "nodes", "racks")
    twisted = parse_cluster("v5p:4x4x8_twisted")
    assert twisted.part((4, 4, 8)).twisted
    assert not twisted.part((4, 4, 4)).twisted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("size = 16", "sizes = 16"), "sizes is not a field. Did you mean 'size'"),
        (("size = 16", "size = 0"), "mine.toml:8: the level's size is 0, give a positive number"),
        (("size = 16", 'size = "x"'), "mine.toml:9: levels.2.size is 'x'. Give a whole number."),
        (("oversubscription = 7", "oversubscription = 0"), "oversubscription is 0"),
        (("hop_s = 8e-6", "hop_s = -1.0"), "hop_s is -1"),
        (("[[levels]]", "shape = [8]\n[[levels]]"), "has both shape and"),
        (('chip = "h100"', 'chip = "v5p"'), "has 4 torus axes"),
        (('chip = "h100"', 'chip = "h100"\nnum_slices = 2'), "slices are for TPUs"),
    ],
)
def test_faults_of_levels(tmp_path, change, message):
    path = tmp_path / "mine.toml"
    path.write_text(LEVELS.replace(*change, 1))
    with pytest.raises(InputError, match=message) as caught:
        parse_cluster(str(path))
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('chip = "v5p"\nshap = [4]\n', "mine.toml:2: shap is not a field. Did you mean 'shape'.*needs the field 's"),
        ('chip = "v5z"\nshape = [4, 4]\n', "mine.toml:1: unknown chip 'v5z'"),
        ('chip = "v5e"\n\nshape = [64, 64]\n', "mine.toml:3: v5e:64x64 is larger than a pod"),
        ('chip = "v5e"\nshape = "4x4"\n', "mine.toml:2: shape is '4x4'. Give a list of a whole number."),
        ("chip = 3\nshape = [4]\n", "mine.toml:1: chip is 3. Give text or a table"),
        ('chip = "h100"\nlevels = 3\n', "mine.toml:2: levels is 3. Give a list of a table of name, "),
        ('shape = [4, 4]\n[chip]\nbase = "v5e"\nhbm = 3\n', "mine.toml:4: chip.hbm is not a field"),
        ('chip = "v5e\n', "mine.toml:1: not valid TOML"),
    ],
)
def test_cluster_file_faults_name_their_line(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        parse_cluster(str(path))


def test_balanced_shape():
    assert [balanced_shape(n, 2) for n in (8, 16, 7)] == [(2, 4), (4, 4), (1, 7)]
    assert balanced_shape(64, 3) == (4, 4, 4)


@pytest.mark.parametrize("name", [name for name in chips() if chip(name).topology != "host"])
def test_every_advised_shape_is_a_cluster(name):
    """Sizes, numbers of axes and slices that are refused name clusters that parse."""
    given = [f"{name}:{count}" for count in (17, 34, 257, 1031, 18823, 9_999_991)]
    given += [f"{name}:40x40", f"{name}:3x7x17", f"{name}:40x40x40", f"{name}:2x2x2x2", f"{name}:2x2x2x2x2x2"]
    for text in (*given, f"{name}:300x300"):
        said = refusal(text)
        advised = re.findall(rf"(?:\d+[*])?{re.escape(name)}:[0-9x]+", said.partition(". ")[2])
        assert bool(advised) == bool(said), said
        assert [refusal(one) for one in advised] == [""] * len(advised), said


def refusal(text):
    """What parse_cluster says against a cluster; "" for one that it takes."""
    try:
        parse_cluster(text)
    except InputError as error:
        return str(error)
    return ""


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
