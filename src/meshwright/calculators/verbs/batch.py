"""`meshwright batch`: share a step out over replicas and microbatches, and see whether chips stay busy."""

from typing import Any

import click

from meshwright.calculators.training.batch_arithmetic import (
    BatchSplit,
    ComputeBoundTokens,
    compute_bound_tokens,
    solve_batch,
)
from meshwright.calculators.training.scaling_laws import critical_batch_tokens
from meshwright.calculators.verbs.show_chip import product_dtype
from meshwright.cli.output import emit_json, json_option, print_fact, print_table, print_text
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_count, parse_count
from meshwright.cost.formulas.roofline import dtype_bytes
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.chip import compute_dtype
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import parse_batch


@click.command()
@click.option("--batch", help="Tokens a step (4Mi) or sequences (1024seq); left out, it is worked out.")
@click.option("--seq", "seq_len", required=True, help="Tokens of a sequence.")
@click.option("--micro", type=int, help="Sequences of a microbatch on one replica.")
@click.option("--accumulate", type=int, help="Microbatches whose gradients are summed before an update.")
@click.option("--replicas", type=int, help="Copies of the model that share the batch: data parallel x FSDP.")
@click.option("--on", "on", help="A cluster: its chips over --chips-per-replica are the replicas, and its limits show.")
@click.option("--chips-per-replica", type=int, default=1, show_default=True, help="tensor x pipeline x context.")
@click.option("--model", "model_name", help="A model: with experts its chips need a larger batch to be busy.")
@click.option("--weights", "weight_dtype", help="Dtype of stored weights, such as int8 [default: bf16].")
@click.option("--loss", type=float, help="Loss reached: shows the batch beyond which steps hardly get fewer.")
@click.option("--max-micro", type=int, help="Most sequences of a microbatch that fit a replica.")
@click.option("--top", default=12, show_default=True, help="How many ways to list.")
@json_option
def command(
    batch: str | None,
    seq_len: str,
    micro: int | None,
    accumulate: int | None,
    replicas: int | None,
    on: str | None,
    chips_per_replica: int,
    model_name: str | None,
    weight_dtype: str | None,
    loss: float | None,
    max_micro: int | None,
    top: int,
    as_json: bool,
) -> None:
    """Solve: sequences a step = micro x accumulate x replicas. Give what is known, the rest is worked out."""
    length = parse_count(seq_len, what="seq")
    if length < 1:
        raise InputError("--seq 0 is no sequence. Give the tokens of one, such as 4096.")
    cluster = parse_cluster(on) if on else None
    replicas = replicas if cluster is None else _replicas(cluster, chips_per_replica, replicas)
    found = solve_batch(
        batch_seqs=parse_batch(batch, seq_len=length) if batch else None,
        microbatch_seqs=micro,
        accumulation=accumulate,
        data_parallel=replicas,
    )
    fitting = [one for one in found if max_micro is None or one.microbatch_seqs <= max_micro]
    if not fitting:
        least = min(one.microbatch_seqs for one in found)
        raise CannotRunError(f"every way needs microbatches of {least} or more. Give more replicas, or --max-micro.")
    limits = _limits(cluster, model_name, weight_dtype)
    facts = {
        "batch_seqs": fitting[0].batch_seqs,
        "seq_len": length,
        "tokens_per_step": fitting[0].batch_seqs * length,
        "num_solutions": len(fitting),
        "critical_batch_tokens": None if loss is None else _critical(loss),
        "limits": limits,
        "solutions": [_row(one, length, chips_per_replica, limits) for one in fitting[:top]],
    }
    if as_json:
        emit_json(facts)
    else:
        _print(facts, limits, cluster)


def _replicas(cluster: Cluster, chips_per_replica: int, given: int | None) -> int:
    """Replicas of a cluster; an InputError when it does not hold a whole number of them, or another one was given."""
    if chips_per_replica < 1 or cluster.num_chips % chips_per_replica:
        raise InputError(
            f"--chips-per-replica {chips_per_replica} does not divide the {cluster.num_chips:,} chips of "
            f"{cluster.short_name}. Use a divisor."
        )
    count = cluster.num_chips // chips_per_replica
    if given is not None and given != count:
        raise InputError(
            f"--replicas {given} is not {cluster.num_chips:,} chips / {chips_per_replica} = {count}. Leave one out."
        )
    return count


def _limits(cluster: Cluster | None, model_name: str | None, weights: str | None) -> ComputeBoundTokens | None:
    if cluster is None and weights is not None:
        raise InputError(f"--weights {weights} changes the limits of a cluster. Give --on.")
    dtype = None if cluster is None else product_dtype(cluster.chip)
    if cluster is None or dtype is None:
        return None
    found = find_model(model_name) if model_name else None
    experts = found is not None and found.num_experts > 0
    return compute_bound_tokens(
        cluster,
        dtype=compute_dtype(cluster.chip, dtype, weights) if weights else dtype,
        weight_bytes=dtype_bytes(weights or dtype),
        num_experts=found.num_experts if found and experts else 1,
        active_experts=found.experts_per_token if found and experts else 1,
    )


def _critical(loss: float) -> float:
    if loss <= 0:
        raise InputError(f"--loss {loss:g} must be positive. Give nats per token, such as 2.2.")
    return float(critical_batch_tokens(loss))


def _row(one: BatchSplit, seq_len: int, chips: int, limits: ComputeBoundTokens | None) -> dict[str, Any]:
    tokens = one.microbatch_seqs * seq_len
    hbm = limits.per_replica_hbm if limits else None
    link = limits.per_chip_link if limits else None
    return {
        "micro": one.microbatch_seqs,
        "accumulate": one.num_microbatches,
        "replicas": one.data_parallel,
        "chips": one.data_parallel * chips,
        "tokens_per_microbatch": tokens,
        "tokens_per_chip": tokens / chips,
        "hbm_compute_bound": None if hbm is None else tokens > hbm,
        "fsdp_compute_bound": None if link is None else tokens / chips > link,
    }


def _print(facts: dict[str, Any], limits: ComputeBoundTokens | None, cluster: Cluster | None) -> None:
    print_text(
        f"{facts['batch_seqs']:,} sequences of {facts['seq_len']:,} = {format_count(facts['tokens_per_step'])} "
        f"tokens a step = micro x accumulate x replicas"
    )
    headers = ["micro", "accumulate", "replicas", "chips", "tokens a microbatch", "tokens a chip"]
    rows = [
        [
            s["micro"],
            s["accumulate"],
            s["replicas"],
            s["chips"],
            s["tokens_per_microbatch"],
            _whole(s["tokens_per_chip"]),
        ]
        for s in facts["solutions"]
    ]
    if limits is not None:
        headers.append("bound by")
        rows = [[*row, _bound(s)] for row, s in zip(rows, facts["solutions"], strict=True)]
    print_table(headers, rows)
    more = facts["num_solutions"] - len(rows)
    if more:
        print_text(f"and {more:,} more ways; --top lists more of them")
    if limits is not None and cluster is not None:
        _print_limits(limits, cluster)
    critical = facts["critical_batch_tokens"]
    if critical is not None:
        side = "beyond" if facts["tokens_per_step"] > critical else "within"
        print_fact(
            "critical batch",
            f"{critical:,.3g} tokens at this loss (2e8 / L^(1/0.21), Kaplan et al. 2020): this step is {side} it",
        )


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _bound(row: dict[str, Any]) -> str:
    """What binds plain FSDP at this microbatch."""
    waits = [name for name, key in (("hbm", "hbm_compute_bound"), ("links", "fsdp_compute_bound")) if row[key] is False]
    return ", ".join(waits) or "compute"


def _print_limits(limits: ComputeBoundTokens, cluster: Cluster) -> None:
    name = cluster.chip.name
    if limits.per_replica_hbm is not None:
        print_fact("weights", f"hide behind compute from {limits.per_replica_hbm:,.0f} tokens a microbatch on {name}")
    if limits.per_chip_link is not None:
        print_fact("FSDP", f"hides behind compute from {limits.per_chip_link:,.0f} tokens a chip ({limits.link})")
