"""`meshwright batch`: splits a step into replicas and microbatches, and shows whether chips are compute-bound.

Sequences per step = microbatch x accumulated microbatches x replicas. Limits: tokens per chip below which memory or
links bind, and the critical batch of the optimiser (`scaling_laws`). Sources: Scaling and Parallelism (slides); How to
Scale Your Model, sections 5.1 and 7, whose B counts tokens.
"""

import itertools
import math
from collections.abc import Iterator

from meshwright.calculators.training.scaling_laws import critical_batch_tokens
from meshwright.cli.verb import SEQ_NEEDED, Count, Options, option, verb
from meshwright.cli.verbs.show_chip import product_dtype
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_count, format_params
from meshwright.cost.formulas.limits import data_parallel_min_tokens_per_chip, ici_intensity
from meshwright.cost.formulas.roofline import critical_batch, dtype_bytes
from meshwright.cost.letters import sparsity
from meshwright.cost.network.links import torus_width
from meshwright.plan.legal import divisors
from meshwright.report.answer import Answer, Fact, Facts, Piece, Table
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import compute_dtype, peak
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.job import parse_batch

MAX_SEQUENCES = 10**7
"""Bound on sequences whose divisors are listed."""


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
    seq_len = given.seq_len
    cluster = parse_cluster(given.on) if given.on else None
    splits = solve_batch(
        batch_seqs=parse_batch(given.batch, seq_len=seq_len) if given.batch else None,
        microbatch_seqs=given.micro,
        accumulation=given.accumulate,
        data_parallel=given.replicas if cluster is None else _replicas(cluster, given),
    )
    allowed_splits = [split for split in splits if given.max_micro is None or split["micro"] <= given.max_micro]
    if not allowed_splits:
        min_micro = min(split["micro"] for split in splits)
        raise CannotRunError(f"all need microbatches of {min_micro} or more. Give more replicas, or --max-micro.")
    if given.loss is not None and given.loss <= 0:
        raise InputError(f"--loss {given.loss:g} must be positive. Give nats per token, such as 2.2.")
    limits, batch_seqs = _limits(cluster, given), math.prod(allowed_splits[0].values())
    facts = {
        "batch_seqs": batch_seqs,
        "seq_len": seq_len,
        "tokens_per_step": batch_seqs * seq_len,
        "num_solutions": len(allowed_splits),
        "critical_batch_tokens": given.loss and critical_batch_tokens(given.loss),
        "limits": limits,
        "solutions": [_row(split, given, limits) for split in allowed_splits[: given.top]],
    }
    return Answer(facts, _text(facts, limits, cluster))


def _replicas(cluster: Cluster, given: Given) -> int:
    """Returns the replicas of a cluster. Raises InputError if they are no whole number, or not those given."""
    chips = given.chips_per_replica
    if chips < 1 or cluster.num_chips % chips:
        raise InputError(
            f"--chips-per-replica {chips} does not divide the {cluster.num_chips:,} chips of {cluster.short_name}. "
            f"Use a divisor."
        )
    num_replicas = cluster.num_chips // chips
    if given.replicas not in (None, num_replicas):
        raise InputError(
            f"--replicas {given.replicas} is not {cluster.num_chips:,} chips / {chips} = {num_replicas}. Leave one out."
        )
    return num_replicas


def _limits(cluster: Cluster | None, given: Given) -> Facts | None:
    weight_dtype = given.weight_dtype
    if cluster is None and weight_dtype is not None:
        raise InputError(f"--weights {weight_dtype} changes the limits of a cluster. Give --on.")
    dtype = product_dtype(cluster.chip) if cluster else None
    if cluster is None or dtype is None:
        return None
    return compute_bound_tokens(
        cluster,
        dtype=compute_dtype(cluster.chip, dtype, weight_dtype) if weight_dtype else dtype,
        weight_bytes=dtype_bytes(weight_dtype or dtype),
        sparsity=sparsity(load_model(given.model_name)) if given.model_name else 1.0,
    )


def _row(split: dict[str, int], given: Given, limits: Facts | None) -> Facts:
    """Returns a solution with its tokens, and what binds plain FSDP: hbm, links, both, or compute."""
    tokens, chips = split["micro"] * given.seq_len, given.chips_per_replica
    hbm_tokens, link_tokens = (limits["per_replica_hbm"], limits["per_chip_link"]) if limits else (None, None)
    is_hidden = {"hbm": hbm_tokens and tokens > hbm_tokens, "links": link_tokens and tokens / chips > link_tokens}
    return {
        **split,
        "chips": split["replicas"] * chips,
        "tokens_per_microbatch": tokens,
        "tokens_per_chip": tokens / chips,
        "hbm_compute_bound": is_hidden["hbm"],
        "fsdp_compute_bound": is_hidden["links"],
        "bound_by": limits and (", ".join(name for name, hidden in is_hidden.items() if hidden is False) or "compute"),
    }


def solve_batch(
    *,
    batch_seqs: int | None = None,
    microbatch_seqs: int | None = None,
    accumulation: int | None = None,
    data_parallel: int | None = None,
) -> list[dict[str, int]]:
    """Returns all splits into whole numbers that agree with the given sizes; the fewest accumulated microbatches first.

    A split has ``micro`` x ``accumulate`` x ``replicas`` sequences. Without ``batch_seqs`` all three are needed; a
    missing size is tried with every divisor. Raises InputError for sizes out of range or missing, CannotRunError with
    the nearest batch that works when nothing divides.
    """
    size_by_name = {"micro": microbatch_seqs, "accumulate": accumulation, "replicas": data_parallel}
    for name, value in {"batch": batch_seqs, **size_by_name}.items():
        if value is not None and not 1 <= value <= MAX_SEQUENCES:
            raise InputError(f"{name}={value} must be between 1 and {MAX_SEQUENCES:,}.")
    if batch_seqs is None:
        if None in size_by_name.values():
            raise InputError("the batch is unknown. Give one more of micro, accumulate and replicas, or the batch.")
        batch_seqs = math.prod(size or 1 for size in size_by_name.values())
    factor_choices = [[size] if size else divisors(batch_seqs) for size in size_by_name.values()]
    splits = [
        {"micro": micro, "accumulate": num_micro, "replicas": batch_seqs // micro // num_micro}
        for micro, num_micro in itertools.product(*factor_choices[:2])
        if batch_seqs % (micro * num_micro) == 0 and batch_seqs // micro // num_micro in factor_choices[2]
    ]
    if not splits:
        raise CannotRunError(_nothing_divides(batch_seqs, {name: size for name, size in size_by_name.items() if size}))
    return sorted(splits, key=lambda split: (split["accumulate"], -split["replicas"]))


def _nothing_divides(batch: int, size_by_name: dict[str, int]) -> str:
    product = math.prod(size_by_name.values())
    text = " x ".join(f"{name} {size}" for name, size in size_by_name.items())
    batch_below, batch_above = batch // product * product, (batch // product + 1) * product
    near_text = f"{batch_below:,} or {batch_above:,}" if batch_below else f"{batch_above:,}"
    if len(size_by_name) == 3:
        return f"{text} = {product:,} sequences, not {batch:,}. Leave one of them out, or give --batch {product}seq."
    product_words = text if len(size_by_name) == 1 else f"{text} = {product:,}"
    return f"{product_words} does not divide {counted(batch, 'sequence')}. Use {near_text} sequences a step."


def compute_bound_tokens(cluster: Cluster, *, dtype: str, weight_bytes: float = 2, sparsity: float = 1.0) -> Facts:
    """Returns the least tokens at which compute takes longer than reading weights, and than the collectives of plain
    FSDP.

    ``per_replica_hbm``: tokens of a microbatch, C / W_hbm for weights of 16 bits, in proportion to ``weight_bytes``.
    ``per_chip_link``: tokens per chip, C / W of the links that FSDP uses, divided by the torus axes. None where rates
    are not known. ``sparsity`` is E / k for k of E experts a token: both limits grow by it. Links: torus axes of more
    than one chip; the NVLink domain; or, of several nodes, all network cards of a node. Source: How to Scale Your
    Model, 1.1 and 5.1.
    """
    rate, hbm_rate, (link, speed, num_axes) = peak(cluster.chip, dtype), cluster.chip.hbm_bytes_per_s, _links(cluster)
    return {
        "per_replica_hbm": hbm_rate and critical_batch(rate, hbm_rate, weight_bytes=weight_bytes) * sparsity,
        "per_chip_link": speed and data_parallel_min_tokens_per_chip(ici_intensity(rate, speed), num_axes) * sparsity,
        "link": link if speed else None,
    }


def _links(cluster: Cluster) -> tuple[str | None, float | None, float]:
    """Returns the link that FSDP's collectives cross, its bytes/s, and its axes; (None, None, 1) without one."""
    chip, torus_links = cluster.chip, torus_width(cluster)
    if torus_links is not None:
        axes_text = f"{len(torus_links.axes)} {'axis' if len(torus_links.axes) == 1 else 'axes'}"
        return f"ICI, {axes_text}, {torus_links.words}", torus_links.bytes_per_s, sum(torus_links.axes)
    if cluster.num_chips > 1 and cluster.kind == "switched" and chip.nvlink_bytes_per_s:
        link_rate, link_name = chip.nvlink_bytes_per_s, "NVLink"
        if cluster.nodes > 1 and chip.nic_bytes_per_s:
            link_rate, link_name = min((link_rate, link_name), (chip.nic_bytes_per_s * cluster.domain, "network"))
        return link_name, link_rate, 1
    return None, None, 1


COLUMNS: Facts = {
    **{name: name for name in ("micro", "accumulate", "replicas", "chips")},
    "tokens a microbatch": "tokens_per_microbatch",
    "tokens a chip": ("tokens_per_chip", lambda value: int(value) if value == int(value) else value),
}


def _text(facts: Facts, limits: Facts | None, cluster: Cluster | None) -> Iterator[Piece]:
    seqs_text = f"{counted(facts['batch_seqs'], 'sequence')} of {facts['seq_len']:,}"
    yield f"{seqs_text}, {format_count(facts['tokens_per_step'])} tokens a step: micro x accumulate x replicas"
    rows = facts["solutions"]
    yield Table.of(rows, COLUMNS if limits is None else {**COLUMNS, "bound by": "bound_by"})
    num_left = facts["num_solutions"] - len(rows)
    if num_left:
        yield f"and {num_left:,} more: --top N lists N"
    if limits is not None and cluster is not None:
        if (min_tokens := limits["per_replica_hbm"]) is not None:
            tokens_text = f"{min_tokens:,.0f} tokens a microbatch on {cluster.chip.name}"
            yield Fact("HBM", f"reading weights takes less time than compute from {tokens_text}")
        if (min_chip_tokens := limits["per_chip_link"]) is not None:
            yield Fact(
                "links",
                f"FSDP takes less time than compute from {min_chip_tokens:,.0f} tokens a chip ({limits['link']})",
            )
    critical_tokens = facts["critical_batch_tokens"]
    if critical_tokens is not None:
        side_word = "beyond" if facts["tokens_per_step"] > critical_tokens else "within"
        yield Fact(
            "critical batch",
            f"{format_params(critical_tokens)} tokens at this loss (2e8 / L^(1/0.21), Kaplan et al. 2020): this step "
            f"is {side_word} it",
        )
