"""Loss and gradients of one device's part of a batch: microbatches summed, then what is summed once per step.

The routers' counts go with the gradients as `BlockPasses.counts` names them: stacked over layers and summed over
microbatches like these, and complete on every device without any further sum.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.algebra.derived import Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.split_backward import step_steps
from meshwright.core.labels import AT_MOST_ONCE
from meshwright.nn.experts.balance import RoutingCounts
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import Cotangents, Inputs, through
from meshwright.parallel.passes import Passes

Microbatch = Callable[[Params, Inputs, Params | None], tuple[jax.Array, Params]]
"""(weights, rows, what earlier microbatches left) -> summed loss and gradients; without the third nothing is added."""


def microbatch_gradients(
    passes: Passes,
    params: Params,
    inputs: Inputs,
    dloss: jax.Array,
    *,
    earlier: Params | None = None,
    overlapped: bool = False,
) -> tuple[jax.Array, Params]:
    """Summed loss of a microbatch's own tokens, and gradients of ``dloss`` times it.

    They are as a microbatch leaves them; with ``overlapped``, added to ``earlier`` ones and as a step leaves them, each
    layer's as soon as they are made.
    """
    results, held = dict(inputs), []
    for stack in passes.stacks:
        stream, embed_held = stack.embed.forward(params, results, None)
        stream, of_turns = stack.layers_forward(params, results, stream)
        results[stack.head.result], head_held = stack.head.forward(params, results, stream)
        held.append((embed_held, of_turns, head_held))
    cotangents, ends, of_layers = {passes.head.result: dloss}, Params(), Params()
    for stack, (embed_held, of_turns, head_held) in reversed(list(zip(passes.stacks, held, strict=True))):
        cotangent, of_head = stack.head.backward(params, results, head_held, cotangents[stack.head.result])
        assert cotangent is not None
        # layers add to the cotangents of what they read
        further = {name: jnp.zeros_like(results[name]) for name in stack.stack.inputs}
        (cotangent, further), grads = stack.stack_backward(
            params, results, of_turns, Cotangents(cotangent, further), earlier=earlier, overlapped=overlapped
        )
        _, of_embed = stack.embed.backward(params, results, embed_held, cotangent)
        cotangents = summed(cotangents, further)
        ends, of_layers = summed(ends, of_head, of_embed), of_layers | grads
    loss = results[passes.head.result]
    if overlapped:
        ends = summed(ends, {n: g for n, g in (earlier or {}).items() if n in ends})
        ends = once_per_step(passes.derived, ends, stacked=frozenset())
    return loss, summed(ends, of_layers)


def microbatch_loss(passes: Passes, params: Params, inputs: Inputs) -> jax.Array:
    """The summed loss alone."""
    results = dict(inputs)
    for stack in passes.stacks:
        stream, _ = stack.embed.forward(params, results, None)
        stream, _ = stack.layers_forward(params, results, stream)
        results[stack.head.result], _ = stack.head.forward(params, results, stream)
    return results[passes.head.result]


def summed(*parts: Params) -> Params:
    """Gradients of several parts of a program: a weight that two of them use (tied embeddings) has both."""
    total: Params = {}
    for part in parts:
        for name, grad in part.items():
            total[name] = total[name] + grad if name in total else grad
    return total


def over_microbatches(
    one: Microbatch, last: Microbatch, params: Params, inputs: Inputs, *, count: int, wide: bool = False
) -> tuple[jax.Array, Params]:
    """Loss and gradients of ``count`` microbatches one after the other, in float32 if more than one or ``wide``.

    ``last`` is run for the last of them, on what ``one`` has left for the others.
    """
    if count == 1:
        loss, grads = last(params, inputs, None)
        return loss, jax.tree.map(lambda g: g.astype(jnp.float32), grads) if wide else grads
    parts = {n: a.reshape(count, a.shape[0] // count, *a.shape[1:]) for n, a in inputs.items()}

    def body(carry: tuple[jax.Array, Params], part: Inputs) -> tuple[tuple[jax.Array, Params], None]:
        # Ties the weights to the microbatch: otherwise XLA hoists some gathers out of the loop, not all.
        weights, rows = lax.optimization_barrier((params, part))
        loss, grads = one(weights, rows, None)
        return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], apart(grads))), None

    shapes = jax.eval_shape(lambda p: one(params, p, None)[1], jax.tree.map(lambda a: a[0], parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
    if one is last:
        total, _ = lax.scan(body, (jnp.zeros(()), zeros), parts)
        return total
    (before, grads), _ = lax.scan(body, (jnp.zeros(()), zeros), jax.tree.map(lambda a: a[:-1], parts))
    final = (params, jax.tree.map(lambda a: a[-1], parts), grads)
    loss, grads = _once_after(grads, lambda given: last(*given), final)
    return before + loss, grads


def apart(grads: Any) -> Any:
    """The gradients themselves, behind a barrier: summed in a loop right after an all-reduce they are what libtpu tries
    to move out of the loop, and fails over (RET_CHECK in while_loop_all_reduce_code_motion, 0.0.42)."""
    return lax.optimization_barrier(grads)


def _once_after(grads: Params, run: Callable[[Any], Any], given: Any) -> Any:
    """``run(given)``, not begun before the gradients are there: a loop of one turn, which no compiler writes out.

    Without it, since a loop over the only microbatch before the last is written out and barriers are dropped before the
    work is put in order, compilers make room for what the last microbatch keeps while the one ahead of it still has its
    own.
    """
    one = sum(grad.reshape(-1)[0].astype(jnp.float32) for grad in grads.values())
    never = (jnp.isnan(one) & jnp.isinf(one)).astype(jnp.int32)
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, given))

    def turn(number: jax.Array, _: Any) -> Any:
        # Tied to the turn: what does not change in a loop is moved out of it.
        return run(lax.optimization_barrier((given, number))[0])

    with jax.named_scope(AT_MOST_ONCE):
        return lax.fori_loop(0, 1 - never, turn, empty)


def without_counts(grads: Params, names: Collection[str]) -> tuple[Params, RoutingCounts | None]:
    """Gradients of the weights ``names``, and what else goes with them: the routers' counts of all layers with experts,
    [layers, Er, E], those of a kind together. None where nothing was counted."""
    counts = [grads[name] for name in sorted(grads.keys() - set(names))]
    return {name: grads[name] for name in names}, jnp.concatenate(counts) if counts else None


def once_per_step(derived: Derived, grads: Params, *, stacked: frozenset[str]) -> Params:
    """Gradients summed over replicas and brought to the optimizer's shards, as derived."""
    steps = step_steps(derived)
    ends = {step.result.name.removeprefix("d"): step for step in derived.ends}
    found = {name: through(steps.get(name, ()), grad, leading=int(name in stacked)) for name, grad in grads.items()}
    return {name: through([ends[name]], grad) if name in ends else grad for name, grad in found.items()}


def in_buckets(derived: Derived, grads: Params, *, stacked: frozenset[str], bucket_bytes: int) -> Params:
    """The same, with the gradients that are only summed over replicas joined in buckets of so many bytes."""
    steps = step_steps(derived)
    joined: dict[tuple[str, ...], list[str]] = {}
    for name in grads:
        if [step.op for step in steps.get(name, ())] == ["all_reduce"]:
            joined.setdefault(steps[name][0].axes, []).append(name)
    together = {name for names in joined.values() for name in names}
    found = once_per_step(derived, {n: g for n, g in grads.items() if n not in together}, stacked=stacked)
    for names in joined.values():
        for bucket in _buckets(names, grads, bucket_bytes):
            flat = jnp.concatenate([grads[name].reshape(-1) for name in bucket])
            total = through(steps[bucket[0]], flat)
            cuts = np.cumsum([grads[name].size for name in bucket])[:-1]
            parts = jnp.split(total, [int(cut) for cut in cuts])
            found |= {name: part.reshape(grads[name].shape) for name, part in zip(bucket, parts, strict=True)}
    return found


def _buckets(names: list[str], grads: Params, bucket_bytes: int) -> list[list[str]]:
    """Names in order, a new bucket where the next would not fit."""
    found: list[list[str]] = [[]]
    room = bucket_bytes
    for name in names:
        size = grads[name].size * grads[name].dtype.itemsize
        if found[-1] and size > room:
            found, room = [*found, []], bucket_bytes
        found[-1].append(name)
        room -= size
    return found


def squared_norm(
    shards: Mapping[str, ShardedArray], grads: Params, mesh: Mapping[str, int], *, stacked: frozenset[str]
) -> jax.Array:
    """This device's share of the squared gradient norm; replicas of a shard count once between them.

    Layers, the ``stacked`` weights, are no replicas over the pipeline.
    """
    total: Any = jnp.zeros((), jnp.float32)
    for name, grad in grads.items():
        copies = 1
        for axis, size in mesh.items():
            of_stage = axis == "pipeline" and name in stacked
            if axis not in shards[name].spread and not of_stage:
                copies *= size
        total += jnp.sum(jnp.square(grad.astype(jnp.float32))) / copies
    return total
