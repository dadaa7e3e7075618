"""Memory items against counts by hand, and the rules that hold between strategies."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.cost.memory.chip import memory_limit, total_bytes
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.pipeline import strategy_pipeline
from meshwright.cost.setting import Setting
from meshwright.spec import catalogue
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import REMAT_POLICIES, STATE_BYTES, Strategy, make_mesh, standard_assignment
from meshwright.spec.weights import num_params, params_by_part

TINY = catalogue.load_model("tiny")
SMALL_HEAD = msgspec.structs.replace(TINY, vocab_size=256)
"""Its layers need the most while they run, not its loss head."""

ITEMS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "communication", "workspace")
MESHES = (
    {},
    {"fsdp": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "context": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
)


def memory(
    axes, *, model=TINY, batch_seqs=32, seq_len=512, symbolic=False, cluster="v5e:4x4", software="compiled", **fields
):
    strategy = Strategy(mesh=make_mesh(axes), **fields)
    without = ("tensor",) if symbolic and axes.get("tensor", 1) == 1 else ()
    derived = derive(transformer(model), strategy, symbolic=symbolic, without=without)
    sizes = Setting(model, parse_cluster(cluster), Job(batch_seqs=batch_seqs, seq_len=seq_len)).sizes(strategy)
    pipeline = strategy_pipeline(strategy, in_lockstep=software == "compiled")
    return memory_parts(derived, sizes).items(pipeline, strategy.offload)


def test_the_items_are_the_agreed_ones_and_sum_to_the_total():
    items = memory({"fsdp": 2, "tensor": 2})
    assert tuple(items) == ITEMS
    assert total_bytes(items) == sum(float(size) for size in items.values())
    assert items["kv_cache"] == 0


@pytest.mark.parametrize("state", STATE_BYTES)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_state_is_bytes_per_parameter_over_the_chips_that_share_it(axes, state):
    """Matrices are split over fsdp, context and tensor; norm scales are the same everywhere."""
    # one program has no gradients yet of a single microbatch while the loss head, here the peak, runs
    items, parts = memory(axes, state=state, software="eager"), STATE_BYTES[state]
    shards = np.prod([axes.get(axis, 1) for axis in ("fsdp", "context", "tensor")])
    norms = params_by_part(TINY)["norm"]
    elements = (num_params(TINY) - norms) / shards + norms
    for item in ("weights", "gradients", "optimizer"):
        assert items[item] == pytest.approx(elements * parts[item], rel=1e-12)


def test_ten_bytes_per_parameter_of_llama3_70b_over_8192_chips():
    """How to Scale Your Model, sections 5.1.1 and 6.2: bf16 weights and two fp32 moments, 700 GB in all."""
    model = catalogue.load_model("llama3-70b")
    items = memory({"fsdp": 1024, "context": 2, "tensor": 4}, model=model, batch_seqs=1024, seq_len=4096)
    norms = params_by_part(model)["norm"]
    assert items["weights"] + items["optimizer"] == pytest.approx(10 * (num_params(model) - norms) / 8192 + 10 * norms)
    assert 8192 * (items["weights"] + items["optimizer"] - 10 * norms) == pytest.approx(7e11, rel=0.01)


def test_state_of_llama3_8b_is_the_argument_size_of_the_compiled_step():
    """The same step compiled for v5e:4x4 (fsdp 4, tensor 4) takes arguments of 4.68 GiB a chip."""
    items = memory({"fsdp": 4, "tensor": 4}, model=catalogue.load_model("llama3-8b"), batch_seqs=16, seq_len=4096)
    assert (items["weights"] + items["optimizer"]) / 2**30 == pytest.approx(4.68, abs=0.01)


def test_block_remat_keeps_the_input_of_every_layer_and_the_head():
    items = memory({"fsdp": 2, "context": 2, "tensor": 2})
    tokens = 32 * 512
    stream = 2 * tokens * 256 / 8
    gathered = 2 * tokens * 256 / 4
    per_token = 4 * tokens * (1 / 8 + 2 / 4)
    assert items["activations"] >= 8 * stream + stream + gathered
    assert items["activations"] <= 8 * stream + stream + gathered + 4 * per_token
    assert items["logits"] == 4 * tokens * 4096 / 8


def test_full_remat_holds_one_chunk_of_logits_and_its_cotangent():
    large = msgspec.structs.replace(TINY, vocab_size=65536)
    assert memory({"fsdp": 2, "tensor": 2}, model=large, remat="full")["logits"] == 2 * 4 * 1024 * 65536 / 2
    asked = {"remat": "full", "batch_seqs": 2, "seq_len": 512}
    chunk, widened = 4 * 512 * 65536, 2 * 256 * 65536
    # TPUs make the cotangent of logits without a cap inside its products, and sum that of the table in float32
    assert memory({"fsdp": 2}, model=large, **asked)["logits"] == chunk + widened
    capped = msgspec.structs.replace(large, family="gemma2", logit_softcap=30.0)
    assert memory({"fsdp": 2}, model=capped, **asked)["logits"] == 2 * chunk + widened


def test_the_embedding_is_the_peak_where_tokens_are_few():
    """Its gradient is summed in float32 and rounded, when no layer holds anything any more."""
    found = memory({"fsdp": 2}, remat="full", batch_seqs=2, seq_len=128)
    assert (found["logits"], found["workspace"] > (4 + 2) * 4096 * 256) == (0, True)
    assert found["activations"] < memory({"fsdp": 2}, model=SMALL_HEAD, batch_seqs=2, seq_len=128)["activations"]
    wide = memory({"fsdp": 2}, remat="full", batch_seqs=2, seq_len=128, state="fp32")
    assert wide["workspace"] < 2 * 4 * 4096 * 256


def test_the_cotangent_of_logits_is_beside_them():
    """In 16 bits beside float32 on GPUs, and on TPUs for one sequence; more sequences' are made inside the products."""
    logits, large = 4 * 512 * 65536, msgspec.structs.replace(TINY, vocab_size=65536)
    gpu, one, two = (
        memory({}, model=large, batch_seqs=count, cluster=where)
        for where, count in (("h100:1x1", 1), ("v5e:1x1", 1), ("v5e:1x1", 2))
    )
    assert gpu["logits"] == one["logits"] == two["logits"] / 2 == logits
    assert gpu["workspace"] == one["workspace"] >= logits / 2 > two["workspace"]


def test_weights_that_stay_whole_have_a_second_copy_in_the_tiles_of_tpu7x():
    model = msgspec.structs.replace(SMALL_HEAD, d_ff=1024)
    for axes, zero, count in (({"fsdp": 8}, 1, 1), ({"fsdp": 8}, 3, 0), ({"tensor": 2}, 3, 0.5)):
        held = {"assignment": standard_assignment(zero=zero), "model": model}
        plain, tiled = (memory(axes, cluster=where, **held)["workspace"] for where in ("v5p:2x2x2", "tpu7x:2x2x2"))
        matrices = layer_params(model) - 16 * 256
        assert tiled - plain == 2 * matrices * count


def test_widths_fill_the_tiles_of_tpus():
    """Heads of 64 take 128 lanes, a hidden layer of 704 takes 768; heads of 32 have another dim there."""
    for change, kept in (({"head_dim": 64}, 8 * 2 * (8 + 8 + 4 + 4) * 64), ({"d_ff": 704}, 0)):
        model = msgspec.structs.replace(SMALL_HEAD, **change)
        gpu, tpu = (
            memory({}, model=model, remat="none", cluster=where)["activations"] for where in ("h100:1x1", "v5e:1x1")
        )
        hidden = 8 * 2 * 3 * (768 - 704)
        assert tpu - gpu >= 32 * 512 * (hidden + kept * 0.9)


def test_stages_hold_a_run_of_weights_and_its_gradients_twice():
    """Gradients of a run of layers in 16 bits until they are added, and its weights where a device has several runs."""
    layers = 2 * layer_params(SMALL_HEAD) / 2
    fields = {"model": SMALL_HEAD, "num_microbatches": 4, "batch_seqs": 4, "seq_len": 128}
    one, two = memory({"pipeline": 2}, **fields), memory({"pipeline": 2}, schedule="interleaved", chunks=2, **fields)
    assert one["workspace"] - two["workspace"] == pytest.approx(layers * (1 - 2 / 2))
    eager = memory({"pipeline": 2}, software="eager", **fields)
    assert one["workspace"] - eager["workspace"] == pytest.approx(layers)


def test_a_table_of_both_ends_keeps_its_gradient_until_the_embedding_has_run():
    tied = msgspec.structs.replace(SMALL_HEAD, tied_embeddings=True)
    fields = {"assignment": standard_assignment(zero=1)}
    own, both = (memory({"fsdp": 8}, model=model, **fields)["gradients"] for model in (SMALL_HEAD, tied))
    # a shard of the other table's gradient is gone
    assert both - own == 2 * 256 * 256 - 2 * 256 * 256 / 8


def test_what_only_the_head_needs_counts_where_the_head_needs_the_most():
    """A layer of many tokens needs more than one chunk of few logits: they are gone by then."""
    many = memory({"fsdp": 2, "tensor": 2}, remat="full", batch_seqs=512)
    assert many["logits"] == 0
    assert many["workspace"] > 2 * 4 * 1024 * 4096 / 2


def test_gathered_weights_are_those_of_the_largest_block():
    """tiny's embedding table is larger than one of its layers; without fsdp nothing is gathered."""
    assert memory({"fsdp": 2})["communication"] == 2 * 4096 * 256
    assert memory({"data": 2, "tensor": 2})["communication"] == 0


def test_a_gathered_weight_of_experts_is_there_twice_on_gpus():
    """Experts are the first dim and fsdp splits the second: a matrix of 8 experts is transposed after its gather."""
    model, strategy = catalogue.load_model("mixtral-8x7b"), Strategy(mesh=make_mesh({"fsdp": 32}))
    gpus, tpus = (
        Setting(model, parse_cluster(on), Job(batch_seqs=64, seq_len=4096)).memory(strategy)["communication"]
        for on in ("h100:8x4", "v5p:2x4x4")
    )
    assert gpus - tpus == 8 * 4096 * 14336 * 2


def test_microbatches_divide_activations_and_add_a_float32_sum_of_gradients():
    one, four = (memory({"fsdp": 2}, num_microbatches=count, software="eager") for count in (1, 4))
    for item in ("activations", "logits"):
        assert four[item] == pytest.approx(one[item] / 4)
    assert four["gradients"] == 3 * one["gradients"]
    assert four["workspace"] < one["workspace"]
    assert four["weights"] == one["weights"]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_less_remat_needs_more_memory(axes):
    items = {remat: memory(axes, remat=remat) for remat in REMAT_POLICIES}
    totals = {remat: float(total_bytes(found)) for remat, found in items.items()}
    assert items["none"]["activations"] > items["matmuls"]["activations"]
    assert min(totals["none"], totals["matmuls"]) > totals["block"]
    assert items["block"]["activations"] >= items["full"]["activations"]
    assert totals["none"] > totals["selective"] > totals["block"]


@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_axes_of_one_device_cost_nothing(axes, remat):
    """Symbolic steps name every axis; with sizes of 1 they must need what the steps without them need."""
    symbolic, concrete = (memory(axes, remat=remat, symbolic=flag) for flag in (True, False))
    assert {k: float(v) for k, v in symbolic.items()} == pytest.approx({k: float(v) for k, v in concrete.items()})


def test_scores_in_memory_enlarge_the_working_set():
    fused, written = (memory({"fsdp": 2}, cluster=where) for where in ("v5e:4x4", "cpu:8"))
    pairs = 16 * 8 * 512 * 512
    assert written["workspace"] - fused["workspace"] >= 0.5 * pairs * (8 + 2)
    of_peak = ("workspace", "logits", "communication", "gradients")  # which move from the head to a layer
    assert {k: v for k, v in written.items() if k not in of_peak} == {
        k: v for k, v in fused.items() if k not in of_peak
    }


def test_the_limit_is_what_the_compiler_offers_where_that_is_known():
    assert memory_limit(parse_cluster("v5e:4x4")) == 15.75 * 2**30
    assert memory_limit(parse_cluster("h100:8")) == 80e9
    assert memory_limit(parse_cluster("cpu:8")) == float("inf")
    measured = Calibration(name="here", chip="cpu", memory_bytes=2e9)
    assert memory_limit(parse_cluster("cpu:8"), measured) == 2e9


# -- ZeRO -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "per_param"), [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)], ids=["0", "1", "2", "3"]
)
@pytest.mark.parametrize("axis", ["fsdp", "context"])
def test_bytes_per_parameter_of_each_stage(zero, per_param, axis):
    """2 of weights, 2 of gradients, 12 of optimizer over 8 devices: what each stage splits.

    Source: Rajbhandari et al., ZeRO (2019), figure 1. Norm scales are whole everywhere.
    """
    items = memory({axis: 8}, assignment=standard_assignment(zero=zero), state="bf16-master", software="eager")
    norms = params_by_part(TINY)["norm"]
    found = items["weights"] + items["gradients"] + items["optimizer"] - 16 * norms
    assert found / (num_params(TINY) - norms) == pytest.approx(per_param)
    assert (items["communication"] > 0) == (zero == 3)


def test_one_program_holds_the_gradients_of_one_microbatch_as_the_optimizer_takes_them():
    """Each layer's are scattered as they are made, so that ZeRO-1 holds no more of them than ZeRO-2."""
    first, second = (memory({"fsdp": 8}, assignment=standard_assignment(zero=zero)) for zero in (1, 2))
    assert first["gradients"] == second["gradients"]
    several = memory({"fsdp": 8}, assignment=standard_assignment(zero=1), num_microbatches=2)
    assert several["gradients"] > 8 * first["gradients"]


def test_replicas_and_tensor_split_as_before_under_every_stage():
    """Data leaves everything whole, tensor splits everything: 16 bytes over 2 devices at any stage."""
    norms = params_by_part(TINY)["norm"]
    for zero in range(4):
        fields = {"assignment": standard_assignment(zero=zero), "state": "bf16-master", "software": "eager"}
        items = memory({"data": 4, "tensor": 2}, **fields)
        held = items["weights"] + items["gradients"] + items["optimizer"]
        assert held == pytest.approx(16 * ((num_params(TINY) - norms) / 2 + norms))


def test_without_sequence_parallelism_the_stream_is_whole_over_tensor():
    """tiny with 8 layers of 2 bytes x 32 x 512 x 256 kept by block remat, and what the head keeps."""
    split, whole = (
        memory({"tensor": 4}, assignment=standard_assignment(sequence_parallel=on))["activations"]
        for on in (True, False)
    )
    stream = 2 * 32 * 512 * 256
    assert whole - split >= 8 * stream * 3 / 4


# -- remat of whole segments --------------------------------------------------------------------------------


def test_segments_keep_their_input_and_the_results_of_one():
    """Every C-th of 8 layers' inputs, and all results of C layers; sqrt is C = sqrt(8)."""
    none, block = (memory({"fsdp": 2}, model=SMALL_HEAD, remat=remat)["activations"] for remat in ("none", "block"))
    stream = 2 * 32 * 512 * 256 / 2
    ends = block - 8 * stream
    layer = (none - ends) / 8
    assert layer > 10 * stream
    for remat, length in (
        ("every-1", 1),
        ("every-2", 2),
        ("every-4", 4),
        ("every-8", 8),
        ("every-100", 8),
        ("sqrt", 8**0.5),
    ):
        found = memory({"fsdp": 2}, model=SMALL_HEAD, remat=remat)["activations"]
        assert found == pytest.approx(8 / length * stream + length * layer + ends), remat


def test_layers_that_run_again_for_each_other_keep_one_input_and_that_of_a_segment():
    """n / C inputs of 8 layers, and the one that is computed again: with one segment two, whatever the layers."""
    full = memory({"fsdp": 2}, model=SMALL_HEAD, remat="full")
    stream = 2 * 32 * 512 * 256 / 2
    for remat, kept in (("recompute-1", 8), ("recompute-2", 4), ("recompute-4", 2), ("recompute-all", 1)):
        found = memory({"fsdp": 2}, model=SMALL_HEAD, remat=remat)
        assert found["activations"] == pytest.approx(full["activations"] - (8 - kept - 1) * stream), remat
        assert {**found, "activations": 0} == {**full, "activations": 0}


STAGES = Strategy(mesh=make_mesh({"pipeline": 2}), schedule="interleaved", chunks=2, num_microbatches=4)


def test_a_run_of_a_stage_keeps_the_input_of_its_segments():
    """8 layers in 2 stages of 2 runs: one input a run, as many as the stash has slots, and one computed again."""
    layers = {}
    for remat in ("recompute-all", "sqrt"):
        derived = derive(transformer(TINY), Strategy(mesh=make_mesh({"pipeline": 2}), remat=remat))
        sizes = Setting(TINY, parse_cluster("v5e:1x2"), Job(batch_seqs=8, seq_len=512)).sizes(STAGES)
        layers[remat] = memory_parts(derived, sizes).layers[0]
    stash, stream = strategy_pipeline(STAGES).stash, layers["sqrt"].stream_bytes
    assert layers["recompute-all"].saved_bytes(1 / 2, stash, 2) == pytest.approx(2 * stash * stream)
    assert layers["recompute-all"].segment_bytes(1 / 4) == stream
    assert layers["sqrt"].segment_repeats(1 / 4) == pytest.approx(2**0.5)


def test_sqrt_of_many_layers_lies_between_none_and_block():
    model = catalogue.load_model("llama3-70b")
    none, sqrt, block = (
        float(total_bytes(memory({"fsdp": 64}, model=model, batch_seqs=64, seq_len=4096, remat=remat)))
        for remat in ("none", "sqrt", "block")
    )
    assert none > 2 * sqrt > 2 * block


# -- pipelines ------------------------------------------------------------------------------------------------


def layer_params(model=TINY):
    """Parameters of all layers; tiny has two tables of one size and a last norm besides."""
    return num_params(model) - 2 * params_by_part(model)["embedding"] - model.d_model


@pytest.mark.parametrize(("software", "tables"), [("compiled", 2), ("eager", 1)])
def test_stages_share_out_layers_and_hold_the_ends(software, tables):
    """Four stages of tiny's 8 layers hold 2 each; in one program every stage has both tables, else one at most."""
    one, four = memory({}, num_microbatches=4), memory({"pipeline": 4}, num_microbatches=4, software=software)
    table = params_by_part(TINY)["embedding"]
    for item, width in (("weights", 2), ("gradients", 2 + 4), ("optimizer", 8)):
        assert one[item] == width * num_params(TINY)
        if (item, software) == ("gradients", "compiled"):
            width = 4  # what a stage leaves is added to the float32 sum at once
        assert four[item] == width * (layer_params() / 4 + tables * table + 256)


def test_uneven_layers_fill_the_fullest_device():
    """Eight layers on three stages: 3, 3 and 2."""
    three, one = (memory({"pipeline": n}, num_microbatches=4)["weights"] for n in (3, 1))
    assert one - three == 2 * layer_params() * (1 - 3 / 8)


@pytest.mark.parametrize(
    ("software", "in_flight"),
    [
        ("compiled", {"1f1b": 8, "gpipe": 17, "naive": 1, "interleaved": 6}),
        ("eager", {"1f1b": 4, "gpipe": 16, "naive": 1, "interleaved": 5.5}),
    ],
)
def test_microbatches_in_flight_keep_their_results(software, in_flight):
    """1F1B keeps those of four microbatches on the first of four stages, of seven in lockstep; GPipe of all sixteen.

    One program holds those of the pass at work besides, before they are written to their slot; a single slot is used as
    it is.
    """
    stream = 2 * 32 * 512 * 256 / 16
    plain = memory({}, model=SMALL_HEAD, num_microbatches=16)["activations"]
    ends = plain - 8 * stream
    for schedule, count in in_flight.items():
        fields = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1, "software": software}
        found = memory({"pipeline": 4}, model=SMALL_HEAD, num_microbatches=16, **fields)["activations"]
        assert found == pytest.approx(ends + count * 2 * stream), schedule


def test_sends_between_stages_have_buffers():
    """The stream on its way on, and its cotangent on its way back; in lockstep results that wait for the head too."""
    stream = 2 * 8 * 512 * 256
    assert memory({"pipeline": 2}, num_microbatches=4, software="eager")["communication"] == 2 * stream
    assert memory({"pipeline": 2}, num_microbatches=4)["communication"] == (2 + 1) * stream
    assert memory({"pipeline": 2}, num_microbatches=4, schedule="gpipe")["communication"] == (2 + 4) * stream
    assert memory({}, num_microbatches=4)["communication"] == 0


def test_what_waits_for_the_gradients_of_weights_is_held():
    """zb-h1 on two stages in lockstep holds, for two microbatches, what the products of four layers' weight gradients
    take: two normed streams, the gate and what it meets, attention's result, and the cotangents of all products."""
    fields = {"axes": {"pipeline": 2}, "num_microbatches": 4, "remat": "block", "cluster": "h100:8x1"}
    both, once = (memory(schedule=schedule, **fields)["activations"] for schedule in ("zb-h1", "1f1b"))
    d, f, heads, kv = 256, 704, 8 * 32, 4 * 32
    operands, cotangents = 2 * d + 2 * f + heads, 2 * d + 2 * f + heads + 2 * kv
    norms = 2 * d  # their gradients come on the way
    assert both - once == 2 * 4 * 2 * (8 * 512 * (operands + cotangents) + norms)
    eager = (float(memory(schedule=s, software="eager", **fields)["activations"]) for s in ("zb-h1", "1f1b"))
    assert len(set(eager)) == 1


def test_dualpipe_holds_two_stages_and_both_ends():
    """Libraries keep two copies of everything; one program keeps one, and has both beside it for the step."""
    table = params_by_part(TINY)["embedding"]
    layers, ends = layer_params(), 2 * table + 256
    for software, copies, sums in (("eager", (2, 2, 2), 6), ("compiled", (3, 2, 1), 4)):
        found = memory({"pipeline": 2}, num_microbatches=8, schedule="dualpipe", software=software)
        for item, width, count in zip(("weights", "gradients", "optimizer"), (2, sums, 8), copies, strict=True):
            assert found[item] == width * (count * layers / 2 + ends), (software, item)


@pytest.mark.parametrize("software", ["compiled", "eager"])
def test_a_tied_table_is_held_once(software):
    """gpt2 has one table of 50,257 x 768 for both ends, positions at the first, and a last norm at the head."""
    model = catalogue.load_model("gpt2")
    table, positions, norm = 50257 * 768, 1024 * 768, 2 * 768
    fields = {"model": model, "batch_seqs": 8, "num_microbatches": 2, "software": software}
    ends = table + norm + (positions if software == "compiled" else 0)
    layers = num_params(model) - table - positions - norm
    assert memory({"pipeline": 2}, **fields)["weights"] == 2 * (layers / 2 + ends)


def test_the_gradients_of_the_first_of_two_microbatches_become_the_sum():
    """Six bytes a weight, two of a microbatch and four of the sum, but for two microbatches that scatter none."""
    norms = params_by_part(SMALL_HEAD)["norm"]
    for zero, count, width in ((1, 2, 4), (1, 3, 6), (3, 2, 6)):
        assignment = standard_assignment(zero=zero)
        found = memory({"fsdp": 4}, model=SMALL_HEAD, batch_seqs=48, num_microbatches=count, assignment=assignment)
        matrices = (num_params(SMALL_HEAD) - norms) / (4 if zero == 3 else 1)
        assert found["gradients"] == pytest.approx(width * (matrices + norms)), (zero, count)


def test_tables_whose_shards_end_within_a_tile_exist_twice_on_tpus():
    """256 columns over 16 devices are whole tiles of eight, over 64 they are not."""
    wide = msgspec.structs.replace(TINY, vocab_size=65536)
    table = 2 * 65536 * 256
    fits, ends = (memory({"fsdp": size}, model=wide, batch_seqs=2 * size, cluster="v5e:8x8") for size in (16, 64))
    assert (fits["communication"], ends["communication"]) == (table, 2 * table)
    on_gpus = memory({"fsdp": 64}, model=wide, batch_seqs=128, cluster="h100:8x8")
    assert on_gpus["communication"] == table


def test_capped_logits_are_in_float32_beside_the_logits():
    """As many bytes again, on TPUs with several sequences too, where no cotangent exists."""
    wide = msgspec.structs.replace(TINY, vocab_size=65536)
    capped = msgspec.structs.replace(wide, logit_softcap=30.0)
    plain, more = (memory({"fsdp": 8}, model=one, cluster="v5e:2x4") for one in (wide, capped))
    assert more["logits"] == plain["logits"] == 4 * 4 * 512 * 65536
    assert more["workspace"] == pytest.approx(more["logits"], rel=1e-3)  # and numbers of each token
