"""One block of a program run forward and backward: what is held between the passes, and the gradients that come out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.split_backward import (
    cotangent_of,
    counts_of,
    gradient_arrays,
    once_per_layer,
    weights_of,
)
from meshwright.algebra.steps import Step
from meshwright.nn.collectives import communicate
from meshwright.nn.context import Context
from meshwright.nn.interpreter import Environment, run
from meshwright.nn.weights import Params

Inputs = dict[str, jax.Array]
"""What a job gives to the blocks of a microbatch by name: tokens, labels, positions, documents; and what earlier stacks
have ended in, for the layers that read it."""

Held = tuple[jax.Array, ...]
"""The forward results that a backward pass is given, in the order of the derivation."""

Ready = tuple[jax.Array, ...]
"""Weights of a block gathered ahead, in the order of `BlockPasses.gathers`."""


class Cotangents(NamedTuple):
    """The cotangent of the stream, and of what layers read of earlier stacks by name, summed over layers so far."""

    stream: jax.Array
    further: Inputs


@dataclass(frozen=True)
class BlockPasses:
    """A block under one derivation. Streams and gradients are one device's blocks."""

    context: Context
    steps: BlockSteps

    @property
    def derived(self) -> Derived:
        return self.context.derived

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that the block uses."""
        return weights_of(self.derived, self.steps)

    @cached_property
    def result(self) -> str:
        """What the block makes: the stream, or the loss."""
        return self.steps.block.result or self.steps.block.ops[-1].out

    @cached_property
    def entering(self) -> str:
        """The stream that the block is given; "" for the first block."""
        made = {op.out for op in self.steps.block.ops}
        used = {name for op in self.steps.block.ops for name in op.inputs} - made
        streams = [n for n in used if self.derived.program.variables[n].role == "activation"]
        return next((name for name in streams if name not in self.further), "")

    @cached_property
    def further(self) -> tuple[str, ...]:
        """What the block reads of earlier stacks."""
        return self.derived.program.further(self.steps.block.name)

    @cached_property
    def counts(self) -> dict[str, ShardedArray]:
        """What the backward pass knows of the router besides gradients: see `counts_of`."""
        return counts_of(self.steps)

    @cached_property
    def gathers(self) -> tuple[Step, ...]:
        """Forward steps that only move weights: what can be done before the stream arrives."""
        return tuple(s for s in self.steps.forward if s.result.name in self.weights)

    def gather(self, weights: Mapping[str, jax.Array]) -> Ready:
        """The weights as the block's products want them."""
        env = run(self.context, self.gathers, {self.derived.declared[n]: weights[n] for n in self.weights})
        return tuple(env[step.result] for step in self.gathers)

    def _environment(self, weights: Mapping[str, jax.Array], inputs: Inputs, ready: Ready | None = None) -> Environment:
        declared = self.derived.declared
        env = {declared[name]: weights[name] for name in self.weights}
        given = declared | {name: shared.given for name, shared in self.derived.shared.items()}
        env |= {given[name]: value for name, value in inputs.items() if name in declared}
        if ready is not None:
            env |= {step.result: value for step, value in zip(self.gathers, ready, strict=True)}
        return env

    def _left(self, steps: Sequence[Step], ready: Ready | None) -> tuple[Step, ...]:
        """The steps without what is ready."""
        there = {step.result for step in self.gathers} if ready is not None else set()
        return tuple(step for step in steps if step.result not in there)

    def forward(
        self, weights: Params, inputs: Inputs, stream: jax.Array | None, *, ready: Ready | None = None
    ) -> tuple[jax.Array, Held]:
        """The block's result, and what its backward pass will be given."""
        env = self._environment(weights, inputs, ready)
        if stream is not None:
            env[self.derived.declared[self.entering]] = stream
        env = run(self.context, self._left(self.steps.forward, ready), env)
        held = tuple(env[array] for array in self.steps.kept)
        return env[self.steps.forward[-1].result], self._moved(held, jax.memory.Space.Host)

    def _moved(self, held: Held, space: Any) -> Held:
        """What a layer holds, brought to host memory or back where the strategy says so."""
        if not (self.context.offload and self.steps.block.carry):
            return held
        return tuple(jax.device_put(array, space) for array in held)

    def recalled(self, held: Held) -> Environment:
        """What the forward pass has held, where the backward pass can use it."""
        return dict(zip(self.steps.kept, self._moved(held, jax.memory.Space.Device), strict=True))

    @cached_property
    def backward_steps(self) -> tuple[Step, ...]:
        """What runs once per layer and microbatch: sums over the step wait, a segment's second run is the loop's."""
        return once_per_layer(self.steps)

    def backward(
        self, weights: Params, inputs: Inputs, held: Held, cotangent: jax.Array, *, ready: Ready | None = None
    ) -> tuple[jax.Array | None, Params]:
        """Cotangent of the entering stream (None for the first block), and gradients as `gradient_arrays` says; among
        them `counts`, which add up over microbatches as gradients do."""
        stream, _, grads = self._backward(weights, inputs, held, Cotangents(cotangent, {}), ready)
        return stream, grads

    def layer_backward(
        self, weights: Params, inputs: Inputs, held: Held, cotangents: Cotangents, *, ready: Ready | None = None
    ) -> tuple[Cotangents, Params]:
        """The same of a layer, which adds to the cotangents of what it reads of earlier stacks."""
        stream, further, grads = self._backward(weights, inputs, held, cotangents, ready)
        assert stream is not None
        return Cotangents(stream, further), grads

    def _backward(
        self, weights: Params, inputs: Inputs, held: Held, cotangents: Cotangents, ready: Ready | None
    ) -> tuple[jax.Array | None, Inputs, Params]:
        env = self._environment(weights, inputs, ready) | self.recalled(held)
        shared = self.derived.shared
        whole = shared[self.result].cotangent if self.result in shared else cotangent_of(self.derived, self.result)
        env[whole] = cotangents.stream
        sums = {name: shared[name].cotangent for name in self.further}
        env |= {sums[name]: value for name, value in cotangents.further.items()}
        env = run(self.context, self._left(self.backward_steps, ready), env)
        arrays = gradient_arrays(self.derived)
        grads = {name: env[arrays[name]] for name in self.weights} | {n: env[a] for n, a in self.counts.items()}
        stream = env[cotangent_of(self.derived, self.entering)] if self.entering else None
        return stream, {name: env[array] for name, array in sums.items()}, grads


def through(steps: Sequence[Step], value: jax.Array, *, leading: int = 0) -> jax.Array:
    """A value after collectives and slices, one after the other."""
    for step in steps:
        value = communicate(step, value, leading=leading)
    return value
