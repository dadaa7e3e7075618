"""Loops over the turns of a span of layers, forward and backward, in their three forms.

Plain: each turn holds what the saved set says. In segments: only what enters a segment is held, and its layers run
again on the way back. Ahead: the weights of the next turn are gathered while one computes, and those of the last turn
stay for its backward pass, which comes first.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.transformer import Span
from meshwright.nn.weights import Params
from meshwright.parallel.blocks import BlockPasses, Cotangents, Inputs, Ready

MAX_WRITTEN_OUT = 16
"""Turns of a loop that are worth the time of compiling each: on two cores a step of 8 layers of 1.8M weights compiles
in 12 s in place of 7 and runs a tenth faster, as nothing is copied into and out of stacks (2026-11-21)."""

Turn = tuple[Params, ...]
"""Weights, or gradients, of the layers of one turn of a loop: one dict for each."""

Finish = Callable[[Turn, Turn | None], Turn]
"""Gradients of a turn, and what earlier microbatches left for the same weights -> gradients as the loop gives them."""


def as_they_are(grads: Turn, earlier: Turn | None) -> Turn:
    """Nothing is done to gradients on the way."""
    return grads


@dataclass(frozen=True)
class TurnPasses:
    """The layers of one turn, one after the other."""

    span: Span
    blocks: Mapping[str, BlockPasses]
    inputs: Inputs
    finish: Finish = as_they_are

    def _of(self, kind: str) -> BlockPasses:
        return self.blocks[kind]

    def gather(self, weights: Turn) -> tuple[Ready, ...]:
        """The turn's weights as its products want them."""
        return tuple(self._of(kind).gather(own) for kind, own in zip(self.span.pattern, weights, strict=True))

    def forward(
        self, weights: Turn, stream: jax.Array, ready: tuple[Ready, ...] | None = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """The stream after the turn, and what is held."""
        held = []
        for number, kind in enumerate(self.span.pattern):
            at_hand = ready[number] if ready is not None else None
            stream, kept = self._of(kind).forward(weights[number], self.inputs, stream, ready=at_hand)
            held.append(kept)
        return stream, tuple(held)

    def backward(
        self,
        weights: Turn,
        held: tuple[Any, ...],
        cotangent: Cotangents,
        earlier: Turn | None,
        ready: tuple[Ready, ...] | None = None,
    ) -> tuple[Cotangents, Turn]:
        """The cotangents of what entered the turn, and its gradients."""
        found: list[Params] = []
        for number, kind in reversed(list(enumerate(self.span.pattern))):
            at_hand = ready[number] if ready is not None else None
            block = self._of(kind)
            cotangent, grads = block.layer_backward(
                weights[number], self.inputs, held[number], cotangent, ready=at_hand
            )
            found = [grads, *found]
        return cotangent, self.finish(tuple(found), earlier)


class LayerLoop(Protocol):
    """A way to run all turns of a span. ``weights`` and gradients have the turns in front."""

    def forward(self, turns: TurnPasses, weights: Turn, stream: jax.Array) -> tuple[jax.Array, Any]: ...
    def backward(
        self, turns: TurnPasses, weights: Turn, held: Any, cotangent: Cotangents, earlier: Turn | None
    ) -> tuple[Cotangents, Turn]: ...


@dataclass(frozen=True)
class PlainLoop:
    """Every turn holds its own saved set. ``written_out`` puts up to `MAX_WRITTEN_OUT` turns into the program one after
    the other."""

    written_out: bool = False

    def _unroll(self, turns: TurnPasses) -> int:
        return turns.span.repeats if self.written_out and turns.span.repeats <= MAX_WRITTEN_OUT else 1

    def forward(self, turns: TurnPasses, weights: Turn, stream: jax.Array) -> tuple[jax.Array, Any]:
        return lax.scan(lambda x, own: turns.forward(own, x), stream, weights, unroll=self._unroll(turns))

    def backward(
        self, turns: TurnPasses, weights: Turn, held: Any, cotangent: Cotangents, earlier: Turn | None
    ) -> tuple[Cotangents, Turn]:
        def back(cotangent: Cotangents, given: Any) -> tuple[Cotangents, Turn]:
            own, kept, before = given
            return turns.backward(own, kept, cotangent, before)

        return lax.scan(back, cotangent, (weights, held, earlier), reverse=True, unroll=self._unroll(turns))


@dataclass(frozen=True)
class SegmentLoop:
    """Only what enters a segment of ``layers`` layers is held."""

    layers: int

    def forward(self, turns: TurnPasses, weights: Turn, stream: jax.Array) -> tuple[jax.Array, Any]:
        def segment(stream: jax.Array, own: Turn) -> tuple[jax.Array, jax.Array]:
            return lax.scan(lambda x, w: (turns.forward(w, x)[0], None), stream, own)[0], stream

        held = []
        for part in self._cut(turns.span, weights):
            stream, kept = lax.scan(segment, stream, part)
            held.append(kept)
        return stream, held

    def backward(
        self, turns: TurnPasses, weights: Turn, held: Any, cotangent: Cotangents, earlier: Turn | None
    ) -> tuple[Cotangents, Turn]:
        def segment(cotangent: Cotangents, given: Any) -> tuple[Cotangents, Turn]:
            own, stream, before = given
            _, kept = lax.scan(lambda x, w: turns.forward(w, x), stream, own)
            return PlainLoop().backward(turns, own, kept, cotangent, before)

        found: list[Turn] = []
        befores = [None] * len(held) if earlier is None else self._cut(turns.span, earlier)
        parts = list(zip(self._cut(turns.span, weights), held, befores, strict=True))
        for given in reversed(parts):
            cotangent, grads = lax.scan(segment, cotangent, given, reverse=True)
            found = [jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads), *found]
        return cotangent, jax.tree.map(lambda *grads: jnp.concatenate(grads), *found)

    def _cut(self, span: Span, weights: Turn) -> list[Turn]:
        """Turns in whole segments, [segments, turns, ...], and a shorter last one where they do not divide."""
        turns = max(1, self.layers // len(span.pattern))
        whole = span.repeats // turns
        cuts = [(0, whole, turns), (whole * turns, 1, span.repeats - whole * turns)]
        return [
            jax.tree.map(lambda w, a=a, n=n, t=t: w[a : a + n * t].reshape(n, t, *w.shape[1:]), weights)
            for a, n, t in cuts
            if n * t
        ]


@dataclass(frozen=True)
class AheadLoop:
    """Weights are gathered one turn ahead, and those of the last turn are held until its backward pass."""

    def forward(self, turns: TurnPasses, weights: Turn, stream: jax.Array) -> tuple[jax.Array, Any]:
        def turn(carry: Any, given: Any) -> tuple[Any, Any]:
            stream, ready = carry
            own, following = given
            coming = turns.gather(following)
            stream, held = turns.forward(own, stream, ready)
            return (stream, coming), held

        first, last = _at(weights, 0), _at(weights, -1)
        ready = turns.gather(first)
        rest = jax.tree.map(lambda w: w[:-1], weights), jax.tree.map(lambda w: w[1:], weights)
        (stream, ready), held = lax.scan(turn, (stream, ready), rest)
        stream, kept = turns.forward(last, stream, ready)
        return stream, (held, kept, ready)

    def backward(
        self, turns: TurnPasses, weights: Turn, held: Any, cotangent: Cotangents, earlier: Turn | None
    ) -> tuple[Cotangents, Turn]:
        def back(carry: Any, given: Any) -> tuple[Any, Turn]:
            cotangent, ready = carry
            own, previous, kept, before = given
            coming = turns.gather(previous)
            cotangent, grads = turns.backward(own, kept, cotangent, before, ready)
            return (cotangent, coming), grads

        others, kept, ready = held
        count = turns.span.repeats
        before = None if earlier is None else _at(earlier, -1)
        coming = turns.gather(_at(weights, -2)) if count > 1 else ready
        cotangent, last = turns.backward(_at(weights, -1), kept, cotangent, before, ready)
        found = [jax.tree.map(lambda g: g[None], last)]
        if count > 2:
            middle = jax.tree.map(lambda w: w[1:-1], (weights, earlier))
            previous = jax.tree.map(lambda w: w[:-2], weights)
            kept_here = jax.tree.map(lambda h: h[1:], others)
            given = (middle[0], previous, kept_here, middle[1])
            (cotangent, coming), grads = lax.scan(back, (cotangent, coming), given, reverse=True)
            found = [grads, *found]
        if count > 1:
            before = None if earlier is None else _at(earlier, 0)
            cotangent, grads = turns.backward(_at(weights, 0), _at(others, 0), cotangent, before, coming)
            found = [jax.tree.map(lambda g: g[None], grads), *found]
        return cotangent, jax.tree.map(lambda *grads: jnp.concatenate(grads), *found)


def _at(tree: Any, index: int) -> Any:
    """One turn of everything."""
    return jax.tree.map(lambda a: a[index], tree)


def segment_layers(segment: int | str | None, num_layers: int) -> int | None:
    """Layers of a segment: "sqrt" is the square root of those that the device holds."""
    if segment == "sqrt":
        return max(1, round(math.sqrt(num_layers)))
    return None if segment is None else int(segment)
