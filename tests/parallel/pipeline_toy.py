"""A model small enough to run under every schedule, with its passes written by hand: residual tanh layers between a
table and a squared loss."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshwright.algebra.schedules.table import Schedule
from meshwright.algebra.schedules.ticks import forward_tables, tick_tables
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.pipeline.executor import StageFunctions, StageWeights, run_schedule
from meshwright.parallel.pipeline.stages import layer_rows

SEQS, LENGTH, WIDTH, WORDS, OUT = 2, 4, 8, 11, 3


def embed(ends, inputs):
    return ends["table"][inputs["tokens"]]


def embed_backward(ends, inputs, dx):
    return {"table": jnp.zeros_like(ends["table"]).at[inputs["tokens"]].add(dx)}


def forward(layers, inputs, x):
    def layer(x, own):
        y = jnp.tanh(x @ own["w"] + own["b"][None, None])
        return x + y, (x, y)

    return lax.scan(layer, x, layers)


def input_backward(layers, inputs, saved, dy):
    def layer(dy, given):
        own, (x, y) = given
        dz = dy * (1 - y**2)
        return dy + dz @ own["w"].T, (x, dz)

    return lax.scan(layer, dy, (layers, saved), reverse=True)


def weight_backward(layers, inputs, handed):
    x, dz = handed
    return {"w": jnp.einsum("lbti,lbto->lio", x, dz), "b": dz.sum((1, 2))}


def backward(layers, inputs, saved, dy):
    dx, handed = input_backward(layers, inputs, saved, dy)
    return dx, weight_backward(layers, inputs, handed)


def head_forward(ends, inputs, y):
    error = y @ ends["out"] - inputs["targets"]
    return {"loss": (error**2).sum(), "count": jnp.float32(error.size)}, (y, error)


def head_backward(ends, inputs, saved):
    y, error = saved
    return 2 * error @ ends["out"].T, {"out": jnp.einsum("btd,bto->do", y, 2 * error)}


STAGES = StageFunctions(
    embed=embed,
    embed_backward=embed_backward,
    forward=forward,
    backward=backward,
    input_backward=input_backward,
    weight_backward=weight_backward,
    head_forward=head_forward,
    head_backward=head_backward,
)

SPECS = StageWeights(
    {"w": PartitionSpec("pipeline"), "b": PartitionSpec("pipeline")}, dict.fromkeys(("table", "out"), PartitionSpec())
)


def data(num_layers: int, microbatches: int) -> tuple[StageWeights, dict]:
    """StageWeights with the layers in their order, and inputs with the microbatches in front."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(0.3 * random.normal(size=shape), jnp.float32)

    layers = {"w": normal(num_layers, WIDTH, WIDTH), "b": normal(num_layers, WIDTH)}
    weights = StageWeights(layers, {"table": normal(WORDS, WIDTH), "out": normal(WIDTH, OUT)})
    tokens = random.integers(0, WORDS, (microbatches, SEQS, LENGTH))
    return weights, {"tokens": jnp.asarray(tokens, jnp.int32), "targets": normal(microbatches, SEQS, LENGTH, OUT)}


def plain_loss(weights: StageWeights, inputs: dict) -> jax.Array:
    """The loss of all microbatches on one device, for `jax.grad`."""

    def one(part):
        y, _ = forward(weights.layers, part, embed(weights.ends, part))
        return head_forward(weights.ends, part, y)[0]["loss"]

    return jax.vmap(one)(inputs).sum()


def reordered(weights: StageWeights, order: np.ndarray) -> StageWeights:
    return weights._replace(layers=jax.tree.map(lambda a: a[order], weights.layers))


def lowered(schedule: Schedule, mesh: Mesh, weights: StageWeights, inputs: dict, *, alone: bool = False):
    """The program of a step (sums, gradients), or of the forward passes ``alone``; weights in their stored order."""
    tables = forward_tables(schedule) if alone else tick_tables(schedule)

    def step(weights, inputs):
        sums, grads = run_schedule(tables, STAGES, weights, inputs)
        return lax.psum(sums, "pipeline"), grads._replace(ends=lax.psum(grads.ends, "pipeline"))

    def loss(weights, inputs):
        return lax.psum(run_schedule(tables, STAGES, weights, inputs)[0], "pipeline")

    body, out = (loss, PartitionSpec()) if alone else (step, (PartitionSpec(), SPECS))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(SPECS, PartitionSpec()), out_specs=out, check_vma=False)
    return jax.jit(mapped).lower(weights, inputs)


@lru_cache
def compiled(schedule: Schedule, layers_each: int):
    """The step over as many devices as the schedule has, with so many layers in each virtual stage."""
    given = data(layers_each * schedule.num_virtual_stages, schedule.num_microbatches)
    return lowered(schedule, device_mesh({"pipeline": schedule.num_devices}), *given).compile()


def gradients(schedule: Schedule, weights: StageWeights, inputs: dict) -> tuple[dict, StageWeights]:
    """Sums and gradients of a pipeline, the layers in their order again."""
    num_layers = len(weights.layers["w"])
    order = layer_rows(schedule, ("layer",) * num_layers)["layer"]
    sums, grads = compiled(schedule, num_layers // schedule.num_virtual_stages)(reordered(weights, order), inputs)
    return sums, reordered(grads, np.argsort(order))
