"""Derived steps of routed experts run on emulated devices against a dense formula on one, values and gradients.

Every mesh sends slots to their experts another way: over one axis or several, gathered over `tensor` or not, with
tokens split over sequences, positions or both.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from msgspec.structs import replace

from meshwright.algebra.derive import derive
from meshwright.algebra.layers import ProgramOptions
from meshwright.algebra.ops.route import ROUTING
from meshwright.algebra.program import Program, Variable
from meshwright.algebra.transformer import parse_block
from meshwright.nn.context import Context
from meshwright.nn.experts import products, slots
from meshwright.nn.experts.balance import routing_metrics
from meshwright.nn.interpreter import run
from meshwright.parallel.mesh import device_mesh, partition_spec
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, Strategy, standard_assignment
from tests.nn.arrays import close
from tests.nn.families import FAMILIES

SIZES = {"B": 8, "T": 8, "D": 8, "E": 8, "Ea": 3, "Fe": 4}
MODEL = replace(
    FAMILIES["mixtral"],
    d_model=SIZES["D"],
    num_experts=SIZES["E"],
    experts_per_token=SIZES["Ea"],
    d_ff_expert=SIZES["Fe"],
)
WEIGHTS = {
    "router": ("D", "E"),
    "router_bias": ("E",),
    "w_gate": ("E", "D", "Fe"),
    "w_up": ("E", "D", "Fe"),
    "b_up": ("E", "Fe"),
    "w_down": ("E", "Fe", "D"),
}
LINES = """
r[B,T,E] = x[B,T,D] * router[D,E]
rb[B,T,E] = bias_add(r[B,T,E], router_bias[E])
gates[B,T,Ea] = route(rb[B,T,E]{given})
we[E,C] = dispatch_gates(gates[B,T,Ea]{capacity})
xe[E,C,D] = dispatch(x[B,T,D], gates[B,T,Ea], we[E,C]{capacity})
ge[E,C,Fe] = xe[E,C,D] * w_gate[E,D,Fe]
u0[E,C,Fe] = xe[E,C,D] * w_up[E,D,Fe]
ue[E,C,Fe] = bias_add(u0[E,C,Fe], b_up[E,Fe])
me[E,C,Fe] = silu_mul(ge[E,C,Fe], ue[E,C,Fe])
mw[E,C,Fe] = weighted(me[E,C,Fe], we[E,C])
ye[E,C,D] = mw[E,C,Fe] * w_down[E,Fe,D]
y[B,T,D] = combine(ye[E,C,D], gates[B,T,Ea], we[E,C])
x2[B,T,D] = add(x[B,T,D], y[B,T,D])
"""


def assigned(base=DEFAULT_ASSIGNMENT, **activation):
    return base | {"activation": base["activation"] | activation}


WHOLE_TOKENS = standard_assignment(sequence_parallel=False)
STRATEGIES = {
    "gathered over tensor": Strategy(mesh={"data": 2, "expert": 2, "tensor": 2}),
    "two axes at once": Strategy(
        mesh={"tensor": 2, "data": 2, "expert": 2},
        assignment=assigned(E=("expert", "tensor"), C=("data", "fsdp", "context"), Fe=()),
    ),
    "at home": Strategy(mesh={"fsdp": 2, "context": 2, "tensor": 2}, assignment=WHOLE_TOKENS),
    "tokens in all ways": Strategy(mesh={"fsdp": 2, "expert": 2, "context": 2}, remat="none"),
    "tokens whole over tensor": Strategy(mesh={"expert": 4, "tensor": 2}, assignment=WHOLE_TOKENS),
    "experts split where tokens are not": Strategy(mesh={"data": 2, "expert": 2}, assignment=assigned(B=("data",))),
    "one device": Strategy(mesh={"data": 1}),
    "microbatches": Strategy(mesh={"expert": 2}, num_microbatches=2),
    "five axes": Strategy(mesh={"data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 2}, remat=("r", "xe")),
    "expert alone": Strategy(mesh={"expert": 8}),
    "context, tensor and experts": Strategy(mesh={"expert": 2, "context": 2, "tensor": 2}, remat="selective"),
}
IN_DEFAULT_TIER = tuple(STRATEGIES)[:1]


def program(options):
    wanted = {"balance": options.balance_loss, "z": options.router_z_loss, "capacity": options.capacity_factor}
    texts = [", ".join(f"{name}={value}" for name, value in wanted.items() if value and name in names)
             for names in (tuple(wanted), ("capacity",))]  # fmt: skip
    given, capacity = (f"; {text}" if text else "" for text in texts)
    variables = {name: Variable(name, dims, "weight") for name, dims in WEIGHTS.items()}
    block = parse_block("layer", LINES.format(given=given, capacity=capacity), variables, carry="x", result="x2")
    return Program((block,), variables)


def draw(*dims, seed=0):
    return np.random.default_rng(seed).normal(size=[SIZES[dim] for dim in dims]).astype(np.float32)


def values():
    return {name: draw(*dims, seed=i) / 2 for i, (name, dims) in enumerate(WEIGHTS.items(), 1)} | {
        "x": draw("B", "T", "D", seed=10)
    }


COTANGENT = draw("B", "T", "D", seed=11)


def run_block(strategy, options):
    """x2, gradients by name, the counts of the router and what was dropped, from the derived steps on their mesh."""
    derived = derive(program(options), strategy)
    block, mesh = derived.blocks[0], device_mesh(strategy.mesh)
    context = Context(model=MODEL, derived=derived, mesh=strategy.mesh, options=options)
    dout = derived.declared["x2"].replace(name="dx2")
    given = {derived.declared[name]: value for name, value in values().items()} | {dout: COTANGENT}
    made = {step.result.name: step.result for step in block.backward}
    results = [derived.declared["x2"], *(made[f"d{name}"] for name in values())]
    results += [ROUTING] if any(ROUTING in step.inputs for step in block.backward) else []

    def body(*blocks):
        env = dict(zip(given, blocks, strict=True))
        forward = run(context, block.forward, env)
        after = run(context, block.backward, env | {array: forward[array] for array in block.kept})
        return tuple({**forward, **after}[array] for array in results)

    specs = [partition_spec(array) for array in given]
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=tuple(partition_spec(array) if array != ROUTING else PartitionSpec() for array in results),
        check_vma=False,
    )
    return {a.name: np.asarray(v) for a, v in zip(results, jax.jit(mapped)(*given.values()), strict=True)}


def dense_layer(v, kept=1.0):
    """Every expert on every token, weighed by the softmax over the chosen scores; the scores and what is chosen."""
    scores = jnp.einsum("btd,de->bte", v["x"], v["router"]) + v["router_bias"][None, None]
    chosen = jax.lax.top_k(scores, SIZES["Ea"])[1]
    inside = jax.nn.one_hot(chosen, SIZES["E"]).sum(-2)
    weights = jax.nn.softmax(jnp.where(inside > 0, scores, -jnp.inf))
    up = jnp.einsum("btd,edf->btef", v["x"], v["w_up"]) + v["b_up"][None, None]
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", v["x"], v["w_gate"])) * up
    return v["x"] + jnp.einsum("btef,efd,bte->btd", hidden, v["w_down"], weights * kept), scores, inside


def dense(options, num_microbatches=1, kept=1.0):
    """x2 and the gradients of its product with the cotangent and of the losses on the router."""

    def total(v):
        x2, scores, inside = dense_layer(v, kept)
        load, importance = inside.mean((0, 1)), jax.nn.softmax(scores).mean((0, 1))
        balance = SIZES["E"] * jnp.sum(load * importance)
        squares = jnp.mean(jax.nn.logsumexp(scores, axis=-1) ** 2)
        extra = options.balance_loss * balance + options.router_z_loss * squares
        return jnp.sum(x2 * COTANGENT) + extra / num_microbatches, (x2, balance, squares)

    grads, (x2, balance, squares) = jax.jit(jax.grad(total, has_aux=True))(values())
    losses = {"balance_loss": float(balance), "router_z_loss": float(squares)}
    return {"x2": x2} | {f"d{name}": grad for name, grad in grads.items()}, losses


LOSSES = ProgramOptions(balance_loss=20.0, router_z_loss=3.0)


@pytest.fixture
def in_blocks(monkeypatch):
    """ExpertBlocks, and packed tokens where they stay at home, for the few slots of these tests."""
    monkeypatch.setattr(products, "FEW_SLOTS", 0)


def check(found, wanted):
    for name, array in wanted.items():
        close(found[name], array, what=name)


@pytest.mark.parametrize(
    "name", [n if n in IN_DEFAULT_TIER else pytest.param(n, marks=pytest.mark.slow) for n in STRATEGIES]
)
def test_every_mesh_computes_what_one_device_does(name, in_blocks):
    strategy = STRATEGIES[name]
    found = run_block(strategy, LOSSES)
    wanted, losses = dense(LOSSES, strategy.num_microbatches)
    check(found, wanted)
    metrics = routing_metrics(jnp.asarray(found["routing"]), experts_per_token=SIZES["Ea"])
    assert {name: float(metrics[name]) for name in losses} == pytest.approx(losses, rel=1e-5)
    assert float(metrics["dropped_share"]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "room"),
    [("tokens in all ways", 0.4), pytest.param("expert alone", 1.0, marks=pytest.mark.slow)]
    + [pytest.param(name, 0.25, marks=pytest.mark.slow) for name in STRATEGIES],
)
def test_rows_without_room_are_sent_in_further_rounds(name, room, in_blocks, monkeypatch):
    """Values, all gradients and the losses, with room for a part of the mean."""
    monkeypatch.setattr(slots, "ROOM", room)
    monkeypatch.setattr(slots, "FURTHER_ROOM", room / 2)
    found = run_block(STRATEGIES[name], LOSSES)
    wanted, _ = dense(LOSSES, STRATEGIES[name].num_microbatches)
    check(found, wanted)


def test_every_row_is_sent_once():
    """Of random counts, skewed ones and none: each row has one round and one place of its own at its expert."""
    rng = np.random.default_rng(3)
    for size, per_device, num_own in ((4, 2, 40), (8, 1, 7), (2, 5, 64)):
        experts = size * per_device
        shares = rng.dirichlet(np.full(experts, 0.3), size=size)
        counts = np.stack([rng.multinomial(num_own, share) for share in shares]).astype(np.int32)
        fullest = int(counts.reshape(size, size, -1).sum((0, 2)).max())
        taken, before, further = np.zeros((size, num_own), int), 0, False
        while before < fullest:
            at = [jnp.asarray(number, jnp.int32) for number in (before, fullest)]
            route = slots.Delivery(jnp.asarray(counts), *at, num_own, further)
            own, there, number = (np.asarray(array) for array in route.places())
            at_device = [np.zeros(route.room, int) for _ in range(size)]
            for device in range(size):
                for expert in range(experts):
                    rows = slice(own[device, expert], own[device, expert] + number[device, expert])
                    taken[device, rows] += 1
                    first = there[device, expert]
                    at_device[expert // per_device][first : first + number[device, expert]] += 1
            for places in at_device:
                assert places.max() <= 1
                assert not np.any(np.diff(places) > 0)  # filled from the front
            before, further = before + route.room, True
        assert np.all(taken == 1)


def test_slots_as_whole_arrays():
    """Without blocks: what small models and bounded slots run."""
    found = run_block(STRATEGIES["gathered over tensor"], ProgramOptions())
    assert "routing" not in found
    check(found, dense(ProgramOptions())[0])


def test_a_bound_drops_the_later_tokens_of_each_device():
    """Half of the mean load, on four devices of two sequences each."""
    strategy, options = Strategy(mesh={"data": 2, "expert": 2}), ProgramOptions(capacity_factor=0.5)
    capacity = 3  # half of 2 x 8 tokens x 3 choices / 8 experts
    inside = np.asarray(jax.jit(dense_layer)(values())[2])
    of_device = inside.reshape(4, -1, SIZES["E"])
    kept = ((of_device.cumsum(1) <= capacity) * of_device).reshape(inside.shape)
    found = run_block(strategy, options)
    check(found, dense(options, kept=kept)[0])
    metrics = routing_metrics(jnp.asarray(found["routing"]), experts_per_token=SIZES["Ea"])
    assert 0 < float(metrics["dropped_share"]) == pytest.approx(1 - kept.sum() / inside.sum(), rel=1e-5)
