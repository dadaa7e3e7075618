"""Ring attention on emulated ranks against one device, and the permutes that the algebra derives."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshwright.algebra.derive import derive
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.rewrites.rings import num_moves
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.transformer import parse_block
from meshwright.hlo.collectives import collectives
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.order import SequenceOrder, zigzag_order
from meshwright.nn.attention.ring import KeyRing, ring_attention, ring_attention_backward
from meshwright.nn.collectives import Ring
from meshwright.spec.strategy import Strategy
from tests.nn.attention import rules

LENGTH = 64


def mesh_of(sizes):
    """Mesh of the first devices, one axis of each size."""
    axes = tuple(f"ring{i}" for i in range(len(sizes)))
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def order_of(dealt, mesh):
    """Which positions the devices of a mesh have, and the permutation of a sequence that deals them out."""
    ranks = mesh.size if dealt == "zigzag" else 0
    return SequenceOrder(ranks), zigzag_order(LENGTH, ranks) if ranks else np.arange(LENGTH, dtype=np.int32)


def passes(mesh, call, *, dealt, divergent=False, way="ring"):
    """Forward and backward of context parallelism as functions of arrays in the order in which the ranks hold them."""
    axes, sharded, held = mesh.axis_names, PartitionSpec(None, mesh.axis_names), PartitionSpec()
    order, permutation = order_of(dealt, mesh)
    ring = KeyRing(axes=axes, order=order, divergent=divergent)

    def own(length):
        index = order.index(axes, length)
        return replace(call, q_idx=index, kv_idx=index)

    def gather(x):
        return jax.lax.all_gather(x, axes, axis=1, tiled=True)

    def scatter(x):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)

    def forward(*qkv):
        q, k, v = qkv
        if way == "ring":
            return ring_attention(own(q.shape[1]), ring, *qkv)
        return attention(replace(own(q.shape[1]), kv_idx=permutation), q, gather(k), gather(v))

    def backward(*given):
        q, k, v = given[3:]
        if way == "ring":
            dq, dk, dv, *more = ring_attention_backward(own(q.shape[1]), ring, given[:3], q, k, v)
        else:
            whole = replace(own(q.shape[1]), kv_idx=permutation)
            dq, dk, dv, *more = attention_backward(whole, given[:3], q, gather(k), gather(v))
            dk, dv = scatter(dk), scatter(dv)
        return dq, dk, dv, *(jax.lax.psum(x, axes) for x in more if x.dtype == jnp.float32)

    mapped = partial(jax.shard_map, mesh=mesh, in_specs=sharded, check_vma=False)
    learnt = [x for x in (call.score.arrays if call.score else ()) if np.asarray(x).dtype == np.float32]
    back = (sharded,) * 3 + (held,) * ((call.sinks is not None) + len(learnt))
    return jax.jit(mapped(forward, out_specs=sharded)), jax.jit(mapped(backward, out_specs=back))


CASES = {
    "in order": {"dealt": "in order"},
    "zigzag": {"dealt": "zigzag"},
    "zigzag round two axes": {"dealt": "zigzag", "sizes": (2, 2)},
    "window": {"dealt": "in order", "mask": "window"},
    "documents and sinks": {"dealt": "zigzag", "mask": "documents", "sinks": True},
    "divergent": {"dealt": "zigzag", "sizes": (2,), "divergent": True},
    "window in zigzag": {"dealt": "zigzag", "mask": "window", "sinks": True},
    "chunks": {"dealt": "in order", "mask": "chunks"},
    "two ranks": {"dealt": "in order", "sizes": (2,)},
    "eight ranks": {"dealt": "zigzag", "sizes": (8,)},
    "eight ranks, window": {"dealt": "in order", "sizes": (8,), "mask": "window"},
    "learnt scores": {"dealt": "zigzag", "score": "own"},
    "learnt distances": {"dealt": "in order", "score": "distance", "mask": "all"},
    "soft cap": {"dealt": "zigzag", "score": "softcap"},
    "keys gathered": {"dealt": "in order", "mask": "transfusion", "score": "alibi", "way": "gather"},
    "keys gathered in zigzag": {"dealt": "zigzag", "mask": "tree", "score": "own", "way": "gather"},
    **{f"{mask}, {dealt}": {"dealt": dealt, "mask": mask} for mask in rules.MASKS for dealt in ("in order", "zigzag")},
    **{
        f"{mask}, {dealt}, eight ranks": {"dealt": dealt, "mask": mask, "score": "several", "sizes": (8,)}
        for mask in rules.MASKS
        for dealt in ("in order", "zigzag")
    },
}
ALWAYS = (
    "window",
    "chunks",
    "documents and sinks",
    "divergent",
    "transfusion, zigzag",
    "keys gathered in zigzag",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in CASES]
)
def test_several_devices_give_what_one_gives(name):
    facts = {"sizes": (4,), "mask": "causal", "score": None, "sinks": False, "divergent": False, "way": "ring"}
    facts |= CASES[name]
    mesh = mesh_of(facts["sizes"])
    given = rules.arrays(T=LENGTH, N=4, K=1, H=4, Hv=3)
    mask, score = rules.rule_of(facts["mask"], facts["score"], LENGTH)
    sinks = np.array([0.5, -1.0, 0.0, 2.0], np.float32) if facts["sinks"] else None
    call = AttentionCall(scale=0.4, mask=mask, score=score, sinks=sinks, learns=score is not None)
    wanted = [x for x in rules.expected(0.4, mask, score, sinks, given) if x is not None]
    _, order = order_of(facts["dealt"], mesh)
    dealt = {n: x[:, order] for n, x in given.items()}
    forward, backward = passes(mesh, call, **{n: facts[n] for n in ("dealt", "divergent", "way")})
    qkv = [dealt[n] for n in "qkv"]
    o, lse = forward(*qkv)
    found = (o, lse, *backward(dealt["dout"], o, lse, *qkv))
    assert len(found) == len(wanted)
    for number, (value, one) in enumerate(zip(found, wanted, strict=True)):
        rules.close(value, one[:, order] if number < 5 else one, f"result {number}")


def test_a_hop_of_which_nothing_is_seen_is_not_computed():
    """Its work is in the branch of a conditional that the ranges of indices decide."""
    mesh = mesh_of((4,))
    mask, _ = rules.rule_of("documents", None, LENGTH)
    forward, _ = passes(mesh, AttentionCall(scale=0.4, mask=mask), dealt="in order")
    given = rules.arrays(T=LENGTH, N=4, K=1, H=4)
    jaxpr = jax.make_jaxpr(forward)(*(given[n] for n in "qkv")).jaxpr
    branches = [x for x in rules.equations(jaxpr) if x.primitive.name == "cond"]
    counts = [[str(branch).count("dot_general") for branch in x.params["branches"]] for x in branches]
    assert any(min(count) == 0 < max(count) for count in counts)


def derived(mesh, window, chunked):
    """How often the derived permutes move a block, forward and backward."""
    rule = f"; window={window}{', chunked' * chunked}" if window else ""
    text = f"o[B,T,N,H] = attention(q[B,T,N,H], k[B,T,K,H], v[B,T,K,H]{rule})\n"
    variables = dict[str, Variable]()
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


# of a window of 17 the first query of a rank of 8 sees 16 keys of earlier ranks
@pytest.mark.parametrize(
    ("dealt", "sizes", "mask", "window", "hops"),
    [
        ("zigzag", (4,), "causal", None, 3),
        ("in order", (8,), "sliding_window(17)", 17, 2),
        ("in order", (8,), "chunked(10)", 10, 1),
        ("in order", (8,), "chunked(16)", 16, 1),
        ("in order", (4,), "chunked(8)", 8, 0),
    ],
)
def test_the_compiled_ring_has_the_derived_permutes(dealt, sizes, mask, window, hops):
    mesh, chunked = mesh_of(sizes), mask.startswith("chunked")
    given = rules.arrays(T=LENGTH, N=2, K=1, H=4, Hv=3)
    mask = rules.mask_of(mask, LENGTH)
    qkv = [given[n] for n in "qkv"]
    held = (given["dout"], jnp.zeros((2, LENGTH, 2, 3)), jnp.zeros((2, LENGTH, 2)))
    counts = []
    for function, arguments in zip(
        passes(mesh, AttentionCall(scale=0.4, mask=mask), dealt=dealt), (qkv, (*held, *qkv)), strict=True
    ):
        found = collectives(function.lower(*arguments).compile().as_text(), dict(mesh.shape))
        permutes = [c for c in found if c.kind == "permute"]
        assert not any(c.in_conditional for c in found)
        counts.append(sum(c.trips * c.num_arrays for c in permutes))
    assert (counts, counts[0]) == (derived(mesh, window, chunked), 2 * hops)


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
