"""Ring attention on emulated ranks against one device, and the permutes that the algebra derives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshwright.algebra.derive import derive
from meshwright.algebra.layers import parse_block
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.rewrites.rings import num_moves
from meshwright.algebra.sizes import OpSizes
from meshwright.hlo.collectives import collectives
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.ring import KeyRing, ring_attention, ring_attention_backward
from meshwright.nn.attention.visibility import AttentionCall, TokenPositions, zigzag_order
from meshwright.nn.collectives import Ring
from meshwright.spec.strategy import Strategy
from tests.nn.arrays import close

LENGTH = 64


def mesh_of(sizes):
    """Mesh of the first devices, one axis of each size."""
    axes = tuple(f"ring{i}" for i in range(len(sizes)))
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def inputs(dealt, num_ranks, *, documents=False, sinks=False):
    """Arrays in the order in which the ring holds them, and the places of their rows."""
    rng = np.random.default_rng(0)
    order = zigzag_order(LENGTH, num_ranks) if dealt == "zigzag" else np.arange(LENGTH)
    shapes = {"q": (2, LENGTH, 2, 4), "k": (2, LENGTH, 1, 4), "v": (2, LENGTH, 1, 3), "dout": (2, LENGTH, 2, 3)}
    arrays = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    places = TokenPositions(jnp.asarray(np.stack([order, order]), jnp.int32))
    if documents:
        numbers = np.sort(rng.integers(0, 4, (2, LENGTH)), axis=1)[:, order]
        places = places._replace(document=jnp.asarray(numbers, jnp.int32))
    extra = {"sinks": jnp.array([0.5, -1.0])} if sinks else {}
    return arrays, places, extra


def whole(arrays, places, extra, window):
    """(o, lse, dq, dk, dv, ...) on one device."""
    call = AttentionCall(scale=0.4, window=window, query=places, key=places, mask="positions", **extra)
    qkv = [arrays[n] for n in "qkv"]
    o, lse = attention(call, *qkv)
    return o, lse, *attention_backward(call, (arrays["dout"], o, lse), *qkv)


def passes(mesh, extra, *, dealt, window, divergent=False):
    """Forward and backward of the ring as functions of global arrays."""
    axes, sharded, held = mesh.axis_names, PartitionSpec(None, mesh.axis_names), PartitionSpec()

    ring = KeyRing(axes=axes, layout=dealt, divergent=divergent)

    def call(places):
        everywhere = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), places)
        return AttentionCall(scale=0.4, window=window, query=places, key=everywhere, mask="positions", **extra)

    def forward(places, *qkv):
        return ring_attention(call(places), ring, *qkv)

    def backward(places, *given):
        dq, dk, dv, *dsinks = ring_attention_backward(call(places), ring, given[:3], *given[3:])
        return dq, dk, dv, *(jax.lax.psum(x, axes) for x in dsinks)

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=sharded, check_vma=False)
    back = (sharded,) * 3 + (held,) * len(extra)
    return jax.jit(mapped(forward, out_specs=sharded)), jax.jit(mapped(backward, out_specs=back))


CASES = {
    "contiguous": {"dealt": "contiguous"},
    "zigzag": {"dealt": "zigzag"},
    "zigzag round two axes": {"dealt": "zigzag", "sizes": (2, 2)},
    "window": {"dealt": "contiguous", "window": 20},
    "documents and sinks": {"dealt": "zigzag", "documents": True, "sinks": True},
    "divergent": {"dealt": "zigzag", "sizes": (2,), "divergent": True},
    "all": {"dealt": "zigzag", "documents": True, "sinks": True, "window": 20},
    "unknown order": {"dealt": "any"},
    "two ranks": {"dealt": "contiguous", "sizes": (2,)},
    "eight ranks": {"dealt": "zigzag", "sizes": (8,)},
    "eight ranks, window": {"dealt": "contiguous", "sizes": (8,), "window": 10, "documents": True},
}
ALWAYS = ("zigzag round two axes", "window", "documents and sinks", "divergent")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CASES]
)
def test_a_ring_gives_what_one_device_gives(name):
    facts = {"sizes": (4,), "window": None, "divergent": False, "documents": False, "sinks": False, **CASES[name]}
    mesh = mesh_of(facts["sizes"])
    arrays, places, extra = inputs(facts["dealt"], mesh.size, documents=facts["documents"], sinks=facts["sinks"])
    expected = jax.jit(whole, static_argnums=3)(arrays, places, extra, facts["window"])
    forward, backward = passes(mesh, extra, **{n: facts[n] for n in ("dealt", "window", "divergent")})
    qkv = [arrays[n] for n in "qkv"]
    o, lse = forward(places, *qkv)
    found = (o, lse, *backward(places, arrays["dout"], o, lse, *qkv))
    for value, wanted, which in zip(found, expected, ("o", "lse", "dq", "dk", "dv", "dsinks"), strict=False):
        close(value, wanted, what=which)
    assert len(found) == len(expected)


def derived(mesh, window):
    """How often the derived permutes move a block, forward and backward."""
    rule = f"; window={window}" if window else ""
    text = f"o[B,T,N,H] = attention(q[B,T,N,H], k[B,T,K,H], v[B,T,K,H], positions[B,T]{rule})\n"
    variables = {"positions": Variable("positions", ("B", "T"), "position")}
    block = parse_block("layer", text, variables, carry="q", result="o")
    sizes = dict(mesh.shape)
    rules = {"activation": {"T": tuple(sizes)}}
    strategy = Strategy(mesh=sizes, assignment=rules, remat="none", context_attention="ring")
    steps = derive(Program((block,), variables), strategy).blocks[0]
    return [
        sum(
            int(num_moves(s, OpSizes(dims={"T": LENGTH}, mesh=sizes, state="fp32"))) for s in phase if s.op == "permute"
        )
        for phase in (steps.forward, steps.backward)
    ]


@pytest.mark.parametrize(
    ("dealt", "sizes", "window"),
    [("zigzag", (4,), None), ("contiguous", (4,), 20), pytest.param("contiguous", (8,), 8, marks=pytest.mark.slow)],
)
def test_the_compiled_ring_has_the_derived_permutes(dealt, sizes, window):
    mesh = mesh_of(sizes)
    arrays, places, _ = inputs(dealt, mesh.size)
    qkv = [arrays[n] for n in "qkv"]
    held = (arrays["dout"], jnp.zeros((2, LENGTH, 2, 3)), jnp.zeros((2, LENGTH, 2)))
    given = ((places, *qkv), (places, *held, *qkv))
    counts = []
    for function, arguments in zip(passes(mesh, {}, dealt=dealt, window=window), given, strict=True):
        found = collectives(function.lower(*arguments).compile().as_text(), dict(mesh.shape))
        permutes = [c for c in found if c.kind == "permute"]
        assert not any(c.in_conditional for c in found)
        counts.append(sum(c.trips * c.num_arrays for c in permutes))
    assert counts == derived(mesh, window)


@pytest.mark.parametrize("divergent", [False, True])
@pytest.mark.parametrize("by", [1, -3])
def test_shift_takes_the_block_from_that_many_places_before(by, divergent):
    mesh = mesh_of((2, 2))
    value = jnp.arange(12).reshape(4, 3)
    spec = PartitionSpec(mesh.axis_names)
    ring = Ring(axes=mesh.axis_names, divergent=divergent)
    moved = jax.shard_map(lambda x: ring.shift(x, by), mesh=mesh, in_specs=spec, out_specs=spec)
    assert np.array_equal(jax.jit(moved)(value), np.roll(value, by, axis=0))


def test_shift_is_right_where_only_some_devices_shift():
    """A permute in such a branch is paired with another group's, or never ends, on emulated devices."""
    mesh = mesh_of((2, 4))
    groups, axis = mesh.axis_names
    ring = Ring(axes=(axis,), divergent=True)

    def body(value):
        def once(x):
            return ring.shift(x, 1)

        return jax.lax.cond(jax.lax.axis_index(groups) == 0, lambda x: once(once(x)), once, value)

    spec = PartitionSpec((groups, axis))
    value = jnp.arange(8).reshape(8, 1)
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    assert mapped(value)[:, 0].tolist() == [2, 3, 0, 1, 7, 4, 5, 6]
    assert not [
        c for c in collectives(mapped.lower(value).compile().as_text(), dict(mesh.shape)) if c.kind == "permute"
    ]
