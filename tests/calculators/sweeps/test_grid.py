"""Models of a given size, and the grid of best plans."""

import pytest

from meshwright.calculators.sweeps.grid import describe, llama_like, plan_grid
from meshwright.calculators.sweeps.sweep import node_clusters, scaling_curve
from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip
from meshwright.spec.job import Job
from meshwright.spec.weights import num_params


@pytest.mark.parametrize("size", ["500M", "1B", "3B", "7B", "13B", "30B", "70B", "175B", "405B", "1T", "10T"])
def test_a_model_of_about_that_size(size):
    found = llama_like(size)
    wanted = {"M": 1e6, "B": 1e9, "T": 1e12}[size[-1]] * float(size[:-1])
    assert num_params(found) == pytest.approx(wanted, rel=0.05)
    assert 40 < found.d_model / found.num_layers < 256
    assert found.num_heads % found.num_kv_heads == 0


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_the_published_models_come_out(name):
    published, found = load_model(name), llama_like(name.removeprefix("llama3-").upper())
    for field in ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        if (name, field) != ("llama3-70b", "d_ff"):
            assert getattr(found, field) == getattr(published, field)
    assert found.tied_embeddings == published.tied_embeddings


def test_sizes_out_of_range():
    with pytest.raises(InputError, match="size 1k is out of range"):
        llama_like("1k")
    assert describe(llama_like("8B")) == "llama-8B: 8.03 B parameters, 32 layers of width 4,096"


def test_cells_are_curves_of_each_model():
    models, clusters = [llama_like("1B"), load_model("llama3-70b")], node_clusters(chip("h100"), (1, 2))
    job = Job(batch_seqs=64, seq_len=4096)
    settings = [Setting(one, clusters[0], job) for one in models]
    grid = plan_grid(settings, clusters)
    assert [[cell.best is not None for cell in row] for row in grid.cells] == [[True, True], [False, True]]
    (alone, _) = scaling_curve(settings[0], clusters)
    assert grid.cells[0][0].best.estimate == alone.best.estimate
