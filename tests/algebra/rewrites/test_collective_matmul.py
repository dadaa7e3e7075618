"""Collective matmuls in a derivation: which steps they take the place of, and what they move and compute."""

from collections import Counter

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.generation.derive import derive_generation
from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops.collective_matmul import NAME as COLLECTIVE_MATMUL
from meshwright.algebra.rewrites.collective_matmul import with_collective_matmuls
from meshwright.algebra.rewrites.rings import num_moves, num_ways
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import transformer
from meshwright.core.errors import InputError
from meshwright.spec import catalogue
from meshwright.spec.strategy import REMAT_POLICIES, Strategy, make_mesh, standard_assignment

LLAMA, MIXTRAL = catalogue.load_model("llama3-8b"), catalogue.load_model("mixtral-8x7b")
MESH = {"fsdp": 2, "tensor": 4}
SIZES = {"B": 8, "T": 4096}


def strategy(axes=MESH, *, sequence_parallel=True, **fields):
    assignment = standard_assignment(sequence_parallel=sequence_parallel)
    return Strategy(mesh=make_mesh(axes), assignment=assignment, **fields)


def layer(ways, *, model=LLAMA, block="layer", **fields):
    derived = derive(transformer(model), strategy(collective_matmul=ways, **fields))
    return next(found for found in derived.blocks if found.block.name == block)


def words(steps):
    """Products in blocks and what goes round for them, one text each."""
    found = []
    for step in steps:
        if step.op == COLLECTIVE_MATMUL:
            found.append(f"{step.details.form}: {' '.join(p.result.name for p in step.parts)}")
        elif step.op == "permute":
            found.append(f"{step.details.ring} {step.inputs[0].name} -> {step.result}")
    return found


def test_a_forward_pass():
    assert words(layer("one-way").forward) == [
        "past h -> h_passing[B_fsdp, T_tensor, D]",
        "all_gather: q k v",
        "reduce_scatter: a",
        "home a_passing -> a[B_fsdp, T_tensor, D]",
        "past h1 -> h1_passing[B_fsdp, T_tensor, D]",
        "all_gather: g u",
        "reduce_scatter: y",
        "home y_passing -> y[B_fsdp, T_tensor, D]",
    ]


def test_a_backward_pass_has_gradients_of_weights_in_the_rounds():
    """Those that need what comes out of the round are outside, and use the array put together from its blocks."""
    steps = layer("one-way", remat="full").backward
    assert [text for text in words(steps) if ":" in text] == [
        "all_gather: q k v",
        "reduce_scatter: a",
        "all_gather: g u",
        "all_gather: dm dw_down",
        "reduce_scatter: dh1 dh1",
        "all_gather: do dwo",
        "reduce_scatter: dh dh dh",
    ]
    outside = [step.result.name for step in steps if step.op == "einsum"]
    assert outside == ["dw_up", "dw_gate", "dwv", "dwk", "dwq"]
    put_together = [array.name for step in steps for array in step.more if array.name in ("h", "h1")]
    assert put_together == ["h", "h1"]
    kept = layer("one-way", remat="none")
    whole = [array for step in kept.forward for array in step.more if array.name in ("h", "h1")]
    assert set(whole) <= set(kept.kept), "what is kept is put together too"
    assert len(whole) == 2


def test_a_sum_that_stays_whole_is_gathered_after_its_round():
    forward = layer("two-way", sequence_parallel=False).forward
    assert words(forward) == [
        "all_reduce: a",
        "home a_passing -> a[B_fsdp, T_tensor, D]",
        "all_reduce: y",
        "home y_passing -> y[B_fsdp, T_tensor, D]",
    ]
    gathers = [step for step in forward if step.op == "all_gather" and step.axes == ("tensor",)]
    assert [str(step.result) for step in gathers] == ["a[B_fsdp, T, D]", "y[B_fsdp, T, D]"]
    assert all(step.critical for step in gathers)
    assert not any(step.op == "all_reduce" for step in forward)


def test_generation_sums_in_blocks_of_the_weights_columns():
    derived = derive_generation(LLAMA, strategy(collective_matmul="one-way"))
    block = next(found for found in derived.blocks if found.block.name == "layer")
    made = [step for step in block.forward if step.op == COLLECTIVE_MATMUL]
    assert [(step.details.form, step.dim) for step in made] == [("all_reduce", "D")] * 2


def runs(block):
    return {"forward": block.forward, "backward": block.backward}


def collective_bytes(steps):
    """Elements that a ring sends over the axis tensor, by what they are for, gathers of sums among them."""
    sent = 0.0
    sizes = OpSizes(dims={**LLAMA.dims, **SIZES}, mesh=strategy().mesh, state="fp32")
    for step in steps:
        if step.axes != ("tensor",) or step.scope == "step":
            continue
        size = sizes.elements(step.full)
        times = {"permute": num_moves(step, sizes), "all_reduce": 2 * 3 / 4}.get(step.op, 3 / 4)
        sent += times * size
    return sent


@pytest.mark.parametrize("ways", ["one-way", "two-way"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("remat", REMAT_POLICIES)
@pytest.mark.parametrize("block", ["layer", "head"])
def test_bytes_products_and_results_stay_what_they_were(block, remat, whole, ways):
    plain = runs(layer("none", remat=remat, sequence_parallel=not whole, block=block))
    found = runs(layer(ways, remat=remat, sequence_parallel=not whole, block=block))
    for name, steps in found.items():
        assert collective_bytes(steps) == pytest.approx(collective_bytes(plain[name]), rel=1e-12)
        products = Counter(p for step in steps for p in (step.parts or (step,)) if p.op == "einsum")
        assert products == Counter(step for step in plain[name] if step.op == "einsum")
        assert_in_order(steps)
        assert {step.result for step in plain[name] if not step.result.unreduced} - made(steps) <= gathered(plain[name])
    assert layer(ways, remat=remat, block=block).kept == layer("none", remat=remat, block=block).kept


def made(steps):
    return {array for step in steps for array in (step.result, *step.more)}


def gathered(steps):
    """What a round need not put together."""
    return {step.result for step in steps if step.op == "all_gather" and step.axes == ("tensor",)}


def assert_in_order(steps):
    """Nothing is used before it is made, and sums begin before they are added to."""
    later = made(steps)
    for number, step in enumerate(steps):
        if step.accumulates:
            assert step.result in made(steps[:number]), step
        unmade = [array for array in step.inputs if array in later and array not in made(steps[:number])]
        given = [a for a in unmade if a in made(steps[number:]) and _is_given(a, steps)]
        assert unmade == given, step


def _is_given(array, steps):
    """Whether the pass is given an array to which it only adds."""
    first = next(step for step in steps if array in (step.result, *step.more))
    return first.accumulates


def test_a_permute_stands_beside_its_products():
    for steps in runs(layer("two-way", remat="full")).values():
        for number, step in enumerate(steps):
            if step.op == "permute":
                there = steps[number + (1 if step.details.ring == "past" else -1)]
                assert there.op == COLLECTIVE_MATMUL
                assert {*step.inputs, step.result} & {*there.inputs, there.result, *there.more}


def test_ways_of_a_permute():
    one, two = (next(step for step in layer(ways).forward if step.op == "permute") for ways in ("one-way", "two-way"))
    long, short = (OpSizes(dims={"B": 1, "T": t, "D": 8}, mesh=strategy().mesh, state="fp32") for t in (4096, 4))
    assert (num_ways(one, long), num_ways(two, long)) == (1, 2)
    assert num_moves(two, long) == 3
    assert num_ways(two, short) == 1, "a block of one position cannot be cut"


def test_slots_of_experts_and_weights_are_left_alone():
    axes = {"expert": 2, "tensor": 2, "fsdp": 2}
    derived = derive(transformer(MIXTRAL), strategy(axes, collective_matmul="one-way"))
    block = next(found for found in derived.blocks if found.block.carry)
    parts = [part for step in (*block.forward, *block.backward) for part in step.parts]
    assert parts
    assert not any("C" in array.dims for part in parts for array in part.inputs)
    moved = [step for step in (*block.forward, *block.backward) if step.axes == ("fsdp",)]
    plain = derive(transformer(MIXTRAL), strategy(axes))
    before = next(found for found in plain.blocks if found.block.carry)
    assert Counter(moved) == Counter(s for s in (*before.forward, *before.backward) if s.axes == ("fsdp",))


def test_without_the_axis_or_the_wish_nothing_changes():
    plain = derive(transformer(LLAMA), strategy({"fsdp": 4}))
    assert derive(transformer(LLAMA), strategy({"fsdp": 4}, collective_matmul="two-way")) == plain
    assert not any(step.parts for block in plain.blocks for step in (*block.forward, *block.backward))


def test_a_sum_with_an_addend_that_is_no_product_stays():
    x, w, partial = (parse_array(t) for t in ("x[T, F_tensor]", "w[F_tensor, D]", "y[T, D]{U_tensor}"))
    steps = (
        Step(op="einsum", inputs=(x, w), result=partial),
        Step(op="copy", inputs=(partial.replace(name="z"),), result=partial, accumulates=True),
        Step(op="reduce_scatter", inputs=(partial,), result=parse_array("y[T_tensor, D]"), axes=("tensor",), dim="T"),
    )
    assert with_collective_matmuls(steps, ways=1) == steps
    assert len(with_collective_matmuls((steps[0], steps[2]), ways=1)) == 2


def test_what_is_asked_for_is_one_of_three():
    assert [strategy(collective_matmul=ways).ring_ways for ways in ("none", "one-way", "two-way")] == [0, 1, 2]
    with pytest.raises(InputError, match=r"collective_matmul is 'twoway'\. Give none, one-way or two-way"):
        strategy(collective_matmul="twoway")
