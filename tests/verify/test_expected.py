"""Expected collectives beside counts made by hand, and labels that are found again."""

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.generation.derive import derive_generation
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.transformer import transformer
from meshwright.core.labels import find_label
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.verify.expected import active_axes, expected_collectives
from tests.traffic import derived_traffic, expected_traffic

TINY = load_model("tiny")
DIMS = {**TINY.dims, "B": 8, "T": 64, "S": 64}


def collectives(axes, *, num_microbatches=1, layer_by_layer=True, **choices):
    strategy = Strategy(mesh=make_mesh(axes), state="bf16-adam", num_microbatches=num_microbatches, **choices)
    derived = derive(transformer(TINY), strategy)
    return list(
        expected_collectives(
            derived,
            DIMS,
            strategy.mesh,
            num_microbatches=num_microbatches,
            width=2,
            layer_by_layer=layer_by_layer,
        )
    )


def of(found, text):
    (one,) = [e for e in found if str(e.label) == text]
    return one


def test_a_gathered_weight():
    one = of(collectives({"fsdp": 4}, remat="none"), "layer:forward:w_up=all_gather")
    assert (one.kind, one.axes, one.num_arrays, one.element_bytes) == ("all_gather", ("fsdp",), 8, 2)
    assert one.full_bytes == 8 * 256 * 704 * 2  # eight layers of D x F


def test_a_gradient_is_scattered_as_often_as_there_are_microbatches():
    for count in (1, 2, 4):
        one = of(collectives({"fsdp": 4}, num_microbatches=count), "layer:backward:dw_up=reduce_scatter")
        assert one.num_arrays in (8, 8 * count)
        assert one.full_bytes == one.num_arrays * 256 * 704 * one.element_bytes


def test_activations_shrink_with_tensor_and_microbatches():
    whole = [e for e in collectives({"tensor": 2}) if e.axes == ("tensor",) and e.label.block == "layer"]
    split = [e for e in collectives({"tensor": 2}, num_microbatches=4) if e.axes == ("tensor",)]
    for one in whole:
        other = of(split, str(one.label))
        if one.kind == "all_gather" and one.label.phase == "forward" and not one.label.result.startswith("w_"):
            assert other.num_arrays == 4 * one.num_arrays
            assert other.full_bytes == one.full_bytes


def test_sums_of_stacked_gradients_are_one_array():
    apart = [e for e in collectives({"data": 2}) if e.kind == "all_reduce"]
    at_once = [e for e in collectives({"data": 2}, layer_by_layer=False) if e.kind == "all_reduce"]
    assert sum(e.full_bytes for e in apart) == sum(e.full_bytes for e in at_once)
    assert sum(e.num_arrays for e in apart) > sum(e.num_arrays for e in at_once)


def test_one_chip_sends_nothing():
    assert not [e for e in collectives({"fsdp": 1}) if e.axes]


def test_traffic_is_the_sum_of_what_is_expected():
    """`derived_traffic` is what the tests of the train step hold compiled programs against."""
    for axes in ({"fsdp": 4}, {"data": 2, "tensor": 2}, {"context": 2, "fsdp": 2}):
        strategy = Strategy(mesh=make_mesh(axes), state="bf16-adam")
        derived = derive(transformer(TINY), strategy)
        traffic = derived_traffic(derived, DIMS, strategy.mesh, num_microbatches=1, width=2)
        found = collectives(axes)
        assert traffic == expected_traffic(found)
        assert sum(one.full_bytes for one in traffic.values()) == sum(e.full_bytes for e in found)


def test_active_axes_are_in_the_order_of_the_mesh():
    assert active_axes(("tensor", "fsdp", "data"), {"data": 2, "fsdp": 1, "tensor": 4}) == ("data", "tensor")


# -- labels -------------------------------------------------------------------------------------------

MESHES = ({"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2, "fsdp": 2})
MOE_MESH = {"expert": 2, "fsdp": 2, "tensor": 2}


def check_labels(derived):
    steps = [step for step, _ in derived.steps(2)]
    steps += [s for block in derived.blocks for s in (*block.forward, *block.backward)]
    steps += [*derived.boundary, *derived.ends, *derived.update]
    for step in steps:
        label = step.label
        assert find_label(str(label)) == label
        assert find_label(f"jit(_step)/shard_map/{label}/dot_general") == label
        assert find_label(f"jit(_step)/transpose(jvp({label}))/while/body") == label
    return steps


@pytest.mark.parametrize("name", models())
def test_every_step_of_every_model_is_found_by_its_label(name):
    """One of each family in all of its steps; of equal families the deeper names."""
    given = load_model(name)
    meshes = (MOE_MESH,) if given.num_experts else MESHES
    for mesh in meshes:
        strategy = Strategy(mesh=make_mesh(mesh), state="bf16-adam", num_microbatches=2)
        try:
            assert len(check_labels(derive(transformer(given), strategy))) > 20
        except Exception as error:
            if type(error).__name__ not in ("InputError", "CannotRunError"):
                raise
            pytest.skip(str(error))


@pytest.mark.parametrize("name", ["tiny", "gemma2-9b", "mixtral-8x7b"])
def test_every_step_of_generation_is_found_by_its_label(name):
    given = load_model(name)
    strategy = Strategy(mesh=make_mesh({"data": 2, "tensor": 2}), state="bf16-adam", context_attention="gather")
    for quantised in (False, True):
        storage = Storage(weights="int8" if quantised else "")
        for prompts in (False, True):
            check_labels(derive_generation(given, strategy, storage, prompts=prompts))


def test_a_name_with_a_prime():
    """The cache after a write is called cache_k'; the text of a program writes the quote with a backslash."""
    wanted = "layer:forward:cache_k'=cache_write"
    assert str(find_label(f"jit(_step)/{wanted}/scatter")) == wanted
    assert str(find_label("jit(_step)/layer:forward:cache_k\\'=cache_write/scatter")) == wanted


def test_where_steps_lie_in_each_other_the_innermost_counts():
    assert str(find_label("a/layer:forward:q=einsum/b/layer:recompute:h=norm/c")) == "layer:recompute:h=norm"
    assert find_label("jit(f)/layer/forward/q") is None
