"""Runs a microbatch forward and backward through a stack: first block, loops over layers, last block.

JAX differentiates nothing here: the backward pass runs the derived backward steps on saved activations.
A loop over a span of layers has five forms. `LayerLoop` saves the activations of every iteration. `SegmentLoop` saves
only the stream that enters a segment, and recomputes its layers in the backward pass; `RerunLoop` recomputes them for
each layer of the segment. `AheadLoop` gathers the weights of the next iteration while one computes, and keeps the last
iteration's for its backward pass, which runs first. `SourceLoop` runs one layer that shares keys and values with
later ones.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.derived import Derived
from meshwright.algebra.program import Stack
from meshwright.algebra.rewrites.split_backward import step_steps
from meshwright.algebra.transformer import MAX_WRITTEN_OUT, Span, spans
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.collectives import as_stored
from meshwright.nn.context import Context
from meshwright.nn.order import after, zeros_after
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import BlockPasses, Cotangents, Inputs, LayerIndex, Ready, Saved, apply_collectives
from meshwright.parallel.held import Tree

IterationParams = tuple[Params, ...]
"""Weights or gradients of one iteration of a loop: a dict for each layer of the iteration."""

LayerWeights = Callable[[LayerIndex], Tree]
"""Function of an iteration's index to its weights, or to gradients of earlier microbatches. It slices the arrays of all
layers at the point of use: a loop over a slice of them would need a copy."""

Carry = tuple[Cotangents, Params]
"""The carry of backward loops: cotangents, and gradients of all layers, stacked like the weights. Each iteration writes
the rows of its layers: gradients stacked by iteration would have to be copied into layer order."""


@dataclass(frozen=True, kw_only=True)
class LayerLoop:
    """Runs all iterations of a span and saves the activations of each, with iterations as the first dim.

    The compiled loop has ``unroll`` iterations in its body. ``finish`` maps (gradients of a layer, its gradients of
    earlier microbatches or None) to the gradients that the loop returns. With ``split``, `backward` writes no gradients
    and returns the operands of `weight_backward` with the carry.
    """

    span: Span
    blocks: Mapping[str, BlockPasses]
    inputs: Inputs
    finish: Callable[[Params, Params | None], Params] | None = None
    split: bool = False
    unroll: int = 1

    def gather(self, weights: IterationParams) -> tuple[Ready, ...]:
        """Returns the gathered weights of one iteration."""
        return tuple(self.blocks[kind].gather(params) for kind, params in zip(self.span.pattern, weights, strict=True))

    def iteration(
        self, weights: IterationParams, stream: Array, ready: tuple[Ready, ...] | None = None, *, again: bool = False
    ) -> tuple[Array, tuple[Tree, ...]]:
        """Returns the stream after one iteration, and its saved activations; ``again``: a recomputation."""
        saved_layers = []
        for position, kind in enumerate(self.span.pattern):
            params, layer_ready = weights[position], ready[position] if ready else None
            stream, layer_saved = self.blocks[kind].forward(params, self.inputs, stream, ready=layer_ready, again=again)
            saved_layers.append(layer_saved)
        return stream, tuple(saved_layers)

    def iteration_back(
        self,
        number: LayerIndex,
        weights: LayerWeights,
        saved: tuple[Tree, ...],
        cotangent: Cotangents,
        earlier: LayerWeights,
        ready: tuple[Ready, ...] | None = None,
    ) -> tuple[Cotangents, IterationParams]:
        """Returns the cotangents of the inputs of one iteration, and its gradients. Each item of ``saved`` is a layer's
        saved activations, or a function of the cotangents that recomputes them."""
        layer_grads: tuple[Tree, ...] = ()
        for position, kind in reversed(list(enumerate(self.span.pattern))):
            block = self.blocks[kind]
            if layer_grads:
                # else compilers copy the weights of all layers of the iteration at its start
                number = after(jnp.asarray(number), [cotangent.stream])
            params, old_grads, gathered = weights(number)[position], earlier(number), ready[position] if ready else None
            results = saved[position](cotangent) if callable(saved[position]) else saved[position]
            cotangent, grads = block.backward(params, self.inputs, results, cotangent, ready=gathered, split=self.split)
            if not self.split:
                grads = self.finish(grads, old_grads[position] if old_grads else None) if self.finish else grads
                grads = jax.tree.map(as_stored, grads)
            # else compilers keep the operands of several layers' gradients, and reduce these gradients together
            cotangent = cotangent._replace(stream=after(cotangent.stream, jax.tree.leaves(grads)))
            layer_grads = (grads, *layer_grads)
        return cotangent, layer_grads

    @property
    def numbers(self) -> Array:
        """The indices of all iterations."""
        return jnp.arange(self.span.repeats)

    def forward(self, weights: LayerWeights, stream: Array) -> tuple[Array, Tree]:
        """Returns the stream after the span, and the arrays saved for the backward pass."""
        return lax.scan(lambda x, index: self.iteration(weights(index), x), stream, self.numbers, unroll=self.unroll)

    def backward(self, weights: LayerWeights, saved: Tree, carry: Carry, earlier: LayerWeights) -> tuple[Carry, Tree]:
        """Returns the carry after all iterations, and with ``split`` the operands of `weight_backward`."""
        return self.backward_over(self.numbers, weights, saved, carry, earlier)

    def backward_over(
        self, numbers: Array, weights: LayerWeights, saved: Tree, carry: Carry, earlier: LayerWeights
    ) -> tuple[Carry, Tree]:
        """Like `backward`, over the iterations ``numbers`` only, last to first."""

        def back(carry: Carry, index_and_saved: Tree) -> tuple[Carry, Tree]:
            index, iteration_saved = index_and_saved
            return self.carried_back(index, weights, iteration_saved, carry, earlier)

        return lax.scan(back, carry, (numbers, saved), reverse=True, unroll=self.unroll)

    def carried_back(
        self,
        number: LayerIndex,
        weights: LayerWeights,
        saved: tuple[Tree, ...],
        carry: Carry,
        earlier: LayerWeights,
        ready: tuple[Ready, ...] | None = None,
    ) -> tuple[Carry, Tree]:
        """Returns the carry after one iteration, and with ``split`` the operands of `weight_backward`."""
        cotangent, stacks = carry
        cotangent, grads = self.iteration_back(number, weights, saved, cotangent, earlier, ready)
        return ((cotangent, stacks), grads) if self.split else ((cotangent, self.written(stacks, number, grads)), None)

    def written(self, grads: Params, number: LayerIndex, found: IterationParams) -> Params:
        """Writes the gradients ``found`` of one iteration into the gradients of all layers."""
        for position, updates in enumerate(found):
            row = self.span.row(position, number)
            grads = grads | {n: lax.dynamic_update_index_in_dim(grads[n], grad, row, 0) for n, grad in updates.items()}
        return grads

    def weight_backward(self, weights: LayerWeights, handed: tuple[Tree, ...], grads: Params) -> Params:
        """Writes the span's gradients into ``grads`` of all layers, from the operands that `backward` returned."""

        def iteration(grads: Params, index_and_operands: Tree) -> tuple[Params, None]:
            index, operands = index_and_operands
            return self.written(grads, index, self.weights_back(weights(index), operands)), None

        return lax.scan(iteration, grads, (self.numbers, handed))[0]

    def weights_back(self, weights: IterationParams, handed: tuple[Tree, ...]) -> IterationParams:
        """Returns the gradients of one iteration from the operands that its backward pass returned."""
        layers = zip(self.span.pattern, weights, handed, strict=True)
        return tuple(self.blocks[kind].weight_backward(params, self.inputs, saved) for kind, params, saved in layers)


@dataclass(frozen=True, kw_only=True)
class SegmentLoop(LayerLoop):
    """Saves only the input stream of each segment of up to ``layers`` layers (or 1 iteration); recomputes the rest."""

    layers: int

    def forward(self, weights: LayerWeights, stream: Array) -> tuple[Array, Tree]:
        def segment(stream: Array, numbers: Array) -> tuple[Array, Array]:
            (entry_stream,) = self.blocks[self.span.pattern[0]].moved((stream,), jax.memory.Space.Host)
            return lax.scan(lambda x, n: (self.iteration(weights(n), x)[0], None), stream, numbers)[0], entry_stream

        entries_by_group = []
        for group_numbers in self._cut():
            stream, entries = lax.scan(segment, stream, group_numbers)
            entries_by_group.append(entries)
        return stream, entries_by_group

    def backward(self, weights: LayerWeights, saved: Tree, carry: Carry, earlier: LayerWeights) -> tuple[Carry, Tree]:
        def segment(carry: Carry, numbers_and_entry: Tree) -> tuple[Carry, Tree]:
            numbers, entry_stream = numbers_and_entry
            (stream,) = self.blocks[self.span.pattern[0]].moved((entry_stream,), jax.memory.Space.Device)
            return self.segment_back(numbers, stream, weights, carry, earlier)

        group_operands = list[Tree]()
        for group_inputs in reversed(list(zip(self._cut(), saved, strict=True))):
            carry, operands = lax.scan(segment, carry, group_inputs, reverse=True)
            group_operands.insert(0, jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), operands))
        return carry, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *group_operands)

    def segment_back(
        self, numbers: Array, stream: Array, weights: LayerWeights, carry: Carry, earlier: LayerWeights
    ) -> tuple[Carry, Tree]:
        """Returns the carry after the iterations of a segment, and with ``split`` the operands of `weight_backward`."""

        def again(stream: Array, number: Array) -> tuple[Array, tuple[Tree, ...]]:
            return self.iteration(weights(number), stream, again=True)

        _, saved_stacks = lax.scan(again, after(stream, [carry[0].stream]), numbers)  # else compilers run it early
        return self.backward_over(numbers, weights, saved_stacks, carry, earlier)

    def _cut(self) -> list[Array]:
        """Returns the iteration indices of whole segments, [segments, iterations], and of a shorter last one if any."""
        num_iterations = self.span.iterations(self.layers)
        num_whole = self.span.repeats // num_iterations * num_iterations
        number_groups = self.numbers[:num_whole].reshape(-1, num_iterations), self.numbers[num_whole:].reshape(1, -1)
        return [group for group in number_groups if group.size]


class RerunLoop(SegmentLoop):
    """Recomputes, for each layer's backward pass, all layers of its segment before it, so that only one layer's
    activations exist at a time. The layers of a segment are unrolled, since each has a different number before it.
    """

    def segment_back(
        self, numbers: Array, stream: Array, weights: LayerWeights, carry: Carry, earlier: LayerWeights
    ) -> tuple[Carry, Tree]:
        def again(stream: Array, number: Array) -> tuple[Array, None]:
            return self.iteration(weights(number), stream, again=True)[0], None

        def kept(offset: int, position: int, cotangents: Cotangents) -> Saved:
            x, iteration_numbers = after((stream, numbers), [cotangents.stream])  # else all layers rerun at once
            if offset:
                x, _ = lax.scan(again, x, iteration_numbers[:offset])
            for kind, params in zip(self.span.pattern[:position], weights(iteration_numbers[offset]), strict=False):
                x, _ = self.blocks[kind].forward(params, self.inputs, x, again=True)
            return tuple(x for _ in self.blocks[self.span.pattern[position]].steps.kept)

        iteration_operands = list[Tree]()
        for index in reversed(range(len(numbers))):
            saved_functions = tuple(partial(kept, index, position) for position in range(len(self.span.pattern)))
            # else one gather of a layer's weights serves several reruns, and its result is kept between them
            iteration_number = after(numbers[index], [carry[0].stream])
            carry, operands = self.carried_back(iteration_number, weights, saved_functions, carry, earlier)
            iteration_operands.insert(0, operands)
        return carry, jax.tree.map(lambda *arrays: jnp.stack(arrays), *iteration_operands)


class AheadLoop(LayerLoop):
    """Gathers weights one iteration ahead, and keeps the last iteration's until its backward pass."""

    def forward(self, weights: LayerWeights, stream: Array) -> tuple[Array, Tree]:
        def iteration(carry: Tree, number: Array) -> tuple[Tree, Tree]:
            stream, gathered = carry
            next_gathered = self.gather(weights(number + 1))
            stream, activations = self.iteration(weights(number), stream, gathered)
            return (stream, next_gathered), activations

        (stream, gathered), saved_stacks = lax.scan(iteration, (stream, self.gather(weights(0))), self.numbers[:-1])
        stream, last_saved = self.iteration(weights(self.span.repeats - 1), stream, gathered)
        return stream, (saved_stacks, last_saved, gathered)

    def backward(self, weights: LayerWeights, saved: Tree, carry: Carry, earlier: LayerWeights) -> tuple[Carry, Tree]:
        def back(carry_and_gathered: Tree, index_and_saved: Tree) -> tuple[Tree, Tree]:
            carry, gathered = carry_and_gathered
            index, iteration_saved = index_and_saved
            next_gathered = self.gather(weights(index - 1))
            carry, operands = self.carried_back(index, weights, iteration_saved, carry, earlier, gathered)
            return (carry, next_gathered), operands

        (earlier_saved, last_saved, gathered), num_iterations = saved, self.span.repeats
        next_gathered = self.gather(weights(num_iterations - 2)) if num_iterations > 1 else gathered
        carry, last_operands = self.carried_back(num_iterations - 1, weights, last_saved, carry, earlier, gathered)
        operands = [_at(last_operands, None)]
        if num_iterations > 2:
            mid_inputs = self.numbers[1:-1], _at(earlier_saved, slice(1, None))
            (carry, next_gathered), mid_operands = lax.scan(back, (carry, next_gathered), mid_inputs, reverse=True)
            operands = [mid_operands, *operands]
        if num_iterations > 1:
            carry, first_operands = self.carried_back(0, weights, _at(earlier_saved, 0), carry, earlier, next_gathered)
            operands = [_at(first_operands, None), *operands]
        return carry, jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *operands)


@dataclass(frozen=True, kw_only=True)
class SourceLoop(LayerLoop):
    """Runs one layer that shares results with later layers, and saves the shared results. ``reruns`` saves the layer's
    input stream instead of its activations; ``ahead`` saves its gathered weights too."""

    reruns: bool = False
    ahead: bool = False

    def forward(self, weights: LayerWeights, stream: Array) -> tuple[Array, Tree]:
        (params,), block = weights(0), self.blocks[self.span.pattern[0]]
        ready = block.gather(params) if self.ahead else None
        result, saved, shares = block.forward_shared(params, self.inputs, stream, ready=ready)
        return result, (shares, block.moved((stream,), jax.memory.Space.Host) if self.reruns else saved, ready)

    def backward(self, weights: LayerWeights, saved: Tree, carry: Carry, earlier: LayerWeights) -> tuple[Carry, Tree]:
        _, layer_saved, ready = saved
        if self.reruns:
            layer_saved = partial(self._again, weights, layer_saved)
        gathered = None if ready is None else (ready,)
        carry, operands = self.carried_back(0, weights, (layer_saved,), carry, earlier, gathered)
        return carry, _at(operands, None)

    def _again(self, weights: LayerWeights, entry: tuple[Array, ...], cotangents: Cotangents) -> Saved:
        block = self.blocks[self.span.pattern[0]]
        (stream,) = after(block.moved(entry, jax.memory.Space.Device), [cotangents.stream])
        if block.steps.rerun is not None:  # the backward pass recomputes all that it needs
            return tuple(stream for _ in block.steps.kept)
        return block.forward(weights(0)[0], self.inputs, stream, again=True)[1]


def _at(tree: Tree, index: int | slice | None) -> Tree:
    """Indexes the first dim of every array: one iteration, a slice, or None, which adds a dim of size 1."""
    return jax.tree.map(lambda a: a[index], tree)


@dataclass(frozen=True)
class Passes:
    """The forward and backward pass of one derivation through the layers of a stack, or of a pipeline stage.

    ``names`` are the blocks of the layers in order (None: all layers of the stack). With ``ahead`` the weights of the
    next iteration are gathered while one computes. ``number`` is the index of the stack.
    """

    context: Context
    names: tuple[str, ...] | None = None
    ahead: bool = False
    number: int = -1

    @property
    def derived(self) -> Derived:
        return self.context.derived

    @cached_property
    def _blocks(self) -> dict[str, BlockPasses]:
        return {steps.block.name: BlockPasses(self.context, steps) for steps in self.derived.blocks}

    @property
    def stack(self) -> Stack:
        """The stack that these passes run."""
        return self.derived.program.stacks[self.number]

    @cached_property
    def stacks(self) -> tuple["Passes", ...]:
        """The passes of every stack of the program, in order."""
        return tuple(replace(self, number=stack_index) for stack_index in range(len(self.derived.program.stacks)))

    @property
    def embed(self) -> BlockPasses:
        """The first block, from tokens to the stream. Only a stack with ``first`` has one."""
        return self._blocks[self.stack.first]

    @property
    def head(self) -> BlockPasses:
        """The last block, from the stream to the loss, or to the result that later stacks read."""
        return self._blocks[self.stack.last]

    @property
    def ends(self) -> tuple[BlockPasses, ...]:
        """The first block, if the stack has one, and the last."""
        return (self.embed, self.head) if self.stack.first else (self.head,)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the layers; each runs as one loop."""
        return spans(self.names if self.names is not None else self.stack.layers)

    def _loop(self, span: Span, inputs: Inputs, **choices: Any) -> LayerLoop:
        """Returns the loop over a span. A segment "sqrt" has about sqrt(L) of a device's L layers."""
        loop_options: dict[str, Any] = {"span": span, "blocks": self._blocks, "inputs": inputs, **choices}
        segment, rerun = next((steps.segment, steps.rerun) for steps in self.derived.blocks if steps.block.carry)
        if any(self._blocks[kind].steps.block.shares for kind in span.pattern):
            return SourceLoop(reruns=segment is not None, ahead=self.ahead, **loop_options)
        if segment == "sqrt":
            segment = max(1, round(math.sqrt(sum(span.num_layers for span in self.spans))))
        if segment is not None:
            return (SegmentLoop if rerun is None else RerunLoop)(layers=int(segment), **loop_options)
        if self.ahead:
            return AheadLoop(**loop_options)
        # On one CPU device copies cost compute time, and there are no collectives to count in loops. If layers are
        # recomputed, the compiler merges both computations in an unrolled loop, and a program of ten layers needs four
        # times the memory of the loop.
        has_recompute = any(block.computes_again for block in self._blocks.values())
        is_one_cpu = default_platform() == "cpu" and math.prod(self.context.mesh.values()) == 1
        is_unrolled = is_one_cpu and not has_recompute and span.repeats <= MAX_WRITTEN_OUT
        return LayerLoop(unroll=span.repeats if is_unrolled else 1, **loop_options)

    def layers_forward(self, params: Params, inputs: Inputs, stream: Array) -> tuple[Array, tuple[Tree, ...]]:
        """Returns the stream after all layers, and the activations that each span saves."""
        saved_by_span = []
        for span in self.spans:
            loop = self._loop(span, inputs)
            stream, span_saved = loop.forward(self._iterations(span, params), stream)
            saved_by_span.append(span_saved)
            inputs = inputs | (span_saved[0] if isinstance(loop, SourceLoop) else {})
        return stream, tuple(saved_by_span)

    def layers_backward(
        self,
        params: Params,
        inputs: Inputs,
        saved: Sequence[Tree],
        cotangents: Cotangents,
        *,
        earlier: Params | None = None,
        overlapped: bool = False,
    ) -> tuple[Cotangents, Params]:
        """Returns the cotangents of the first layer's input stream and, summed over layers, of results of earlier
        stacks; and gradients stacked like the weights.

        With ``overlapped`` each layer adds its gradients to the gradients of ``earlier`` microbatches and runs their
        collectives of scope "step" as soon as it has computed them.
        """

        def finished(grads: Params, earlier: Params | None) -> Params:
            steps_by_name = step_steps(self.derived)
            total_grads = grads if earlier is None else jax.tree.map(jnp.add, earlier, grads)
            return {name: apply_collectives(steps_by_name.get(name, ()), grad) for name, grad in total_grads.items()}

        finish = finished if overlapped else None
        loops = zip((self._loop(span, inputs) for span in self.spans), saved, strict=True)
        shares = {n: x for loop, kept in loops if isinstance(loop, SourceLoop) for n, x in kept[0].items()}
        inputs, further = inputs | shares, cotangents.further
        cotangents = Cotangents(cotangents.stream, {**further, **{n: jnp.zeros_like(x) for n, x in shares.items()}})

        def iteration(_: int, loop: LayerLoop) -> IterationParams:  # evaluated for shapes only, by `_zeros`
            weights, earlier_grads = self._iterations(loop.span, params), self._earlier(loop.span, earlier)
            saved_arrays = loop.iteration(weights(0), cotangents.stream)[1]
            return loop.iteration_back(0, weights, saved_arrays, cotangents, earlier_grads)[1]

        zero_grads = self._zeros(inputs, iteration, cotangents.stream, finish=finish)
        carry, _ = self._backward(params, inputs, saved, (cotangents, zero_grads), earlier, finish=finish)
        return Cotangents(carry[0].stream, {name: carry[0].further[name] for name in further}), carry[1]

    def input_backward(
        self, params: Params, inputs: Inputs, saved: Sequence[Tree], cotangents: Cotangents
    ) -> tuple[Cotangents, tuple[Tree, ...]]:
        """Returns the cotangents of the first layer's input stream, and each span's operands of `weight_backward`."""
        (cotangents, _), operands_by_span = self._backward(params, inputs, saved, (cotangents, {}), None, split=True)
        return cotangents, operands_by_span

    def weight_backward(self, params: Params, inputs: Inputs, handed: Sequence[Tree]) -> Params:
        """Returns the gradients, stacked like the weights, from the operands that `input_backward` returned."""

        def iteration(number: int, loop: LayerLoop) -> IterationParams:
            return loop.weights_back(self._iterations(loop.span, params)(0), _at(handed[number], 0))

        grads = self._zeros(inputs, iteration, jax.tree.leaves(handed)[0])
        for span, operands in zip(self.spans, handed, strict=True):
            grads = self._loop(span, inputs).weight_backward(self._iterations(span, params), operands, grads)
        return grads

    def _backward(
        self,
        params: Params,
        inputs: Inputs,
        saved: Sequence[Tree],
        carry: Carry,
        earlier: Params | None,
        **choices: Any,
    ) -> tuple[Carry, tuple[Tree, ...]]:
        """Returns the carry after all layers, and for each span, with ``split``, the operands of `weight_backward`."""
        operands_by_span: tuple[Tree, ...] = ()
        for span, results in reversed(list(zip(self.spans, saved, strict=True))):
            loop = self._loop(span, inputs, **choices)
            carry, handed = loop.backward(self._iterations(span, params), results, carry, self._earlier(span, earlier))
            operands_by_span = (handed, *operands_by_span)
        return carry, operands_by_span

    def _zeros(
        self, inputs: Inputs, iteration: Callable[[int, LayerLoop], IterationParams], array: Array, **choices: Any
    ) -> Params:
        """Returns zeros for the gradients of all layers, created after ``array``. ``iteration`` maps (index of a span,
        its loop) to the gradients of one iteration, for their shapes."""
        num_rows = Counter(kind for span in self.spans for kind in span.pattern * span.repeats)
        zero_grads = Params()  # constants would be allocated early and kept through all layers
        for span_index, span in enumerate(self.spans):
            layer_shapes = jax.eval_shape(partial(iteration, span_index, self._loop(span, inputs, **choices)))
            for kind, structs in zip(span.pattern, layer_shapes, strict=True):
                zero_grads |= {n: zeros_after((num_rows[kind], *g.shape), g.dtype, array) for n, g in structs.items()}
        return zero_grads

    def _earlier(self, span: Span, earlier_grads: Params | None) -> LayerWeights:
        return (lambda number: None) if earlier_grads is None else self._iterations(span, earlier_grads)

    def _iterations(self, span: Span, params: Params) -> LayerWeights:
        """Returns a function of an iteration's index to the weights of its layers, a dict for each layer."""

        def of_layer(position: int, kind: str, number: LayerIndex) -> Params:
            row, block = span.row(position, number), self._blocks[kind]
            names = (name for name in (*block.weights, *block.counts, block.presence) if name in params)
            return {name: as_stored(lax.dynamic_index_in_dim(params[name], row, keepdims=False)) for name in names}

        return lambda iteration_index: tuple(of_layer(i, kind, iteration_index) for i, kind in enumerate(span.pattern))
