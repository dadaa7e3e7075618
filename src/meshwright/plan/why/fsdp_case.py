"""Which of four situations plain data parallelism is in: FSDP alone over all chips of a plan, in one microbatch."""

import msgspec

from meshwright.core.units import format_seconds
from meshwright.cost.formulas import limits
from meshwright.cost.formulas.training_budget import train_seconds, training_flops
from meshwright.cost.network.collectives import group_rates
from meshwright.cost.network.placement import physical_placement
from meshwright.plan.plan_file import Plan
from meshwright.spec.calibration import matmul_rate
from meshwright.spec.strategy import STATE_BYTES
from meshwright.spec.weights import num_active_params, num_params

CASES: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("FSDP (or data parallelism) alone", ()),
    2: (
        "context or tensor parallelism; not a pipeline, which has fewer replicas, but several microbatches on each",
        ("context", "tensor"),
    ),
    3: (
        "pipeline stages, or tensor parallelism across nodes, so that a chip moves fewer weights",
        ("pipeline", "tensor"),
    ),
    4: (
        "context or tensor parallelism for the sequences, and pipeline stages or tensor parallelism across nodes for "
        "the weights",
        ("context", "tensor", "pipeline"),
    ),
}
"""Case of `FsdpCase` -> (what helps, the axes that help)."""


class FsdpCase(msgspec.Struct, frozen=True, kw_only=True):
    """FSDP alone over all chips of a plan, in one microbatch.

    FSDP alone has two limits. A chip needs at least one sequence. And the gathers of all weights and sums of all
    gradients, whose time does not fall with more chips, must take less time than compute, which does fall. The limits
    that are exceeded decide which other axes help. Source: Horace He's lecture on machine-learning systems, "4
    situations" of scaling FSDP.

    ``case`` is 1 if neither limit is exceeded, 2 if there are more chips than sequences, 3 if communication takes
    longer than compute, 4 if both hold. On ``max_chips_by_comms`` chips the two take equally long. ``other_axes`` has
    each of pipeline, context and tensor that the plan uses; ``follows`` is True if they agree with the case's advice.
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
    def words(self) -> str:
        """The case, its two limits with their numbers, the advice, and what the plan does."""
        amount = "no more" if self.chips <= self.sequences else "more"
        phrase = "longer than" if self.comms_s > self.compute_s else "hidden by"
        axes = ", ".join(self.other_axes) or "no other axis"
        if self.case == 1 and self.other_axes:
            axes += ", which these limits do not require"
        return (
            f"case {self.case} of 4, FSDP alone: {amount} chips ({self.chips:,}) than sequences ({self.sequences:,}), "
            f"communication of {format_seconds(self.comms_s)} {phrase} {format_seconds(self.compute_s)} of compute, "
            f"equal on about {self.max_chips_by_comms:,.0f} chips. What helps: {CASES[self.case][0]}. "
            f"This plan has {axes}."
        )


def fsdp_case(plan: Plan) -> FsdpCase | None:
    """Returns the case of a plan's job on its cluster; None on one chip and on this machine's emulated devices.

    Compute is 6 FLOPs per token and active parameter, at the rate of products. Communication is two gathers of all
    weights and a scatter of their gradients over every link of the cluster, at the plan's rates.
    """
    cluster, job, strategy = plan.cluster, plan.job, plan.strategy
    if cluster.num_chips == 1 or cluster.kind == "host":
        return None
    flops_per_s = matmul_rate(cluster.chip, plan.calibration, strategy.matmul_dtype)
    flops = training_flops(num_active_params(plan.model), job.tokens_per_step)
    compute_s = train_seconds(flops, num_chips=cluster.num_chips, peak_flops=flops_per_s)
    placement = physical_placement(cluster)
    seconds_per_byte = group_rates(placement, placement.mesh, plan.calibration)["all_gather"].seconds_per_byte
    weight_bytes = STATE_BYTES[strategy.state]["weights"]
    comms_s = limits.flat_fsdp_comms_s(num_params(plan.model), 1 / seconds_per_byte, bytes_per_param=weight_bytes)
    other_axes = tuple(axis for axis in ("pipeline", "context", "tensor") if strategy.mesh.get(axis, 1) > 1)
    case_number = 1 + (cluster.num_chips > job.batch_seqs) + 2 * (comms_s > compute_s)
    return FsdpCase(
        case=case_number,
        chips=cluster.num_chips,
        sequences=job.batch_seqs,
        compute_s=compute_s,
        comms_s=float(comms_s),
        max_chips_by_comms=float(cluster.num_chips * compute_s / comms_s),
        tokens_per_chip=job.tokens_per_step / cluster.num_chips,
        other_axes=other_axes,
        # case 1 allows no other axis; the others need one that they name
        follows=not other_axes if case_number == 1 else not set(CASES[case_number][1]).isdisjoint(other_axes),
    )
