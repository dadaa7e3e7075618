"""Weights and caches of generation as they lie on devices: shapes, shardings, orders in memory; how they get there."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.generation import CacheArray, Storage, quantised_weights
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.transformer import weight_variables
from meshwright.nn import quantisation
from meshwright.nn.attention.platform import platform_of
from meshwright.nn.cache import LayerCache, cache_layout
from meshwright.nn.context import Context
from meshwright.nn.forward import run_block, run_stack
from meshwright.nn.ops.quantised_embed import DTYPES
from meshwright.nn.weights import Params, param_shapes
from meshwright.parallel.held import Shapes, resized, without_split
from meshwright.parallel.mesh import named_sharding, partition_spec, shardings
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy

Cache = dict[str, Any]
"""Row of the cache table -> its array, whose first dim is the layers of its kind, or a tuple of arrays of layers."""


class HeldArrays:
    """Weights and caches of a step of generation on a mesh: ``declared`` are the arrays of its programs by name,
    ``table`` the rows of the cache."""

    model: Model
    strategy: Strategy
    mesh: Mesh | AbstractMesh
    table: tuple[CacheArray, ...]
    storage: Storage
    declared: Mapping[str, ShardedArray]
    max_len: int
    batch_invariant: bool = False

    @property
    def heads_first(self) -> Collection[str]:
        """Caches, in tuples of layers, whose pages have heads before slots."""
        return ()

    @cached_property
    def quantised(self) -> quantisation.Quantised:
        """The weights that are stored in the dtype of the storage, and their scales."""
        return quantised_weights(self.model, self.storage.weights)

    @cached_property
    def param_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the weights, and of the scales of quantised ones."""
        return {
            each: partition_spec(self.declared[each], stacked=bool(weight.layers))
            for name, (weight, _) in weight_variables(self.model).items()
            for each in ([stored.name for stored in self.quantised[name]] if name in self.quantised else [name])
        }

    @cached_property
    def cache_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the cache."""
        return {row.name: partition_spec(self.declared[row.name], stacked=True) for row in self.table}

    @cached_property
    def param_shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each weight, and scale, on the mesh."""
        return shardings(self.mesh, self.param_specs)

    @cached_property
    def cache_shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each array of the cache on the mesh."""
        return shardings(self.mesh, self.cache_specs)

    @cached_property
    def cache_layouts(self) -> dict[str, Layout]:
        """The order in memory of each array of the cache whose order is not the platform's own, see `cache_layout`."""
        if isinstance(self.mesh, AbstractMesh):
            return {}
        platform, split = platform_of(self.mesh.devices.flat[0]), self.cache_shardings
        found = {
            row.name: cache_layout(platform, row.dims, split[row.name].shard_shape(row.stacked_shape), row.dtype)
            for row in self.table
        }
        return {name: layout for name, layout in found.items() if layout}

    @property
    def cache_formats(self) -> dict[str, NamedSharding | Format]:
        """The sharding of each array of the cache, with its order in memory if that is not the platform's own."""
        ordered = {name: Format(layout, self.cache_shardings[name]) for name, layout in self.cache_layouts.items()}
        return {**self.cache_shardings, **ordered}

    @property
    def logits_sharding(self) -> NamedSharding:
        """The sharding of logits [B, V]."""
        return named_sharding(self.mesh, self.declared["logits"])

    @property
    def dtype(self) -> Any:
        """The dtype of the weights that are not quantised, and of the stream."""
        return DTYPES[self.strategy.state_dtype]

    @cached_property
    def param_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes and dtypes of the weights."""
        loaded = self._loaded_shapes[1]
        return quantisation.param_shapes(self.model, loaded, self.storage.weights) if self.quantises else dict(loaded)

    @property
    def _loaded_shapes(self) -> tuple[Shapes, Shapes]:
        """Shapes of weights that are floats, or as a folder stores them: the model's own, and with the vocabulary
        padded."""
        both: Any = (param_shapes(self.model, dtype=self.dtype, mesh=mesh) for mesh in ({}, self.strategy.mesh))
        own, held = both if self.quantises else (quantisation.param_shapes(self.model, one, "") for one in both)
        return own, held

    @property
    def quantises(self) -> bool:
        """True if `place` makes the narrow weights from wide ones."""
        return bool(self.storage.weights)

    @property
    def loaded_shardings(self) -> dict[str, Any]:
        """The sharding of each weight of a checkpoint, before `place` pads the vocabulary."""
        return shardings(self.mesh, self._loaded_specs)

    @property
    def _loaded_specs(self) -> dict[str, PartitionSpec]:
        return without_split(*self._loaded_shapes, self.param_specs)

    @cached_property
    def cache_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes and dtypes of the cache."""
        return {row.name: jax.ShapeDtypeStruct(row.stacked_shape, DTYPES[row.dtype]) for row in self.table}

    def place(self, params: Mapping[str, Any]) -> Params:
        """Puts weights on their devices in the step's dtype, with the vocabulary padded; quantises float weights there
        if the step stores them so."""
        params = resized(dict(params), *self._loaded_shapes, self.param_specs)
        if "embed_scale" in params or not self.quantises:
            return {name: self._on_devices(name, array) for name, array in params.items()}
        placed = jax.device_put(dict(params), {name: self.param_shardings[name] for name in params})
        plain = param_shapes(self.model, dtype=self.dtype)
        quantise = jax.jit(
            lambda given: quantisation.stored_params(
                self.model, {n: p.astype(plain[n].dtype) for n, p in given.items()}, self.storage.weights
            ),
            out_shardings=self.param_shardings,
        )
        return quantise(placed)

    def _on_devices(self, name: str, array: Any) -> Any:
        """Puts an array on its devices."""
        return jax.device_put(jnp.asarray(array, self.param_shapes[name].dtype), self.param_shardings[name])

    def init_cache(self) -> Cache:
        """Returns an empty cache, made on its devices."""
        shapes = self.cache_shapes.items()
        empty = jax.jit(
            lambda: {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes}, out_shardings=self.cache_formats
        )
        return empty()

    def run(
        self, derived: Derived, params: Params, cache: Cache, given: Mapping[str, Any], *, longest: int = 1
    ) -> tuple[Array, Cache]:
        """Returns logits and the next cache, on one device's shards; ``given`` are the other inputs by name.

        Loops over layers carry caches whole, so that a step changes what it writes and copies nothing.
        """
        context = Context(
            model=self.model,
            derived=derived,
            mesh=self.strategy.mesh,
            seq_len=self.max_len,
            longest=longest,
            alike=self.batch_invariant,
            dtype=self.strategy.state_dtype,
        )
        (stack,) = derived.program.stacks

        def layer(steps: BlockSteps, number: Any, values: Mapping[str, Any], cache: Cache) -> tuple[Array, Cache]:
            held = {
                name: LayerCache(array[number], None, name in self.heads_first)
                if isinstance(array, tuple)
                else LayerCache(array, number)
                for name, array in cache.items()
                if name in steps.block.reads
            }
            stream, env = run_block(context, steps, {**values, **held})
            writes = (step for step in steps.forward if step.op == "cache_write")
            written: Any = {step.inputs[0].name: env[step.result].stack for step in writes}
            for name, stack in written.items():
                if isinstance(cache[name], tuple):
                    written[name] = (*cache[name][:number], stack, *cache[name][number + 1 :])
                elif name in self.cache_layouts:  # also inside loops XLA then keeps the order of a layout
                    written[name] = with_layout_constraint(stack, self.cache_layouts[name])
            return stream, {**cache, **written}

        return run_stack(context, stack, params, given, layer, cache)
