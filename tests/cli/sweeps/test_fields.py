"""Fields, values and clusters as a person writes them."""

import pytest

from meshwright.cli.sweeps.fields import growing, read_fields, sweep_clusters
from meshwright.core.errors import InputError
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import REMAT_POLICIES


def names(text):
    return [cluster.short_name.partition(":")[2] for cluster in sweep_clusters(text)]


def test_a_range_doubles_the_shortest_size():
    assert names("h100:8x1..8x8") == ["8x1", "8x2", "8x4", "8x8"]
    assert names("v5p:4x4x4..8x8x16") == ["4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"]
    assert names("v5p:8x16x16..16x20x28") == ["8x16x16", "16x16x16", "16x16x28", "16x20x28"]
    assert names("h100:8x4..h100:8x4") == ["8x4"]
    assert names("h100:2x1..8x4") == ["2x1", "4x1", "8x1", "8x2", "8x4"]


def test_lists_and_ranges_come_by_size():
    assert names("h100:8x8, 8x1..8x2") == ["8x1", "8x2", "8x8"]
    assert [cluster.short_name for cluster in sweep_clusters("h100:8x8,v5p:2x2x2,2x2x4")] == [
        "v5p:2x2x2", "v5p:2x2x4", "h100:8x8",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["h100:8x8..8x1", "h100:8x1..v5p:4x4x4", "h100:8x1..8x2x2", "v5e:4x4..2*v5e:8x8"])
def test_what_is_no_range(text):
    with pytest.raises(InputError, match="is no range of clusters"):
        sweep_clusters(text)


def test_growing_clusters():
    def shapes(text):
        return [cluster.short_name.partition(":")[2] for cluster in growing(parse_cluster(text))]

    assert shapes("h100:8x4") == ["2x1", "4x1", "8x1", "8x2", "8x4"]
    assert shapes("v5p:4x4x8")[-4:] == ["2x2x4", "2x4x4", "4x4x4", "4x4x8"]
    assert growing(parse_cluster("2*v5e:4x4"))[-1].num_slices == 2


def test_models_and_clusters_are_fields():
    fields = read_fields("llama3-8b,7B", "h100:8x1,h100:8x2", ["mesh.tensor=1,2", "batch=1Mi..2Mi"])
    assert {name: list(values) for name, values in fields.items()} == {
        "model": ["llama3-8b", "llama-7B"],
        "on": ["8", "16"],
        "tensor": ["1", "2"],
        "batch": ["1 Mi", "2 Mi"],
        "seq_len": ["4096"],
    }
    assert fields["batch"] == {"1 Mi": "1048576", "2 Mi": "2097152"}
    mixed = read_fields("llama3-8b", "h100:8x8,v5p:4x4x4", ["micro=1"])
    assert list(mixed["on"]) == ["h100:8x8", "v5p:4x4x4"]


def test_usual_values():
    fields = read_fields("llama3-8b", "h100:8x2", ["tensor", "remat", "micro=1"])
    assert (list(fields["tensor"]), tuple(fields["remat"])) == (["1", "2", "4", "8"], REMAT_POLICIES)
    with pytest.raises(InputError, match="'batch' is not FIELD=VALUES"):
        read_fields("llama3-8b", "h100:8x2", ["batch"])
    with pytest.raises(InputError, match="remat is given twice"):
        read_fields("llama3-8b", "h100:8x2", ["remat", "remat=block"])


@pytest.mark.parametrize("texts", [["remat"], ["batch=4Mi", "micro=1"]])
def test_a_batch_or_a_microbatch_is_given(texts):
    with pytest.raises(InputError, match="give --batch 4Mi for the best plans, or micro=1"):
        read_fields("llama3-8b", "h100:8x2", texts)


def test_a_field_has_one_name_with_and_without_its_section():
    found = read_fields("tiny", "h100:8x1", ["batch=1Mi", "strategy.remat", "strategy.mesh.tensor=2", "model.d_ff=8"])
    assert list(found) == ["seq_len", "model", "on", "batch", "remat", "tensor", "d_ff"]
    with pytest.raises(InputError, match="remat is given twice"):
        read_fields("tiny", "h100:8x1", ["batch=1Mi", "strategy.remat=block", "remat=full"])
