"""Where routed experts communicate: the collectives of a layer written out from the theory, forward and backward."""

import re

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.ops.route import Routing
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.transformer import parse_block, transformer
from meshwright.core.errors import InputError
from meshwright.spec.catalogue import load_model
from meshwright.spec.strategy import Strategy

EXPERTS = """
r[B,T,E] = x[B,T,D] * router[D,E]
gates[B,T,Ea] = route(r[B,T,E])
we[E,C] = dispatch_gates(gates[B,T,Ea])
xe[E,C,D] = dispatch(x[B,T,D], gates[B,T,Ea], we[E,C])
ge[E,C,F] = xe[E,C,D] * w_up[E,D,F]
me[E,C,F] = weighted(ge[E,C,F], we[E,C])
ye[E,C,D] = me[E,C,F] * w_down[E,F,D]
y[B,T,D] = combine(ye[E,C,D], gates[B,T,Ea], we[E,C])
x2[B,T,D] = add(x[B,T,D], y[B,T,D])
"""

RULES = {
    "activation": {"F": ("Y",), "B": ("X", "Z"), "E": ("Z",), "C": ("X", "Y"), "T": ("Y",)},
    "weight": {"E": ("Z",), "F": ("Y",), "D": ("X",)},
}
"""Tokens on X, Y and Z; experts on Z, their widths on Y; weights split over X as well."""

# Forward: slots go from the devices of their tokens to those of their experts (Z), are gathered where the width is
# split (Y), and go the same ways back. Weights are gathered over X alone: each device keeps its own experts.
FORWARD = """
router[D, E_Z] = AllGather_X(router[D_X, E_Z])
router[D, E] = AllGather_Z(router[D, E_Z])
we[E_Z, C_XY] = AllToAll_Z:C->E(we[E, C_XYZ])
we[E_Z, C_X] = AllGather_Y(we[E_Z, C_XY])
xe[E_Z, C_XY, D] = AllToAll_Z:C->E(xe[E, C_XYZ, D])
xe[E_Z, C_X, D] = AllGather_Y(xe[E_Z, C_XY, D])
w_up[E_Z, D, F_Y] = AllGather_X(w_up[E_Z, D_X, F_Y])
w_down[E_Z, F_Y, D] = AllGather_X(w_down[E_Z, F_Y, D_X])
ye[E_Z, C_XY, D] = ReduceScatter_Y(ye[E_Z, C_X, D]{U_Y})
ye[E, C_XYZ, D] = AllToAll_Z:E->C(ye[E_Z, C_XY, D])
"""

# Backward: the same in reverse. An expert's gradient is summed over the devices of X, which hold the same expert,
# and not over Z; the router's is summed over all, for every device has tokens of its own.
BACKWARD = """
dye[E_Z, C_XY, D] = AllToAll_Z:C->E(dye[E, C_XYZ, D])
dye[E_Z, C_X, D] = AllGather_Y(dye[E_Z, C_XY, D])
dw_down[E_Z, F_Y, D_X] = ReduceScatter_X(dw_down[E_Z, F_Y, D]{U_X})
w_down[E_Z, F_Y, D] = AllGather_X(w_down[E_Z, F_Y, D_X])
dw_up[E_Z, D_X, F_Y] = ReduceScatter_X(dw_up[E_Z, D, F_Y]{U_X})
w_up[E_Z, D, F_Y] = AllGather_X(w_up[E_Z, D_X, F_Y])
dwe[E_Z, C_XY] = ReduceScatter_Y(dwe[E_Z, C_X]{U_Y})
dwe[E, C_XYZ] = AllToAll_Z:E->C(dwe[E_Z, C_XY])
dxe[E_Z, C_XY, D] = ReduceScatter_Y(dxe[E_Z, C_X, D]{U_Y})
dxe[E, C_XYZ, D] = AllToAll_Z:E->C(dxe[E_Z, C_XY, D])
drouter[D_X, E]{U_ZY} = ReduceScatter_X(drouter[D, E]{U_XZY})
drouter[D_X, E_Z]{U_Y} = ReduceScatter_Z(drouter[D_X, E]{U_ZY})
drouter[D_X, E_Z] = AllReduce_Y(drouter[D_X, E_Z]{U_Y})
router[D, E_Z] = AllGather_X(router[D_X, E_Z])
router[D, E] = AllGather_Z(router[D, E_Z])
"""


def experts(rules=RULES, remat="none", text=EXPERTS, **fields):
    variables = {
        "router": Variable("router", ("D", "E"), "weight"),
        "w_up": Variable("w_up", ("E", "D", "F"), "weight"),
        "w_down": Variable("w_down", ("E", "F", "D"), "weight"),
    }
    block = parse_block("layer", text, variables, carry="x", result="x2")
    strategy = Strategy(mesh={"X": 2, "Y": 2, "Z": 2}, assignment=rules, remat=remat, **fields)
    return derive(Program((block,), variables), strategy).blocks[0]


def lines(text):
    """The lines of a text; axes of a sum have no order."""
    return {
        re.sub(r"U_([XYZ]+)", lambda axes: "U_" + "".join(sorted(axes[1])), line.strip())
        for line in text.strip().splitlines()
    }


def collectives(steps):
    return lines("\n".join(str(step) for step in steps if step.is_collective))


def test_slots_go_to_their_experts_and_back():
    block = experts()
    assert collectives(block.forward) == lines(FORWARD)
    assert collectives(block.backward) == lines(BACKWARD)


def test_each_device_sorts_its_own_tokens():
    local = [str(step) for step in experts().forward if step.op in ("route", "dispatch", "combine")]
    assert local == [
        "gates[B_XZ, T_Y, Ea] = route(r[B_XZ, T_Y, E])",
        "xe[E, C_XYZ, D] = dispatch(x[B_XZ, T_Y, D], chosen[B_XZ, T_Y, Ea], we[E, C_XYZ])",
        "y[B_XZ, T_Y, D] = combine(ye[E, C_XYZ, D], chosen[B_XZ, T_Y, Ea])",
    ]


def test_without_an_axis_for_experts_no_slot_leaves_its_device():
    activation = RULES["activation"] | {"E": (), "C": ("X", "Y", "Z"), "F": ()}
    whole = {"activation": activation, "weight": {"D": ("X", "Z")}}
    block = experts(whole)
    assert {step.op for step in (*block.forward, *block.backward) if step.is_collective} == {
        "all_gather", "reduce_scatter", "all_reduce",
    }  # fmt: skip
    assert not any(step.result.name in ("xe", "ye") for step in block.forward if step.is_collective)


def test_the_exchange_is_waited_for():
    exchanges = [s for s in (*experts().forward, *experts().backward) if s.op == "all_to_all"]
    assert len(exchanges) == 6
    assert all(step.critical for step in exchanges)


WITH_LOSSES = EXPERTS.replace("route(r[B,T,E])", "route(r[B,T,E]; balance=0.01, z=0.001)")


@pytest.mark.parametrize("remat", ["none", "block", "selective"])
def test_the_router_is_counted_over_all_tokens_once(remat):
    """Losses on the router add one AllReduce to the backward pass, whatever is run again, and none to the forward."""
    plain, block = experts(remat=remat), experts(remat=remat, text=WITH_LOSSES, num_microbatches=4)
    assert [str(s) for s in block.forward if s.is_collective] == [str(s) for s in plain.forward if s.is_collective]
    more = [s for s in block.backward if s.is_collective and "routing" in str(s)]
    assert [str(s) for s in more] == ["routing[Er, E] = AllReduce_XZY(routing[Er, E]{U_XZY})"]
    others = [str(s) for s in block.backward if s.is_collective and s not in more]
    assert others == [str(s) for s in plain.backward if s.is_collective]
    route = next(s for s in block.forward if s.op == "route")
    assert [str(a) for a in route.more] == ["chosen[B_XZ, T_Y, Ea]", "routing[Er, E]{U_XZY}"]
    back = next(s for s in block.backward if s.op == "route_backward")
    assert back.inputs[-1] == more[0].result
    assert back.details == Routing(balance=0.01, z=0.001, microbatches=4)


def test_without_losses_nothing_is_counted():
    block = experts()
    assert not any("routing" in str(step) for step in block.backward)
    assert all(len(step.more) == 1 for step in block.forward if step.op == "route")


def test_weights_are_those_of_the_tokens_at_hand():
    """Slots are given by the device that has the token; weights of other tokens' slots are of no use there."""
    activation = {"Ea": ("X",), **RULES["activation"]}
    apart = {"activation": activation, "weight": RULES["weight"]}
    with pytest.raises(InputError, match=r"dispatch needs x\[B_XZ, T_Y, D\] and gates\[B_Z, T_Y, Ea_X\] split alike"):
        experts(apart)


def test_tokens_must_have_their_width():
    split = {"activation": {"D": ("X",), "B": ("Y",), "E": ("Z",)}, "weight": {"E": ("Z",)}}
    with pytest.raises(InputError, match="dispatch needs D whole"):
        experts(split)


def test_a_block_that_is_run_again_sends_its_slots_again():
    """With the layer's input alone kept, tokens and weights are sent once more, but results not: no gradient needs
    them."""
    derived = derive(transformer(load_model("mixtral-8x7b")), Strategy(mesh={"expert": 4}, remat="block"))
    layer = next(b for b in derived.blocks if b.block.carry)
    phases = [step.phase for step in (*layer.forward, *layer.backward) if step.op == "all_to_all"]
    assert [phases.count(phase) for phase in ("forward", "recompute", "backward")] == [3, 2, 3]
