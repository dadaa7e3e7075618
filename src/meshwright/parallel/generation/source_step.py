"""The step that runs an encoder on sources and writes the keys and values of cross-attention to cache pages."""

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from meshwright.algebra.derived import Derived
from meshwright.algebra.layers import FEATURES
from meshwright.algebra.notation import ShardedArray
from meshwright.nn.weights import Params
from meshwright.parallel.generation.held_arrays import Cache, HeldArrays
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.parallel.mesh import GivenOptions, compiler_options, lower, partition_spec, shardings


class SourceRows(NamedTuple):
    """Host arrays of sources, read by `SourceStep.encode`."""

    contents: Any
    lengths: Any
    slots: Any


SOURCE_INPUTS = ("encoder_lengths", "encoder_slots", "encoder_positions")
"""Inputs of the encoder's program besides tokens or features."""


class SourceStep(HeldArrays):
    """The encoder's programs of a model with an encoder; ``derived_sources`` are their derived steps."""

    derived_sources: Derived
    num_owners: int
    programs: ProgramStore
    _compiled: dict[tuple[int, ...], jax.stages.Compiled]

    @cached_property
    def compiler(self) -> GivenOptions:
        """The compiler options for the mesh."""
        return compiler_options(self.mesh)

    def _parts_of(self, array: ShardedArray, dim: str) -> int:
        return math.prod(self.strategy.mesh[axis] for axis in array.axes_of(dim))

    @property
    def source_parts(self) -> tuple[int, int]:
        """Numbers that must divide the sources of a batch, and the padded positions of each source."""
        names = "encoder_x", self.source_name, "encoder_o"
        arrays = [self.derived_sources.declared[name] for name in names]
        num_parts, position_parts = (math.lcm(*(self._parts_of(array, dim) for array in arrays)) for dim in "BS")
        return math.lcm(self.num_owners, num_parts), position_parts

    def encode(self, params: Params, cache: Cache, rows: SourceRows) -> Cache:
        """Writes the keys and values of sources to the cache and returns it. ``contents`` have the form of
        `empty_sources`, with ``lengths``[B] valid positions each; ``slots``[B, S] are cache slots (`NO_SLOT`:
        padding). Each shape is compiled once."""
        return self.compiled_sources(*rows.slots.shape)(params, cache, list(rows))

    def empty_sources(self, num_sources: int, length: int) -> np.ndarray:
        """Returns zeros: tokens [B, S], or if the encoder reads features [B, M, 2 S] in the stream's dtype."""
        num_features = self.model.encoder.features if self.model.encoder else 0
        if num_features:
            return np.zeros((num_sources, num_features, 2 * length), self.dtype)
        return np.zeros((num_sources, length), np.int32)

    def compiled_sources(self, num_sources: int, length: int) -> jax.stages.Compiled:
        """Returns the encoder's program for ``num_sources`` of ``length`` positions, compiled at the first call."""
        shape = num_sources, length
        if shape not in self._compiled:
            lower_shape = partial(self.lower_sources, num_sources, length)
            self._compiled[shape] = self.programs.get(f"sources-{num_sources}-{length}", lower_shape)
        return self._compiled[shape]

    def lower_sources(self, num_sources: int, length: int) -> jax.stages.Lowered:
        """Lowers the encoder's program for ``num_sources`` of ``length`` positions, without data."""
        params, cache = (jax.eval_shape(self.by_layer, shapes) for shapes in (self.param_shapes, self.cache_shapes))
        contents = self.empty_sources(num_sources, length)
        shapes = (num_sources,), (num_sources, length)
        rows = [jax.ShapeDtypeStruct(contents.shape, contents.dtype)]
        rows += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
        param_specs, cache_specs = (self.by_layer(specs) for specs in (self.param_specs, self.cache_specs))
        declared_arrays, replication = self.derived_sources.declared, NamedSharding(self.mesh, PartitionSpec())
        mapped_run = jax.shard_map(
            lambda params, cache, given: self.run(self.derived_sources, params, cache, given)[1],
            mesh=self.mesh,
            in_specs=(param_specs, cache_specs, {n: partition_spec(declared_arrays[n]) for n in self.source_inputs}),
            out_specs=cache_specs,
            check_vma=False,
        )

        def encode(params: Params, cache: Cache, rows: Sequence[Array]) -> Cache:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (num_sources, length))
            inputs = dict(zip((self.source_name, *SOURCE_INPUTS), (*rows, positions), strict=True))
            return mapped_run(params, cache, {name: inputs[name] for name in self.source_inputs})

        program = jax.jit(
            encode,
            in_shardings=(shardings(self.mesh, param_specs), self.held_formats, replication),
            out_shardings=self.held_formats,
            donate_argnums=1,
            keep_unused=True,  # the decoder's weights are unused here
            compiler_options=self.compiler.used,
        )
        platform = self.platform if isinstance(self.mesh, AbstractMesh) else ""
        return lower(program, self.mesh, params, cache, rows, platform=platform)

    @property
    def source_inputs(self) -> list[str]:
        """Names of the inputs of the encoder's program."""
        return [name for name in (self.source_name, *SOURCE_INPUTS) if name in self.derived_sources.declared]

    @property
    def source_name(self) -> str:
        """Name of the input with the sources: features or tokens."""
        return FEATURES if FEATURES in self.derived_sources.declared else "encoder_tokens"
