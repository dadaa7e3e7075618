"""Prefill and generation of a strategy: derived steps inside `shard_map`, each compiled once, the cache in place."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation import (
    PHASES,
    CacheDtype,
    Storage,
    WeightStorage,
    cache_sizes,
    cache_table,
    derive_phase,
    job_strategy,
    weight_dtype,
)
from meshwright.algebra.layers import PLAIN, mask_data
from meshwright.algebra.notation import check
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.core.errors import InputError
from meshwright.core.fields import checked
from meshwright.nn.weights import Params
from meshwright.parallel.generation.held_arrays import Cache, HeldArrays
from meshwright.parallel.mesh import compiler_options, lower, partition_spec, shardings, strategy_mesh
from meshwright.spec.job import Job
from meshwright.spec.model import MASK_DATA, Model, require_runnable
from meshwright.spec.strategy import Strategy, held_dims, require_runnable_strategy
from meshwright.spec.weights import without_mtp


class GenerateStep(HeldArrays):
    """Generates with a model under a strategy: up to ``batch_seqs`` sequences of at most ``max_len`` positions.

    ``prefill`` and ``generate`` consume the cache and return the next one. With ``weights`` in int8, fp8 or int4
    `place` quantises weights on their devices. Rotations that depend on the length of a sequence use ``max_len``.
    """

    @checked
    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        *,
        max_len: int,
        batch_seqs: int,
        cache_dtype: CacheDtype = "bf16",
        weights: WeightStorage = "as they are",
        mesh: Mesh | AbstractMesh | None = None,
    ) -> None:
        model = without_mtp(model)
        require_runnable(model)
        require_runnable_strategy(strategy, trains=False)
        if max_len < 1:
            raise InputError(f"max_len={max_len} must be at least 1.")
        if model.learned_positions and max_len > model.max_positions:
            raise InputError(
                f"{model.name} has {model.max_positions} learned positions, and {max_len} are asked for. "
                f"Use shorter prompts, or fewer tokens."
            )
        decode = Job(kind="decode", batch_seqs=batch_seqs, seq_len=max_len)
        self.strategy = strategy_of_heads(job_strategy(decode, strategy), model.num_kv_heads)
        self.model, self.max_len, self.batch_seqs = model, max_len, batch_seqs
        self.storage = storage = Storage(cache_dtype=cache_dtype, weights=weight_dtype(weights))
        self.prefill_declared, self.generate_declared = (
            derive_phase(model, phase, self.strategy, storage) for phase in PHASES
        )
        self.declared = self.prefill_declared.declared | self.generate_declared.declared
        # room for a prompt of any length up to max_len, padded to what the axes divide
        self.cache_len = -(-max_len // self._prompt_parts) * self._prompt_parts
        self.table = cache_table(
            model, batch_seqs=batch_seqs, max_len=self.cache_len, storage=storage, strategy=self.strategy
        )
        self.cache_sizes = cache_sizes(batch_seqs=batch_seqs, max_len=self.cache_len, storage=storage)
        # Heads and widths divide over ``tensor``, sequences over the other axes.
        sizes = {**held_dims(model.dims, strategy.mesh), "B": batch_seqs, **self.cache_sizes}
        for name, array in self.prefill_declared.declared.items():
            if self.prefill_declared.program.variables[name].role in ("weight", "vector", "cache", "output"):
                check(array, sizes, strategy.mesh)
        for row in self.table:  # of a window a ring has fewer slots
            check(self.generate_declared.declared[row.name], dict(zip(row.dims, row.shape, strict=True)), strategy.mesh)
        self.mesh = mesh or strategy_mesh(strategy)
        self.compiler = compiler_options(self.mesh)
        self._compiled: dict[int, jax.stages.Compiled] = {}

    @property
    def _prompt_parts(self) -> int:
        """Number of shards of the positions of a prompt."""
        return math.prod(self.strategy.mesh[axis] for axis in self.prefill_declared.declared["x"].axes_of("T"))

    # -- what a user calls -------------------------------------------------------------------------

    def padded_length(self, length: int) -> int:
        """Returns the length for which a prompt's program is compiled: at least 8, a power of two times the number of
        shards of positions; at most the length of the cache."""
        parts = self._prompt_parts
        return min(parts * max(1, 2 ** math.ceil(math.log2(max(length, 8) / parts))), self.cache_len)

    def prefill(
        self, params: Params, cache: Cache, tokens: Any, lengths: Any, data: Mapping[str, Any] = {}
    ) -> tuple[Array, Cache]:
        """Returns logits [B, V] after each row's last token, and the cache with the keys and values.

        ``tokens`` [B, T] are padded behind ``lengths`` [B], at least 1. Each T is compiled once; `padded_length` gives
        few different ones. ``data`` is what the model's mask reads, by the names of `MASK_DATA`: [B], or [B, positions]
        of prompts and of what follows, 0 where they are shorter. By default a prefix is the whole prompt, and there are
        no images or global tokens.
        """
        given = self.prefill_inputs(tokens, lengths, data)
        return self.compiled(given["tokens"].shape[1])(params, cache, given)

    def generate(
        self, params: Params, cache: Cache, tokens: Any, positions: Any, data: Mapping[str, Any] = {}
    ) -> tuple[Array, Cache]:
        """Returns logits [B, V] after one more token per row, ``tokens`` [B] at ``positions`` [B], and the cache;
        ``data`` as for `prefill`."""
        return self.compiled(0)(params, cache, self.decode_inputs(tokens, positions, data))

    def prefill_inputs(self, tokens: Any, lengths: Any, data: Mapping[str, Any] = {}) -> dict[str, Array]:
        """Returns the inputs of the program of `prefill` besides weights and cache, on its devices."""
        tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths, np.int32)
        (batch, length), wanted = tokens.shape, self.batch_seqs
        if batch != wanted or lengths.shape != (batch,):
            raise InputError(f"{batch} prompts with {lengths.size} lengths; the step takes {wanted} of both. Pad both.")
        if length > self.cache_len or lengths.max() > length or lengths.min() < 1:
            raise InputError(
                f"prompts of {lengths.min()} to {lengths.max()} tokens in rows of {length}; the cache holds "
                f"{self.cache_len}. Give 1 to that many, padded behind, or a larger max_len."
            )
        sizes = {**self.model.dims, "B": batch, "T": length}
        check(self.prefill_declared.declared["x"], sizes, self.strategy.mesh)
        found = self._mask_inputs({"prefix": lengths, **data}, length)
        return self._placed(1, tokens=tokens, last=lengths - 1, **found)

    def decode_inputs(self, tokens: Any, positions: Any, data: Mapping[str, Any] = {}) -> dict[str, Array]:
        """Returns the inputs of the program of `generate` besides weights and cache, on its devices."""
        return self._placed(0, tokens=tokens, positions=positions, **self._mask_inputs(data, self.cache_len))

    def _mask_inputs(self, data: Mapping[str, Any], length: int) -> dict[str, np.ndarray]:
        """Returns what the mask reads of ``length`` positions, 0 where nothing is given."""
        found = {name: np.zeros(shape.shape, np.int32) for name, shape in self._mask_shapes(length).items()}
        for name, array in found.items():
            if name not in data and name in ("enter", "leave", "lengths"):
                raise InputError(
                    f"attention_mask={self.model.attention_mask!r} reads {name} of each sequence. In Python give it in "
                    "data; or use another mask."
                )
            rows = np.asarray(data.get(name, array), np.int32)
            part = (slice(None), slice(min(length, rows.shape[-1])))[: rows.ndim]
            array[part] = rows[part]
        return found

    def _mask_shapes(self, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.batch_seqs, length)
        return {n: jax.ShapeDtypeStruct(shape[: len(MASK_DATA[n])], jnp.int32) for n in mask_data(self.model, PLAIN)}

    def compiled(self, length: int) -> jax.stages.Compiled:
        """Returns the program for prompts of a padded length, or for one more token if 0; compiles it once."""
        if length not in self._compiled:
            self._compiled[length] = self.lower(length).compile()
        return self._compiled[length]

    def lower(self, length: int, *, platform: str = "") -> jax.stages.Lowered:
        """Lowers the program without data; on an abstract mesh for ``platform``."""
        rows = jax.ShapeDtypeStruct((self.batch_seqs,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((self.batch_seqs, length), jnp.int32)
        given = {"tokens": tokens, "last": rows} if length else {"tokens": rows, "positions": rows}
        given |= self._mask_shapes(length or self.cache_len)
        return lower(self._program(length), self.mesh, self.param_shapes, self.cache_shapes, given, platform=platform)

    # -- the programs ------------------------------------------------------------------------------

    def _given_specs(self, length: int) -> dict[str, PartitionSpec]:
        """Returns the shardings of `prefill_inputs`; if ``length`` is 0 of `decode_inputs`, [B]."""
        specs = self._specs(self.prefill_declared if length else self.generate_declared)
        rows = specs.pop("positions" if length else "last")
        return specs if length else specs | {"tokens": rows, "positions": rows}

    def _specs(self, derived: Derived) -> dict[str, PartitionSpec]:
        """Returns the shardings of the inputs of a derived program."""
        names = ("tokens", "positions", "last", *mask_data(self.model, PLAIN))
        return {name: partition_spec(derived.declared[name]) for name in names}

    def _placed(self, length: int, **given: Any) -> dict[str, Array]:
        """Puts the inputs of a program on its devices."""
        arrays = {n: a if isinstance(a, Array) else np.asarray(a, np.int32) for n, a in given.items()}
        return jax.device_put(arrays, shardings(self.mesh, self._given_specs(length)))

    def _program(self, length: int) -> Any:
        """Returns the jitted function (weights, cache, inputs) -> (logits, cache); see `compiled`."""
        derived = self.prefill_declared if length else self.generate_declared
        mapped = jax.shard_map(
            partial(self.run, derived),
            mesh=self.mesh,
            in_specs=(self.param_specs, self.cache_specs, self._specs(derived)),
            out_specs=(partition_spec(derived.declared["logits"]), self.cache_specs),
            check_vma=False,
        )

        def of_tokens(logits: Array, cache: Cache) -> tuple[Array, Cache]:
            return logits[:, : self.model.vocab_size], cache

        def prefill(params: Params, cache: Cache, given: dict[str, Array]) -> tuple[Array, Cache]:
            shape = given["tokens"].shape
            positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape)
            return of_tokens(*mapped(params, cache, {**given, "positions": positions}))

        def generate(params: Params, cache: Cache, given: dict[str, Array]) -> tuple[Array, Cache]:
            columns = given | {name: given[name][:, None] for name in ("tokens", "positions")}
            return of_tokens(*mapped(params, cache, {**columns, "last": jnp.zeros_like(given["tokens"])}))

        return jax.jit(
            prefill if length else generate,
            in_shardings=(self.param_shardings, self.cache_formats, shardings(self.mesh, self._given_specs(length))),
            out_shardings=(self.logits_sharding, self.cache_formats),
            donate_argnums=1,
            compiler_options=self.compiler.used,
        )
