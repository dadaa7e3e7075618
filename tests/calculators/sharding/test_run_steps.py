"""Steps of products on emulated devices give the unsharded product."""

import numpy as np
import pytest

from meshwright.algebra.einsum import einsum_steps
from meshwright.calculators.sharding.einsum_cost import all_ways
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.calculators.verbs.shard import run_steps

CASES = [
    ("In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]", {"X": 4, "Y": 2}),
    ("A[I,J_XY] * B[J_X,K] -> C[I,K_Y]", {"X": 2, "Y": 2}),
    ("Q[B,N_YZ,H] * K[B_Z,S,H] -> S[B_Z,N_Y,S]", {"Y": 2, "Z": 2}),
    ("A[I_X,J] * B[J,K_X] -> C[I,K]", {"X": 8}),
]


@pytest.mark.parametrize(("text", "mesh"), CASES)
def test_the_rules_way(text, mesh):
    lhs, rhs, out = parse_einsum(text)
    _check(lhs, rhs, out, einsum_steps(lhs, rhs, out), mesh)


def test_every_way_of_one_product():
    lhs, rhs, out = parse_einsum(CASES[0][0])
    for steps in all_ways(lhs, rhs, out).values():
        _check(lhs, rhs, out, steps, CASES[0][1])


def _check(lhs, rhs, out, steps, mesh):
    rng = np.random.default_rng(0)
    values = {a: rng.normal(size=[8] * len(a.dims)).astype(np.float32) for a in (lhs, rhs)}
    letters = {d: chr(97 + i) for i, d in enumerate(dict.fromkeys((*lhs.dims, *rhs.dims)))}
    left, right, result = ("".join(letters[d] for d in a.dims) for a in (lhs, rhs, out))
    expected = np.einsum(f"{left},{right}->{result}", *values.values())
    np.testing.assert_allclose(run_steps(steps, values, mesh), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
