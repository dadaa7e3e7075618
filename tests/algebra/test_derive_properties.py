"""Derived forward and backward steps, executed on blocks, give the unsharded results and gradients.

For several small programs under any assignment of up to three mesh axes, every remat and any slices. The
backward pass starts from what the derivation says is kept, and nothing else.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.algebra.blocks import execute, join, split
from meshwright.algebra.derive import derive
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.transformer import parse_block
from meshwright.spec.strategy import Strategy, assign

PROGRAMS = {
    "two matmuls": """
        Tmp[B,F] = In[B,D] * Win[D,F]
        Out[B,D] = Tmp[B,F] * Wout[F,D]
    """,
    "residual": """
        Tmp[B,F] = In[B,D] * Win[D,F]
        Y[B,D] = Tmp[B,F] * Wout[F,D]
        Out[B,D] = add(In[B,D], Y[B,D])
    """,
    "fan-out": """
        H[B,T,D] = In[B,T,G] * Wh[G,D]
        P[B,T,F] = H[B,T,D] * Wp[D,F]
        Q[B,T,E] = H[B,T,D] * Wq[D,E]
        R[B,T,D] = P[B,T,F] * Wr[F,D]
        S[B,T,D] = Q[B,T,E] * Ws[E,D]
        Out[B,T,D] = add(R[B,T,D], S[B,T,D])
    """,
    "one weight used twice": """
        Tmp[B,F] = In[B,D] * W[D,F]
        Out[B,D] = Tmp[B,F] * W[D,F]
    """,
    "batched product of activations": """
        K[B,S,D] = In[B,T,D] * Wk[T,S]
        P[B,T,S] = In[B,T,D] * K[B,S,D]
        Out[B,T,D] = P[B,T,S] * K[B,S,D]
    """,
}
MESHES = ({"X": 4}, {"X": 2, "Y": 2}, {"Y": 3, "X": 2}, {"X": 1, "Y": 4}, {"X": 2, "Y": 2, "Z": 2})


def make_program(name):
    variables = {}
    block = parse_block("layer", PROGRAMS[name], variables, carry="In", result="Out")
    for variable in list(variables.values()):
        if variable.name.startswith("W"):
            variables[variable.name] = Variable(variable.name, variable.dims, "weight")
    return Program((block,), variables)


@st.composite
def rules(draw, dims, axes):
    """Any axes on any dims, several dims wanting one axis included: the first that an array has gets it."""
    found = {}
    for dim in draw(st.permutations(dims)):
        found[dim] = tuple(draw(st.lists(st.sampled_from(axes), unique=True, max_size=len(axes))))
    return found


@st.composite
def strategies(draw, program):
    mesh = draw(st.sampled_from(MESHES))
    dims = sorted({d for v in program.variables.values() for d in v.dims})
    assignment = {role: draw(rules(dims, list(mesh))) for role in ("activation", "weight")}
    for role in ("grad", "optimizer"):
        if draw(st.booleans()):
            assignment[role] = draw(rules(dims, list(mesh)))
    made = [op.out for op in program.blocks[0].ops]
    remat = draw(st.one_of(st.sampled_from(("none", "block")), st.lists(st.sampled_from(made)).map(tuple)))
    slice_axes = tuple(draw(st.sets(st.sampled_from(list(mesh)))))
    return Strategy(mesh=mesh, assignment=assignment, remat=remat, slice_axes=slice_axes)


def unsharded(program, values, dout):
    """Every result of the program, and the gradient of sum(Out * dout) by every variable."""
    values, ops = dict(values), program.blocks[0].ops
    dims = {name: "".join(v.dims) for name, v in program.variables.items()}
    for op in ops:
        left, right = (values[n] for n in op.inputs)
        spec = f"{dims[op.inputs[0]]},{dims[op.inputs[1]]}->{dims[op.out]}"
        values[op.out] = left + right if op.kind == "add" else np.einsum(spec, left, right)
    gradients = dict.fromkeys(dims, 0) | {"Out": dout}
    for op in reversed(ops):
        for name, other in (op.inputs, op.inputs[::-1]):
            d = gradients[op.out]
            spec = f"{dims[op.out]},{dims[other]}->{dims[name]}"
            gradients[name] = gradients[name] + (d if op.kind == "add" else np.einsum(spec, d, values[other]))
    return values, gradients


def gradient_of(variable, strategy, keep):
    """Where a gradient ends: at the optimizer's shards, that of an input in the input's own sharding."""
    role = "optimizer" if variable.role == "weight" else variable.role
    return ShardedArray(f"d{variable.name}", variable.dims, assign(strategy.rules(role), variable.dims, keep=keep))


def assert_equal_to_unsharded(program, strategy, *, symbolic=False):
    mesh, length = strategy.mesh, math.prod(strategy.mesh.values())
    random = np.random.default_rng(0)
    shapes = {v.name: [length] * len(v.dims) for v in program.variables.values()}
    made = {op.out for op in program.blocks[0].ops}
    values = {n: random.integers(-2, 3, shape) for n, shape in shapes.items() if n not in made}
    dout = random.integers(-2, 3, shapes["Out"])
    wanted, gradients = unsharded(program, values, dout)

    derived = derive(program, strategy, symbolic=symbolic)
    (steps,), declared = derived.blocks, derived.declared
    start = {declared[n]: split(v, declared[n], mesh) for n, v in values.items()}
    forward = execute(steps.forward, start, mesh)
    np.testing.assert_array_equal(join(forward[declared["Out"]], declared["Out"], mesh), wanted["Out"])

    cotangent = declared["Out"].replace(name="dOut")
    kept = {array: forward[array] for array in steps.kept}
    backward = execute(steps.backward, {**start, **kept, cotangent: split(dout, cotangent, mesh)}, mesh)
    for variable in values:
        keep = None if symbolic else strategy.active_axes
        array = gradient_of(program.variables[variable], strategy, keep)
        np.testing.assert_array_equal(join(backward[array], array, mesh), gradients[variable])


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_forward_and_backward_equal_the_unsharded_program(name, data):
    program = make_program(name)
    strategy, symbolic = data.draw(strategies(program)), data.draw(st.booleans(), label="symbolic")
    assert_equal_to_unsharded(program, strategy, symbolic=symbolic)
