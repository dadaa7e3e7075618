"""`meshwright batch`: divides a step over replicas and microbatches, and shows whether chips stay busy."""

from collections.abc import Iterator
from typing import Any

from meshwright.calculators.training.batch_arithmetic import (
    BatchSolution,
    ComputeBoundTokens,
    compute_bound_tokens,
    solve_batch,
)
from meshwright.calculators.training.scaling_laws import critical_batch_tokens
from meshwright.calculators.verbs.show_chip import product_dtype
from meshwright.cli.verb import SEQ_NEEDED, Count, Options, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_count, format_params
from meshwright.cost.formulas.limit_table import sparsity
from meshwright.cost.formulas.roofline import dtype_bytes
from meshwright.report.answer import Answer, Fact, Piece, Table
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import compute_dtype
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import parse_batch


class Given(Options):
    batch: str | None = option("Tokens a step (4Mi) or sequences (1024seq); left out, it is worked out.")
    seq_len: Count = SEQ_NEEDED
    micro: Count | None = option("Sequences of a microbatch on one replica.")
    accumulate: Count | None = option("Microbatches whose gradients are summed before an update.")
    replicas: Count | None = option("Copies of the model that share the batch: data parallel x FSDP.")
    on: str | None = option("A cluster: its chips over --chips-per-replica are the replicas, and its limits show.")
    chips_per_replica: Count = option("tensor x pipeline x context.", default=1)
    model_name: str | None = option(
        "A model: with experts its chips need a larger batch to be busy.", "--model", needs={"on": "--on"}
    )
    weight_dtype: str | None = option("Dtype of stored weights, such as int8 [default: bf16].", "--weights")
    loss: float | None = option("Loss reached: shows the batch beyond which steps hardly get fewer.")
    max_micro: Count | None = option("Most sequences of a microbatch that fit a replica.")
    top: Count = option("How many solutions to list.", default=12)


@verb(Given)
def command(given: Given) -> Answer:
    """Solve: sequences a step = micro x accumulate x replicas. Give what is known, the rest is worked out."""
    length = given.seq_len
    cluster = parse_cluster(given.on) if given.on else None
    found = solve_batch(
        batch_seqs=parse_batch(given.batch, seq_len=length) if given.batch else None,
        microbatch_seqs=given.micro,
        accumulation=given.accumulate,
        data_parallel=given.replicas if cluster is None else _replicas(cluster, given),
    )
    fitting = [one for one in found if given.max_micro is None or one.microbatch_seqs <= given.max_micro]
    if not fitting:
        least = min(one.microbatch_seqs for one in found)
        raise CannotRunError(f"all need microbatches of {least} or more. Give more replicas, or --max-micro.")
    if given.loss is not None and given.loss <= 0:
        raise InputError(f"--loss {given.loss:g} must be positive. Give nats per token, such as 2.2.")
    limits = _limits(cluster, given)
    facts = {
        "batch_seqs": fitting[0].batch_seqs,
        "seq_len": length,
        "tokens_per_step": fitting[0].batch_seqs * length,
        "num_solutions": len(fitting),
        "critical_batch_tokens": given.loss and critical_batch_tokens(given.loss),
        "limits": limits,
        "solutions": [_row(one, given, limits) for one in fitting[: given.top]],
    }
    return Answer(facts, _text(facts, limits, cluster))


def _replicas(cluster: Cluster, given: Given) -> int:
    """Returns the replicas of a cluster. Raises InputError if they are no whole number, or not those given."""
    each = given.chips_per_replica
    if each < 1 or cluster.num_chips % each:
        raise InputError(
            f"--chips-per-replica {each} does not divide the {cluster.num_chips:,} chips of {cluster.short_name}. "
            f"Use a divisor."
        )
    count = cluster.num_chips // each
    if given.replicas not in (None, count):
        raise InputError(
            f"--replicas {given.replicas} is not {cluster.num_chips:,} chips / {each} = {count}. Leave one out."
        )
    return count


def _limits(cluster: Cluster | None, given: Given) -> ComputeBoundTokens | None:
    weights = given.weight_dtype
    if cluster is None and weights is not None:
        raise InputError(f"--weights {weights} changes the limits of a cluster. Give --on.")
    dtype = product_dtype(cluster.chip) if cluster else None
    if cluster is None or dtype is None:
        return None
    return compute_bound_tokens(
        cluster,
        dtype=compute_dtype(cluster.chip, dtype, weights) if weights else dtype,
        weight_bytes=dtype_bytes(weights or dtype),
        sparsity=sparsity(load_model(given.model_name)) if given.model_name else 1.0,
    )


def _row(one: BatchSolution, given: Given, limits: ComputeBoundTokens | None) -> dict[str, Any]:
    tokens, chips = one.microbatch_seqs * given.seq_len, given.chips_per_replica
    hbm, link = (limits.per_replica_hbm, limits.per_chip_link) if limits else (None, None)
    row = {
        "micro": one.microbatch_seqs,
        "accumulate": one.num_microbatches,
        "replicas": one.data_parallel,
        "chips": one.data_parallel * chips,
        "tokens_per_microbatch": tokens,
        "tokens_per_chip": tokens / chips,
        "hbm_compute_bound": hbm and tokens > hbm,
        "fsdp_compute_bound": link and tokens / chips > link,
    }
    return {**row, "bound_by": limits and _bound(row)}


COLUMNS: dict[str, Any] = {
    **{name: name for name in ("micro", "accumulate", "replicas", "chips")},
    "tokens a microbatch": "tokens_per_microbatch",
    "tokens a chip": ("tokens_per_chip", lambda value: int(value) if value == int(value) else value),
}


def _text(facts: dict[str, Any], limits: ComputeBoundTokens | None, cluster: Cluster | None) -> Iterator[Piece]:
    yield (
        f"{facts['batch_seqs']:,} sequences of {facts['seq_len']:,} = {format_count(facts['tokens_per_step'])} "
        f"tokens a step = micro x accumulate x replicas"
    )
    rows = facts["solutions"]
    yield Table.of(rows, COLUMNS if limits is None else {**COLUMNS, "bound by": "bound_by"})
    more = facts["num_solutions"] - len(rows)
    if more:
        yield f"and {more:,} more ways; --top lists more of them"
    if limits is not None and cluster is not None:
        yield from _limits_text(limits, cluster)
    critical = facts["critical_batch_tokens"]
    if critical is not None:
        side = "beyond" if facts["tokens_per_step"] > critical else "within"
        yield Fact(
            "critical batch",
            f"{format_params(critical)} tokens at this loss (2e8 / L^(1/0.21), Kaplan et al. 2020): this step is "
            f"{side} it",
        )


def _bound(row: dict[str, Any]) -> str:
    """Returns what binds plain FSDP at this microbatch."""
    waits = [name for name, key in (("hbm", "hbm_compute_bound"), ("links", "fsdp_compute_bound")) if row[key] is False]
    return ", ".join(waits) or "compute"


def _limits_text(limits: ComputeBoundTokens, cluster: Cluster) -> Iterator[Piece]:
    name = cluster.chip.name
    if limits.per_replica_hbm is not None:
        yield Fact("weights", f"hide behind compute from {limits.per_replica_hbm:,.0f} tokens a microbatch on {name}")
    if limits.per_chip_link is not None:
        yield Fact("FSDP", f"hides behind compute from {limits.per_chip_link:,.0f} tokens a chip ({limits.link})")
