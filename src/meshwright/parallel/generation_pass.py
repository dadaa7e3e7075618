"""One pass of a program that generates, on one device's blocks: the stream through all layers, the cache beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.cache_write import CacheWrite
from meshwright.algebra.program import Stack
from meshwright.algebra.transformer import Span, spans
from meshwright.nn.cache import LayerCache
from meshwright.nn.context import Context
from meshwright.nn.interpreter import run
from meshwright.nn.weights import Params

Cache = dict[str, jax.Array]
"""Row of the cache table -> its array, the layers of its kind in front."""


@dataclass(frozen=True)
class GenerationPass:
    """A derived prefill or generate program. Caches are carried whole through the loops over layers, so that a step
    changes what it writes and copies nothing."""

    context: Context

    @cached_property
    def _blocks(self) -> dict[str, BlockSteps]:
        return {steps.block.name: steps for steps in self.context.derived.blocks}

    def run(self, params: Params, cache: Cache, given: Mapping[str, Any]) -> tuple[jax.Array, Cache]:
        """Logits and the cache after, from what the job gives by name: tokens, positions, last."""
        stack = self._stack
        x, _ = self._block(self._blocks[stack.first], {**given, **params}, {})
        for span in spans(stack.layers):
            x, cache = self._span(span, x, cache, params, given)
        logits, _ = self._block(self._blocks[stack.last], {**given, **params, stack.carry: x}, {})
        return logits, cache

    @property
    def _stack(self) -> Stack:
        (stack,) = self.context.derived.program.stacks
        return stack

    def _span(
        self, span: Span, x: jax.Array, cache: Cache, params: Params, given: Mapping[str, Any]
    ) -> tuple[jax.Array, Cache]:
        def turn(carry: tuple[jax.Array, Cache], number: jax.Array) -> tuple[tuple[jax.Array, Cache], None]:
            stream, held = carry
            for position, kind in enumerate(span.pattern):
                place, per_turn = span.place(position)
                layer = span.starts[kind] + number * per_turn + place
                stream, held = self._layer(self._blocks[kind], layer, stream, held, params, given)
            return (stream, held), None

        return lax.scan(turn, (x, cache), jnp.arange(span.repeats, dtype=jnp.int32))[0]

    def _layer(
        self, steps: BlockSteps, layer: jax.Array, x: jax.Array, cache: Cache, params: Params, given: Mapping[str, Any]
    ) -> tuple[jax.Array, Cache]:
        used = {name for op in steps.block.ops for name in op.inputs}
        own = {n: lax.dynamic_index_in_dim(p, layer, keepdims=False) for n, p in params.items() if n in used}
        held = {name: LayerCache(stack, layer) for name, stack in cache.items() if name in used}
        x, written = self._block(steps, {**given, **own, self._stack.carry: x}, held)
        return x, {**cache, **written}

    def _block(
        self, steps: BlockSteps, values: Mapping[str, Any], held: Mapping[str, LayerCache]
    ) -> tuple[jax.Array, Cache]:
        """What the block makes, and the arrays of the cache that it has written."""
        declared = self.context.derived.declared
        used = {name for op in steps.block.ops for name in op.inputs}
        given = {declared[n]: value for n, value in {**values, **held}.items() if n in used}
        env: dict[ShardedArray, Any] = dict(run(self.context, steps.forward, given))
        written = {s.inputs[0].name: env[s.result].stack for s in steps.forward if isinstance(s.details, CacheWrite)}
        return env[declared[steps.block.result or steps.block.ops[-1].out]], written
