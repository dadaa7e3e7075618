"""Memory predicted for CPU devices beside what XLA assigns to the compiled training step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cost.memory.chip import total_bytes
from meshwright.cost.setting import Setting
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from tests.cost.memory_child import CASES, LORA, MESHES, TINY, WIDE, case

DAILY = ("tensor",)
MOST = 0.1
"""Greatest difference of a prediction, as a share of what is assigned."""


def predicted(found, on=""):
    model, strategy, batch_seqs, seq_len = found
    cluster = parse_cluster(on or f"cpu:{strategy.num_chips}")
    return Setting(model, cluster, Job(batch_seqs=batch_seqs, seq_len=seq_len)).memory(strategy)


def assigned(name):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    command = [sys.executable, "-m", "tests.cost.memory_child", name]
    root = Path(__file__).parents[2]
    said = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return sum(json.loads(said.stdout.splitlines()[-1]))


def test_there_are_fifteen_meshes():
    assert len({repr(strategy) for _, strategy, _, _ in MESHES.values()}) == 15


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DAILY else pytest.mark.slow) for n in CASES])
def test_a_step_needs_what_is_predicted(name):
    """Arguments and temporaries, as `train` prints them beside the prediction."""
    assert total_bytes(predicted(CASES[name])) == pytest.approx(assigned(name), rel=MOST)


def test_logits_and_their_cotangent_are_both_there():
    """2 sequences of 64 tokens x 262,144 logits of 4 bytes, twice, and no gradient of a frozen table."""
    found = predicted(case({}, model=LORA, seqs=2))
    logits = 4 * 2 * 64 * 262144
    assert found["logits"] == logits
    assert logits <= found["workspace"] < 1.01 * logits
    assert found["weights"] < 1.01 * 4 * 64 * (262144 + 2 * 448)
    narrow = predicted(case({}, model=WIDE, seqs=2, state="bf16-adam"))
    assert narrow["logits"] == logits <= narrow["workspace"]


def test_sums_at_the_end_are_beside_the_gradients():
    """In buckets or one by one, all gradients of replicas are there twice; of ZeRO-1 a shard of them besides."""
    plain, bucketed, naive = (
        predicted(case({"data": 8}, zero=0, gradient_sync=sync)) for sync in ("overlapped", "bucketed", "naive")
    )
    assert bucketed == naive
    assert bucketed["gradients"] == 2 * plain["gradients"] == 2 * plain["weights"]


def test_microbatches_add_their_gradients_to_a_sum():
    one, four = (predicted(case({"data": 8}, zero=0, num_microbatches=count, seqs=32)) for count in (1, 4))
    assert four["gradients"] == 2 * one["gradients"]


def test_layers_without_a_loop_copy_their_weights_and_what_products_transpose():
    """8 layers of tiny on one device: 786,432 weights each; the inputs of seven products are four arrays."""
    written, looped = (predicted(case({}, remat="none", seqs=8), on) for on in ("cpu:1", "h100:1x1"))
    tokens = 8 * 128
    layer = 256 * (8 + 4 + 4) * 32 + 8 * 32 * 256 + 3 * 256 * 704
    operands = tokens * (256 + 256 + 256 + 704)
    assert written["activations"] - looped["activations"] == 8 * 4 * operands
    assert written["workspace"] - looped["workspace"] >= 8 * 4 * layer
    assert TINY.num_layers == 8
