"""Loops over a span of layers, forward and backward, in three forms.

`LayerLoop` saves the activations of every iteration. `SegmentLoop` saves only the stream that enters a segment, and
runs its layers again in the backward pass. `AheadLoop` gathers the weights of the next iteration while one computes,
and keeps those of the last iteration for its backward pass, which comes first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.transformer import Span
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import BlockPasses, Cotangents, Inputs, Ready

IterationParams = tuple[Params, ...]
"""Weights or gradients of one iteration of a loop: a dict for each of its layers."""

Finish = Callable[[IterationParams, IterationParams | None], IterationParams]
"""(gradients of an iteration, those of earlier microbatches or None) -> gradients that the loop returns."""


@dataclass(frozen=True, kw_only=True)
class LayerLoop:
    """Runs all iterations of a span and saves the activations of each. Iterations are the first dim of every array.

    The compiled loop has ``unroll`` iterations in its body. With ``split``, `backward` returns the operands of
    `weight_backward` instead of gradients.
    """

    span: Span
    blocks: Mapping[str, BlockPasses]
    inputs: Inputs
    finish: Finish | None = None
    split: bool = False
    unroll: int = 1

    def gather(self, weights: IterationParams) -> tuple[Ready, ...]:
        """Returns the gathered weights of one iteration."""
        return tuple(self.blocks[kind].gather(own) for kind, own in zip(self.span.pattern, weights, strict=True))

    def iteration(
        self, weights: IterationParams, stream: jax.Array, ready: tuple[Ready, ...] | None = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Returns the stream after one iteration, and its saved activations."""
        saved = []
        for number, kind in enumerate(self.span.pattern):
            own, at_hand = weights[number], ready[number] if ready else None
            stream, kept = self.blocks[kind].forward(own, self.inputs, stream, ready=at_hand)
            saved.append(kept)
        return stream, tuple(saved)

    def iteration_back(
        self,
        weights: IterationParams,
        saved: tuple[Any, ...],
        cotangent: Cotangents,
        earlier: IterationParams | None,
        ready: tuple[Ready, ...] | None = None,
    ) -> tuple[Cotangents, IterationParams]:
        """Returns the cotangents of the inputs of one iteration, and its gradients."""
        found: tuple[Any, ...] = ()
        for number, kind in reversed(list(enumerate(self.span.pattern))):
            own, at_hand = weights[number], ready[number] if ready else None
            cotangent, left = self.blocks[kind].backward(
                own, self.inputs, saved[number], cotangent, ready=at_hand, split=self.split
            )
            found = (left, *found)
        return cotangent, self.finish(found, earlier) if self.finish else found

    def forward(self, weights: IterationParams, stream: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the stream after the span, and what the backward pass needs."""
        return lax.scan(lambda x, own: self.iteration(own, x), stream, weights, unroll=self.unroll)

    def backward(
        self, weights: IterationParams, saved: Any, cotangent: Cotangents, earlier: IterationParams | None
    ) -> tuple[Cotangents, IterationParams]:
        """Returns the cotangents of the inputs of the span, and its gradients."""

        def back(cotangent: Cotangents, given: Any) -> tuple[Cotangents, IterationParams]:
            own, kept, before = given
            return self.iteration_back(own, kept, cotangent, before)

        return lax.scan(back, cotangent, (weights, saved, earlier), reverse=True, unroll=self.unroll)

    def weight_backward(self, weights: IterationParams, handed: tuple[Any, ...]) -> IterationParams:
        """Returns gradients from what `backward` returned with ``split``."""

        def iteration(_: None, given: Any) -> tuple[None, IterationParams]:
            layers = zip(self.span.pattern, *given, strict=True)
            return None, tuple(self.blocks[kind].weight_backward(own, self.inputs, left) for kind, own, left in layers)

        return lax.scan(iteration, None, (weights, handed))[1]


@dataclass(frozen=True, kw_only=True)
class SegmentLoop(LayerLoop):
    """Saves only the stream that enters each segment of ``layers`` layers."""

    layers: int

    def forward(self, weights: IterationParams, stream: jax.Array) -> tuple[jax.Array, Any]:
        def segment(stream: jax.Array, own: IterationParams) -> tuple[jax.Array, jax.Array]:
            return lax.scan(lambda x, w: (self.iteration(w, x)[0], None), stream, own)[0], stream

        saved = []
        for part in self._cut(weights):
            stream, kept = lax.scan(segment, stream, part)
            saved.append(kept)
        return stream, saved

    def backward(
        self, weights: IterationParams, saved: Any, cotangent: Cotangents, earlier: IterationParams | None
    ) -> tuple[Cotangents, IterationParams]:
        def segment(cotangent: Cotangents, given: Any) -> tuple[Cotangents, IterationParams]:
            own, stream, before = given
            _, kept = LayerLoop.forward(self, own, stream)
            return LayerLoop.backward(self, own, kept, cotangent, before)

        found: list[IterationParams] = []
        for given in reversed(list(zip(self._cut(weights), saved, self._cut(earlier), strict=True))):
            cotangent, grads = lax.scan(segment, cotangent, given, reverse=True)
            found = [jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads), *found]
        return cotangent, jax.tree.map(lambda *grads: jnp.concatenate(grads), *found)

    def _cut(self, weights: IterationParams | None) -> list[Any]:
        """Returns whole segments, [segments, iterations, ...], and a shorter last one for the remainder."""
        iterations = max(1, self.layers // len(self.span.pattern))
        whole = self.span.repeats // iterations
        cuts = [(0, whole, iterations), (whole * iterations, 1, self.span.repeats - whole * iterations)]
        return [
            jax.tree.map(lambda w, a=a, n=n, t=t: w[a : a + n * t].reshape(n, t, *w.shape[1:]), weights)
            for a, n, t in cuts
            if n * t
        ]


class AheadLoop(LayerLoop):
    """Gathers weights one iteration ahead, and keeps those of the last iteration until its backward pass."""

    def forward(self, weights: IterationParams, stream: jax.Array) -> tuple[jax.Array, Any]:
        def iteration(carry: Any, given: Any) -> tuple[Any, Any]:
            stream, ready = carry
            own, following = given
            coming = self.gather(following)
            stream, saved = self.iteration(own, stream, ready)
            return (stream, coming), saved

        ready = self.gather(_at(weights, 0))
        rest = _at(weights, slice(None, -1)), _at(weights, slice(1, None))
        (stream, ready), saved = lax.scan(iteration, (stream, ready), rest)
        stream, kept = self.iteration(_at(weights, -1), stream, ready)
        return stream, (saved, kept, ready)

    def backward(
        self, weights: IterationParams, saved: Any, cotangent: Cotangents, earlier: IterationParams | None
    ) -> tuple[Cotangents, IterationParams]:
        def back(carry: Any, given: Any) -> tuple[Any, IterationParams]:
            cotangent, ready = carry
            own, previous, kept, before = given
            coming = self.gather(previous)
            cotangent, grads = self.iteration_back(own, kept, cotangent, before, ready)
            return (cotangent, coming), grads

        others, kept, ready = saved
        count, middle = self.span.repeats, slice(1, -1)
        coming = self.gather(_at(weights, -2)) if count > 1 else ready
        cotangent, last = self.iteration_back(_at(weights, -1), kept, cotangent, _at(earlier, -1), ready)
        found = [_at(last, None)]
        if count > 2:
            before = _at(weights, slice(None, -2)), _at(others, slice(1, None)), _at(earlier, middle)
            (cotangent, coming), grads = lax.scan(
                back, (cotangent, coming), (_at(weights, middle), *before), reverse=True
            )
            found = [grads, *found]
        if count > 1:
            cotangent, grads = self.iteration_back(_at(weights, 0), _at(others, 0), cotangent, _at(earlier, 0), coming)
            found = [_at(grads, None), *found]
        return cotangent, jax.tree.map(lambda *grads: jnp.concatenate(grads), *found)


def _at(tree: Any, index: int | slice | None) -> Any:
    """Returns one iteration of every array, or a slice of several; None adds a first dim of size 1."""
    return jax.tree.map(lambda a: a[index], tree)
