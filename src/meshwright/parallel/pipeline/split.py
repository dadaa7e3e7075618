"""The backward pass of layers in two parts, for schedules whose weight gradients have a pass of their own.

The first part runs the derived steps that the stream's cotangent needs, the second all the others. What the second
takes from the first is handed on, gathered activations as they are: no collective runs twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.pipeline import SplitBackward
from meshwright.algebra.rewrites.split_backward import cotangent_of, gradient_arrays
from meshwright.algebra.steps import Step
from meshwright.algebra.transformer import Span
from meshwright.nn.interpreter import run
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import BlockPasses, Cotangents, Held, Inputs, Ready
from meshwright.parallel.layer_loops import Turn, TurnPasses
from meshwright.parallel.passes import Passes, _stacked


@dataclass(frozen=True)
class SplitBlock:
    """A block's backward pass as two lists of its derived steps."""

    block: BlockPasses

    @property
    def parts(self) -> SplitBackward:
        """Which steps run in which pass."""
        assert self.block.steps.split is not None
        return self.block.steps.split

    def _steps(self, places: Sequence[int]) -> tuple[Step, ...]:
        """The steps at some places of the backward pass; a segment's second run is the loop's."""
        steps = self.block.steps
        return tuple(steps.backward[place] for place in places if place >= steps.num_again)

    @property
    def handed(self) -> tuple[ShardedArray, ...]:
        """What the second pass is given by the first; the counts of a router go with the gradients that it makes."""
        counts = (array for array in self.block.counts.values() if array not in self.parts.handed)
        return (*self.parts.handed, *counts)

    def input_backward(
        self, weights: Params, inputs: Inputs, held: Held, cotangent: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The cotangent of the entering stream, and what `weight_backward` needs."""
        block = self.block
        env = block._environment(weights, inputs) | block.recalled(held)
        env[cotangent_of(block.derived, block.result)] = cotangent
        env = run(block.context, self._steps(self.parts.inputs), env)
        return env[cotangent_of(block.derived, block.entering)], tuple(env[array] for array in self.handed)

    def weight_backward(self, weights: Params, inputs: Inputs, handed: Sequence[jax.Array]) -> Params:
        """Gradients of the block's weights, and its `counts`, as its whole backward pass leaves them."""
        env = self.block._environment(weights, inputs) | dict(zip(self.handed, handed, strict=True))
        env = run(self.block.context, self._steps(self.parts.weights), env)
        arrays = gradient_arrays(self.block.derived)
        counts = {name: env[array] for name, array in self.block.counts.items()}
        return {name: env[arrays[name]] for name in self.block.weights} | counts


class SplitTurns(TurnPasses):
    """The layers of one turn, whose way back leaves, in place of gradients, what these are made from."""

    def backward(
        self,
        weights: Turn,
        held: tuple[Any, ...],
        cotangent: Cotangents,
        earlier: Turn | None,
        ready: tuple[Ready, ...] | None = None,
    ) -> tuple[Cotangents, Any]:
        handed: list[Any] = []
        for number, kind in reversed(list(enumerate(self.span.pattern))):
            block = SplitBlock(self.blocks[kind])
            stream, found = block.input_backward(weights[number], self.inputs, held[number], cotangent.stream)
            cotangent = Cotangents(stream, {})
            handed.insert(0, found)
        return cotangent, tuple(handed)

    def gradients(self, weights: Turn, handed: tuple[Any, ...]) -> Turn:
        """Of every layer, from what `backward` left."""
        return tuple(
            SplitBlock(self.blocks[kind]).weight_backward(own, self.inputs, given)
            for kind, own, given in zip(self.span.pattern, weights, handed, strict=True)
        )


class SplitPasses(Passes):
    """Passes over layers with a backward pass in two parts."""

    def layers_input_backward(
        self, params: Params, inputs: Inputs, held: Sequence[Any], cotangent: jax.Array
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """The cotangent of what entered the first layer, and what each span hands on."""
        handed: list[Any] = []
        for span, kept in reversed(list(zip(self.spans, held, strict=True))):
            turns = SplitTurns(span, self._blocks, inputs)
            given = Cotangents(cotangent, {})
            (cotangent, _), found = self.loop.backward(turns, self._turns(span, params), kept, given, None)
            handed.insert(0, found)
        return cotangent, tuple(handed)

    def layers_weight_backward(self, params: Params, inputs: Inputs, handed: Sequence[Any]) -> Params:
        """Gradients stacked as the weights are."""
        found = [
            self._span_gradients(span, params, inputs, given) for span, given in zip(self.spans, handed, strict=True)
        ]
        names = dict.fromkeys(name for grads in found for name in grads)
        parts = {name: [grads[name] for grads in found if name in grads] for name in names}
        return {name: each[0] if len(each) == 1 else jnp.concatenate(each) for name, each in parts.items()}

    def _span_gradients(self, span: Span, params: Params, inputs: Inputs, handed: Any) -> Params:
        turns = SplitTurns(span, self._blocks, inputs)
        _, grads = lax.scan(lambda _, given: (None, turns.gradients(*given)), None, (self._turns(span, params), handed))
        return _stacked(grads)
