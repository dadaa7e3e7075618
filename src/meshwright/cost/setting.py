"""A setting: the model, cluster, job and rates for which strategies are priced."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import Derived
from meshwright.algebra.generation.cache import cache_sizes, pages_of_window, source_len
from meshwright.algebra.generation.derive import derive_job, derive_phase, job_strategy
from meshwright.algebra.generation.program import AS_WRITTEN, Storage
from meshwright.algebra.layers import PLAIN
from meshwright.algebra.program import Program
from meshwright.algebra.sizes import Number
from meshwright.algebra.transformer import stage_names, transformer
from meshwright.core.errors import CannotRunError
from meshwright.core.fields import Checked
from meshwright.core.units import counted
from meshwright.cost.arrays import total
from meshwright.cost.memory.chip import MEMORY_MARGINS, memory_limit
from meshwright.cost.memory.state import memory_parts
from meshwright.cost.network.placement import Placement
from meshwright.cost.pipeline import PipelineCost, strategy_pipeline
from meshwright.cost.step_costs import collective_groups, op_sizes
from meshwright.cost.step_rates import StepRates, attention_scores, has_grouped_kernels, step_rates
from meshwright.cost.work.sequences import LikeSequences
from meshwright.cost.work.slots import SlotSizes
from meshwright.spec.assumptions import AS_RUN, Assumptions, require_runnable_assumptions, require_runnable_strategy
from meshwright.spec.calibration import Calibration, datasheet_calibration
from meshwright.spec.chip import catalogued, compiled_as
from meshwright.spec.cluster import Cluster, Topology
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

PAGE_LENS: dict[Topology, int] = {"torus": 128, "host": 32, "switched": 16}
"""Positions of a page: as many as attention reads at once, on TPUs also a row of a tile of scales, on GPUs vLLM's."""


class Setting(Checked, frozen=True, dict=True):
    """The model, cluster, job and rates that strategies are priced in. A verb makes one and passes it on whole.

    Without a ``calibration`` links and kernels take the rates of the data sheet. ``storage`` says how a job that
    generates stores weights and caches, and ``known`` counts positions that caches have before its prompts or, with an
    encoder, positions of a source; ``assumptions`` say which software runs the step. Properties are computed when they
    are first read, and kept; the program is shared by all settings of one model.
    """

    model: Model
    cluster: Cluster
    job: Job
    calibration: Calibration | None = None
    storage: Storage = AS_WRITTEN
    assumptions: Assumptions = AS_RUN
    known: int = 0

    @property
    def program(self) -> Program:
        """The model's training step in blocks of ops."""
        return transformer(self.model, PLAIN)

    @cached_property
    def rates(self) -> Calibration:
        """The calibration; without one, the chip's data sheet as a calibration."""
        return self.calibration or datasheet_calibration(self.cluster.chip)

    @cached_property
    def memory_limit(self) -> float:
        """Bytes of a chip that programs may fill; infinity for this machine if unknown."""
        return memory_limit(self.cluster, self.calibration)

    @property
    def memory_margin(self) -> float:
        """Share of a chip's memory that listed plans leave free."""
        return MEMORY_MARGINS[self.cluster.kind]

    @property
    def memory_room(self) -> float:
        """Most bytes of a chip that a listed plan may be predicted to need: `memory_limit` less the margin."""
        return self.memory_limit * (1 - self.memory_margin)

    def derived(self, strategy: Strategy) -> Derived:
        """Returns the job's steps under a strategy, for the software it runs on. Raises InputError for unknown axes."""
        make_mesh(strategy.mesh)
        fuses_head = self.assumptions.traits.is_compiled
        return derive_job(self.model, self.job, strategy, storage=self.step_storage, fused_head=fuses_head)

    @property
    def reads_sources(self) -> bool:
        """True if the job's prompts are an encoder's sources; the decoder then runs each sequence's first row."""
        return self.model.encoder is not None and self.job.has_prompts

    @property
    def max_len(self) -> int:
        """Positions of each sequence, ``known`` ones included; 1 if the prompts are sources."""
        if self.reads_sources:
            return 1
        return self.job.seq_len + (0 if self.model.encoder else self.known)

    @property
    def source_len(self) -> int:
        """Positions of each source, 0 without an encoder."""
        if self.reads_sources:
            return self.job.seq_len
        return (self.known or source_len(self.model)) if self.model.encoder else 0

    @property
    def row_dims(self) -> dict[str, int]:
        """Sizes of the dims of rows and caches, in a job that generates."""
        job, lengths = self.job, {"max_len": self.max_len, "source_len": self.source_len}
        num_rows = job.batch_seqs if self.reads_sources else job.tokens_per_step
        size_by_dim = {"B": num_rows, "T": 1, "Q": job.batch_seqs, "O": job.batch_seqs}
        size_by_dim |= cache_sizes(batch_seqs=job.batch_seqs, **lengths, storage=self.step_storage)
        return size_by_dim | ({"S": self.source_len} if self.reads_sources else {})

    @property
    def step_storage(self) -> Storage:
        """How the step of a job that generates stores weights and caches: with enough pages for all of its sequences,
        and for their windows."""
        job, page_len, window_len = (
            self.job,
            self.storage.page_len or PAGE_LENS[self.cluster.kind],
            self.model.sliding_window,
        )
        storage = replace(self.storage, page_len=page_len)
        if self.model.encoder and not storage.num_pages:  # sources may be shorter than the encoder reads
            num_pages = -(-self.max_len // page_len) - (-self.source_len // page_len)
            storage = replace(storage, num_pages=job.batch_seqs * num_pages)
        if not window_len:
            return storage
        num_pages = pages_of_window(window_len, page_len, job.step_len)
        return replace(storage, window_pages=job.batch_seqs * min(num_pages, -(-self.max_len // page_len)))

    def symbolic(self, strategy: Strategy, *, without: tuple[str, ...] = ()) -> Derived:
        """Returns the job's steps for a mesh of any sizes, except the axes ``without``; pricing fills in the sizes.

        A strategy that repeats kv heads (`with_repeated_heads`) is for the meshes that need it.
        """
        optimizer, fuses_head = self.job.optimizer, self.assumptions.traits.is_compiled
        if not self.job.trains:
            mesh_axes, has_prompts = tuple(axis for axis in strategy.mesh if axis not in without), self.job.has_prompts
            step_strategy = job_strategy(self.job, strategy)
            return derive_phase(self.model, step_strategy, self.step_storage, mesh_axes, prompts=has_prompts)
        return derive(
            self.program, strategy, symbolic=True, without=without, optimizer=optimizer, fused_head=fuses_head
        )

    def sizes(
        self, strategy: Strategy, *, mesh: Mapping[str, Number] | None = None, microbatch_seqs: Number = None
    ) -> SlotSizes:
        """Returns the sizes of one microbatch under a strategy; in a job that generates, of a step's rows and pages.

        ``mesh`` and ``microbatch_seqs`` replace the strategy's; their sizes may be arrays.
        """
        job = self.job
        num_seqs = job.batch_seqs / strategy.num_microbatches if microbatch_seqs is None else microbatch_seqs
        if not job.trains:
            num_rows = 1.0 if self.reads_sources else float(job.step_len)
            sequences = LikeSequences(num_seqs, num_rows, self.max_len - num_rows, float(self.source_len))
            return self.step_sizes(strategy, sequences, mesh=mesh)
        return self._sizes(strategy, mesh or strategy.mesh, job.seq_len, num_seqs)

    def step_sizes(
        self,
        strategy: Strategy,
        *sequences: LikeSequences,
        mesh: Mapping[str, Number] | None = None,
        outputs: Number = None,
    ) -> SlotSizes:
        """Returns the sizes of a server's step over ``sequences``. Their caches have whole pages for all positions,
        with the step's rows, and for their sources. ``outputs`` rows have logits, by default one of each sequence."""
        page_len = float(self.step_storage.page_len)
        num_rows, seqs = total(part.count * part.rows for part in sequences), total(part.count for part in sequences)
        lengths = [(part.count, part.rows + part.before, part.source) for part in sequences]
        source_positions = total(count * source for count, _, source in lengths)
        pages = total(count * (np.ceil(own / page_len) + np.ceil(source / page_len)) for count, own, source in lengths)
        entries = (total(count * own for count, own, _ in lengths) + source_positions) / page_len
        sizes = self._sizes(strategy, mesh or strategy.mesh, 1, num_rows)
        num_outputs = seqs if outputs is None else outputs
        dims = {"Q": seqs, "O": num_outputs, "Pl": page_len, "Pg": pages, "Bp": entries / seqs}
        if self.model.encoder:
            dims |= {"S": source_positions / seqs, "Bx": source_positions / seqs / page_len}
        if window := self.model.sliding_window:
            window_pages = (part.count * pages_of_window(window, page_len, part.rows) for part in sequences)
            dims["Pw"] = np.minimum(total(window_pages), pages)
        return replace(sizes, dims={**sizes.dims, **dims}, sequences=sequences)

    def _sizes(self, strategy: Strategy, mesh: Mapping[str, Number], seq_len: int, num_seqs: Number) -> SlotSizes:
        target_chip = catalogued(compiled_as(self.cluster.chip), "libtpu")
        sizes = op_sizes(
            self.model,
            seq_len=seq_len,
            microbatch_seqs=num_seqs,
            mesh=mesh,
            strategy=strategy,
            scores=attention_scores(self.cluster, self.assumptions),
            grouped=has_grouped_kernels(self.cluster),
            on_gpus=self.cluster.kind == "switched" and self.assumptions.traits.is_compiled,
            assumptions=self.assumptions,
        )
        on_cpus = self.cluster.kind == "host" and self.assumptions.traits.is_compiled
        return replace(sizes, tile_rows=target_chip.tile_rows if target_chip else 0, on_cpus=on_cpus)

    def memory(self, strategy: Strategy, derived: Derived | None = None) -> dict[str, Number]:
        """Returns the bytes per chip of each item under a strategy; ``derived``: its steps, if derived already."""
        parts = memory_parts(derived or self.derived(strategy), self.sizes(strategy))
        return parts.items(self.pipeline(strategy), strategy.offload)

    def step_rates(self, strategy: Strategy, placements: Sequence[Placement], *derived: Derived) -> StepRates:
        """Returns the machine's rates on some placements, for the groups of mesh axes in the derived steps."""
        return step_rates(
            self.cluster,
            placements,
            collective_groups(*derived),
            strategy,
            assumptions=self.assumptions,
            calibration=self.calibration,
        )

    def pipeline(self, strategy: Strategy) -> PipelineCost:
        """Returns the pipeline of a strategy."""
        return strategy_pipeline(
            strategy, in_lockstep=self.assumptions.traits.is_compiled, names=stage_names(self.model)
        )

    def of_island(self, strategy: Strategy) -> "Setting":
        """Returns the setting of one of a strategy's islands, with its share of the batch; itself without islands.

        Raises CannotRunError if the cluster has another number of islands, or they do not divide the batch.
        """
        num_islands, cluster, job = strategy.num_islands, self.cluster, self.job
        if num_islands != cluster.num_islands:
            remedy = f"Set islands={cluster.num_islands}"
            if cluster.num_islands == 1:
                remedy = f"Leave it out, or name the islands: {num_islands}*{cluster.short_name}@1Gbit/s, say"
            cluster_text = f"{cluster.short_name} is {counted(cluster.num_islands, 'island')}"
            raise CannotRunError(f"the mesh has islands={num_islands}, and {cluster_text}. {remedy}.")
        if job.batch_seqs % num_islands:
            nearest_batch = max(1, round(job.batch_seqs / num_islands)) * num_islands
            raise CannotRunError(
                f"islands={num_islands} does not divide the batch of {job.batch_seqs} sequences. "
                f"Use a batch of {nearest_batch} sequences."
            )
        if num_islands == 1:
            return self
        island_job = replace(job, batch_seqs=job.batch_seqs // num_islands)
        return replace(self, cluster=cluster.island, job=island_job)

    def require_runnable(self, strategy: Strategy) -> None:
        """Raises CannotRunError if the cluster is this machine and it cannot run the strategy or assumptions."""
        if self.cluster.kind == "host":
            require_runnable_strategy(strategy, trains=self.job.trains)
            require_runnable_assumptions(self.assumptions)

    def on(self, cluster: Cluster) -> "Setting":
        """Returns this setting on another cluster; itself if the cluster is the same."""
        return self if cluster == self.cluster else replace(self, cluster=cluster)
