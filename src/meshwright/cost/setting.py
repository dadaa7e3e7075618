"""The setting of a question: what is trained, on which chips, how much of it, and at which rates."""

from functools import cached_property

import msgspec

from meshwright.algebra.derived import Derived
from meshwright.algebra.generation import AS_WRITTEN, Storage, derive_job
from meshwright.algebra.layers import PLAIN
from meshwright.algebra.program import Program
from meshwright.algebra.transformer import transformer
from meshwright.cost.memory import memory_limit
from meshwright.spec.calibration import Calibration, datasheet_calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.plan_file import Plan
from meshwright.spec.strategy import Strategy


class Setting(msgspec.Struct, frozen=True, dict=True):
    """What strategies are priced in. A verb makes one and hands it on whole.

    Without a ``calibration`` links and kernels take the rates of the data sheet. What follows from the four is made
    when it is first asked for, and kept; the program is shared by all settings of one model.
    """

    model: Model
    cluster: Cluster
    job: Job
    calibration: Calibration | None = None
    storage: Storage = AS_WRITTEN

    @property
    def program(self) -> Program:
        """The model's training step in blocks of ops."""
        return transformer(self.model, PLAIN)

    @cached_property
    def rates(self) -> Calibration:
        """The calibration, or that of the chip's data sheet."""
        return self.calibration or datasheet_calibration(self.cluster.chip)

    @cached_property
    def memory_limit(self) -> float:
        """Bytes of a chip that programs may fill; infinity where that is not known."""
        return memory_limit(self.cluster, self.calibration)

    def derived(self, strategy: Strategy) -> Derived:
        """The steps of the job under a strategy, as its software runs them."""
        fused_head = strategy.software == "compiled"
        return derive_job(self.model, self.job, strategy, storage=self.storage, fused_head=fused_head)

    def on(self, cluster: Cluster) -> "Setting":
        """The same job on another cluster."""
        return self if cluster == self.cluster else msgspec.structs.replace(self, cluster=cluster)


def setting_of(plan: Plan, storage: Storage = AS_WRITTEN) -> Setting:
    """The setting of a plan file, for weights and caches stored so."""
    return Setting(plan.model, plan.cluster, plan.job, plan.calibration, storage)
