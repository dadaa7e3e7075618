"""The program that reads sources, and the step of the decoder that meets them: counts written out by hand."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.generation.cache import cache_table
from meshwright.algebra.generation.derive import derive_encoding, derive_phase
from meshwright.algebra.generation.program import Storage
from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.cost.work.ops import op_flops, op_hbm_bytes
from meshwright.cost.work.sequences import LikeSequences
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.why.explain_service import explain_service
from meshwright.simulate.service import service_traffic, simulate_service
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Encoder
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh

BOTH = msgspec.structs.replace(load_model("tiny"), name="both", encoder=Encoder(num_layers=3, length=96))
ONE = Strategy(mesh=make_mesh({}), assignment=LAYOUTS["prompts"])
B, S, BEFORE = 5, 40, 10
"""Sequences, positions of their sources, and those of their own before the step."""


def counts(kind):
    """FLOPs of each block for all its layers, and the bytes of the steps that end in a name of one layer."""
    setting = Setting(BOTH, parse_cluster("v5e:2x4"), Job(kind=kind, batch_seqs=B, seq_len=S))
    sizes = setting.step_sizes(ONE, LikeSequences(B, 1.0, BEFORE * (kind == "decode"), float(S)))
    blocks = setting.derived(ONE).blocks
    flops = {block.name: block.repeat * sum(op_flops(step, sizes) for step in block.forward) for block in blocks}
    return flops, {step.result.name: op_hbm_bytes(step, sizes) for block in blocks for step in block.forward}


def test_the_encoder_is_counted_once_a_request():
    n, h, k, d, f = BOTH.num_heads, BOTH.head_dim, BOTH.num_kv_heads, BOTH.d_model, BOTH.d_ff
    flops, _ = counts("prefill")
    own = 2 * d * h * (2 * n + 2 * k) + 4 * n * S * h + 6 * d * f
    assert flops["encoder_layer"] == 3 * B * S * own
    assert flops["cross_layer"] == BOTH.num_layers * B * S * 4 * d * k * h
    of_row = 2 * d * h * (2 * n + 2 * k) + 4 * d * n * h + 4 * n * h * (1 + S) + 6 * d * f
    assert flops["layer"] == BOTH.num_layers * B * of_row, "the first row of each follows"


def test_each_step_of_the_decoder_reads_the_keys_of_sources():
    n, h, k, d, f = BOTH.num_heads, BOTH.head_dim, BOTH.num_kv_heads, BOTH.d_model, BOTH.d_ff
    flops, num_bytes = counts("decode")
    assert flops.keys() == {"embed", "layer", "head"}
    of_row = 2 * d * h * (2 * n + 2 * k) + 4 * d * n * h + 4 * n * h * (BEFORE + 1 + S) + 6 * d * f
    assert flops["layer"] == BOTH.num_layers * B * of_row
    for name, positions in (("cross_o", S), ("o", BEFORE + 1)):
        rows = 2 * B * n * h * 2
        caches = 2 * B * positions * k * h * 2
        assert rows + caches < num_bytes[name] < 1.05 * (rows + caches), "and the tables of pages"


def test_pages_of_sources_are_of_the_pool_of_all():
    """As many as a sequence and its source fill; no array is added."""
    table = cache_table(BOTH, batch_seqs=3, max_len=10, storage=Storage(page_len=4))
    assert [(row.name, row.shape[:2]) for row in table] == [("cache_k", (3 * (3 + 24), 4)), ("cache_v", (81, 4))]
    assert {row.name for row in table} <= {v.name for v in derive_encoding(BOTH, ONE).program.of_role("cache")}


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"data": 2, "tensor": 2}, {"context": 2}])
def test_sources_stay_with_their_owner(axes):
    """Heads split keys as they split caches, places of sequences split sources, and context their positions."""
    strategy = Strategy(mesh=make_mesh(axes), assignment=LAYOUTS["prompts"])
    derived = derive_encoding(BOTH, strategy)
    moved = {step.result.name for block in derived.blocks for step in block.forward if step.is_collective}
    owned = {"encoder_kr", "encoder_v", "cross_k", "cross_v"} if "context" in axes else {"encoder_a", "encoder_y"}
    assert moved == owned | ({"encoder_x"} if "tensor" in axes else set())
    phase = derive_phase(BOTH, strategy, prompts=True)
    assert [block.name for block in phase.blocks] == [*(b.name for b in derived.blocks), "embed", "layer", "head"]


SERVICE = Service(prompt_len=90, output_len=30, requests_per_s=20.0)


BIASED = msgspec.structs.replace(BOTH, relative_buckets=8, relative_shared=True)
"""All layers of a stack read one table of biases."""


@pytest.mark.parametrize("model", [BOTH, BIASED], ids=["rope", "bias"])
def test_a_service_has_room_for_sources_and_outputs(model):
    """Its explanation prices the same steps, and a light load meets them. Pages of 128 are whole."""
    result = plan_service(service_setting(model, parse_cluster("v5e:2x2")), SERVICE)
    plan = result.as_written
    pool = plan.generate
    held = pool.batch_seqs * (128 + 128) * BOTH.num_layers * 2 * BOTH.num_kv_heads * BOTH.head_dim * 2
    assert pool.memory["kv_cache"] == pytest.approx(held / pool.strategy.num_chips, rel=0.01)
    told = explain_service(plan)
    for name, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("memory left", "free_bytes")):
        assert told.value(name) == pytest.approx(getattr(plan.predicted, field), rel=1e-6)
    record = simulate_service(result, plan, service_traffic(SERVICE, duration_s=60, requests_per_s=0.1))
    assert np.median(record.ttft_s) == pytest.approx(plan.predicted.ttft_s, rel=0.05)


@pytest.mark.parametrize(
    "change", [{"prefix_share": 0.5}, {"chunk_len": 16}, {"prompt_len": 97}, {"output_len": 10**6}]
)
def test_services_that_an_encoder_does_not_have(change):
    setting = service_setting(BOTH, parse_cluster("v5e:2x2"))
    with pytest.raises(InputError, match=r"reads whole prompts|positions of both"):
        plan_service(setting, msgspec.structs.replace(SERVICE, **change))
