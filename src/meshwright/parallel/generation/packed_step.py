"""The generation step: rows of any sequences on a paged cache, in few compiled shapes."""

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from msgspec.structs import replace

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation.cache import cache_sizes, cache_table, source_len
from meshwright.algebra.generation.derive import derive_encoding, derive_generation, generation_strategy
from meshwright.algebra.generation.program import WINDOW_PAGES, Storage
from meshwright.algebra.notation import check
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import checked
from meshwright.nn.attention.platform import platform_of
from meshwright.nn.weights import Params
from meshwright.parallel.generation.held_arrays import Cache
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.parallel.generation.source_step import SourceStep
from meshwright.parallel.mesh import lower, partition_spec, shardings
from meshwright.spec.assumptions import require_runnable_strategy
from meshwright.spec.job import Job
from meshwright.spec.model import MASK_DATA, Model, require_runnable
from meshwright.spec.strategy import Strategy, held_dims
from meshwright.spec.weights import without_mtp

ALIKE_ROWS = 32
"""Maximum rows of a batch-invariant step. Smaller steps are used only if they sum in the same order as a step of this
size: on CPUs, XLA splits the sums of some products depending on the number of rows."""


class PackedShape(NamedTuple):
    """A compiled shape: numbers of rows, sequences and rows with logits, and the maximum rows of one sequence."""

    rows: int
    sequences: int
    outputs: int
    longest: int


class PackedRows(NamedTuple):
    """Host arrays that a step reads, see `PackedStep.step`; optional fields are None unless the step has them."""

    tokens: Any
    sources: Any
    positions: Any
    slots: Any
    first: Any
    counts: Any
    lengths: Any
    pages: Any
    last: Any
    adapters: Any = None
    window_slots: Any = None
    window_pages: Any = None
    source_lengths: Any = None
    source_pages: Any = None
    prefix: Any = None
    documents: Any = None
    is_global: Any = None
    enter: Any = None
    leave: Any = None
    spans: Any = None

    def each_alone(self, whose: Sequence[int] | np.ndarray) -> "PackedRows":
        """Returns the rows as separate sequences of one row; ``whose`` [R] is the present sequence of each row."""
        row_ids, lengths = np.arange(len(self.tokens)), np.asarray(self.positions) + 1
        names = [name for name in (*TABLES, *OF_MASKS, "source_lengths") if getattr(self, name) is not None]
        fields = {name: getattr(self, name)[whose] for name in names}
        return self._replace(**fields | {"first": row_ids, "counts": np.ones_like(row_ids), "lengths": lengths})

    @classmethod
    def joined(cls, parts: Sequence["PackedRows"], shape: PackedShape) -> "PackedRows":
        """Concatenates the rows of all owners of sequences (`PackedStep.num_owners`), each padded to its equal share
        of ``shape`` with rows that change nothing."""
        num_owners, filler_of = len(parts), {"sources": -1, "adapters": -1, "slots": NO_SLOT, "window_slots": NO_SLOT}
        arrays = dict[str, np.ndarray]()
        for name in (name for name, value in zip(cls._fields, parts[0], strict=True) if value is not None):
            field_shape = length_of(name, shape) // num_owners, *np.shape(getattr(parts[0], name))[1:]
            arrays[name] = np.full((num_owners, *field_shape), filler_of.get(name, 0), np.int32)
            for owner_array, part in zip(arrays[name], parts, strict=True):
                owner_array[: len(getattr(part, name))] = getattr(part, name)
            if name in ("first", "last"):
                arrays[name] += shape.rows // num_owners * np.arange(num_owners)[:, None]  # after earlier owners' rows
            arrays[name] = arrays[name].reshape(-1, *field_shape[1:])
        return cls(**arrays)


TABLES = ("pages", "window_pages", "source_pages")
"""Fields of `PackedRows` that are page tables, a row per sequence."""
OF_MASKS = tuple(name for name in MASK_DATA if name != "lengths")
"""Fields of mask data per sequence: an entry per position, or (``prefix``) a number."""
OF_SEQUENCES = ("first", "counts", "lengths", "source_lengths", *TABLES, *OF_MASKS)
"""Fields of `PackedRows` whose first dim is sequences."""
NO_SLOT = 2**30
"""A slot index beyond every pool, whose writes are dropped."""


def length_of(name: str, shape: PackedShape) -> int:
    """Returns the length of the first dim of a field of `PackedRows` in a shape."""
    return shape.outputs if name == "last" else shape.sequences if name in OF_SEQUENCES else shape.rows


def slots_of(positions: np.ndarray, tables: np.ndarray, owner: Sequence[int] | np.ndarray, page_len: int) -> np.ndarray:
    """Returns the cache slots of ``positions`` [R] of the sequences ``owner`` [R], given page tables [Q, Bp]."""
    return tables[owner, positions // page_len] * page_len + positions % page_len


class PackedStep(SourceStep):
    """Steps of a model under a strategy, of up to ``max_seqs`` sequences of at most ``max_len`` positions.

    Keys and values of all sequences are in ``num_pages`` pages of ``page_len`` slots; for layers with a window they are
    in ``window_pages``, if the storage has any. On CPUs weights and caches are tuples with an item per layer and the
    loops over layers are unrolled. The mesh has ``num_owners`` shards of sequences: each sequence belongs to one owner,
    and its rows, pages and rows with logits are in that owner's equal share of each array.

    With ``batch_invariant`` (float32 on one CPU device) the results of a row depend bit for bit only on its sequence
    and the number of rows, in steps of 2 to `ALIKE_ROWS` rows that attention treats as separate sequences (``longest``
    is 1). Raises InputError or CannotRunError for sizes, models or strategies that cannot run.
    """

    @checked
    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        *,
        max_len: int,
        max_seqs: int,
        storage: Storage,
        batch_invariant: bool = False,
    ) -> None:
        model = without_mtp(model)
        require_runnable(model)
        require_runnable_strategy(strategy, trains=False)
        if max_len < 1 or max_seqs < 1:
            raise InputError(f"max_len={max_len} and max_seqs={max_seqs} must be at least 1.")
        if model.learned_positions and max_len > model.max_positions:
            raise InputError(
                f"{model.name} has {model.max_positions} learned positions; give at most that, not max_len={max_len}."
            )
        _ = storage.executed  # raises for dtypes that can be planned but not run
        storage = replace(storage, page_len=storage.page_len or max_len)  # contiguous: pages as long as a sequence
        self.strategy = strategy_of_heads(generation_strategy(strategy), model.common_kv_heads)
        self.model, self.max_len, self.max_seqs, self.storage = model, max_len, max_seqs, storage
        self.derived, self.derived_prompts = (
            derive_generation(model, self.strategy, storage, prompts=prompts) for prompts in (False, True)
        )
        self.declared = self.derived.declared
        if model.encoder:
            self.derived_sources = derive_encoding(model, self.strategy, storage)
            self.declared = self.derived_sources.declared | self.declared
        self.num_owners = self._parts_of(self.declared["first"], "Q")
        self.table = cache_table(model, batch_seqs=max_seqs, max_len=max_len, storage=storage, strategy=self.strategy)
        sizes = {"batch_seqs": max_seqs, "max_len": max_len, "source_len": source_len(model)}
        self.cache_sizes = cache_sizes(**sizes, storage=storage)
        size_by_dim = held_dims(model.dims, strategy.mesh)
        programs = [self.derived.program, *([self.derived_sources.program] if model.encoder else [])]
        weight_names = {v.name for program in programs for v in program.of_role("weight", "vector")}
        dims_by_cache = {row.name: dict(zip(row.dims, row.shape, strict=True)) for row in self.table}
        for name, array in self.declared.items():
            if name in dims_by_cache or name in weight_names:
                check(array, dims_by_cache.get(name, size_by_dim), strategy.mesh)
        if any(size % self.num_owners for size in (max_seqs, self.cache_sizes["Pg"], storage.window_pages)):
            raise InputError(
                f"max_seqs={max_seqs} and num_pages={self.cache_sizes['Pg']} must divide over the {self.num_owners} "
                f"shards of sequences. Give multiples of {self.num_owners}."
            )
        self.batch_invariant = batch_invariant
        if batch_invariant and not (self.unrolled and strategy.num_chips == 1 and self.dtype == jnp.float32):
            raise CannotRunError(
                "batch_invariant runs only in float32 on one CPU device in this version. Turn batch_invariant off, "
                "or serve float32 weights on one CPU device."
            )
        if batch_invariant and model.moe_layers:
            raise CannotRunError(
                f"{model.name} has experts, whose results depend bit for bit on the batch in this version. Turn "
                "batch_invariant off."
            )
        self.programs = ProgramStore(None, None)
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def row_parts(self, longest: int) -> int:
        """Returns the number that must divide the rows, sequences and rows with logits of a step with up to ``longest``
        rows per sequence."""
        declared_arrays = self._derived(longest).declared
        names = ("x", "tokens", "q" if "q" in declared_arrays else "qr")  # "qr": the name without bias and rope
        num_parts = [self._parts_of(declared_arrays[name], "B") for name in names]
        return math.lcm(self.num_owners, *num_parts)

    def _derived(self, longest: int) -> Derived:
        return self.derived_prompts if longest > 1 else self.derived

    # -- what a user calls -------------------------------------------------------------------------

    def on(self, mesh: Mesh | AbstractMesh, platform: str = "") -> "PackedStep":
        """Returns a copy of this step on another mesh, which compiles its programs anew. For a mesh without devices
        give its ``platform``: its programs can then be lowered, not compiled."""
        step = copy(self)
        for name in [name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)]:
            del vars(step)[name]  # recomputed for the new mesh
        step.mesh, step._compiled = mesh, {}
        step.platform = platform or platform_of(mesh.devices.flat[0])
        return step

    def keep_programs(self, folder: Path) -> None:
        """Saves compiled programs in files under a folder from now on, and loads programs that have files there."""
        key_sizes = self.max_len, self.max_seqs, self.batch_invariant, [device.id for device in self.mesh.devices.flat]
        key_facts = [replace(self.model, name=""), self.strategy, self.storage, key_sizes, self.compiler.used]
        self.programs = ProgramStore(folder, key_facts)

    def step(self, params: Params, cache: Cache, latest: Array, rows: PackedRows, longest: int) -> tuple[Array, Cache]:
        """Returns logits [O, V] of rows ``last``, and the cache.

        A row is a token at a position of its sequence: ``tokens``[R], or if ``sources``[R] >= 0 that entry of
        ``latest``[max_seqs], which is on the devices. Its key is written to cache slot ``slots``[R] (`NO_SLOT`:
        padding). Sequence q has ``counts``[q] rows, at most ``longest``, from row ``first``[q] on; after them it has
        ``lengths``[q] positions, in ``pages``[q, Bp]. Layers with separate window pages use ``window_slots`` and
        ``window_pages``. If the storage has adapters, a row uses adapter ``adapters``[R] (-1: none). Each shape is
        compiled once.
        """
        shape = PackedShape(len(rows.tokens), len(rows.first), len(rows.last), longest)
        return self.compiled(shape)(params, cache, latest, self.flat(rows))

    def flat(self, rows: PackedRows) -> np.ndarray:
        """Returns the fields that the step reads, concatenated to one int32 array, as its programs take them. Raises
        InputError if the rows lack a field."""
        if missing := [name for name in self.fields if getattr(rows, name) is None]:
            raise InputError(f"the step of {self.model.name} reads {', '.join(missing)}, which these rows lack.")
        return np.concatenate([getattr(rows, name).ravel() for name in self.fields], dtype=np.int32)

    def shape_of(self, job: Job) -> PackedShape:
        """Returns the shape of a job's step: all rows of its sequences, with logits of each sequence's last row."""
        return PackedShape(job.tokens_per_step, job.batch_seqs, job.batch_seqs, job.step_len)

    def compiled(self, shape: PackedShape) -> jax.stages.Compiled:
        """Returns the program of a shape, compiled or loaded at the first call."""
        if shape not in self._compiled:
            self._compiled[shape] = self.programs.get(self.program_name(shape), partial(self.lower, shape))
        return self._compiled[shape]

    def program_name(self, shape: PackedShape) -> str:
        """Returns the name under which ``programs`` stores the program of a shape."""
        return "step-" + "-".join(map(str, shape))

    def lower_job(self, job: Job) -> jax.stages.Lowered:
        """Lowers a job's step without data. With an encoder, prompts are its sources, padded to equal shards."""
        if not (self.model.encoder and job.has_prompts):
            return self.lower(self.shape_of(job))
        _, position_parts = self.source_parts
        return self.lower_sources(job.batch_seqs, -(-job.seq_len // position_parts) * position_parts)

    def lower(self, shape: PackedShape) -> jax.stages.Lowered:
        """Lowers the program of a shape without data."""
        params, cache = (jax.eval_shape(self.by_layer, shapes) for shapes in (self.param_shapes, self.cache_shapes))
        latest_struct = jax.ShapeDtypeStruct((self.max_seqs,), jnp.int32)
        flat_struct = jax.ShapeDtypeStruct((sum(map(math.prod, self._parts(shape))),), jnp.int32)
        platform = self.platform if isinstance(self.mesh, AbstractMesh) else ""
        return lower(self._program(shape), self.mesh, params, cache, latest_struct, flat_struct, platform=platform)

    # -- the programs ------------------------------------------------------------------------------

    @cached_property
    def fields(self) -> list[str]:
        """The fields of `PackedRows` that the step reads."""
        return [name for name in PackedRows._fields if name == "sources" or name in self.declared]

    @property
    def has_windows(self) -> bool:
        """True if layers with a window have separate pages."""
        return WINDOW_PAGES in self.declared

    def _parts(self, shape: PackedShape) -> list[tuple[int, ...]]:
        """Returns the array shape of each of `fields`."""
        dims_by_field = {**dict.fromkeys(TABLES, (self.cache_sizes["Bp"],)), "prefix": ()}
        dims_by_field["source_pages"] = (self.cache_sizes["Bx"],)
        dims_by_field |= {name: (self.max_len,) for name in OF_MASKS if name != "prefix"}
        return [(length_of(name, shape), *dims_by_field.get(name, ())) for name in self.fields]

    @cached_property
    def mask_fields(self) -> list[str]:
        """The fields of `PackedRows` that the model's mask reads."""
        return [name for name in self.fields if name in OF_MASKS]

    def _program(self, shape: PackedShape) -> jax.stages.Wrapped:
        """Returns the jitted function (weights, cache, latest, rows) -> (logits, cache)."""
        input_names = [name for name in self.fields if name != "sources"]
        param_specs, cache_specs = (self.by_layer(specs) for specs in (self.param_specs, self.cache_specs))
        replication = NamedSharding(self.mesh, PartitionSpec())
        derived_program = self._derived(shape.longest)
        declared_arrays = derived_program.declared
        mapped_run = jax.shard_map(
            partial(self.run, derived_program, longest=shape.longest),
            mesh=self.mesh,
            in_specs=(param_specs, cache_specs, {name: partition_spec(declared_arrays[name]) for name in input_names}),
            out_specs=(partition_spec(declared_arrays["logits"]), cache_specs),
            check_vma=False,
        )

        def step(params: Params, cache: Cache, latest: Array, flat: Array) -> tuple[Array, Cache]:
            shapes = self._parts(shape)
            ends = np.cumsum([math.prod(dims) for dims in shapes]).tolist()
            fields = (flat[end - math.prod(dims) : end].reshape(dims) for dims, end in zip(shapes, ends, strict=True))
            inputs = dict(zip(self.fields, fields, strict=True))
            latest_slots = inputs.pop("sources")
            inputs["tokens"] = jnp.where(latest_slots >= 0, latest[jnp.maximum(latest_slots, 0)], inputs["tokens"])
            inputs |= {name: inputs[name][:, None] for name in input_names if declared_arrays[name].dims == ("B", "T")}
            # else XLA shards ``flat`` like some of its fields, and must reshard the others
            inputs = {name: lax.with_sharding_constraint(array, replication) for name, array in inputs.items()}
            logits, cache = mapped_run(params, cache, inputs)
            return logits[:, : self.model.vocab_size], cache  # the vocabulary is padded to equal parts

        return jax.jit(
            step,
            in_shardings=(shardings(self.mesh, param_specs), self.held_formats, replication, replication),
            out_shardings=(self.logits_sharding, self.held_formats),
            donate_argnums=1,  # donated: else every step copies all pages
            keep_unused=bool(self.model.encoder),  # the encoder's weights are unused here
            compiler_options=self.compiler.used,
        )


def sizes_up_to(most: int, *, least: int = 1, halves_from: int = 0) -> list[int]:
    """Returns ``least``, doubled up to ``most``, which ends the list; from ``halves_from`` on also 1.5 times each."""
    sizes, size = list[int](), least
    while size < most:
        sizes += [size, size * 3 // 2] if halves_from and size >= halves_from else [size]
        size *= 2
    return [*(num_rows for num_rows in sizes if num_rows < most), max(least, most)]
