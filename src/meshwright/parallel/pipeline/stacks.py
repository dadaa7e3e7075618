"""The passes of one pipeline stage over a program of several stacks (such as encoder and decoder).

A stage runs its layers of every stack, on one stream per stack. Every stage also computes the last block of each stack
but the last, from the stream that arrives. If that stack continues in later stages, the result has no effect, as the
stage's layers of the next stack are then zeros, which add nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.nn.weights import Params
from meshwright.parallel.blocks import Cotangents, Inputs
from meshwright.parallel.gradients import summed
from meshwright.parallel.held import Tree
from meshwright.parallel.passes import Passes

Streams = dict[str, Array]
"""Name of a stack's stream -> the stream, or its cotangent."""


@dataclass(frozen=True)
class StagePasses:
    """The passes of a stage over ``stacks``, each restricted to the stage's layers. The argument ``layers`` has the
    stage's weights, and the weights of `between` with a first dim of 1."""

    stacks: tuple[Passes, ...]

    @cached_property
    def between(self) -> tuple[str, ...]:
        """Names of the weights of the last blocks of all stacks but the last."""
        return tuple(dict.fromkeys(name for stack in self.stacks[:-1] for name in stack.head.weights))

    @cached_property
    def _streams(self) -> tuple[Passes, ...]:
        """The stacks with a stream; other stacks only prepare weights."""
        return tuple(stack for stack in self.stacks if stack.stack.first)

    # -- the ends ----------------------------------------------------------------------------------

    def embed(self, ends: Params, inputs: Inputs) -> Streams:
        """Returns the input streams of the first stage, from the first block of each stack."""
        return {stack.stack.carry: stack.embed.forward(ends, inputs, None)[0] for stack in self._streams}

    def embed_backward(self, ends: Params, inputs: Inputs, dstreams: Streams) -> Params:
        """Returns the gradients of the weights of all first blocks."""

        def of_stack(stack: Passes) -> Params:
            saved_arrays = stack.embed.forward(ends, inputs, None)[1] if stack.embed.steps.kept else ()
            return stack.embed.backward(ends, inputs, saved_arrays, Cotangents(dstreams[stack.stack.carry], {}))[1]

        return summed(*map(of_stack, self._streams))

    def to_head(self, streams: Streams) -> Array:
        """Returns the stream that the loss head reads."""
        return streams[self.stacks[-1].stack.carry]

    def head_forward(self, ends: Params, inputs: Inputs, stream: Array) -> tuple[Array, tuple[Array, ...]]:
        """Returns the summed loss, and the arrays saved for the loss head's backward pass."""
        return self.stacks[-1].head.forward(ends, inputs, stream)

    def head_backward(self, dloss: Array) -> Callable[..., tuple[Streams, Params]]:
        """Returns a function that runs the loss head backward, given the cotangent ``dloss`` of the summed loss."""

        def run(ends: Params, inputs: Inputs, saved: tuple[Array, ...]) -> tuple[Streams, Params]:
            dy, saved = lax.optimization_barrier((dloss, saved))  # else exponentials are kept for both passes
            cotangents, grads = self.stacks[-1].head.backward(ends, inputs, saved, Cotangents(dy, {}))
            others = jax.eval_shape(self.embed, ends, inputs)
            dstreams = {name: jnp.zeros(struct.shape, struct.dtype) for name, struct in others.items()}
            return dstreams | {self.stacks[-1].stack.carry: cotangents.stream}, grads

        return run

    # -- the layers --------------------------------------------------------------------------------

    def forward(self, layers: Params, inputs: Inputs, streams: Streams) -> tuple[Streams, Tree]:
        """Returns the streams after the stage, and the arrays saved for its backward pass."""
        results, streams, saved = dict(inputs), dict(streams), []
        for stack in self.stacks:
            name, layers_saved = stack.stack.carry, ()
            if stack.stack.first:
                streams[name], layers_saved = stack.layers_forward(layers, results, streams[name])
            ended_stream = None if stack is self.stacks[-1] else streams.get(name)
            saved.append((layers_saved, ended_stream))
            if stack is not self.stacks[-1]:
                results[stack.head.result], _ = stack.head.forward(self._of_heads(layers), results, ended_stream)
        return streams, tuple(saved)

    def backward(self, layers: Params, inputs: Inputs, saved: Tree, dstreams: Streams) -> tuple[Streams, Params]:
        """Returns the cotangents of the stage's input streams, and the stage's gradients."""
        dstreams, grads_by_stack, head_grads = self._backward(layers, inputs, saved, dstreams, split=False)
        return dstreams, {name: grad for grads in grads_by_stack for name, grad in grads.items()} | head_grads

    def input_backward(self, layers: Params, inputs: Inputs, saved: Tree, dstreams: Streams) -> tuple[Streams, Tree]:
        """Returns the cotangents of the stage's input streams, and the operands of `weight_backward`."""
        dstreams, operands_by_stack, head_grads = self._backward(layers, inputs, saved, dstreams, split=True)
        return dstreams, (operands_by_stack, head_grads, tuple(ended_stream for _, ended_stream in saved))

    def weight_backward(self, layers: Params, inputs: Inputs, handed: Tree) -> Params:
        """Returns the stage's gradients, from the operands that `input_backward` returned."""
        operands_by_stack, grads, ended_streams = handed
        results, _ = self._results(layers, inputs, ended_streams)
        for stack, operands in zip(self._streams, operands_by_stack, strict=True):
            grads = grads | stack.weight_backward(layers, results, operands)
        return grads

    def _backward(
        self, layers: Params, inputs: Inputs, saved: Tree, dstreams: Streams, *, split: bool
    ) -> tuple[Streams, tuple[Tree, ...], Params]:
        """Returns the cotangents of the streams; for each stack with a stream the gradients of its layers (with
        ``split``, their operands); and the gradients of the weights of `between`."""
        results, saved_by_head = self._results(layers, inputs, [ended_stream for _, ended_stream in saved])
        dstreams, dresults, head_grads, results_by_stack = dict(dstreams), Inputs(), Params(), list[Tree]()
        for stack, (layers_saved, _), head_saved in reversed(list(zip(self.stacks, saved, saved_by_head, strict=True))):
            name = stack.stack.carry
            if stack is not self.stacks[-1]:
                cotangents = Cotangents(dresults.pop(stack.head.result), {})
                cotangents, grads = stack.head.backward(self._of_heads(layers), results, head_saved, cotangents)
                head_grads |= {weight_name: grad[None] for weight_name, grad in grads.items()}
                dstreams |= {name: dstreams[name] + cotangents.stream} if name in dstreams else {}
            if stack.stack.first:
                zeros = {result_name: jnp.zeros_like(results[result_name]) for result_name in stack.stack.inputs}
                run = stack.input_backward if split else stack.layers_backward
                cotangents, layer_results = run(layers, results, layers_saved, Cotangents(dstreams[name], zeros))
                dstreams[name], dresults = cotangents.stream, summed(dresults, cotangents.further)
                results_by_stack.insert(0, layer_results)
        return dstreams, tuple(results_by_stack), head_grads

    def _results(self, layers: Params, inputs: Inputs, ended: Sequence[Array | None]) -> tuple[Inputs, list[Tree]]:
        """Returns the inputs plus the results of all stacks but the last, from their final streams ``ended``, and the
        saved activations of each stack's last block, () for the loss head."""
        results, saved_by_head = dict(inputs), list[Tree]()
        for stack, ended_stream in zip(self.stacks[:-1], ended, strict=False):
            weights = self._of_heads(layers)
            results[stack.head.result], head_saved = stack.head.forward(weights, results, ended_stream)
            saved_by_head.append(head_saved)
        return results, [*saved_by_head, ()]

    def _of_heads(self, layers: Mapping[str, Array]) -> Params:
        return {name: layers[name][0] for name in self.between}
