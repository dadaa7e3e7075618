"""Loops over the turns of a span of layers, forward and backward, in their three forms.

Plain: each turn holds what the saved set says. In segments: only what enters a segment is held, and its layers run
again on the way back. Ahead: the weights of the next turn are gathered while one computes, and those of the last turn
stay for its backward pass, which comes first.
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

Turn = tuple[Params, ...]
"""Weights, or gradients, of the layers of one turn of a loop: one dict for each."""

Finish = Callable[[Turn, Turn | None], Turn]
"""Gradients of a turn, and what earlier microbatches left for the same weights -> gradients as the loop gives them."""


@dataclass(frozen=True, kw_only=True)
class LayerLoop:
    """All turns of a span, each with a saved set of its own. Weights and gradients have the turns in front.

    ``unroll`` turns at a time are written into the program one after the other. With ``split`` the way back leaves, in
    place of gradients, what `weight_backward` makes these from.
    """

    span: Span
    blocks: Mapping[str, BlockPasses]
    inputs: Inputs
    finish: Finish | None = None
    split: bool = False
    unroll: int = 1

    def gather(self, weights: Turn) -> tuple[Ready, ...]:
        """One turn's weights as its products want them."""
        return tuple(self.blocks[kind].gather(own) for kind, own in zip(self.span.pattern, weights, strict=True))

    def turn(
        self, weights: Turn, stream: jax.Array, ready: tuple[Ready, ...] | None = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """The stream after one turn, and what is held."""
        held = []
        for number, kind in enumerate(self.span.pattern):
            own, at_hand = weights[number], ready[number] if ready else None
            stream, kept = self.blocks[kind].forward(own, self.inputs, stream, ready=at_hand)
            held.append(kept)
        return stream, tuple(held)

    def turn_back(
        self,
        weights: Turn,
        held: tuple[Any, ...],
        cotangent: Cotangents,
        earlier: Turn | None,
        ready: tuple[Ready, ...] | None = None,
    ) -> tuple[Cotangents, Turn]:
        """The cotangents of what entered one turn, and its gradients."""
        found: tuple[Any, ...] = ()
        for number, kind in reversed(list(enumerate(self.span.pattern))):
            own, at_hand = weights[number], ready[number] if ready else None
            cotangent, left = self.blocks[kind].backward(
                own, self.inputs, held[number], cotangent, ready=at_hand, split=self.split
            )
            found = (left, *found)
        return cotangent, self.finish(found, earlier) if self.finish else found

    def forward(self, weights: Turn, stream: jax.Array) -> tuple[jax.Array, Any]:
        """The stream after all turns, and what is held for the way back."""
        return lax.scan(lambda x, own: self.turn(own, x), stream, weights, unroll=self.unroll)

    def backward(
        self, weights: Turn, held: Any, cotangent: Cotangents, earlier: Turn | None
    ) -> tuple[Cotangents, Turn]:
        """The cotangents of what entered the span, and its gradients."""

        def back(cotangent: Cotangents, given: Any) -> tuple[Cotangents, Turn]:
            own, kept, before = given
            return self.turn_back(own, kept, cotangent, before)

        return lax.scan(back, cotangent, (weights, held, earlier), reverse=True, unroll=self.unroll)

    def weight_backward(self, weights: Turn, handed: tuple[Any, ...]) -> Turn:
        """Gradients from what a ``split`` way back has left."""

        def turn(_: None, given: Any) -> tuple[None, Turn]:
            layers = zip(self.span.pattern, *given, strict=True)
            return None, tuple(self.blocks[kind].weight_backward(own, self.inputs, left) for kind, own, left in layers)

        return lax.scan(turn, None, (weights, handed))[1]


@dataclass(frozen=True, kw_only=True)
class SegmentLoop(LayerLoop):
    """Only what enters a segment of ``layers`` layers is held."""

    layers: int

    def forward(self, weights: Turn, stream: jax.Array) -> tuple[jax.Array, Any]:
        def segment(stream: jax.Array, own: Turn) -> tuple[jax.Array, jax.Array]:
            return lax.scan(lambda x, w: (self.turn(w, x)[0], None), stream, own)[0], stream

        held = []
        for part in self._cut(weights):
            stream, kept = lax.scan(segment, stream, part)
            held.append(kept)
        return stream, held

    def backward(
        self, weights: Turn, held: Any, cotangent: Cotangents, earlier: Turn | None
    ) -> tuple[Cotangents, Turn]:
        def segment(cotangent: Cotangents, given: Any) -> tuple[Cotangents, Turn]:
            own, stream, before = given
            _, kept = LayerLoop.forward(self, own, stream)
            return LayerLoop.backward(self, own, kept, cotangent, before)

        found: list[Turn] = []
        for given in reversed(list(zip(self._cut(weights), held, self._cut(earlier), strict=True))):
            cotangent, grads = lax.scan(segment, cotangent, given, reverse=True)
            found = [jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads), *found]
        return cotangent, jax.tree.map(lambda *grads: jnp.concatenate(grads), *found)

    def _cut(self, weights: Turn | None) -> list[Any]:
        """Turns in whole segments, [segments, turns, ...], and a shorter last one where they do not divide."""
        turns = max(1, self.layers // len(self.span.pattern))
        whole = self.span.repeats // turns
        cuts = [(0, whole, turns), (whole * turns, 1, self.span.repeats - whole * turns)]
        return [
            jax.tree.map(lambda w, a=a, n=n, t=t: w[a : a + n * t].reshape(n, t, *w.shape[1:]), weights)
            for a, n, t in cuts
            if n * t
        ]


class AheadLoop(LayerLoop):
    """Weights are gathered one turn ahead, and those of the last turn are held until its backward pass."""

    def forward(self, weights: Turn, stream: jax.Array) -> tuple[jax.Array, Any]:
        def turn(carry: Any, given: Any) -> tuple[Any, Any]:
            stream, ready = carry
            own, following = given
            coming = self.gather(following)
            stream, held = self.turn(own, stream, ready)
            return (stream, coming), held

        ready = self.gather(_at(weights, 0))
        rest = _at(weights, slice(None, -1)), _at(weights, slice(1, None))
        (stream, ready), held = lax.scan(turn, (stream, ready), rest)
        stream, kept = self.turn(_at(weights, -1), stream, ready)
        return stream, (held, kept, ready)

    def backward(
        self, weights: Turn, held: Any, cotangent: Cotangents, earlier: Turn | None
    ) -> tuple[Cotangents, Turn]:
        def back(carry: Any, given: Any) -> tuple[Any, Turn]:
            cotangent, ready = carry
            own, previous, kept, before = given
            coming = self.gather(previous)
            cotangent, grads = self.turn_back(own, kept, cotangent, before, ready)
            return (cotangent, coming), grads

        others, kept, ready = held
        count, middle = self.span.repeats, slice(1, -1)
        coming = self.gather(_at(weights, -2)) if count > 1 else ready
        cotangent, last = self.turn_back(_at(weights, -1), kept, cotangent, _at(earlier, -1), ready)
        found = [_at(last, None)]
        if count > 2:
            before = _at(weights, slice(None, -2)), _at(others, slice(1, None)), _at(earlier, middle)
            (cotangent, coming), grads = lax.scan(
                back, (cotangent, coming), (_at(weights, middle), *before), reverse=True
            )
            found = [grads, *found]
        if count > 1:
            cotangent, grads = self.turn_back(_at(weights, 0), _at(others, 0), cotangent, _at(earlier, 0), coming)
            found = [_at(grads, None), *found]
        return cotangent, jax.tree.map(lambda *grads: jnp.concatenate(grads), *found)


def _at(tree: Any, index: int | slice | None) -> Any:
    """One turn of everything, or several; with None one turn as a stack of one."""
    return jax.tree.map(lambda a: a[index], tree)
