"""Loss and gradients of one device's part of a batch: sums over microbatches, and collectives that run once per step.

With ``gradient_sync`` "overlapped" these collectives run in the backward pass of the last microbatch, else after it.
Gradients include the routers' counts (`BlockPasses.counts`): stacked over layers and summed over microbatches like
gradients, but already summed over devices.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from meshwright.algebra.derived import Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.split_backward import step_steps
from meshwright.core.labels import AT_MOST_ONCE
from meshwright.nn.order import after, never
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import Cotangents, Inputs, apply_collectives
from meshwright.parallel.held import Tree
from meshwright.parallel.passes import Passes
from meshwright.spec.strategy import Strategy

Losses = dict[str, Array]
"""Name of a loss of the program -> a scalar: the summed loss, or its cotangent."""

LossAndGradients = tuple[Losses, Params]
"""Summed losses, and gradients by name."""


def microbatch_gradients(
    passes: Passes,
    params: Params,
    inputs: Inputs,
    dloss: Losses,
    *,
    earlier: Params | None = None,
    overlapped: bool = False,
) -> LossAndGradients:
    """Returns the summed losses of a microbatch, and the gradients of the sum of ``dloss`` times each loss.

    With ``overlapped`` each layer adds its gradients to the ``earlier`` ones and runs their collectives of scope "step"
    as soon as it has computed them.
    """
    results, stack_saved = _forward(passes, params, inputs)
    cotangents, end_grads, layer_grads = dict(dloss), Params(), Params()
    num_uses = Counter(name for stack in passes.stacks for block in stack.ends for name in block.weights)
    # complete last: gradients of embeddings, and of weights that several embeddings or heads use
    embed_names = {name for stack in passes.stacks if stack.stack.first for name in stack.embed.weights}
    late_names = {name for name, uses in num_uses.items() if uses > 1} | embed_names
    for stack, (embed_saved, layers_saved, head_saved) in reversed(list(zip(passes.stacks, stack_saved, strict=True))):
        # else compilers keep logits until they compute the loss, which no layer needs, and exponentials for both passes
        cotangent = after(cotangents[stack.head.result], [results[stack.head.result]])
        cotangent, head_saved = lax.optimization_barrier((cotangent, head_saved))
        head_cotangents = Cotangents(cotangent, {})
        (cotangent, _), head_grads = stack.head.backward(params, results, head_saved, head_cotangents)
        if overlapped:
            ready_grads = {n: g for n, g in head_grads.items() if n not in late_names}
            head_grads |= once_per_step(passes.derived, _with_earlier(ready_grads, earlier), stacked=frozenset())
        # else compilers defer the products until all layers have run, and keep the cotangent of the logits
        cotangent = after(cotangent, head_grads.values())
        # Layers add to the cotangents of the results of earlier stacks.
        first_shares = stack.embed.steps.block.shares if stack.stack.first else ()
        dresults = {name: jnp.zeros_like(results[name]) for name in (*stack.stack.inputs, *first_shares)}
        (cotangent, dresults), stack_grads = stack.layers_backward(
            params, results, layers_saved, Cotangents(cotangent, dresults), earlier=earlier, overlapped=overlapped
        )
        if stack.stack.first:
            _, embed_grads = stack.embed.backward(params, results, embed_saved, Cotangents(cotangent, dresults))
            dresults = {name: dresults[name] for name in stack.stack.inputs}
        else:
            # the stack's input stream is an earlier stack's result, if it has one
            embed_grads, dresults = {}, {stack.stack.carry: cotangent} if stack.stack.carry else {}
        cotangents = summed(cotangents, dresults)
        end_grads, layer_grads = summed(end_grads, head_grads, embed_grads), layer_grads | stack_grads
    if overlapped:
        late_grads = {n: g for n, g in end_grads.items() if n in late_names}
        end_grads |= once_per_step(passes.derived, _with_earlier(late_grads, earlier), stacked=frozenset())
    return {name: results[name] for name in dloss}, summed(end_grads, layer_grads)


def _with_earlier(grads: Params, earlier_grads: Params | None) -> Params:
    return summed(grads, {name: grad for name, grad in (earlier_grads or {}).items() if name in grads})


def microbatch_loss(passes: Passes, params: Params, inputs: Inputs) -> Array:
    """Returns the cross entropy of a microbatch, summed over tokens."""
    return _forward(passes, params, inputs)[0]["loss"]


def _forward(passes: Passes, params: Params, inputs: Inputs) -> tuple[Inputs, list[Tree]]:
    """Returns the inputs with the results of all stacks added, and the activations that each stack saves."""
    results, saved_by_stack = dict(inputs), []
    for stack in passes.stacks:
        embeds, head = stack.stack.first, stack.head
        entering: Tree = (results.get(stack.stack.carry), ())
        stream, embed_saved = entering
        if embeds:
            stream, embed_saved, shares = stack.embed.forward_shared(params, results, None)
            results |= shares
        stream, layers_saved = stack.layers_forward(params, results, stream)
        # else compilers keep the gathered tied table through all layers
        tied_names = {step.result.name for step in head.gathers} & {*stack.embed.weights} if embeds else ()
        params = params | after({name: params[name] for name in tied_names}, [stream]) if tied_names else params
        results[head.result], head_saved = head.forward(params, results, stream)
        saved_by_stack.append((embed_saved, layers_saved, head_saved))
    return results, saved_by_stack


def summed(*parts: Params) -> Params:
    """Merges gradients by name; adds the gradients of a weight that is in several ``parts`` (tied embeddings)."""
    grad_sums: Params = {}
    for part_grads in parts:
        for name, grad in part_grads.items():
            grad_sums[name] = grad_sums[name] + grad if name in grad_sums else grad
    return grad_sums


def step_gradients(
    passes: Passes, params: Params, inputs: Inputs, dloss: Losses, *, strategy: Strategy, stacked: frozenset[str]
) -> LossAndGradients:
    """Returns the losses summed over all microbatches, and the gradients of the sum of ``dloss`` times each loss, after
    the collectives of the strategy's ``gradient_sync``.

    Gradients are summed in float32 if there are several microbatches or the training state has float32 gradients.
    """
    sync_kind = strategy.gradient_sync
    losses, grads = _over_microbatches(
        passes, params, inputs, dloss, count=strategy.num_microbatches, overlapped=sync_kind == "overlapped"
    )
    if strategy.state == "bf16-master-fp32-grads":
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    if sync_kind == "naive":
        grads = once_per_step(passes.derived, grads, stacked=stacked)
    elif sync_kind == "bucketed":
        grads = in_buckets(passes.derived, grads, stacked=stacked, bucket_bytes=strategy.bucket_bytes)
    return losses, grads


def _over_microbatches(
    passes: Passes, params: Params, inputs: Inputs, dloss: Losses, *, count: int, overlapped: bool
) -> LossAndGradients:
    """Runs ``count`` microbatches in sequence and sums losses and gradients; with ``overlapped`` the last microbatch
    adds the sum of the earlier microbatches layer by layer."""
    gradients_of = partial(microbatch_gradients, passes, dloss=dloss)
    last_gradients_of = partial(gradients_of, overlapped=overlapped)
    if count == 1:  # no loop, so no separate float32 sum
        return last_gradients_of(params, inputs)
    microbatches = {n: a.reshape(count, a.shape[0] // count, *a.shape[1:]) for n, a in inputs.items()}

    def body(carry: LossAndGradients, microbatch: Inputs) -> tuple[LossAndGradients, None]:
        # Ties the weights to the microbatch: otherwise XLA hoists some gathers out of the loop, not all.
        losses, grads = gradients_of(*lax.optimization_barrier((params, microbatch)))
        return jax.tree.map(jnp.add, carry, (losses, barrier(grads))), None

    grad_shapes = jax.eval_shape(lambda part: gradients_of(params, part)[1], jax.tree.map(lambda a: a[0], microbatches))
    zero_grads = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), grad_shapes)
    start_carry = {name: jnp.zeros(()) for name in dloss}, zero_grads
    if not overlapped:
        return lax.scan(body, start_carry, microbatches)[0]
    (earlier_losses, grads), _ = lax.scan(body, start_carry, jax.tree.map(lambda a: a[:-1], microbatches))
    last_operands = (params, jax.tree.map(lambda a: a[-1], microbatches), grads)

    def run(given: Tree, *_: Tree) -> LossAndGradients:  # zeros are replaced, not added to
        return last_gradients_of(*given[:2], earlier=given[2])

    # The last microbatch starts after the gradients exist. Compilers unroll a loop over one microbatch before the last,
    # and drop barriers before they schedule instructions. They would then allocate the last microbatch's activations
    # while those of the previous one are still live. No compiler unrolls this loop.
    false = never(list(grads.values()))  # constant zeros would be allocated from the start
    empty_results = jax.tree.map(lambda s: jnp.full(s.shape, false, s.dtype), jax.eval_shape(run, last_operands))
    losses, grads = at_most_once(1 - false.astype(jnp.int32), run, last_operands, *empty_results)
    return summed(earlier_losses, losses), grads


def barrier(grads: Tree) -> Tree:
    """Returns the gradients behind an optimization barrier.

    Without it libtpu tries to move a sum that follows an all-reduce out of the loop, and fails (RET_CHECK in
    while_loop_all_reduce_code_motion, 0.0.42).
    """
    return lax.optimization_barrier(grads)


def at_most_once(runs: Array, body: Callable[..., tuple[Tree, ...]], given: Tree, *values: Tree) -> tuple[Tree, ...]:
    """Returns ``body(given, *values)`` if ``runs``, else ``values``, by a loop of one iteration or none."""

    def once(number: Array, values: tuple[Tree, ...]) -> tuple[Tree, ...]:
        # Depends on the iteration: XLA moves loop invariants out of the loop, where they run in every tick.
        return body(lax.optimization_barrier((given, number))[0], *values)

    with jax.named_scope(AT_MOST_ONCE):  # `hlo` counts the products of this scope once
        return lax.fori_loop(0, runs.astype(jnp.int32), once, values)  # GPUs copy buffers of `lax.cond`


def once_per_step(derived: Derived, grads: Params, *, stacked: frozenset[str]) -> Params:
    """Applies the derived steps of scope "step" to gradients: sums over replicas, shards for the optimizer."""
    steps_by_name = step_steps(derived)
    end_of = {step.result.name.removeprefix("d"): step for step in derived.ends}  # weights on all stages of a pipeline
    reduced_grads = {
        n: apply_collectives(steps_by_name.get(n, ()), grad, leading=int(n in stacked)) for n, grad in grads.items()
    }
    return {n: apply_collectives([end_of[n]], grad) if n in end_of else grad for n, grad in reduced_grads.items()}


def in_buckets(derived: Derived, grads: Params, *, stacked: frozenset[str], bucket_bytes: int) -> Params:
    """Like `once_per_step`, but gradients that need only an all-reduce share buckets of up to ``bucket_bytes``."""
    steps_by_name = step_steps(derived)
    names_by_axes: dict[tuple[str, ...], list[str]] = {}
    for name in grads:
        if [step.op for step in steps_by_name.get(name, ())] == ["all_reduce"]:
            names_by_axes.setdefault(steps_by_name[name][0].axes, []).append(name)
    bucketed_names = {name for names in names_by_axes.values() for name in names}
    reduced_grads = once_per_step(derived, {n: g for n, g in grads.items() if n not in bucketed_names}, stacked=stacked)
    for names in names_by_axes.values():
        name_buckets, room_bytes = [list[str]()], bucket_bytes
        for name in names:  # in order; a new bucket starts if the next array does not fit
            num_bytes = grads[name].size * grads[name].dtype.itemsize
            if name_buckets[-1] and num_bytes > room_bytes:
                name_buckets, room_bytes = [*name_buckets, []], bucket_bytes
            name_buckets[-1].append(name)
            room_bytes -= num_bytes
        for bucket in name_buckets:
            flat, unflatten = ravel_pytree([grads[name] for name in bucket])
            reduced_grads |= zip(bucket, unflatten(apply_collectives(steps_by_name[bucket[0]], flat)), strict=True)
    return reduced_grads


def squared_norm(
    shards: Mapping[str, ShardedArray], grads: Params, mesh: Mapping[str, int], *, stacked: frozenset[str]
) -> Array:
    """Returns this device's share of the squared gradient norm: each shard's sum of squares / its number of replicas.

    ``stacked`` weights (of layers) are not replicated over the pipeline.
    """
    squared_total = jnp.zeros((), jnp.float32)
    for name, grad in grads.items():
        split_axes = {*shards[name].spread, *(("pipeline",) if name in stacked else ())}
        num_copies = math.prod(axis_size for axis, axis_size in mesh.items() if axis not in split_axes)
        squared_total += jnp.sum(jnp.square(grad.astype(jnp.float32))) / num_copies
    return squared_total
