"""Small plans compiled for hardware that is not here, by the real compilers; `make test-aot` installs them."""

import msgspec
import pytest

from meshwright.api.proving import PROGRAM
from meshwright.spec.catalogue import load_model
from meshwright.spec.strategy import standard_assignment
from meshwright.verify.proof import Proof, prove
from meshwright.verify.running import python_program
from meshwright.verify.traffic import TOLERANCE
from tests.parallel.plain_encoder_decoder import T5
from tests.verify.compiled import proof_of, request_for

pytestmark = pytest.mark.aot

SMALL = msgspec.structs.replace(
    load_model("tiny"),
    name="small",
    num_layers=4,
    d_model=1024,
    d_ff=2816,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=16384,
)
"""Arrays that fill tiles and are too large to stay on the chip's core."""

EXPERTS = msgspec.structs.replace(
    SMALL,
    name="experts",
    family="mixtral",
    num_experts=4,
    experts_per_token=2,
    d_ff_expert=1408,
    gates_sum_to_one=True,
)

CHUNKS = msgspec.structs.replace(
    EXPERTS,
    name="chunks",
    family="llama4",
    sliding_window=200,
    sliding_layers=(0, 2),
    chunked_windows=True,
    unrotated_layers=(1, 3),
    qk_unit_norm=True,
    router_scores="sigmoid",
    gates_sum_to_one=False,
    weighted_inputs=True,
)

NAMED = {"full all-reduce", "scattered all-reduce", "joined", "padding", "repeated", "shared"}
"""Differences that these compilers make in plans without fault."""


def check(found: Proof, *, memory: float) -> None:
    """It runs, no byte is without a name, the products are as derived, and memory is within a share."""
    assert found.runs, found.refusal
    assert found.traffic_error == ""
    assert found.traffic.remainder <= TOLERANCE
    assert {one.name for one in found.traffic.differences} <= NAMED
    assert found.products.compiled == pytest.approx(found.products.derived, rel=TOLERANCE)
    assert found.memory.arguments == pytest.approx(found.memory.predicted_arguments, rel=0.02)
    assert abs(found.memory.error) <= memory


@pytest.mark.parametrize(
    ("on", "axes", "memory"),
    [
        ("v5e:2x2", {"fsdp": 2, "tensor": 2}, 0.2),
        # the cotangent of this small model's logits exists beside them: in drawn plans it does for one sequence alone
        ("v4p:2x2x1", {"fsdp": 4}, 0.25),
        ("v5p:2x2x1", {"data": 2, "tensor": 2}, 0.2),
        ("v6e:2x2", {"fsdp": 2, "context": 2}, 0.2),
        ("2*v5e:2x2", {"data": 2, "fsdp": 4}, 0.2),
        ("h100:8x1", {"fsdp": 4, "tensor": 2}, 0.2),
        # the loss head is the peak of this model, and its whole gradient in float32 is in no item
        ("b200:8x1", {"fsdp": 8}, 0.3),
    ],
)
def test_training(on, axes, memory):
    # a v4's core has 134 MB, which hold a good part of the arrays of shorter sequences
    found = proof_of(SMALL, on, axes, length=4096 if on.startswith("v4") else 1024)
    check(found, memory=memory)
    assert found.outcome.ended == "stopped"
    assert found.outcome.max_rss_bytes < 3e9


def bytes_by_kind(found: Proof) -> dict[str, tuple[float, float]]:
    """Derived and compiled bytes of each kind of collective."""
    sums: dict[str, tuple[float, float]] = {}
    for row in found.traffic.rows:
        derived, compiled = sums.get(row.kind, (0.0, 0.0))
        sums[row.kind] = derived + row.derived_bytes, compiled + row.compiled_bytes
    return sums


WHOLE_TORUS = [
    ("v5e:4x4", {"fsdp": 16}, 0.01),
    ("v5e:8x8", {"fsdp": 64}, 0.01),
    ("v6e:4x8", {"data": 2, "fsdp": 16}, 0.01),
    ("v5p:4x4x4", {"fsdp": 16, "context": 4}, 0.01),
    # between slices small shards are padded
    ("2*v5e:4x4", {"fsdp": 32}, 0.05),
]
"""Groups that fill a slice: compiled at once, their sums and some of their gathers would be all-reduces."""


@pytest.mark.parametrize(("on", "axes", "share"), WHOLE_TORUS)
def test_sums_and_gathers_over_a_whole_torus_stay_what_they_are(on, axes, share):
    found = proof_of(SMALL, on, axes, seqs=64)
    assert found.runs, found.refusal
    assert found.traffic.remainder <= TOLERANCE
    sent = bytes_by_kind(found)
    for kind in ("reduce_scatter", "all_gather"):
        derived, compiled = sent[kind]
        assert compiled == pytest.approx(derived, rel=share), kind
    assert sent["all_reduce"][1] - sent["all_reduce"][0] < 0.01 * found.traffic.derived_bytes
    assert found.traffic.compiled_bytes == pytest.approx(found.traffic.derived_bytes, rel=share)


def test_one_sum_over_a_whole_torus_is_a_full_all_reduce():
    """The cause: without a placement the program scatters over all torus axes at once."""
    request = request_for(SMALL, "v5e:4x4", {"fsdp": 16}, seqs=64)
    strategy = msgspec.structs.replace(request.strategy, placement={})
    at_once = msgspec.structs.replace(request, strategy=strategy)
    found = prove(at_once, program=python_program(PROGRAM), timeout_s=120)
    derived, compiled = bytes_by_kind(found)["reduce_scatter"]
    assert compiled < 0.1 * derived
    assert bytes_by_kind(found)["all_reduce"][1] > 1.8 * derived
    assert "full all-reduce" in {one.name for one in found.traffic.differences}


def test_a_sum_over_two_whole_axes_and_every_other_chip_of_the_third_runs_axis_by_axis():
    """tensor takes every other chip of z; at once libtpu would send the scatters over all others whole."""
    choices = {"placement": {}}
    found = proof_of(SMALL, "v5p:4x4x4", {"fsdp": 16, "context": 2, "tensor": 2}, seqs=64, choices=choices)
    derived, compiled = bytes_by_kind(found)["reduce_scatter"]
    assert compiled == pytest.approx(derived, rel=0.02)
    assert "full all-reduce" not in {one.name for one in found.traffic.differences}


STACKS = msgspec.structs.replace(T5, vocab_size=16384, d_model=1024)
CAUSES = {
    # inside a slice scattered and gathered, between slices summed
    "scattered all-reduce": (SMALL, "2*v5e:2x2", {"data": 4, "fsdp": 2}, {"zero": 1}),
    # gradients of the ends, summed over data and then over stages
    "joined": (SMALL, "h100:8x1", {"pipeline": 2, "data": 4}, {"num_microbatches": 4}),
    # weights of slots: rows of one number
    "padding": (EXPERTS, "v5e:2x2", {"expert": 4}, {}),
    # no room for the gathered weights
    "repeated": (load_model("llama3-8b"), "v5e:2x2", {"fsdp": 4}, {"remat": "full"}),
    # one table that both stacks gather before their first layers
    "shared": (STACKS, "v5e:2x2", {"fsdp": 4}, {}),
    # nothing uses the last block of a ring
    "dropped": (SMALL, "h100:8x1", {"context": 8}, {"context_attention": "ring"}),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_difference_has_its_name_where_its_cause_is_built(name):
    given, on, axes, choices = CAUSES[name]
    if "zero" in choices:
        choices = {"assignment": standard_assignment(zero=choices["zero"])}
    found = proof_of(given, on, axes, seqs=32, length=2048 if name == "repeated" else 1024, choices=choices)
    named = [one for one in found.traffic.differences if one.name == name]
    assert abs(sum(one.extra_bytes for one in named)) > 1e6
    assert found.traffic.remainder <= TOLERANCE


def test_sixteen_bits_are_float32_for_a_compiler_that_lacks_them():
    found = proof_of(SMALL, "v5e:2x2", {"fsdp": 2, "tensor": 2}, platform="cpu")
    assert "float32" in {one.name for one in found.traffic.differences}


@pytest.mark.parametrize(
    ("on", "axes"), [("v5e:2x2", {"fsdp": 2, "expert": 2}), ("h100:8x1", {"fsdp": 4, "expert": 2})]
)
def test_experts_with_a_bound(on, axes):
    check(proof_of(EXPERTS, on, axes, choices={"capacity_factor": 1.25}), memory=0.25)


@pytest.mark.parametrize(
    ("on", "axes"), [("v5e:2x2", {"fsdp": 2, "context": 2}), ("h100:8x1", {"fsdp": 4, "expert": 2})]
)
def test_attention_in_chunks(on, axes):
    check(proof_of(CHUNKS, on, axes, choices={"context_attention": "gather"}), memory=0.25)


def test_stages():
    choices = {"num_microbatches": 4}
    check(proof_of(SMALL, "h100:8x1", {"pipeline": 2, "fsdp": 4}, choices=choices), memory=0.3)


@pytest.mark.parametrize(("on", "axes"), [("v5e:2x2", {"fsdp": 4}), ("h100:8x1", {"fsdp": 8})])
def test_what_is_too_large_is_refused_with_bytes(on, axes):
    given = load_model("llama3-8b" if on.startswith("v5e") else "llama3-70b")
    found = proof_of(given, on, axes, seqs=8, length=2048, choices={"remat": "full"})
    assert not found.runs
    assert found.memory.needed > found.memory.available > 1e10
    assert f"needs {found.memory.needed / 1e9:.1f} GB" in found.refusal
    assert f"times the {found.memory.available / 1e9:.1f} GB" in found.refusal
    assert found.memory.predicted > found.memory.available  # the prediction refuses it too


@pytest.mark.parametrize("capped", [{}, {"family": "gemma2", "logit_softcap": 30.0}])
def test_a_large_vocabulary_in_chunks(capped):
    """The sum of the table's gradient over chunks is in float32; capped logits stand beside their cotangent."""
    given = msgspec.structs.replace(load_model("llama3.2-1b"), num_layers=4, **capped)
    check(proof_of(given, "v5e:2x4", {"fsdp": 8}, length=4096, choices={"remat": "full"}), memory=0.03)


@pytest.mark.parametrize(("on", "tensor"), [("v5e:2x2", 4), ("h100:8x1", 8)])
def test_int8_generation(on, tensor):
    # a small vocabulary: what is copied of a large one to generate on TPUs is in no item
    given = msgspec.structs.replace(load_model("llama3-8b"), num_layers=4, vocab_size=16384)
    asked = {"seqs": 8, "length": 2048, "step": "generate"}
    found = proof_of(given, on, {"tensor": tensor}, weights="int8", **asked)
    check(found, memory=0.2)
    wide = proof_of(given, on, {"tensor": tensor}, **asked)
    check(wide, memory=0.2)
    # a byte less for each weight
    weights = 4 * given.d_model * (2 * 4096 + 2 * 1024 + 3 * given.d_ff) + 2 * given.d_model * given.vocab_size
    assert wide.memory.arguments - found.memory.arguments == pytest.approx(weights / tensor, rel=0.02)


@pytest.mark.parametrize(
    ("on", "axes"), [("v5e:2x2", {"tensor": 4}), ("v6e:2x2", {"tensor": 4}), ("v6e:2x2", {"data": 2, "tensor": 2})]
)
def test_heads_that_are_wider_than_tiles_in_int8(on, axes):
    """Of layers with a window each device has 4 heads of 256, of the others one of 512: no pool is copied, nor are the
    weights of all layers with a window, of which an iteration has five. Copies of pools of two heads are predicted."""
    given = msgspec.structs.replace(
        load_model("gemma4-31b"), num_layers=12, sliding_layers=(*range(5), *range(6, 11)), d_ff=2048, vocab_size=16384
    )
    asked = {"seqs": 96, "length": 4096, "step": "generate", "cache_dtype": "int8"}
    check(proof_of(given, on, axes, weights="int8", **asked), memory=0.05)


def test_the_whole_compiler():
    found = proof_of(SMALL, "v5e:2x2", {"fsdp": 2, "tensor": 2}, depth="full", timeout_s=300)
    assert found.outcome.ended == "done"
    check(found, memory=0.2)
    early = proof_of(SMALL, "v5e:2x2", {"fsdp": 2, "tensor": 2})
    assert found.memory.needed == early.memory.needed
    assert found.traffic == early.traffic
