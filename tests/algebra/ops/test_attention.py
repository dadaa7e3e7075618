"""How attention's queries meet keys on other devices: the collectives of each way, written out."""

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.rewrites.rings import Round
from meshwright.algebra.transformer import parse_block
from meshwright.core.errors import InputError
from meshwright.spec.strategy import Strategy

ATTENTION = """
o[B,T,N,H] = attention(q[B,T,N,H], k[B,T,K,H], v[B,T,K,H])
"""
RULES = {"activation": {"N": ("Y",), "K": ("Y",), "T": ("X",)}}

GATHER = (
    """
    k[B, T, K_Y, H] = AllGather_X(k[B, T_X, K_Y, H])
    v[B, T, K_Y, H] = AllGather_X(v[B, T_X, K_Y, H])
    """,
    """
    dk[B, T_X, K_Y, H] = ReduceScatter_X(dk[B, T, K_Y, H]{U_X})
    dv[B, T_X, K_Y, H] = ReduceScatter_X(dv[B, T, K_Y, H]{U_X})
    """,
)
ULYSSES = (
    """
    q[B, T, N_YX, H] = AllToAll_X:T->N(q[B, T_X, N_Y, H])
    k[B, T, K_YX, H] = AllToAll_X:T->K(k[B, T_X, K_Y, H])
    v[B, T, K_YX, H] = AllToAll_X:T->K(v[B, T_X, K_Y, H])
    o[B, T_X, N_Y, H] = AllToAll_X:N->T(o[B, T, N_YX, H])
    """,
    """
    do[B, T, N_YX, H] = AllToAll_X:T->N(do[B, T_X, N_Y, H])
    dq[B, T_X, N_Y, H] = AllToAll_X:N->T(dq[B, T, N_YX, H])
    dk[B, T_X, K_Y, H] = AllToAll_X:K->T(dk[B, T, K_YX, H])
    dv[B, T_X, K_Y, H] = AllToAll_X:K->T(dv[B, T, K_YX, H])
    """,
)
RING = (
    """
    k_passing[B, T_X, K_Y, H] = Permute_X(k[B, T_X, K_Y, H])
    v_passing[B, T_X, K_Y, H] = Permute_X(v[B, T_X, K_Y, H])
    """,
    """
    k_returning[B, T_X, K_Y, H] = Permute_X(k[B, T_X, K_Y, H])
    v_returning[B, T_X, K_Y, H] = Permute_X(v[B, T_X, K_Y, H])
    dk[B, T_X, K_Y, H] = Permute_X(dk_passing[B, T_X, K_Y, H])
    dv[B, T_X, K_Y, H] = Permute_X(dv_passing[B, T_X, K_Y, H])
    """,
)


def attention(way, *, text=ATTENTION, rules=RULES, mesh=None):
    variables = dict[str, Variable]()
    block = parse_block("layer", text, variables, carry="q", result="o")
    strategy = Strategy(mesh=mesh or {"X": 4, "Y": 2}, assignment=rules, remat="none", context_attention=way)
    return derive(Program((block,), variables), strategy).blocks[0]


def collectives(steps):
    return {str(step) for step in steps if step.is_collective}


def lines(text):
    return {line.strip() for line in text.strip().splitlines()}


@pytest.mark.parametrize(("way", "expected"), [("gather", GATHER), ("ulysses", ULYSSES), ("ring", RING)])
def test_each_way_has_its_collectives(way, expected):
    block = attention(way)
    assert collectives(block.forward) == lines(expected[0])
    assert collectives(block.backward) == lines(expected[1])


@pytest.mark.parametrize("way", ["gather", "ulysses", "ring"])
def test_no_way_communicates_where_positions_are_whole(way):
    block = attention(way, mesh={"Y": 2})
    assert not collectives((*block.forward, *block.backward))


def test_a_ring_says_what_goes_round_and_how_far():
    block = attention("ring", text=ATTENTION.replace("])\n", "]; window=64)\n"))
    rings = {step.result.name: step.details for step in (*block.forward, *block.backward) if step.is_collective}
    assert rings["k_passing"] == rings["v_returning"] == Round(ring="past", window=64)
    assert rings["dk"] == Round(ring="home", window=64)
    (local,) = (step for step in block.forward if step.op == "attention")
    assert local.details == Attention(ring=("X",), window=64)


def test_ulysses_needs_heads_that_are_split_alike():
    with pytest.raises(InputError, match="heads and sequences must be split alike"):
        attention("ulysses", rules={"activation": {"K": ("Y",), "T": ("X",)}})
