"""What the algebra says of a request: sizes, memory by item, FLOPs of products, collectives of stages."""

import msgspec
import pytest

from meshwright.algebra.generation.program import AS_WRITTEN, Storage
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.parallel.pipeline.stages import strategy_schedule
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Encoder
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify.expected import StepDerivation, expected_collectives, expected_of_pipeline
from meshwright.verify.request import Request
from meshwright.verify.targets import Target
from tests.parallel.plain_encoder_decoder import T5, WHISPER
from tests.verify.compiled import proof_of

TINY, MIXTRAL = load_model("tiny"), load_model("mixtral-8x7b")
SEQS, LENGTH = 16, 128
PASSES = ("forward", "recompute")


def derivation(
    axes, *, given=TINY, on="v5p:2x2x2", remat="none", step="train", storage=AS_WRITTEN, choices=None, **fields
):
    strategy = Strategy(mesh=make_mesh(axes), state="bf16-adam", remat=remat, **(choices or {}))
    job = Job(kind=step, batch_seqs=SEQS, seq_len=LENGTH)
    target = Target(platform="cpu", num_devices=strategy.num_chips)
    setting = Setting(given, parse_cluster(on), job, storage=storage)
    return StepDerivation(Request(setting=setting, strategy=strategy, target=target, step=step, **fields))


def matmul_params(given) -> int:
    """Weights of tiny that take part in products: all but the table of the embedding and the norms."""
    heads = given.num_heads * given.head_dim
    keys = 2 * given.num_kv_heads * given.head_dim
    layer = given.d_model * (2 * heads + keys + 3 * given.d_ff)
    return given.num_layers * layer + given.d_model * given.vocab_size


# -- sizes --------------------------------------------------------------------------------------------


def test_sizes_of_the_whole_batch():
    dims = derivation({"fsdp": 8}).dims
    assert (dims["B"], dims["T"]) == (SEQS, LENGTH)
    assert "C" not in dims


def test_products_of_an_encoder_have_its_length():
    """Of each layer of the encoder w_up, forward and twice backward: 6 D F for each of its positions."""
    both = msgspec.structs.replace(TINY, encoder=Encoder(num_layers=3, length=96))
    found = derivation({"fsdp": 8}, given=both).products()
    up = sum(flops for label, flops in found.items() if label.result in ("encoder_u", "dencoder_w_up"))
    assert up == 3 * 4 * TINY.d_model * TINY.d_ff * 96 * SEQS / 8


def test_generation_has_one_new_position():
    dims = derivation({"tensor": 4}, step="decode").dims
    assert (dims["B"], dims["T"], dims["S"]) == (SEQS, 1, LENGTH)


def test_slots_of_experts():
    """The filled ones in the mean, and with a bound its share of them."""
    tokens = SEQS * LENGTH
    assert derivation({"expert": 8}, given=MIXTRAL).dims["C"] == tokens * 2 // 8
    bounded = derivation({"expert": 8}, given=MIXTRAL, choices={"capacity_factor": 1.25}).dims["C"]
    assert bounded == pytest.approx(tokens * 2 / 8 * 1.25, rel=0.1)
    assert derivation({"fsdp": 8}, given=MIXTRAL).dims["C"] == tokens * 2 // 8


def test_slots_are_of_one_microbatch():
    whole = derivation({"expert": 8}, given=MIXTRAL).dims["C"]
    assert derivation({"expert": 8}, given=MIXTRAL, choices={"num_microbatches": 2}).dims["C"] == whole // 2


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "more"),
    [
        ({"fsdp": 8}, {}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"num_microbatches": 2}),
        ({"fsdp": 4, "context": 2}, {}),
        ({"pipeline": 2, "fsdp": 4}, {"num_microbatches": 4}),
        ({"fsdp": 8}, {"offload": ["optimizer"]}),
    ],
)
@pytest.mark.parametrize("remat", ["none", "block", "full"])
def test_memory_is_what_a_plan_is_priced_with(axes, more, remat):
    found = derivation(axes, remat=remat, choices=more)
    job = Job(batch_seqs=SEQS, seq_len=LENGTH)
    priced = price_strategy(Setting(TINY, found.setting.cluster, job), found.request.strategy)
    assert sum(found.memory().values()) == pytest.approx(sum(priced.estimate.memory.values()))


@pytest.mark.parametrize(("axes", "share"), [({"tensor": 4}, 4), ({"data": 2, "tensor": 2}, 2), ({"fsdp": 8}, 8)])
def test_memory_of_generation_is_weights_and_cache(axes, share):
    """Weights are split by tensor (and fsdp); 2 for k and v x layers x sequences x positions x heads x 2 bytes. TPUs
    would fill up tiles."""
    found = derivation(axes, step="decode", on="h100:8x1")
    memory = found.memory()
    norms = (2 * TINY.num_layers + 1) * TINY.d_model
    split = matmul_params(TINY) + TINY.vocab_size * TINY.d_model
    assert memory["weights"] == pytest.approx(2 * (split / share + norms))
    chips = found.request.strategy.num_chips
    cache = 2 * TINY.num_layers * SEQS * LENGTH * TINY.num_kv_heads * TINY.head_dim * 2
    assert memory["kv_cache"] == pytest.approx(cache / chips)
    assert memory["workspace"] > 0


def test_int8_weights_are_half_of_the_products_weights():
    plain, int8 = (
        derivation({"tensor": 4}, step="decode", storage=s).memory() for s in (AS_WRITTEN, Storage(weights="int8"))
    )
    saved = plain["weights"] - int8["weights"]
    assert 0.9 * matmul_params(TINY) / 4 < saved < 1.05 * (matmul_params(TINY) + TINY.vocab_size * TINY.d_model) / 4
    assert plain["kv_cache"] == int8["kv_cache"]


def test_an_int8_cache_is_half_and_its_scales():
    wide, narrow = (
        derivation({"tensor": 4}, step="decode", storage=Storage(cache_dtype=d)).memory() for d in ("bf16", "int8")
    )
    assert 0.5 < narrow["kv_cache"] / wide["kv_cache"] < 0.6


# -- products -----------------------------------------------------------------------------------------


def without_attention(found: StepDerivation) -> float:
    return sum(flops for label, flops in found.products().items() if "attention" not in label.op)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_products_are_six_flops_a_parameter_and_token(axes):
    found = derivation(axes)
    chips = found.request.strategy.num_chips
    assert without_attention(found) == pytest.approx(6 * matmul_params(TINY) * SEQS * LENGTH / chips)


def test_whole_layers_again_are_eight():
    head = TINY.d_model * TINY.vocab_size
    again = 2 * (matmul_params(TINY) - head)
    found = without_attention(derivation({"fsdp": 8}, remat="full")) - without_attention(derivation({"fsdp": 8}))
    # the last product of a layer is not needed again
    last = 2 * TINY.num_layers * TINY.d_model * TINY.d_ff
    assert found * 8 / (SEQS * LENGTH) in (pytest.approx(again), pytest.approx(again - last))


@pytest.mark.parametrize(("remat", "again"), [("recompute-all", 28), ("recompute-2", 4)])
def test_layers_that_run_again_for_each_other_are_two_flops_a_parameter_each_time(remat, again):
    """8 layers: 8 x 7 / 2 or 8 (2 - 1) / 2 forward passes of one more than remat full."""
    a_layer = (matmul_params(TINY) - TINY.d_model * TINY.vocab_size) / TINY.num_layers
    more, full = (without_attention(derivation({"fsdp": 8}, remat=r)) for r in (remat, "full"))
    assert (more - full) * 8 / (SEQS * LENGTH) == pytest.approx(2 * again * a_layer)


@pytest.mark.parametrize(("choices", "again"), [({}, 4 * 3 / 2), ({"schedule": "interleaved", "chunks": 4}, 0)])
def test_layers_of_a_stage_run_again_in_every_tick(choices, again):
    """Two stages of 4 layers, or of runs of one, which run nothing again and have no collective for it."""
    derived = derivation(
        {"pipeline": 2, "tensor": 4}, remat="recompute-all", choices={"num_microbatches": 4, **choices}
    )
    ticks, found = tick_tables(strategy_schedule(derived.request.strategy)).num_ticks, derived.products()
    layers = 1 if choices else 4
    ups = {
        phase: sum(f for label, f in found.items() if (label.phase, label.result) == (phase, "u")) for phase in PASSES
    }
    assert ups["forward"] == pytest.approx(2 * TINY.d_model * TINY.d_ff * SEQS / 4 * LENGTH / 4 * layers * ticks)
    assert ups["recompute"] == pytest.approx(ups["forward"] * (1 + again / layers))
    assert all(one.num_arrays for one in derived.expected())


def test_microbatches_are_as_many_flops():
    one, four = (without_attention(derivation({"fsdp": 8}, choices={"num_microbatches": n})) for n in (1, 2))
    assert one == pytest.approx(four)


def test_generation_has_two_flops_a_parameter_of_one_position():
    found = derivation({"tensor": 4}, step="decode")
    assert without_attention(found) == pytest.approx(2 * matmul_params(TINY) * SEQS / 4)


def test_stages_count_every_tick():
    """The text of a pipeline has each product once, in a loop over all ticks."""
    choices = {"num_microbatches": 4}
    found = derivation({"pipeline": 2, "fsdp": 4}, choices=choices)
    ticks = tick_tables(strategy_schedule(found.request.strategy)).num_ticks
    assert ticks > 4
    layers = 6 * (matmul_params(TINY) - TINY.d_model * TINY.vocab_size) * SEQS * LENGTH / 8
    of_layers = sum(f for label, f in found.products().items() if label.block == "layer" and label.op == "einsum")
    assert of_layers == pytest.approx(layers * ticks / 4)


# -- collectives --------------------------------------------------------------------------------------


def test_collectives_are_those_of_the_derivation():
    found = derivation({"fsdp": 4, "tensor": 2}, choices={"num_microbatches": 2})
    strategy = found.request.strategy
    wanted = expected_collectives(found.derived, found.dims, strategy.mesh, num_microbatches=2, width=2)
    assert found.expected() == list(wanted)


def test_collectives_of_stages_are_those_of_every_tick():
    found = derivation({"pipeline": 2, "fsdp": 4}, choices={"num_microbatches": 4})
    strategy = found.request.strategy
    tables = tick_tables(strategy_schedule(strategy))
    assert found.expected() == list(expected_of_pipeline(found.derived, tables, found.dims, strategy.mesh, width=2))
    assert {e.kind for e in found.expected() if e.axes == ("pipeline",)} >= {"permute"}


def test_a_step_without_gradients_sends_none():
    for step in ("prefill", "decode"):
        found = derivation({"fsdp": 4, "tensor": 2}, step=step, choices={"num_microbatches": 4})
        assert {e.label.phase for e in found.expected()} == {"forward"}
    assert {e.label.phase for e in derivation({"fsdp": 4, "tensor": 2}).expected()} >= {"forward", "backward"}


def test_ring_attention_is_of_training_alone():
    """A cache is read whole: keys are gathered over context to generate."""
    axes = {"context": 4, "tensor": 2}
    choices = {"context_attention": "ring"}
    trained, made = (derivation(axes, step=step, choices=choices).strategy for step in ("train", "prefill"))
    assert (trained.context_attention, made.context_attention) == ("ring", "gather")


# -- sources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [T5, WHISPER], ids=["t5", "whisper"])
def test_the_program_that_reads_sources_is_the_derived_one(given):
    """Compiled for emulated devices: a prompt beside an encoder is a source, and its first row a step of decode."""
    found = proof_of(given, "cpu:8", {"context": 2, "tensor": 4}, seqs=8, length=24, step="prefill")
    assert found.runs, found.refusal
    assert {row.axes for row in found.traffic.rows} == {("tensor",), ("context",)}
    assert all(row.compiled_arrays == row.derived_arrays for row in found.traffic.rows)
    assert found.products.compiled == found.products.derived > 0


def test_memory_of_sources_has_the_weights_of_both_stacks_and_whole_pages():
    given = msgspec.structs.replace(T5, encoder=msgspec.structs.replace(T5.encoder, length=200))
    sources, rows = (derivation({}, given=given, on="v5p:1x1x1", step=step) for step in ("prefill", "decode"))
    assert sources.memory()["weights"] == rows.memory()["weights"]
    # 128 positions of a source and a row, or 128 rows behind sources of 200
    assert (sources.dims["Pg"], rows.dims["Pg"]) == (SEQS * (1 + 1), SEQS * (1 + 2))
    assert sources.memory()["kv_cache"] / rows.memory()["kv_cache"] == pytest.approx(2 / 3)
