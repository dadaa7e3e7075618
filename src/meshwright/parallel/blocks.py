"""Runs one block of a program forward and backward.

If a schedule splits the backward pass, its first part runs the derived steps that the stream's cotangent needs, its
second part all other steps (weight gradients). The first part passes operands to the second, gathered activations
included, so that no collective runs twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.pipeline import SplitBackward
from meshwright.algebra.rewrites.split_backward import (
    cotangent_of,
    counts_of,
    gradient_arrays,
    once_per_layer,
    trained_of,
    weights_of,
)
from meshwright.algebra.steps import Step
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.collectives import as_stored, communicate
from meshwright.nn.context import Context
from meshwright.nn.interpreter import Environment, run
from meshwright.nn.order import after
from meshwright.nn.weights import Params
from meshwright.parallel.held import Tree

Inputs = dict[str, Array]
"""Inputs of a microbatch's blocks by name: tokens, labels, positions, documents, results of earlier stacks, and
results that earlier layers share with later ones."""

Saved = tuple[Array, ...]
"""Forward results saved for the backward pass, in the order of the derivation."""

Ready = tuple[Array, ...]
"""The gathered weights of a block, in the order of `BlockPasses.gathers`."""


LayerIndex = int | Array
"""Index of an iteration of a loop over layers."""


class Cotangents(NamedTuple):
    """The cotangent of the stream (None before the first block), and the cotangents, summed over layers, of other
    results that later layers read."""

    stream: Any
    further: Inputs


def presence_of(block_name: str) -> str:
    """Returns the name of the scalar that is 0 in a padding layer, which must not change the stream, else 1.
    Only layers that norm or scale the stream need it; zero weights make any other padding layer add nothing."""
    return f"{block_name}_presence"


@dataclass(frozen=True)
class BlockPasses:
    """The forward and backward passes of a block under one derivation. Arrays are one device's shards."""

    context: Context
    steps: BlockSteps

    @property
    def derived(self) -> Derived:
        return self.context.derived

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights and buffers that the block uses."""
        return weights_of(self.derived, self.steps)

    @cached_property
    def result(self) -> str:
        """The name of the block's result: the stream or the loss."""
        return self.steps.block.result or self.steps.block.ops[-1].out

    @cached_property
    def entering(self) -> str:
        """The name of the stream that enters the block; "" for the first block."""
        stacks, block_name = self.derived.program.stacks, self.steps.block.name
        return next((stack.carry for stack in stacks if block_name in (*stack.layers, stack.last)), "")

    @cached_property
    def further(self) -> tuple[str, ...]:
        """Names of the results of earlier stacks and layers that the block reads, and of results that it shares."""
        return (*self.derived.program.shared_inputs(self.steps.block.name), *self.steps.block.shares)

    @cached_property
    def counts(self) -> dict[str, ShardedArray]:
        """The arrays of the router's counts, which the backward pass returns with the gradients; see `counts_of`."""
        return counts_of(self.steps)

    @cached_property
    def presence(self) -> str:
        """The name of the scalar that is 0 in padding layers, see `presence_of`."""
        return presence_of(self.steps.block.name)

    @cached_property
    def computes_again(self) -> bool:
        """True if the backward pass recomputes activations (remat)."""
        return any(step.phase == "recompute" for step in self.steps.backward)

    @cached_property
    def gathers(self) -> tuple[Step, ...]:
        """Forward steps that only gather weights, and so can run before the stream arrives."""
        return tuple(step for step in self.steps.forward if step.result.name in self.weights)

    def gather(self, weights: Mapping[str, Array]) -> Ready:
        """Returns the results of `gathers`."""
        env = run(self.context, self.gathers, {self.derived.declared[name]: weights[name] for name in self.weights})
        return tuple(env[step.result] for step in self.gathers)

    def _environment(self, weights: Mapping[str, Array], inputs: Inputs) -> Environment:
        declared_arrays = self.derived.declared
        array_of = declared_arrays | {name: shared_result.given for name, shared_result in self.derived.shared.items()}
        env = {declared_arrays[name]: weights[name] for name in self.weights}
        return env | {array_of[name]: array for name, array in inputs.items() if name in declared_arrays}

    def _run(self, steps: Sequence[Step], env: Environment, ready: Ready | None) -> Environment:
        """Runs the steps, except those whose results are ``ready``."""
        ready_results = {} if ready is None else dict(zip((step.result for step in self.gathers), ready, strict=True))
        return run(self.context, [step for step in steps if step.result not in ready_results], env | ready_results)

    def moved(self, saved: Saved, space: Any) -> Saved:
        """Moves the saved activations of a layer to host memory or back, where the strategy offloads them."""
        if not (self.context.offload and self.steps.block.carry):
            return saved
        return tuple(jax.device_put(array, space) for array in saved)

    def forward(
        self, weights: Params, inputs: Inputs, stream: Array | None, *, ready: Ready | None = None, again: bool = False
    ) -> tuple[Array, Saved]:
        """Returns the block's result and saved activations. ``ready``: gathered weights; ``again``: recompute."""
        result, saved, _ = self.forward_shared(weights, inputs, stream, ready=ready, again=again)
        return result, saved

    def forward_shared(
        self, weights: Params, inputs: Inputs, stream: Array | None, *, ready: Ready | None = None, again: bool = False
    ) -> tuple[Array, Saved, Inputs]:
        """Like `forward`, and also returns the results that the block shares with later layers."""
        env = self._environment(weights, inputs)
        if stream is not None:
            env[self.derived.declared[self.entering]] = stream
        steps = self.steps.backward[: self.steps.num_again] if again else self.steps.forward
        env = self._run(steps, env, ready)
        shares = {name: env[self.derived.shared[name].given] for name in self.steps.block.shares if not again}
        saved = tuple(env[array] for array in self.steps.kept)
        if _has_one_layout():
            saved = jax.tree.map(as_stored, saved)
        result = env[self.steps.forward[-1].result]
        if stream is not None and self.presence in weights:
            result = jnp.where(weights[self.presence] > 0, result, stream)
        # recomputed activations are used at once
        saved = saved if again else self.moved(saved, jax.memory.Space.Host)
        return result, saved, shares

    def backward(
        self,
        weights: Params,
        inputs: Inputs,
        saved: Saved,
        cotangents: Cotangents,
        *,
        ready: Ready | None = None,
        split: bool = False,
    ) -> tuple[Cotangents, Tree]:
        """Returns the cotangents of the block's inputs and its weight gradients; with ``split``, the operands of
        `weight_backward` instead of the gradients."""
        steps, shared = self.steps, self.derived.shared
        env = self._environment(weights, inputs)
        saved = self.moved(saved, jax.memory.Space.Device)
        if self.computes_again and self.steps.block.carry:
            # else compilers recompute several layers before the first runs backward, or keep recomputed results
            saved = after(saved, [cotangents.stream])
        env |= zip(steps.kept, jax.tree.map(as_stored, saved) if _has_one_layout() else saved, strict=True)
        dresult = shared[self.result].cotangent if self.result in shared else cotangent_of(self.derived, self.result)
        dfurther = {name: shared[name].cotangent for name in self.further}
        env |= {dresult: cotangents.stream} | {array: cotangents.further[name] for name, array in dfurther.items()}
        env = self._run(self._backward_at(self._split.inputs) if split else once_per_layer(steps), env, ready)
        dstream = env[cotangent_of(self.derived, self.entering)] if self.entering else None
        if dstream is not None and self.presence in weights:
            dstream = jnp.where(weights[self.presence] > 0, dstream, cotangents.stream)
        grads_or_operands = tuple(env[array] for array in self.handed) if split else self._gradients(env)
        dfurther_values = {name: env[array] for name, array in dfurther.items()}
        return Cotangents(dstream, {**cotangents.further, **dfurther_values}), grads_or_operands

    def _gradients(self, env: Environment) -> Params:
        """Returns the gradients in ``env`` by weight name, and the router's `counts`, summed like gradients."""
        array_by_name = gradient_arrays(self.derived)
        gradients = {name: env[array_by_name[name]] for name in trained_of(self.derived, self.steps)}
        return gradients | {name: env[array] for name, array in self.counts.items()}

    # -- the backward pass in two parts -------------------------------------------------------------

    @property
    def _split(self) -> SplitBackward:
        assert self.steps.split is not None
        return self.steps.split

    def _backward_at(self, step_indices: Sequence[int]) -> tuple[Step, ...]:
        """Returns the backward steps of these indices, except recomputation, which `SegmentLoop` runs."""
        return tuple(self.steps.backward[index] for index in step_indices if index >= self.steps.num_again)

    @property
    def handed(self) -> tuple[ShardedArray, ...]:
        """Operands of `weight_backward` that the first part computes, and the router's counts."""
        count_arrays = (array for array in self.counts.values() if array not in self._split.handed)
        return (*self._split.handed, *count_arrays)

    def weight_backward(self, weights: Params, inputs: Inputs, handed: Sequence[Array]) -> Params:
        """Returns the gradients, from the operands that `backward` returned with ``split``."""
        env = self._environment(weights, inputs) | dict(zip(self.handed, handed, strict=True))
        return self._gradients(self._run(self._backward_at(self._split.weights), env, None))


def _has_one_layout() -> bool:
    """True on GPUs, where saved activations are forced into the layout of stored arrays.

    GPUs would otherwise transpose the activations of all layers if the two passes use different layouts. On TPUs the
    compiler's layout serves both passes and pads fewer rows.
    """
    return default_platform() in ("cuda", "rocm")


def apply_collectives(steps: Sequence[Step], value: Array, *, leading: int = 0) -> Array:
    """Applies collectives and slices in order; ``leading`` dims of ``value`` precede the dims of the steps."""
    for step in steps:
        value = communicate(step, value, leading=leading)
    return value


PIECES = 8
"""Number of pieces in which an updated matrix outside the layers is gathered."""


def moved_in_pieces(
    moves: Mapping[str, Sequence[Step]], shards: Params, into: Params, *, stacked: frozenset[str]
) -> Params:
    """Applies collectives to shards of weights and writes the results ``into`` the old weights: ``stacked`` weights one
    layer at a time, others in `PIECES`. At once, GPUs would hold a second copy of all weights in the gather's layout,
    and libtpu would copy the old weights; a piece's layout does not spread to the whole weight.
    """
    moved_params = {name: shard for name, shard in shards.items() if not moves[name]}
    cut_by_name = {
        name: (0, shards[name].shape[0]) if name in stacked else cut(shards[name].shape, into[name].shape)
        for name in shards
        if name not in moved_params
    }
    for count in {count for _, count in cut_by_name.values()}:
        dim_by_name = {name: dim for name, (dim, num_pieces) in cut_by_name.items() if num_pieces == count}

        def one_piece(number: Array, whole: Params, dim_of: dict[str, int] = dim_by_name, count: int = count) -> Params:
            for name, dim in dim_of.items():
                piece_len = shards[name].shape[dim] // count
                piece = lax.dynamic_slice_in_dim(shards[name], number * piece_len, piece_len, dim)
                part = as_stored(apply_collectives(moves[name], piece, leading=int(name in stacked)))
                whole |= {name: as_stored(lax.dynamic_update_slice_in_dim(whole[name], part, number * piece_len, dim))}
            return whole  # stored layout: else GPUs keep transposed copies of the weights

        moved_params |= lax.fori_loop(0, count, one_piece, {name: as_stored(into[name]) for name in dim_by_name})
    return {name: moved_params[name] for name in shards}


def cut(shard: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """Returns a dim of equal size in both shapes that `PIECES` divides, and `PIECES`; (0, 1) if there is none."""
    dims = list(zip(shard, whole, strict=True))
    return next(((dim, PIECES) for dim, (part, full) in enumerate(dims) if part == full and part % PIECES == 0), (0, 1))
