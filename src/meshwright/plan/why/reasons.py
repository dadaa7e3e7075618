"""Which of the four situations of plain data parallelism a job is in on a cluster, and what the plan does about it.

FSDP over every chip has two limits. A chip needs at least one sequence; and the gathers and sums of all weights, which
take as long on more chips, must be shorter than the computation, which does not. Which of them are passed says which
other axes help. Source: Horace He's lecture on machine-learning systems, "4 situations" of scaling FSDP.
"""

import msgspec

from meshwright.core.units import format_seconds
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.training_budget import train_seconds, training_flops
from meshwright.cost.network.collectives import group_rates
from meshwright.cost.network.placement import physical_placement
from meshwright.spec.calibration import matmul_rate
from meshwright.spec.plan_file import Plan
from meshwright.spec.strategy import STATE_BYTES
from meshwright.spec.weights import num_active_params, num_params

ADVICE: dict[int, str] = {
    1: "FSDP (or data parallelism) alone",
    2: "context or tensor parallelism; not a pipeline, which needs as many microbatches as stages and so takes the "
    "sequences back",
    3: "pipeline stages, or tensor parallelism across nodes, so that a chip moves fewer weights",
    4: "context or tensor parallelism for the sequences, and pipeline stages or tensor parallelism across nodes for "
    "the weights",
}
"""What helps in each of the four cases."""

HELPERS: dict[int, tuple[str, ...]] = {
    1: (),
    2: ("context", "tensor"),
    3: ("pipeline", "tensor"),
    4: ("context", "tensor", "pipeline"),
}
"""The axes that the advice of each case names."""


class FsdpCase(msgspec.Struct, frozen=True, kw_only=True):
    """FSDP over all chips of a plan, as if it split nothing else, in one microbatch.

    ``case``: 1 neither limit is passed, 2 there are more chips than sequences, 3 communication takes longer than
    compute, 4 both. ``max_chips_by_comms`` is where the two take equally long. ``other_axes`` are those that the plan
    itself splits besides data and fsdp, and ``follows`` whether they are what the case asks for.
    """

    case: int
    chips: int
    sequences: int
    compute_s: float
    comms_s: float
    max_chips_by_comms: float
    tokens_per_chip: float
    other_axes: tuple[str, ...]
    follows: bool

    @property
    def advice(self) -> str:
        """What helps."""
        return ADVICE[self.case]

    @property
    def words(self) -> str:
        """The case, its two limits with their numbers, the advice, and what the plan does."""
        batch = "no more" if self.chips <= self.sequences else "more"
        order = "longer than" if self.comms_s > self.compute_s else "hidden by"
        taken = ", ".join(self.other_axes) or "no other axis"
        if self.case == 1 and self.other_axes:
            taken += ", which these limits do not ask for"
        return (
            f"case {self.case} of 4, FSDP alone: {batch} chips ({self.chips:,}) than sequences ({self.sequences:,}), "
            f"communication of {format_seconds(self.comms_s)} {order} {format_seconds(self.compute_s)} of compute, "
            f"equal on about {self.max_chips_by_comms:,.0f} chips. What helps: {self.advice}. This plan has {taken}."
        )


def fsdp_case(plan: Plan) -> FsdpCase | None:
    """The case of a plan's job on its cluster; None on one chip and on this machine's emulated devices.

    Compute is 6 N tokens at the rate of products; communication is two gathers and a scatter of all weights over every
    link of the cluster, at the rates that its plans are priced with.
    """
    cluster, job, strategy = plan.cluster, plan.job, plan.strategy
    if cluster.num_chips == 1 or cluster.kind == "host":
        return None
    rate = matmul_rate(cluster.chip, plan.calibration, strategy.matmul_dtype)
    flops = training_flops(num_active_params(plan.model), job.tokens_per_step)
    compute = train_seconds(flops, num_chips=cluster.num_chips, peak_flops=rate)
    placement = physical_placement(cluster)
    gather = group_rates(placement, placement.mesh, plan.calibration).seconds_per_byte_all_gather
    width = STATE_BYTES[strategy.state]["weights"]
    comms = limits.flat_fsdp_comms_s(num_params(plan.model), 1 / gather, bytes_per_param=width)
    others = tuple(axis for axis in ("pipeline", "context", "tensor") if strategy.mesh.get(axis, 1) > 1)
    case = 1 + (cluster.num_chips > job.batch_seqs) + 2 * (comms > compute)
    return FsdpCase(
        case=case,
        chips=cluster.num_chips,
        sequences=job.batch_seqs,
        compute_s=compute,
        comms_s=float(comms),
        max_chips_by_comms=float(cluster.num_chips * compute / comms),
        tokens_per_chip=job.tokens_per_step / cluster.num_chips,
        other_axes=others,
        follows=_follows(case, others),
    )


def _follows(case: int, others: tuple[str, ...]) -> bool:
    """Whether the axes of a plan are some that the case asks for; none beyond, in case 1."""
    return not others if case == 1 else bool(set(HELPERS[case]) & set(others))
