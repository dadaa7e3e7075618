"""What `derive` makes of two matmuls and of the llama decoder, against published algorithms and facts."""

import re
from collections import Counter
from itertools import product as every

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.notation import local_elements
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.rewrites.remat import SavedSet
from meshwright.algebra.tape import Shardings
from meshwright.algebra.transformer import parse_block, transformer
from meshwright.core.dims import ISLAND_AXES
from meshwright.core.errors import InputError
from meshwright.spec.catalogue import load_model
from meshwright.spec.strategy import (
    DEFAULT_ASSIGNMENT,
    REMAT_POLICIES,
    Strategy,
    make_mesh,
    standard_assignment,
)

FEED_FORWARD = """
Tmp[B,F] = In[B,D] * Win[D,F]
Out[B,D] = Tmp[B,F] * Wout[F,D]
"""

# -- the algorithm boxes of How to Scale Your Model, sections 5.1.1 to 5.1.4 and exercise 7.7 ------------
# Each box: mesh, assignment, forward lines, backward lines; without the lines "Loss = ..." and "dOut = ...",
# with every collective's axes written out, and with the right name where the box misprints it.

DATA_PARALLEL = (
    {"X": 4},
    {"activation": {"B": ("X",)}},
    """
    Tmp[B_X, F] = In[B_X, D] * Win[D, F]
    Out[B_X, D] = Tmp[B_X, F] * Wout[F, D]
    """,
    """
    dWout[F, D]{U_X} = Tmp[B_X, F] * dOut[B_X, D]
    dWout[F, D] = AllReduce_X(dWout[F, D]{U_X})
    dTmp[B_X, F] = dOut[B_X, D] * Wout[F, D]
    dWin[D, F]{U_X} = In[B_X, D] * dTmp[B_X, F]
    dWin[D, F] = AllReduce_X(dWin[D, F]{U_X})
    dIn[B_X, D] = dTmp[B_X, F] * Win[D, F]
    """,
)

FSDP = (
    {"X": 4},
    {"activation": {"B": ("X",)}, "weight": {"D": ("X",)}},
    """
    Win[D, F] = AllGather_X(Win[D_X, F])
    Tmp[B_X, F] = In[B_X, D] * Win[D, F]
    Wout[F, D] = AllGather_X(Wout[F, D_X])
    Out[B_X, D] = Tmp[B_X, F] * Wout[F, D]
    """,
    """
    dWout[F, D]{U_X} = Tmp[B_X, F] * dOut[B_X, D]
    dWout[F, D_X] = ReduceScatter_X(dWout[F, D]{U_X})
    Wout[F, D] = AllGather_X(Wout[F, D_X])
    dTmp[B_X, F] = dOut[B_X, D] * Wout[F, D]
    dWin[D, F]{U_X} = dTmp[B_X, F] * In[B_X, D]
    dWin[D_X, F] = ReduceScatter_X(dWin[D, F]{U_X})
    Win[D, F] = AllGather_X(Win[D_X, F])
    dIn[B_X, D] = dTmp[B_X, F] * Win[D, F]
    """,
)

TENSOR = (
    {"Y": 4},
    {"activation": {"F": ("Y",), "D": ("Y",)}, "weight": {"F": ("Y",)}},
    """
    In[B, D] = AllGather_Y(In[B, D_Y])
    Tmp[B, F_Y] = In[B, D] * Win[D, F_Y]
    Out[B, D]{U_Y} = Tmp[B, F_Y] * Wout[F_Y, D]
    Out[B, D_Y] = ReduceScatter_Y(Out[B, D]{U_Y})
    """,
    """
    dOut[B, D] = AllGather_Y(dOut[B, D_Y])
    dWout[F_Y, D] = Tmp[B, F_Y] * dOut[B, D]
    dTmp[B, F_Y] = dOut[B, D] * Wout[F_Y, D]
    In[B, D] = AllGather_Y(In[B, D_Y])
    dWin[D, F_Y] = dTmp[B, F_Y] * In[B, D]
    dIn[B, D]{U_Y} = dTmp[B, F_Y] * Win[D, F_Y]
    dIn[B, D_Y] = ReduceScatter_Y(dIn[B, D]{U_Y})
    """,
)

# The box calls Wout W_2 in line 4 of its forward pass, and says that line 7 of the backward pass can be shared
# with line 2 of the previous layer: it is line 1 of this layer's own forward pass that gathers In.
FSDP_AND_TENSOR = (
    {"X": 4, "Y": 2},
    {"activation": {"B": ("X",), "F": ("Y",), "D": ("Y",)}, "weight": {"D": ("X",), "F": ("Y",)}},
    """
    In[B_X, D] = AllGather_Y(In[B_X, D_Y])
    Win[D, F_Y] = AllGather_X(Win[D_X, F_Y])
    Tmp[B_X, F_Y] = In[B_X, D] * Win[D, F_Y]
    Wout[F_Y, D] = AllGather_X(Wout[F_Y, D_X])
    Out[B_X, D]{U_Y} = Tmp[B_X, F_Y] * Wout[F_Y, D]
    Out[B_X, D_Y] = ReduceScatter_Y(Out[B_X, D]{U_Y})
    """,
    """
    dOut[B_X, D] = AllGather_Y(dOut[B_X, D_Y])
    dWout[F_Y, D]{U_X} = Tmp[B_X, F_Y] * dOut[B_X, D]
    dWout[F_Y, D_X] = ReduceScatter_X(dWout[F_Y, D]{U_X})
    Wout[F_Y, D] = AllGather_X(Wout[F_Y, D_X])
    dTmp[B_X, F_Y] = dOut[B_X, D] * Wout[F_Y, D]
    In[B_X, D] = AllGather_Y(In[B_X, D_Y])
    dWin[D, F_Y]{U_X} = dTmp[B_X, F_Y] * In[B_X, D]
    dWin[D_X, F_Y] = ReduceScatter_X(dWin[D, F_Y]{U_X})
    Win[D, F_Y] = AllGather_X(Win[D_X, F_Y])
    dIn[B_X, D]{U_Y} = dTmp[B_X, F_Y] * Win[D, F_Y]
    dIn[B_X, D_Y] = ReduceScatter_Y(dIn[B_X, D]{U_Y})
    """,
)

TWO_D_WEIGHT_STATIONARY = (
    {"X": 4, "Y": 2, "Z": 2},
    {"activation": {"F": ("Y", "Z"), "D": ("X", "Y", "Z")}, "weight": {"D": ("X",), "F": ("Y", "Z")}},
    """
    In[B, D_X] = AllGather_YZ(In[B, D_XYZ])
    Tmp[B, F_YZ]{U_X} = In[B, D_X] * Win[D_X, F_YZ]
    Tmp[B, F_YZ] = AllReduce_X(Tmp[B, F_YZ]{U_X})
    Out[B, D_X]{U_YZ} = Tmp[B, F_YZ] * Wout[F_YZ, D_X]
    Out[B, D_XYZ] = ReduceScatter_YZ(Out[B, D_X]{U_YZ})
    """,
    None,
)

BOXES = {
    "5.1.1 data parallel": DATA_PARALLEL,
    "5.1.2 FSDP": FSDP,
    "5.1.3 tensor": TENSOR,
    "5.1.4 FSDP and tensor": FSDP_AND_TENSOR,
    "exercise 7.7": TWO_D_WEIGHT_STATIONARY,
}


def feed_forward(mesh, assignment, remat=("Tmp",)):
    variables = {
        "Win": Variable("Win", ("D", "F"), "weight"),
        "Wout": Variable("Wout", ("F", "D"), "weight"),
    }
    block = parse_block("mlp", FEED_FORWARD, variables, carry="In", result="Out")
    strategy = Strategy(mesh=mesh, assignment=assignment, remat=remat)
    return derive(Program((block,), variables), strategy)


def canonical(line):
    """A product with its operands in alphabetical order; any other line as it is."""
    result, _, made = line.strip().partition(" = ")
    return f"{result} = {' * '.join(sorted(made.split(' * ')))}"


def canonical_lines(text):
    return [canonical(line) for line in text.strip().splitlines()]


@pytest.mark.parametrize("name", BOXES)
def test_the_boxes_come_out(name):
    """With Tmp kept and nothing else, as the boxes are written: they gather In again in the backward pass."""
    mesh, assignment, forward, backward = BOXES[name]
    (block,) = feed_forward(mesh, assignment).blocks
    assert [canonical(str(step)) for step in block.forward] == canonical_lines(forward)
    if backward:
        assert [canonical(str(step)) for step in block.backward] == canonical_lines(backward)


@pytest.mark.parametrize("name", ["5.1.3 tensor", "5.1.4 FSDP and tensor"])
def test_an_activation_that_was_kept_is_not_gathered_again(name):
    """The boxes note that this line can be skipped: with remat "none" it is. Weights are gathered again."""
    mesh, assignment, _, backward = BOXES[name]
    wanted = [line for line in canonical_lines(backward) if " = AllGather_Y(In[" not in line]
    (block,) = feed_forward(mesh, assignment, remat="none").blocks
    assert [canonical(str(step)) for step in block.backward] == wanted
    assert len(wanted) == len(canonical_lines(backward)) - 1


@pytest.mark.parametrize("name", BOXES)
def test_what_is_on_the_critical_path(name):
    """Collectives on activations are, unless they can be done ahead; those on weights and gradients are not."""
    mesh, assignment, _, _ = BOXES[name]
    (block,) = feed_forward(mesh, assignment).blocks
    for step in (*block.forward, *block.backward):
        ahead = step.phase == "backward" and str(step).startswith("In[")
        is_weight = re.match("d?W", step.result.name)
        assert step.critical == (step.is_collective and not is_weight and not ahead)


def fan_out(activation, weight):
    """Steps that make or move dH: H was used by Wq and by Wp, in that order backward."""
    dims = {"Wh": ("G", "D"), "Wp": ("D", "F"), "Wq": ("D", "E")}
    variables = {name: Variable(name, d, "weight") for name, d in dims.items()}
    text = """
    H[B,D] = In[B,G] * Wh[G,D]
    P[B,F] = H[B,D] * Wp[D,F]
    Q[B,E] = H[B,D] * Wq[D,E]
    R[B,F] = Q[B,E] * Z[E,F]
    Out[B,F] = add(P[B,F], R[B,F])
    """
    block = parse_block("layer", text, variables, carry="In", result="Out")
    strategy = Strategy(mesh={"X": 2, "Y": 2}, assignment={"activation": activation, "weight": weight}, remat="none")
    (steps,) = derive(Program((block,), variables), strategy).blocks
    found = [s for s in steps.backward if s.result.name == "dH"]
    return [("+" if s.accumulates else "") + str(s) for s in found]


def test_addends_split_differently_meet_on_the_way():
    """dH from P is summed over X into the whole dH from Q, and both are sliced at once. The whole dH stays known."""
    assert fan_out({"F": ("X",), "D": ("Y",)}, {"F": ("X",)}) == [
        "dH[B, D] = dQ[B, E] * Wq[D, E]",
        "dH[B, D]{U_X} = dP[B, F_X] * Wp[D, F_X]",
        "+dH[B, D] = AllReduce_X(dH[B, D]{U_X})",
        "dH[B, D_Y] = Slice_Y(dH[B, D])",
    ]


def test_an_addend_is_not_taken_for_the_sum():
    """The whole dH that came from Q is a part of dH only: where the whole dH is needed, it is gathered."""
    assert fan_out({"D": ("Y",)}, {"E": ("Y",), "G": ("Y",), "D": ("Y",)}) == [
        "dH[B, D] = dQ[B, E] * Wq[D, E]",
        "dH[B, D_Y] = dP[B, F] * Wp[D_Y, F]",
        "+dH[B, D_Y] = Slice_Y(dH[B, D])",
        "dH[B, D] = AllGather_Y(dH[B, D_Y])",
    ]


# -- traffic of data parallelism and the stages of ZeRO ------------------------------------------------


def weight_traffic(assignment):
    """Elements moved over X for each parameter by rings: V for a gather or a scatter, 2 V for an all-reduce."""
    derived = feed_forward({"X": 4}, {"activation": {"B": ("X",)}, **assignment})
    sizes = {"B": 8, "D": 16, "F": 32}
    total = 0
    for step, times in derived.steps(1):
        if step.is_collective and step.result.name != "grad_norm":
            assert step.axes == ("X",)
            weight = 2 if step.op == "all_reduce" else 1
            total += times * weight * local_elements(step.full, sizes, {"X": 4})
    return total / (2 * 16 * 32)


def test_zero_1_and_2_move_as_much_as_data_parallelism_and_zero_3_half_as_much_again():
    """A reduce-scatter and a gather make one all-reduce; FSDP gathers each weight a second time."""
    sharded = {"D": ("X",)}
    assert weight_traffic({}) == 2
    assert weight_traffic({"optimizer": sharded}) == 2
    assert weight_traffic({"grad": sharded, "optimizer": sharded}) == 2
    assert weight_traffic({"weight": sharded}) == 3


def test_the_stages_of_zero_differ_in_when_gradients_are_scattered():
    """ZeRO-1 once per step, after the microbatches; ZeRO-2 for every microbatch, so that only a shard accumulates."""
    sharded = {"D": ("X",)}
    for assignment, scope in (({"optimizer": sharded}, "step"), ({"grad": sharded, "optimizer": sharded}, "layer")):
        derived = feed_forward({"X": 4}, {"activation": {"B": ("X",)}, **assignment})
        sums = [s for s in derived.blocks[0].backward if s.is_collective and s.result.name in ("dWin", "dWout")]
        assert [(s.op, s.scope) for s in sums] == [("reduce_scatter", scope)] * 2


def test_zero_gathers_the_updated_shards():
    derived = feed_forward({"X": 4}, {"grad": {"D": ("X",)}, "optimizer": {"D": ("X",)}})
    assert [str(s) for s in derived.update if s.result.name == "Win"] == [
        "Win[D_X, F] = Slice_X(Win[D, F])",
        "Win[D_X, F] = adamw(dWin[D_X, F], Win[D_X, F], Win.mu.state[D_X, F], Win.nu.state[D_X, F])",
        "Win[D, F] = AllGather_X(Win[D_X, F])",
    ]


def test_a_sharded_optimizer_follows_the_weights_without_communication():
    derived = feed_forward(*FSDP[:2])
    assert [str(s) for s in derived.update] == [
        "grad_norm[] = AllReduce_X(grad_norm[]{U_X})",
        "Win[D_X, F] = adamw(dWin[D_X, F], Win[D_X, F], Win.mu.state[D_X, F], Win.nu.state[D_X, F])",
        "Wout[F, D_X] = adamw(dWout[F, D_X], Wout[F, D_X], Wout.mu.state[F, D_X], Wout.nu.state[F, D_X])",
    ]


# -- the llama decoder ---------------------------------------------------------------------------------

TINY = transformer(load_model("tiny"))
SIZES = {**load_model("tiny").dims, "B": 64, "T": 128}


def llama(remat="block", program=TINY, **axes):
    return derive(program, Strategy(mesh=make_mesh(axes), remat=remat))


def layer(remat="block", **axes):
    return next(block for block in llama(remat, **axes).blocks if block.block.name == "layer")


def count(steps, op, axis):
    """Collectives of one kind over one axis, on each phase."""
    return dict(Counter(s.phase for s in steps if s.op == op and axis in s.axes))


def test_block_remat_repeats_all_tensor_collectives_but_the_last():
    """Two gathers and two scatters forward; the last scatter makes the next layer's input, which is kept."""
    block = layer("block", fsdp=2, tensor=2)
    steps = (*block.forward, *block.backward)
    assert count(steps, "all_gather", "tensor") == {"forward": 2, "recompute": 2, "backward": 2}
    assert count(steps, "reduce_scatter", "tensor") == {"forward": 2, "recompute": 1, "backward": 2}
    assert {s.result.name for s in block.backward if s.phase == "recompute" and s.op == "reduce_scatter"} == {"a"}


def test_without_remat_nothing_is_done_again():
    block = layer("none", fsdp=2, tensor=2)
    assert {s.phase for s in block.backward} == {"backward"}
    assert count(block.backward, "all_gather", "tensor") == {"backward": 2}


@pytest.mark.parametrize("remat", [policy for policy in REMAT_POLICIES if policy not in ("sqrt", "recompute-all")])
def test_fsdp_gathers_each_weight_once_forward_and_once_backward(remat):
    block = layer(remat, fsdp=4)
    weights = {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}
    for steps in (block.forward, block.backward):
        gathers = [s for s in steps if s.op == "all_gather"]
        assert Counter(s.result.name for s in gathers) == Counter(weights)
        assert {s.phase for s in gathers} == {"forward" if steps is block.forward else "backward"}
    scattered = [s.result.name for s in block.backward if s.op == "reduce_scatter"]
    assert Counter(scattered) == Counter(f"d{name}" for name in weights)


@pytest.mark.parametrize("remat", ["sqrt", "every-4", "every-1"])
def test_segments_of_layers_are_run_again_whole(remat):
    """A backward pass is a forward pass and the backward pass of remat "none": weights are gathered once for each."""
    again, plain = layer(remat, fsdp=2, tensor=2), layer("none", fsdp=2, tensor=2)
    assert again.forward == plain.forward
    assert again.kept == plain.kept
    number = again.num_again
    assert number == len(plain.forward)
    first, rest = again.backward[:number], again.backward[number:]
    assert [(str(s), s.critical) for s in first] == [(str(s), s.critical) for s in plain.forward]
    assert rest == plain.backward
    moved = {s.result.name for s in first if s.is_collective and s.phase == "backward"}
    assert moved == {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}
    assert {s.phase for s in first if s.result.name not in moved} == {"recompute"}
    assert (again.segment, plain.segment) == ("sqrt" if remat == "sqrt" else int(remat[-1]), None)


@pytest.mark.parametrize(
    ("remat", "forward"), [("recompute-all", 8 * 7 // 2), ("recompute-4", 8 * 3 // 2), ("every-4", 8)]
)
def test_layers_run_again_for_every_later_layer_of_their_segment(remat, forward):
    """Of n = 8 layers and two microbatches: n (n - 1) / 2 and n (C - 1) / 2 forward passes of one layer, each with its
    gathers of weights, before backward passes that are those of remat "full"."""
    again, full = layer(remat, fsdp=2, tensor=2), layer("full", fsdp=2, tensor=2)
    found = Counter()
    for step, times in llama(remat, fsdp=2, tensor=2).steps(2):
        found[step.block, step.phase, step.op, step.result.name] += times
    own = 0 if remat == "every-4" else 8
    assert found["layer", "forward", "einsum", "q"] == 2 * 8
    assert found["layer", "recompute", "einsum", "q"] == 2 * (forward + own)
    assert found["layer", "backward", "all_gather", "wq"] == 2 * (forward + 8)
    if own:
        assert again.kept == full.kept
        assert again.backward[again.num_again :] == full.backward
        assert [(str(s), s.critical) for s in again.backward[: again.num_again]] == [
            (str(s), s.critical) for s in full.forward
        ]


def test_only_layers_come_in_segments():
    derived = llama("sqrt", fsdp=2)
    assert [block.segment for block in derived.blocks] == [None, "sqrt", None]
    assert (derived.blocks[0], derived.blocks[2]) == (llama("none", fsdp=2).blocks[0], llama("none", fsdp=2).blocks[2])


@pytest.mark.parametrize(("name", "addends"), [("dh", 3), ("dh1", 2)])
def test_fan_out_is_summed_unreduced_and_reduced_once(name, addends):
    """q, k and v all used h, gate and up used h1."""
    made = [s for s in layer(tensor=2).backward if s.result.name == name]
    assert [s.op for s in made] == ["einsum"] * addends + ["reduce_scatter"]
    accumulated = [s.accumulates for s in made]
    assert accumulated == [False] + [True] * (addends - 1) + [False]


def test_gradients_that_are_alike_on_several_devices_are_summed_once_per_step():
    """Over data, and over every axis for norms; all other collectives run for every layer and microbatch."""
    derived = llama(data=2, fsdp=2, tensor=2)
    block = derived.blocks[1]
    per_step = {s.result.name: s.axes for s in block.backward if s.scope == "step"}
    norms = {"dattn_norm", "dmlp_norm"}
    assert {n for n, axes in per_step.items() if axes == ("data", "fsdp", "tensor")} == norms
    assert {n for n, axes in per_step.items() if axes == ("data",)} == {
        f"d{n}" for n in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
    }
    assert all(s.op == "all_reduce" for s in block.backward if s.scope == "step")
    assert all(s.scope == "layer" for s in (*block.forward, *block.backward) if s.op != "all_reduce")
    assert {s.scope for b in (derived.blocks[0], derived.blocks[2]) for s in b.forward} == {"microbatch"}


def test_how_often_steps_run():
    num_layers = load_model("tiny").num_layers
    times = {(s.op, s.phase, s.result.name): n for s, n in llama(data=2, fsdp=2).steps(num_microbatches=5)}
    assert times["all_gather", "forward", "wq"] == 5 * num_layers
    assert times["reduce_scatter", "backward", "dwq"] == 5 * num_layers
    assert times["all_reduce", "backward", "dwq"] == num_layers
    assert times["adamw", "update", "wq"] == num_layers
    assert times["all_gather", "forward", "unembed"] == 5
    assert times["adamw", "update", "embed"] == 1
    assert times["all_reduce", "update", "loss"] == 1


def test_context_parallelism_gathers_keys_and_values():
    forward = [s for s in layer("none", context=4).forward if s.is_collective and s.critical]
    assert [(s.op, s.result.name, s.axes) for s in forward] == [
        ("all_gather", "kr", ("context",)),
        ("all_gather", "v", ("context",)),
    ]
    backward = [s for s in layer("none", context=4).backward if s.is_collective and s.critical]
    assert {(s.op, s.result.name) for s in backward} == {("reduce_scatter", "dkr"), ("reduce_scatter", "dv")}


# -- stages of a pipeline, and the stages of ZeRO ---------------------------------------------------------


def test_between_stages_the_stream_goes_on_and_its_cotangent_back():
    derived = llama(pipeline=2, fsdp=2, tensor=2)
    assert [(str(s), s.phase, s.critical) for s in derived.boundary] == [
        ("x[B_fsdp, T_tensor, D] = Permute_pipeline(x[B_fsdp, T_tensor, D])", "forward", True),
        ("dx[B_fsdp, T_tensor, D] = Permute_pipeline(dx[B_fsdp, T_tensor, D])", "backward", True),
    ]
    assert llama(fsdp=2, tensor=2).boundary == ()


def test_stages_split_no_array():
    """A pipeline leaves the steps of every layer as they are; only the sums over all devices name its axis."""
    split, whole = llama(pipeline=2, fsdp=2), llama(fsdp=2)
    assert [(b.forward, b.backward, b.kept) for b in split.blocks] == [
        (b.forward, b.backward, b.kept) for b in whole.blocks
    ]
    assert [b.split is None for b in split.blocks] == [True, False, True]
    assert all(b.split is None for b in whole.blocks)
    assert split.num_layers == whole.num_layers == load_model("tiny").num_layers
    over = {s.result.name for s in split.update if "pipeline" in s.axes}
    assert over == {"loss", "grad_norm"}


def zero_traffic(zero, *, count=4, **axes):
    """(op, once a step?) of what moves the gradient and the weight wq, with how often a layer and step move it."""
    derived = derive(TINY, Strategy(mesh=make_mesh(axes), assignment=standard_assignment(zero=zero), remat="none"))
    found = Counter()
    for step, times in derived.steps(count):
        if step.is_collective and step.result.name in ("wq", "dwq"):
            found[step.op, step.result.name] += times / load_model("tiny").num_layers
    return dict(found)


@pytest.mark.parametrize("axis", ["fsdp", "context", "expert"])
def test_the_standard_stages_of_zero(axis):
    """Four microbatches: 0 sums once, 1 scatters and gathers once, 2 scatters each time, 3 gathers twice each time."""
    assert zero_traffic(0, **{axis: 4}) == {("all_reduce", "dwq"): 1}
    assert zero_traffic(1, **{axis: 4}) == {("reduce_scatter", "dwq"): 1, ("all_gather", "wq"): 1}
    assert zero_traffic(2, **{axis: 4}) == {("reduce_scatter", "dwq"): 4, ("all_gather", "wq"): 1}
    assert zero_traffic(3, **{axis: 4}) == {("reduce_scatter", "dwq"): 4, ("all_gather", "wq"): 8}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_sum_once_under_every_stage(zero):
    assert zero_traffic(zero, data=4) == {("all_reduce", "dwq"): 1}


def test_without_sequence_parallelism_tensor_sums_whole_streams():
    """An all-reduce where the stream is whole, a gather and a scatter where it is split: as many bytes."""
    mesh = make_mesh({"tensor": 4})
    split, whole = (
        derive(TINY, Strategy(mesh=mesh, assignment=standard_assignment(sequence_parallel=on), remat="none")).blocks[1]
        for on in (True, False)
    )
    assert count(split.forward, "all_reduce", "tensor") == {}
    assert count(whole.forward, "all_reduce", "tensor") == {"forward": 2}
    assert count(split.forward, "all_gather", "tensor") == count(split.forward, "reduce_scatter", "tensor")
    assert count(whole.forward, "all_gather", "tensor") == {}


def test_one_device_needs_no_communication():
    assert [str(s) for s, _ in llama().steps() if s.is_collective or s.op == "slice"] == []


def test_tied_embeddings_are_gathered_and_reduced_in_both_places():
    program = transformer(load_model("llama3.2-1b"))
    derived = llama(program=program, fsdp=4)
    for block in (derived.blocks[0], derived.blocks[2]):
        assert [s.op for s in block.forward if s.result.name == "embed"] == ["all_gather"]
        assert [s.op for s in block.backward if s.result.name == "dembed" and s.is_collective] == ["reduce_scatter"]
    assert [s.result.name for s in derived.update].count("embed") == 1


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}])
def test_what_is_kept_is_what_the_policy_says(axes):
    kept = {remat: {a.name for a in layer(remat, **axes).kept} for remat in REMAT_POLICIES}
    assert kept["block"] == kept["full"] == kept["recompute-all"] == {"x"}
    assert kept["selective"] == {"x", "qr", "kr", "v", "o", "lse", "x1", "g", "u"}
    assert kept["matmuls"] == {"x", "q", "k", "v", "a", "g", "u"}
    assert kept["none"] >= kept["selective"] - {"o"}
    assert kept["sqrt"] == kept["none"]
    assert {a.name for a in layer(("x1", "m"), **axes).kept} == {"x", "x1", "m"}


def test_an_unknown_optimizer_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"optimizer 'adamww' is not known\. Did you mean 'adamw'"):
        derive(TINY, Strategy(mesh=make_mesh({})), optimizer="adamww")
    with pytest.raises(InputError, match="optimizer 'einsum' is not known"):
        derive(TINY, Strategy(mesh=make_mesh({})), optimizer="einsum")


def test_partial_sums_are_not_kept():
    """A name in the saved set means the finished result: with T whole, ``a`` has the same axes before its sum."""
    stream = {**DEFAULT_ASSIGNMENT["activation"], "T": ("context",)}
    strategy = Strategy(
        mesh=make_mesh({"tensor": 2}), assignment={**DEFAULT_ASSIGNMENT, "activation": stream}, remat="matmuls"
    )
    layer = derive(TINY, strategy).blocks[1]
    saved = SavedSet(Shardings(TINY, strategy, strategy.active_axes))
    made = {
        str(step.result): saved.keeps(step.result, layer.block) for step in layer.forward if step.result.name == "a"
    }
    assert made == {"a[B, T, D]{U_tensor}": False, "a[B, T, D]": True}


def summary(derived, mesh):
    """Every step that does something on this mesh, with all that cost and order of work depend on."""
    found = Counter()
    for step, times in derived.steps():
        axes = tuple(axis for axis in step.axes if mesh[axis] > 1)
        if axes or not (step.is_collective or step.op == "slice"):
            elements = tuple(local_elements(a, SIZES, mesh) for a in (*step.inputs, step.result, *step.more))
            key = (step.op, axes, step.block, step.phase, step.scope, step.critical, step.accumulates, step.details)
            found[*key, step.result.name, elements] += times
    return found


@pytest.mark.parametrize("remat", [*REMAT_POLICIES, "every-2", "recompute-2", ("q", "x1", "m"), ("a", "y", "h")])
def test_steps_with_symbols_for_sizes_are_those_of_each_mesh(remat):
    """Axes of one device, left in, change neither a collective nor a local step: what is searched is what runs."""
    strategy = Strategy(mesh=make_mesh({}), remat=remat)
    # a chunked loss head takes another form where the vocabulary is whole
    split, whole = (derive(TINY, strategy, symbolic=True, without=axes) for axes in ((), ("tensor",)))
    for sizes in every((1, 2), repeat=len(ISLAND_AXES)):
        mesh = dict(zip(ISLAND_AXES, sizes, strict=True))
        symbolic = split if mesh["tensor"] > 1 else whole
        assert summary(symbolic, mesh) == summary(derive(TINY, Strategy(mesh=mesh, remat=remat)), mesh)


def test_steps_come_out_of_the_same_derivation_whatever_the_sizes():
    small, large = (derive(TINY, Strategy(mesh=make_mesh(m)), symbolic=True) for m in ({}, {"fsdp": 8, "tensor": 4}))
    assert small.blocks == large.blocks


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ("blok", r"remat 'blok' is not a policy\. Did you mean 'block'\?"),
        (("x1", "w_dwn"), r"remat keeps 'w_dwn', which is not a result of the program"),
    ],
)
def test_unknown_names_of_remat_are_refused(remat, message):
    with pytest.raises(InputError, match=message):
        llama(remat)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"T": (), "D": ("tensor",)}, r"rms_norm needs D whole, and x\[B, T, D_tensor\] splits it over tensor"),
        # heads split otherwise than their keys
        ({"N": ()}, "heads and sequences must be split alike"),
    ],
)
def test_activations_that_no_op_takes_are_refused(changes, message):
    stream = {**DEFAULT_ASSIGNMENT["activation"], **changes}
    strategy = Strategy(mesh=make_mesh({"tensor": 2}), assignment={**DEFAULT_ASSIGNMENT, "activation": stream})
    with pytest.raises(InputError, match=message):
        derive(TINY, strategy)
