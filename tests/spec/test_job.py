"""Jobs of every kind, and what only training has."""

import pytest

from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job, require_training


@pytest.mark.parametrize(("kind", "tokens"), [("train", 8 * 512), ("prefill", 8 * 512), ("decode", 8)])
def test_tokens_of_a_step(kind, tokens):
    """A decode step runs one token of each sequence against a cache of 512 positions."""
    job = Job(kind=kind, batch_seqs=8, seq_len=512)
    assert job.tokens_per_step == tokens
    assert job.trains == (kind == "train")


def test_a_job_trains_unless_it_says_otherwise():
    assert Job(batch_seqs=8, seq_len=512).kind == "train"


def test_an_unknown_kind_names_the_near_one():
    with pytest.raises(InputError, match=r"job.kind 'decod' is not known. Did you mean 'decode'\?$"):
        Job(kind="decod", batch_seqs=8, seq_len=512)
    with pytest.raises(InputError, match=r"job.kind 'dance' is not known. Known: decode, prefill, train.$"):
        Job(kind="dance", batch_seqs=8, seq_len=512)


def test_only_training_has_tokens_in_all():
    with pytest.raises(InputError, match="train_tokens is for jobs of kind train"):
        Job(kind="decode", batch_seqs=8, seq_len=512, train_tokens=1000)


def test_what_takes_training_alone_says_what_takes_the_others():
    require_training(Job(batch_seqs=8, seq_len=512), "train")
    job = Job(kind="decode", batch_seqs=8, seq_len=512)
    with pytest.raises(InputError, match=r"plan takes jobs of kind train.*of kind decode.*--step decode"):
        rank_plans(Setting(load_model("tiny"), parse_cluster("v5e:2x2"), job))
