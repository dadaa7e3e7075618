"""The setting of a question: what is trained, on which chips, how much of it, and at which rates."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec.structs import replace

from meshwright.algebra.derive import derive
from meshwright.algebra.derived import Derived
from meshwright.algebra.generation import AS_WRITTEN, Storage, cache_sizes, derive_job
from meshwright.algebra.layers import PLAIN
from meshwright.algebra.program import Program
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.transformer import layer_names, transformer
from meshwright.core.fields import Checked
from meshwright.cost.memory import memory_limit, memory_parts
from meshwright.cost.network.placement import Placement
from meshwright.cost.pipeline import PipelineCost, strategy_pipeline
from meshwright.cost.step_costs import collective_groups, op_sizes
from meshwright.cost.step_rates import StepRates, attention_scores, step_rates
from meshwright.spec.calibration import Calibration, datasheet_calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.plan_file import Plan
from meshwright.spec.strategy import (
    AS_RUN,
    Assumptions,
    Strategy,
    make_mesh,
    require_runnable_assumptions,
    require_runnable_strategy,
)


class Setting(Checked, frozen=True, dict=True):
    """The model, cluster, job and rates that strategies are priced in. A verb makes one and passes it on whole.

    Without a ``calibration`` links and kernels take the rates of the data sheet. ``assumptions`` say whose software
    runs the step. What follows from the fields is made when it is first asked for, and kept; the program is shared by
    all settings of one model.
    """

    model: Model
    cluster: Cluster
    job: Job
    calibration: Calibration | None = None
    storage: Storage = AS_WRITTEN
    assumptions: Assumptions = AS_RUN

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
        """Bytes of a chip that programs may fill; infinity if unknown."""
        return memory_limit(self.cluster, self.calibration)

    def derived(self, strategy: Strategy) -> Derived:
        """The steps of the job under a strategy, as the assumed software runs them; InputError for unknown axes."""
        make_mesh(strategy.mesh)
        fused_head = self.assumptions.fused_head
        return derive_job(self.model, self.job, strategy, storage=self.storage, fused_head=fused_head)

    def symbolic(self, strategy: Strategy, *, without: tuple[str, ...] = ()) -> Derived:
        """Returns the training steps of every mesh, ``without`` some axes: sizes are filled in when they are priced."""
        optimizer, fused_head = self.job.optimizer, self.assumptions.fused_head
        return derive(
            self.program, strategy, symbolic=True, without=without, optimizer=optimizer, fused_head=fused_head
        )

    def sizes(
        self, strategy: Strategy, *, mesh: Mapping[str, Number] | None = None, microbatch_seqs: Number = None
    ) -> OpSizes:
        """Sizes of one microbatch under a strategy; of caches too, in a job that generates.

        Another mesh and other sequences of a microbatch may be arrays. A query that meets a cache meets every slot of
        it: nothing is skipped.
        """
        job = self.job
        found = op_sizes(
            self.model,
            seq_len=job.step_len,
            microbatch_seqs=job.batch_seqs / strategy.num_microbatches if microbatch_seqs is None else microbatch_seqs,
            mesh=mesh or strategy.mesh,
            strategy=strategy,
            scores=attention_scores(self.cluster, self.assumptions),
            assumptions=self.assumptions,
        )
        if job.trains:
            return found
        cache = cache_sizes(batch_seqs=job.batch_seqs, max_len=job.seq_len, storage=self.storage)
        causal = found.causal and job.kind != "decode"
        return replace(found, dims={**found.dims, **cache}, causal=causal)

    def memory(self, strategy: Strategy, derived: Derived | None = None) -> dict[str, Number]:
        """Bytes per chip of each item under a strategy, whose steps may be derived already."""
        parts = memory_parts(derived or self.derived(strategy), self.sizes(strategy))
        return parts.items(self.pipeline(strategy), strategy.offload)

    def step_rates(self, strategy: Strategy, placements: Sequence[Placement], *derived: Derived) -> StepRates:
        """Returns the machine's rates on some placements, in the groups that the derived steps use."""
        return step_rates(
            self.cluster,
            placements,
            collective_groups(*derived),
            strategy,
            assumptions=self.assumptions,
            calibration=self.calibration,
        )

    def pipeline(self, strategy: Strategy) -> PipelineCost:
        """The pipeline of a strategy."""
        return strategy_pipeline(strategy, self.assumptions.software, names=layer_names(self.model))

    def require_runnable(self, strategy: Strategy) -> None:
        """Raises CannotRunError for what this machine's own devices would not run in this version."""
        if self.cluster.kind == "host":
            require_runnable_strategy(strategy)
            require_runnable_assumptions(self.assumptions)

    def on(self, cluster: Cluster) -> "Setting":
        """Returns the setting of the job on another cluster."""
        return self if cluster == self.cluster else replace(self, cluster=cluster)


def setting_of(plan: Plan, storage: Storage = AS_WRITTEN) -> Setting:
    """The setting of a plan file, for weights and caches stored so."""
    return Setting(plan.model, plan.cluster, plan.job, plan.calibration, storage, plan.assumptions)
