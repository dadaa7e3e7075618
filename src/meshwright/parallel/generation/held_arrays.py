"""Shapes, shardings and memory layouts of weights and caches on devices during generation, and their placement."""

import math
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from meshwright.algebra.derived import BlockSteps, Derived
from meshwright.algebra.generation.cache import CacheArray
from meshwright.algebra.generation.program import Storage, scale_name
from meshwright.algebra.generation.stored import quantised_weights
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.transformer import rows, weight_variables
from meshwright.nn import quantisation
from meshwright.nn.attention.platform import platform_of
from meshwright.nn.cache import PART_LAYOUT, LayerCache, cache_layout, page_parts
from meshwright.nn.context import Context
from meshwright.nn.contract import FLOATS, Turned
from meshwright.nn.forward import run_block, run_stack
from meshwright.nn.hf.weights import OutputsFirst
from meshwright.nn.ops.quantised_embed import DTYPES
from meshwright.nn.weights import Params, param_shapes
from meshwright.parallel.held import Shapes, Tree, resized, without_split
from meshwright.parallel.mesh import named_sharding, partition_spec, shardings, strategy_mesh
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy

Cache = dict[str, Tree]
"""Name of a row of the cache table -> an array with a first dim of layers, or a tuple with an array per layer."""


class HeldArrays:
    """Weights and caches of a generation step on a mesh. ``declared``: array name -> sharded array of its programs;
    ``table``: the arrays of the cache. On CPUs arrays are tuples with an item per layer, and layer loops are
    unrolled."""

    model: Model
    strategy: Strategy
    table: tuple[CacheArray, ...]
    storage: Storage
    declared: Mapping[str, ShardedArray]
    max_len: int
    batch_invariant: bool

    @cached_property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh of the strategy, on the devices of all processes, or the mesh that `PackedStep.on` has set."""
        return strategy_mesh(self.strategy)

    @cached_property
    def platform(self) -> str:
        """The platform of the mesh's devices."""
        return platform_of(self.mesh.devices.flat[0])

    @cached_property
    def unrolled(self) -> bool:
        """True on CPUs, where loops over layers are unrolled."""
        return self.platform == "cpu"  # CPU loops copy each slice of a stack of layers

    # -- shapes and shardings ----------------------------------------------------------------------

    @cached_property
    def quantised(self) -> quantisation.Quantised:
        """Name of a quantised weight -> the arrays (narrow values, scales) that store it."""
        return quantised_weights(self.model, self.storage.weights)

    @cached_property
    def param_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the weights; for quantised weights, of their values and scales."""
        return {
            key: partition_spec(self.declared[key], stacked=bool(weight.layers))
            for name, (weight, _) in weight_variables(self.model).items()
            for key in ([array.name for array in self.quantised[name]] if name in self.quantised else [name])
        }

    @cached_property
    def cache_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the cache arrays by name, with pages in parts where `page_parts` splits them."""
        return {
            name: spec if self._page_parts[name] == 1 else PartitionSpec(*spec[:2], None, *spec[2:])
            for name, spec in self._whole_specs.items()
        }

    @cached_property
    def _whole_specs(self) -> dict[str, PartitionSpec]:
        """Shardings of the cache with pages as one dim (not in parts)."""
        return {row.name: partition_spec(self.declared[row.name], stacked=True) for row in self.table}

    @cached_property
    def _page_parts(self) -> dict[str, int]:
        """Number of parts of a page for each cache array, see `page_parts`; 1 if devices split the slots of a page."""
        return {
            r.name: 1 if self.declared[r.name].axes[1] else page_parts(self.platform, r.dims, self._shard(r), r.dtype)
            for r in self.table
        }

    def _shard(self, row: CacheArray) -> tuple[int, ...]:
        """Returns the per-device shape of a cache array, with pages as one dim (not in parts)."""
        return NamedSharding(self.mesh, self._whole_specs[row.name]).shard_shape(row.stacked_shape)

    @cached_property
    def param_shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each weight and scale on the mesh."""
        return shardings(self.mesh, self.param_specs)

    @cached_property
    def cache_shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each array of the cache on the mesh."""
        return shardings(self.mesh, self.cache_specs)

    @cached_property
    def cache_layouts(self) -> dict[str, Layout]:
        """The memory layout of each cache array that does not use the platform's default, see `cache_layout`."""
        if isinstance(self.mesh, AbstractMesh):
            return {}
        layouts = {
            r.name: cache_layout(self.platform, r.dims, self._shard(r), r.dtype)
            if self._page_parts[r.name] == 1
            else PART_LAYOUT
            for r in self.table
        }
        return {name: layout for name, layout in layouts.items() if layout}

    @property
    def logits_sharding(self) -> NamedSharding:
        """The sharding of logits [O, V]."""
        return named_sharding(self.mesh, self.declared["logits"])

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of unquantised weights and of the stream."""
        return DTYPES[self.strategy.state_dtype]

    @cached_property
    def param_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes and dtypes of the weights as stored, scales included."""
        shapes = self._loaded_shapes[1]
        return quantisation.param_shapes(self.model, shapes, self.storage.weights) if self.quantises else dict(shapes)

    @property
    def _loaded_shapes(self) -> tuple[Shapes, Shapes]:
        """Shapes of the weights that `place` receives (floats, or as a folder stores them): without padding, and with
        the vocabulary padded."""
        pair: Any = (param_shapes(self.model, dtype=self.dtype, mesh=mesh) for mesh in ({}, self.strategy.mesh))
        plain, held = pair if self.quantises else (quantisation.param_shapes(self.model, shapes, "") for shapes in pair)
        return plain, held

    @property
    def quantises(self) -> bool:
        """True if `place` quantises float weights."""
        return bool(self.storage.weights)

    @property
    def loaded_shardings(self) -> dict[str, Tree]:
        """The sharding of each weight to load, before `place` pads the vocabulary; if unrolled and not quantised, a
        tuple with an item per layer, which includes the memory order."""
        shapes, padded = self._loaded_shapes
        specs = without_split(shapes, padded, self.param_specs)
        if not self.unrolled or self.quantises:
            return shardings(self.mesh, specs)
        sharding_by_name: dict[str, Tree] = {}
        for name, spec in specs.items():
            layer_index = 0 if name in self._num_layers else None
            sharding: Tree = NamedSharding(self.mesh, spec if layer_index is None else PartitionSpec(*spec[1:]))
            if name in self.outputs_first and shapes[name].shape == padded[name].shape:  # pad before transposing
                ordered_sharding = NamedSharding(self.mesh, self._in_order(name, spec, layer_index))
                sharding = OutputsFirst(sharding, ordered_sharding, self.outputs_first[name])
            sharding_by_name[name] = sharding if layer_index is None else (sharding,) * self._num_layers[name]
        return sharding_by_name

    @cached_property
    def cache_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shapes and dtypes of the cache; CPUs store narrow floats as integer bits (`nn.contract.FLOATS`)."""
        bits_of = {floats: bits for bits, floats in FLOATS.items()} if self.unrolled else {}
        dtype_of = {row.name: jnp.dtype(DTYPES[row.dtype]) for row in self.table}

        def shape(row: CacheArray) -> tuple[int, ...]:
            num_layers, num_pages, page_len, *dims = row.stacked_shape
            if (parts := self._page_parts[row.name]) == 1:
                return row.stacked_shape
            return num_layers, num_pages, parts, page_len // parts, *dims

        return {
            row.name: jax.ShapeDtypeStruct(shape(row), bits_of.get(dtype_of[row.name], dtype_of[row.name]))
            for row in self.table
        }

    # -- memory orders --------------------------------------------------------------------------

    @property
    def heads_first(self) -> Collection[str]:
        """Names of caches whose per-layer arrays have heads before slots; none unless unrolled."""
        names_with_heads = (row.name for row in self.table if row.dims[2:3] and row.dims[2][0] == "K")
        return frozenset(names_with_heads) if self.unrolled else ()  # the order that CPU products read without a copy

    @cached_property
    def outputs_first(self) -> dict[str, int]:
        """Name -> number of input dims, for weights stored as matrices [outputs, inputs]; empty unless unrolled.

        CPU products read this order up to twice as fast as [inputs, outputs] (bf16, 2 to 16 rows, jaxlib 0.10.2).
        """
        turned_parts = "attention", "mlp", "shared_experts", "unembedding"
        weight_items = rows(self.model).items() if self.unrolled else ()
        return {
            name: len(weight.inputs)
            for name, weight in weight_items
            if weight.kind == "matrix" and weight.part in turned_parts and name not in self.quantised
        }

    @cached_property
    def _num_layers(self) -> dict[str, int]:
        """Name -> layers in the first dim, for caches, weights of layers and their scales."""
        layers_by_cache = {row.name: row.num_layers for row in self.table}
        repeats = {name: repeat for name, (weight, repeat) in weight_variables(self.model).items() if weight.layers}
        return layers_by_cache | repeats | {scale_name(name): repeat for name, repeat in repeats.items()}

    def by_layer(self, given: Mapping[str, Tree]) -> dict[str, Tree]:
        """Returns stacked arrays, or their PartitionSpecs, with their dims in the order in which devices hold them; if
        unrolled, an array with layers becomes a tuple with an item per layer."""
        num_layers_of = self._num_layers if self.unrolled else {}
        return {
            name: tuple(self._in_order(name, array, layer_index) for layer_index in range(num_layers_of[name]))
            if name in num_layers_of
            else self._in_order(name, array, None)
            for name, array in given.items()
        }

    def _in_order(self, name: str, stacked: Any, layer_index: int | None) -> Any:
        """Returns an array (one layer of it, given ``layer_index``) in memory order, see `heads_first` and
        `outputs_first`; given a PartitionSpec, returns the result's PartitionSpec."""
        num_inputs = self.outputs_first.get(name)
        if not isinstance(stacked, PartitionSpec):
            array = stacked if layer_index is None else stacked[layer_index]
            if num_inputs:
                return array.reshape(math.prod(array.shape[:num_inputs]), -1).T
            return jnp.swapaxes(array, 1, 2) if name in self.heads_first else array
        dim_axes = list(stacked if layer_index is None else stacked[1:])
        if num_inputs:
            return PartitionSpec(dim_axes[num_inputs], dim_axes[0])
        if name in self.heads_first:
            dim_axes[1:3] = dim_axes[2], dim_axes[1]
        return PartitionSpec(*dim_axes)

    # -- on the devices ----------------------------------------------------------------------------

    def place(self, params: Mapping[str, Tree]) -> Params:
        """Puts weights on their devices in the step's dtype, with the vocabulary padded; quantises float weights there
        if the storage is quantised."""
        params = resized(dict(params), *self._loaded_shapes, self.param_specs)
        if "embed_scale" in params or not self.quantises:  # weights with scales are quantised already
            arrays = {name: self._on_devices(name, array) for name, array in params.items()}
        else:
            float_params = jax.device_put(dict(params), {name: self.param_shardings[name] for name in params})
            float_shapes = param_shapes(self.model, dtype=self.dtype)
            quantise = jax.jit(
                lambda floats: quantisation.stored_params(
                    self.model, {n: p.astype(float_shapes[n].dtype) for n, p in floats.items()}, self.storage.weights
                ),
                out_shardings=self.param_shardings,
            )
            arrays = quantise(float_params)
        if not self.unrolled:
            return arrays
        num_layers = self._num_layers
        layer_arrays = {n: a if n in num_layers else a[0] for n, a in arrays.items() if isinstance(a, tuple)}
        stacked_arrays = {n: array for n, array in arrays.items() if n not in layer_arrays}
        specs = self.by_layer({name: self.param_specs[name] for name in stacked_arrays})
        return layer_arrays | jax.jit(self.by_layer, out_shardings=shardings(self.mesh, specs))(stacked_arrays)

    def _on_devices(self, name: str, array: Tree) -> Tree:
        """Puts an array, or a tuple of layers in memory order, on its devices."""
        dtype = self.param_shapes[name].dtype
        if not isinstance(array, tuple):
            return jax.device_put(jnp.asarray(array, dtype), self.param_shardings[name])
        spec = self._in_order(name, self.param_specs[name], 0 if name in self._num_layers else None)
        sharding = NamedSharding(self.mesh, spec)
        return tuple(jax.device_put(jnp.asarray(layer, dtype), sharding) for layer in array)

    def init_cache(self) -> Cache:
        """Returns a cache of zeros, allocated on its devices."""
        shapes = jax.eval_shape(self.by_layer, self.cache_shapes)
        make_zeros = partial(jax.tree.map, lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return jax.jit(make_zeros, out_shardings=self.held_formats)()

    @property
    def held_formats(self) -> Tree:
        """The sharding of each cache array on devices, with its memory layout if that is not the platform's
        default."""
        if self.unrolled:
            return shardings(self.mesh, self.by_layer(self.cache_specs))
        held = self.cache_shardings
        return {**held, **{name: Format(layout, held[name]) for name, layout in self.cache_layouts.items()}}

    def run(
        self, derived: Derived, params: Params, cache: Cache, given: Mapping[str, Array], *, longest: int = 1
    ) -> tuple[Array, Cache]:
        """Runs a derived program on one device's shards. Returns the last stack's result (such as logits) and the
        updated cache; ``given`` are further inputs by name.

        Loops over layers carry whole caches, so that a step writes in place and copies nothing.
        """

        def turned(name: str) -> Tree:
            shape = self.param_shardings[name].shard_shape(self.param_shapes[name].shape)
            dims, num_in = shape[isinstance(params[name], tuple) :], self.outputs_first[name]
            return jax.tree.map(lambda leaf: Turned(leaf.reshape(dims[num_in:] + dims[:num_in]), num_in), params[name])

        params = params | {name: turned(name) for name in self.outputs_first}
        context = Context(
            model=self.model,
            derived=derived,
            mesh=self.strategy.mesh,
            seq_len=self.max_len,
            longest=longest,
            alike=self.batch_invariant,
            dtype=self.strategy.state_dtype,  # quantised weights do not imply it
        )

        def layer(steps: BlockSteps, number: Any, values: Mapping[str, Tree], cache: Cache) -> tuple[Array, Cache]:
            written_names = {step.inputs[0].name for step in steps.forward if "Pl" in step.result.dims}
            # a cache that this layer only reads belongs to one earlier layer
            number_of = {name: number if name in written_names else jnp.zeros_like(number) for name in cache}
            cache_by_name = {
                name: LayerCache(array[number if name in written_names else 0], None, name in self.heads_first)
                if isinstance(array, tuple)
                else LayerCache(array, number_of[name])
                for name, array in cache.items()
                if name in steps.block.reads
            }
            stream, env = run_block(context, steps, {**values, **cache_by_name})
            write_steps = (step for step in steps.forward if "Pl" in step.result.dims)
            new_arrays: Cache = {step.inputs[0].name: env[step.result].stack for step in write_steps}
            for name, new_array in new_arrays.items():
                if isinstance(cache[name], tuple):
                    new_arrays[name] = (*cache[name][:number], new_array, *cache[name][number + 1 :])
                elif name in self.cache_layouts:  # XLA then keeps the layout inside loops too
                    new_arrays[name] = with_layout_constraint(new_array, self.cache_layouts[name])
            return stream, {**cache, **new_arrays}

        given, names = dict(given), {block.name: block.ops[-1].out for block in derived.program.blocks}
        result = jnp.zeros(())
        for stack in derived.program.stacks:
            result, cache = run_stack(context, stack, params, given, layer, cache)
            given[names.get(stack.last, "")] = result
        return result, cache
