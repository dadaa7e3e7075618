"""Runs one block of a program forward and backward.

Where a schedule splits the backward pass, its first part runs the derived steps that the stream's cotangent needs, its
second part all others (weight gradients). The first part hands operands to the second, gathered activations among them,
so that no collective runs twice.
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
"""Inputs of the blocks of a microbatch by name: tokens, labels, positions, documents, results of earlier stacks and
those that earlier layers share."""

Saved = tuple[Array, ...]
"""Forward results that the backward pass reads, in the order of the derivation."""

Ready = tuple[Array, ...]
"""Gathered weights of a block, in the order of `BlockPasses.gathers`."""


LayerIndex = int | Array
"""Number of an iteration of a loop over layers."""


class Cotangents(NamedTuple):
    """Cotangents of the stream (None before the first block) and, summed over layers, of other results that later
    layers read."""

    stream: Any
    further: Inputs


def presence_of(block_name: str) -> str:
    """Returns the name of a number that is 0 in a layer of zeros, which passes its stream on, and else 1. Only layers
    that norm or scale the stream itself are given it: with weights of zeros the others add nothing to it."""
    return f"{block_name}_presence"


@dataclass(frozen=True)
class BlockPasses:
    """The passes of a block under one derivation. Arrays are one device's shards."""

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
        """The result of the block: the stream, or the loss."""
        return self.steps.block.result or self.steps.block.ops[-1].out

    @cached_property
    def entering(self) -> str:
        """The stream that enters the block; "" for the first block."""
        stacks, block_name = self.derived.program.stacks, self.steps.block.name
        return next((stack.carry for stack in stacks if block_name in (*stack.layers, stack.last)), "")

    @cached_property
    def further(self) -> tuple[str, ...]:
        """Results of earlier stacks and layers that the block reads, and those that it shares itself."""
        return (*self.derived.program.shared_inputs(self.steps.block.name), *self.steps.block.shares)

    @cached_property
    def counts(self) -> dict[str, ShardedArray]:
        """The arrays of the router's counts, which the backward pass returns with the gradients; see `counts_of`."""
        return counts_of(self.steps)

    @cached_property
    def presence(self) -> str:
        """The name of the number of `presence_of`."""
        return presence_of(self.steps.block.name)

    @cached_property
    def computes_again(self) -> bool:
        """True if the backward pass computes activations again from those that are saved."""
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
        """Returns the block's result, and the activations that its backward pass reads; ``again`` during that pass."""
        result, saved, _ = self.forward_shared(weights, inputs, stream, ready=ready, again=again)
        return result, saved

    def forward_shared(
        self, weights: Params, inputs: Inputs, stream: Array | None, *, ready: Ready | None = None, again: bool = False
    ) -> tuple[Array, Saved, Inputs]:
        """Returns what `forward` does, and the results that the block shares with later layers."""
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
        # what runs again is used at once
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
        """Returns the cotangents of the block's inputs, and its gradients; with ``split`` the operands of
        `weight_backward` instead of gradients."""
        steps, shared = self.steps, self.derived.shared
        env = self._environment(weights, inputs)
        saved = self.moved(saved, jax.memory.Space.Device)
        if self.computes_again and self.steps.block.carry:
            # else compilers compute several layers again before the first runs backward, or keep what they computed
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
        """Returns the gradients, as `gradient_arrays` has them, and `counts`, which microbatches sum like gradients."""
        array_by_name = gradient_arrays(self.derived)
        gradients = {name: env[array_by_name[name]] for name in trained_of(self.derived, self.steps)}
        return gradients | {name: env[array] for name, array in self.counts.items()}

    # -- the backward pass in two parts -------------------------------------------------------------

    @property
    def _split(self) -> SplitBackward:
        assert self.steps.split is not None
        return self.steps.split

    def _backward_at(self, step_indices: Sequence[int]) -> tuple[Step, ...]:
        """Returns the backward steps of these indices, without recomputation, which `SegmentLoop` runs."""
        return tuple(self.steps.backward[index] for index in step_indices if index >= self.steps.num_again)

    @property
    def handed(self) -> tuple[ShardedArray, ...]:
        """Operands of the second part that the first computes, and the router's counts, which the second returns."""
        count_arrays = (array for array in self.counts.values() if array not in self._split.handed)
        return (*self._split.handed, *count_arrays)

    def weight_backward(self, weights: Params, inputs: Inputs, handed: Sequence[Array]) -> Params:
        """Returns the gradients from what `backward` returned with ``split``."""
        env = self._environment(weights, inputs) | dict(zip(self.handed, handed, strict=True))
        return self._gradients(self._run(self._backward_at(self._split.weights), env, None))


def _has_one_layout() -> bool:
    """True if saved activations keep the layout of stored arrays.

    GPUs would transpose those of all layers where the two passes use them in other layouts. On TPUs one layout serves
    both, in which fewer rows are padded.
    """
    return default_platform() in ("cuda", "rocm")


def apply_collectives(steps: Sequence[Step], value: Array, *, leading: int = 0) -> Array:
    """Returns a value after a sequence of collectives and slices."""
    for step in steps:
        value = communicate(step, value, leading=leading)
    return value


PIECES = 8
"""Parts in which an updated matrix outside the layers is gathered."""


def moved_in_pieces(
    moves: Mapping[str, Sequence[Step]], shards: Params, into: Params, *, stacked: frozenset[str]
) -> Params:
    """Returns shards of weights after their collectives, written ``into`` the old weights by layer or in `PIECES`.

    Gathered at once, GPUs hold all of them beside the weights, once more in the layout of a gather, and libtpu copies
    the old weights. The layout that a piece is gathered into does not reach the whole weight.
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
            return whole  # in the stored layout: else GPUs hold transposed copies of the weights

        moved_params |= lax.fori_loop(0, count, one_piece, {name: as_stored(into[name]) for name in dim_by_name})
    return {name: moved_params[name] for name in shards}


def cut(shard: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """Returns a dim that the collectives from one shape to the other leave alone, and the number of pieces along it."""
    dims = list(zip(shard, whole, strict=True))
    return next(((dim, PIECES) for dim, (part, full) in enumerate(dims) if part == full and part % PIECES == 0), (0, 1))
