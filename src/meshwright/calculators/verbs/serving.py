"""`meshwright serving`: what a replica of a model serves, in closed form: steps, batches, slices, requests, dollars."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from meshwright.calculators.serving.replica import (
    DRAFTS,
    DecodeStep,
    ServingReplica,
    lru_hit_share,
    request_rates,
    smallest_slice,
    uncached_share,
)
from meshwright.calculators.serving.sharding import sharding
from meshwright.calculators.serving.tricks import tricks
from meshwright.cli.fields import parse_fields, split_values, with_fields
from meshwright.cli.output import four_digits, three_digits
from meshwright.cli.verb import Bytes, Count, Options, argument, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_bytes, format_params, format_rate, format_seconds, parse_count
from meshwright.cost.formulas.serving import expected_tokens
from meshwright.report.answer import (
    Answer,
    Condition,
    Detail,
    Fact,
    Facts,
    Heading,
    Piece,
    PlainPiece,
    Quantity,
    Show,
    Symbols,
    Table,
    TableColumns,
)  # fmt: skip
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip, peak
from meshwright.spec.cluster import parse_cluster, slice_shapes
from meshwright.spec.cluster_shapes import times

POSITIVE, SHARE = click.FloatRange(0, min_open=True), click.FloatRange(0, 1, min_open=True)
MOST_BATCH = 8192
"""Largest batch of the points of --contexts."""
MANY = 100
"""From this many times the compute-bound batch, the text says that a larger one gains nothing."""
USUAL_ACCEPTANCE = 0.8
"""The probability that a drafted token is right, for --tricks: that of Leviathan et al. 2022 in the middle."""
PARTS = {"weights_s": "weights", "kv_s": "KV cache", "flops_s": "FLOPs"}
DRAFTED = partial(option, group="Speculation")
CACHED = partial(option, group="Prefix cache", needs={"prefixes": "--prefixes"})


class Given(Options):
    model_name: str | None = argument(metavar="[MODEL]", required=False)
    on: str = option("A cluster, such as v5e:4x4, or a chip: its smallest slice that holds weights and caches.")
    prompt: Count = option("Tokens of a prompt.", default="8192")
    output: Count = option("Tokens that a request generates.", default="512")
    batch: str | None = option("Sequences at once: 32, 1,8,64 or 1..256 [default: as many as fit].")
    context: Count | None = option("Positions of each cache [default: prompt + output].")
    weights: str = option("Dtype of stored weights: bf16, int8, int4, fp8.", default="bf16")
    kv: str = option("Dtype of the caches.", default="bf16", needs={"counts_caches": "caches without --kv-per-token"})
    dtype: str = option("Dtype of the products: their peak is C.", default="bf16")
    params: Count | None = option("Parameters, such as 70B, in place of the model's.")
    kv_token_bytes: Bytes | None = option("Cache of a token, such as 100kB, in place of the model's.", "--kv-per-token")
    mfu: float = option("Share of the peak that prefill reaches.", type=SHARE, default=0.4)
    price: float | None = option("Dollars a chip-hour, instead of the catalogue's.", type=POSITIVE)
    fields: tuple[str, ...] = option("A field of the model: num_kv_heads=1.", "--set", metavar="KEY=VALUE")
    contexts: str | None = option("Latency against throughput at each context: 2048,8192 or 2Ki..64Ki.")
    accept: float | None = DRAFTED("Probability that a drafted token is right.", type=SHARE)
    draft_cost: float = DRAFTED(
        "Time of a draft's step over one of the model.",
        default=0.05,
        needs={"has_drafts": "--accept or --tricks"},
        is_rare=True,
    )
    tricks: bool = option("What each trick gains by itself, and all together; drafts with --accept, by default 0.8.")
    prefixes: int | None = CACHED("Number of prompts that repeat.", type=click.IntRange(1, 10**7), needs={})
    prefix_cache: Bytes | None = CACHED(
        "Size of the prefix cache [default: memory without weights].", "--cache", is_rare=True
    )
    zipf: float = CACHED("Popularity of prompts: 1 / rank^Z.", type=click.FloatRange(0, 10), default=0.0, is_rare=True)
    png: Path | None = option("Draw the time of a step by batch, or --contexts, to this file (.png or .svg).")

    @property
    def counts_caches(self) -> bool:
        """True if the bytes of a token's cache follow from the model."""
        return self.kv_token_bytes is None

    @property
    def has_drafts(self) -> bool:
        """True if something is drafted."""
        return self.accept is not None or self.tricks


@verb(Given)
def command(given: Given) -> Answer:
    """Show bounds on serving MODEL: time of a step by batch, what fits, requests a second and their cost.

    Without MODEL give --params and --kv-per-token. Times are rooflines: all chips share weights and caches evenly,
    nothing is sent, and programs need no memory of their own.
    """
    replica = _replica(given)
    context_len = given.context or given.prompt + given.output
    kv_bytes = replica.kv_bytes(context_len)
    max_batch = replica.batch_that_fits(kv_bytes)
    powers_of_two = (1 << power for power in range(max_batch.bit_length()))
    batches = _counts(given.batch, "--batch") or [*(batch for batch in powers_of_two if batch < max_batch), max_batch]
    column_by_name = {name: column.tolist() for name, column in replica.points(batches, kv_bytes).items()}
    facts: Facts = {
        **{name: getattr(given, name) for name in ("prompt", "output", "weights", "dtype", "mfu")},
        "kv": given.kv if given.counts_caches else None,
        "model": replica.model.name if replica.model else None,
        "cluster": replica.cluster.short_name,
        "num_chips": replica.cluster.num_chips,
        "params": replica.num_params,
        "active_params": replica.active_params,
        "context": context_len,
        "kv_bytes_per_token": replica.kv_bytes(1),
        "memory": _memory(replica, kv_bytes, batches[-1]),
        "free_bytes": replica.free_bytes,
        "largest_batch": max_batch,
        "critical_batch": replica.critical_batch,
        "steps": [dict(zip(column_by_name, row, strict=True)) for row in zip(*column_by_name.values(), strict=True)],
        "requests": _requests(replica, given, batches[-1], kv_bytes),
        "slices": _slices(replica, given, kv_bytes),
        "sharding": sharding(replica, batches[-1]),
        "contexts": [_context(replica, length) for length in _counts(given.contexts, "--contexts")],
        "speculation": _speculation(given, replica.step(batches[-1], kv_bytes)) if given.accept else None,
        "prefixes": _prefixes(replica, given) if given.prefixes else None,
        "tricks": _tricks(replica, given) if given.tricks else [],
    }
    return Answer(facts, _text(facts), {given.png: lambda: _figure(facts)})


# -- what is given --------------------------------------------------------------------------------------


def _replica(given: Given) -> ServingReplica:
    model = load_model(given.model_name) if given.model_name else None
    if model is None and (given.params is None or given.kv_token_bytes is None):
        raise InputError("there is no model. Name one, or give --params 30B and --kv-per-token 100kB.")
    if model is None and given.fields:
        raise InputError("--set changes a field of a model. Name one.")
    if model is not None:
        model = with_fields(model, "model", parse_fields(given.fields, sections=("model",))["model"])
    is_cluster = ":" in given.on or given.on.endswith(".toml")
    cluster = parse_cluster(given.on) if is_cluster else smallest_slice(chip(given.on), 1)
    replica = ServingReplica(
        cluster=cluster, model=model, params=given.params, kv_token_bytes=given.kv_token_bytes,
        weights=given.weights, kv=given.kv, peak_flops=peak(cluster.chip, given.dtype), price_usd_per_hour=given.price,
    )  # fmt: skip
    if is_cluster:
        return replica
    batch_seqs = max(_counts(given.batch, "--batch"), default=1)
    num_bytes = replica.weight_bytes + batch_seqs * replica.kv_bytes(given.context or given.prompt + given.output)
    return replace(replica, cluster=smallest_slice(cluster.chip, num_bytes))


def _counts(text: str | None, flag: str) -> list[int]:
    words = split_values(f"={text}", what=flag, form="N,N or N..N") if text else ()
    counts = sorted(parse_count(word, what=flag) for word in words)
    if counts and counts[0] < 1:
        raise InputError(f"{flag} {text}: each must be at least 1.")
    return counts


# -- facts ----------------------------------------------------------------------------------------------


def _memory(replica: ServingReplica, kv_bytes: float, batch: int) -> list[Facts]:
    """Returns bytes, the number of chips they fill, and the smallest slice on offer; None if no pod is large enough."""
    bytes_of_item = {"weights": replica.weight_bytes, counted(batch, "cache"): kv_bytes * batch,
            "both": replica.weight_bytes + kv_bytes * batch, "another cache": kv_bytes}  # fmt: skip
    rows = []
    for item, num_bytes in bytes_of_item.items():
        row = {"what": item, "bytes": num_bytes, "chips": num_bytes / replica.memory_bytes}
        rows.append(row | {"smallest_slice": None})
        with suppress(CannotRunError):
            rows[-1]["smallest_slice"] = times(smallest_slice(replica.cluster.chip, num_bytes).shape)
    return rows


def _requests(at: ServingReplica, given: Given, batch: int, kv_bytes: float) -> Facts:
    num_chips, chip, prompt_len = at.cluster.num_chips, at.cluster.chip, given.prompt
    step_s, prefill_s = at.step(batch, kv_bytes).time_s, at.prefill_s(prompt_len, given.mfu)
    link, cache = chip.dcn_bytes_per_s if chip.topology == "torus" else chip.nic_bytes_per_s, at.kv_bytes(prompt_len)
    return {
        "batch": batch,
        "fits": batch <= at.batch_that_fits(kv_bytes),
        "ttft_s": prefill_s,
        "tpot_s": step_s,
        **request_rates(
            batch, step_s, prompt_len=prompt_len, output_len=given.output, prefill_s=prefill_s, num_chips=num_chips
        ),
        "kv_transfer_s": link and cache / (num_chips * link),  # section 7.4
        "usd_per_million_input": at.usd_per_million_tokens(prompt_len / prefill_s),
        "usd_per_million_output": at.usd_per_million_tokens(batch / step_s),
    }


def _slices(first_replica: ServingReplica, given: Given, kv_bytes: float) -> list[Facts]:
    """Returns rates of this cluster and, where it exists, of one with twice the chips, each at its largest batch."""
    clusters, rows = [first_replica.cluster], []
    with suppress(CannotRunError):
        clusters.append(slice_shapes(first_replica.cluster.chip, 2 * first_replica.cluster.num_chips)[0])
    for replica in (replace(first_replica, cluster=cluster) for cluster in clusters):
        batch = replica.batch_that_fits(kv_bytes)
        request_facts = _requests(replica, given, batch, kv_bytes)
        request_fields = (
            "ttft_s", "tpot_s", "finished_per_step", "tokens_per_s_per_chip", "per_s", "per_s_per_chip",
            "usd_per_million_input", "usd_per_million_output",
        )  # fmt: skip
        rows.append({"cluster": replica.cluster.short_name, "free_bytes": replica.free_bytes, "largest_batch": batch}
                     | {name: request_facts[name] for name in request_fields})  # fmt: skip
    return rows


def _context(replica: ServingReplica, num_positions: int) -> Facts:
    """Returns step time and tokens/s at batch 1, at the largest batch that fits, and at every batch between."""
    kv_bytes = replica.kv_bytes(num_positions)
    max_batch = min(replica.batch_that_fits(kv_bytes), MOST_BATCH)
    points = replica.points(range(1, max_batch + 1), kv_bytes)
    last_point = {name: points[name][-1].item() for name in ("time_s", "tokens_per_s_per_chip", "longest")}
    row = {"context": num_positions, "fastest_s": points["time_s"][0].item(), "largest_batch": max_batch, **last_point}
    return {**row, "points": points}


def _tricks(replica: ServingReplica, given: Given) -> list[Facts]:
    drafts = {"acceptance": given.accept or USUAL_ACCEPTANCE, "draft_cost": given.draft_cost}
    return tricks(replica, prompt_len=given.prompt, output_len=given.output, **drafts)


def _speculation(given: Given, step: DecodeStep) -> Facts:
    """Returns tokens a step and speed-up for each number of drafts, and the best number."""
    num_tokens = expected_tokens(given.accept, DRAFTS)
    speedups = step.speedups(given.accept, draft_cost=given.draft_cost)
    num_drafts = int(speedups.argmax())
    return {"best": num_drafts, "tokens": num_tokens, "speedup": speedups, "tpot_s": step.time_s / speedups[num_drafts]}


def _prefixes(replica: ServingReplica, given: Given) -> Facts:
    cache_bytes = replica.free_bytes if given.prefix_cache is None else given.prefix_cache
    num_prompts = cache_bytes / replica.kv_bytes(given.prompt)
    hit_share = lru_hit_share(num_prompts, [rank**-given.zipf for rank in range(1, (given.prefixes or 1) + 1)])
    left_share = uncached_share(hit_share * given.prompt, given.prompt)
    return {"cache_bytes": cache_bytes, "room": num_prompts, "hit_share": hit_share, "prefill_left": left_share}


# -- text -----------------------------------------------------------------------------------------------

BYTES, SECONDS, THREE = format_bytes, format_seconds, "{:.3g}".format


MEMORY: TableColumns = {"memory": "what", "bytes": "bytes", "chips": ("chips", THREE),
                        "smallest slice": "smallest_slice"}  # fmt: skip
STEPS: TableColumns = {
    "batch": "batch",
    **{words: name for name, words in PARTS.items()},
    "step": "time_s",
    "tokens/s per chip": ("tokens_per_s_per_chip", four_digits),
    "bound by": ("longest", lambda part: part.replace("_", " ")),
    "fits": "fits",
}
LETTERS = {
    "M": "axes of links ({:g}), one for D where D and F are split", "N": "chips ({:,})",
    "W": "bytes/s of an axis, both directions of a ring ({})", "D": "width of the model ({:,})",
    "F": "width of the feed-forward ({:,})", "B": "batch ({:,})", "w": "bytes of a weight ({:g})",
    "alpha": "FLOP/s of a chip / W ({:,.0f})", "beta": "memory rate / W ({:.3g})", "hop": "latency of a hop ({})",
}  # fmt: skip
BOUNDS: TableColumns = {"size": "name", "bound": ("bound", three_digits), "formula": "formula"}
SLICES: dict[str, tuple[str, Show]] = {
    "free for caches": ("free_bytes", BYTES), "largest batch": ("largest_batch", "{:,}".format),
    "TTFT": ("ttft_s", SECONDS), "step": ("tpot_s", SECONDS), "finished a step": ("finished_per_step", THREE),
    "tokens/s per chip": ("tokens_per_s_per_chip", four_digits), "requests/s": ("per_s", THREE),
    "requests/s per chip": ("per_s_per_chip", THREE), "$/M input": ("usd_per_million_input", "${:.3g}".format),
    "$/M output": ("usd_per_million_output", "${:.3g}".format),
}  # fmt: skip
"""Rows of the table that has a column for each slice."""
TRICKS: TableColumns = {
    "trick": "trick", "a token": "kv_token_bytes", "batch": "largest_batch", "drafts": "drafts",
    "TPOT": "tpot_s", "tokens/s per chip": ("tokens_per_s_per_chip", four_digits), "times": ("times", THREE),
    "$/M output": ("usd_per_million_output", lambda usd: usd and f"${usd:.3g}"),
}  # fmt: skip
CONTEXTS: TableColumns = {
    "context": "context", "fastest": "fastest_s", "largest batch": "largest_batch",
    "its step": "time_s", "tokens/s per chip": ("tokens_per_s_per_chip", four_digits),
    "bound by": ("longest", lambda part: part.replace("_", " ")),
}  # fmt: skip


def _text(facts: Facts) -> Iterator[Piece]:
    yield (
        f"{facts['model'] or 'a model'} on {facts['cluster']} ({counted(facts['num_chips'], 'chip')}): "
        f"{format_params(facts['params'])} parameters in {facts['weights']}, {BYTES(facts['kv_bytes_per_token'])} of "
        f"cache a token{f' in {kv}' if (kv := facts['kv']) else ''}, products in {facts['dtype']}; prompts of "
        f"{facts['prompt']:,} tokens, {facts['output']:,} generated"
    )
    room, max_batch = BYTES(facts["free_bytes"]), facts["largest_batch"]
    yield Table.of(facts["steps"], STEPS)
    yield Fact("fits", f"{counted(max_batch, 'cache')} of {facts['context']:,} tokens in the {room} beside weights")
    yield Fact("compute-bound", f"products with weights, from a batch of {four_digits(facts['critical_batch'])}")
    if facts["requests"]["batch"] > MANY * facts["critical_batch"]:
        yield Fact("", "far beyond it a larger batch takes longer and gives hardly more tokens/s")
    if not facts["requests"]["fits"]:
        yield Fact("does not fit", f"a batch of {facts['requests']['batch']:,}: what follows is as if it did")
    yield from _requests_text(facts["requests"], facts["mfu"])
    yield Table.of(facts["memory"], MEMORY)
    if facts["contexts"]:
        yield Table.of(facts["contexts"], CONTEXTS, "Latency against throughput: batch 1, and the largest that fits")
    if facts["tricks"]:
        yield Table.of(facts["tricks"], TRICKS, "Tricks, each at the largest batch that fits")
        yield Condition(
            "none of these: a KV head per head (latent caches stay), full attention in every layer, bf16, each cache "
            "as long as the longest and read whole; window: of such layers; * without one KV head and int8 weights"
        )
    if spec := facts["speculation"]:
        tokens, speedup = (THREE(spec[name][spec["best"]]) for name in ("tokens", "speedup"))
        gain_text = f"{tokens} tokens a step, {speedup} times faster, TPOT {SECONDS(spec['tpot_s'])}"
        yield Fact("speculation", f"best with {counted(spec['best'], 'draft')}: {gain_text}")
    if prefix_facts := facts["prefixes"]:
        hits_text = f"{prefix_facts['hit_share']:.1%} of prompts found; {BYTES(prefix_facts['cache_bytes'])} hold"
        left_text = (
            f"{three_digits(prefix_facts['room'])} prompts; {prefix_facts['prefill_left']:.1%} of prefill is left"
        )
        yield Fact("prefix cache", f"{hits_text} {left_text}")
    yield Condition("rooflines: chips share weights and caches evenly, send nothing, and need no memory for programs")
    slice_rows = facts["slices"]
    cells = {name: [row[field] for row in slice_rows] for name, (field, _) in SLICES.items()}
    rows = [[name, *(None if v is None else Quantity(v, SLICES[name][1]) for v in row)] for name, row in cells.items()]
    columns = [Heading(row["cluster"], name=name) for row, name in zip(slice_rows, ("value", "doubled"), strict=False)]
    slices = Table([Heading("with its largest batch", name="figure"), *columns], [r for r in rows if r[1] is not None])
    yield Detail("largest batch, twice the chips", [slices])
    if facts["sharding"]:
        yield Detail("bounds of sharding", [*_sharding_text(facts["sharding"])])


def _sharding_text(shard: Facts) -> Iterator[PlainPiece]:
    yield Table.of(shard["bounds"], BOUNDS)
    links_text, memory_text, flops_text = map(SECONDS, shard["product"].values())
    yield Fact("a product", f"over all chips: links {links_text}, memory {memory_text}, FLOPs {flops_text}")
    tensor_text, two_text = map(SECONDS, shard["layer"].values())
    yield Fact("a layer", f"its collectives: {tensor_text} with tensor, {two_text} with weights over D and F")
    yield Fact("latency", f"binds gathers of less than {BYTES(shard['latency_bound_bytes'])} over all chips")
    letters = {**shard["letters"], "W": format_rate(shard["letters"]["W"]), "hop": SECONDS(shard["letters"]["hop"])}
    yield Symbols({name: text.format(letters[name]) for name, text in LETTERS.items()})


def _requests_text(at: Facts, mfu: float) -> Iterator[Piece]:
    yield Fact("TTFT", f"{SECONDS(at['ttft_s'])}: the prompt's FLOPs at {mfu:.0%} of the peak")
    tpot_text, mixed_text = SECONDS(at["tpot_s"]), SECONDS(at["tpot_interleaved_s"])
    total = f"{SECONDS(at['generation_s'])} a request"
    yield Fact("TPOT", f"{tpot_text} at batch {at['batch']:,}, {total}; {mixed_text} if the same chips prefill")
    step_text = (
        f"{THREE(at['finished_per_step'])} finish and {four_digits(at['evicted_per_step'])} cached tokens are freed"
    )
    rate_text = f"{THREE(at['per_s'])} a second, {THREE(at['per_s_per_chip'])} a chip"
    yield Fact("requests", f"{rate_text}; in each step {step_text}")
    suffix = f"; sending a cache takes {SECONDS(at['kv_transfer_s'])}" if at["kv_transfer_s"] else ""
    yield Fact(
        "prefill", f"{THREE(at['prefill_servers'])} slices that only prefill keep one that only generates busy{suffix}"
    )
    if at["usd_per_million_input"]:
        price_texts = (f"${at[f'usd_per_million_{side}']:.3g}" for side in ("input", "output"))
        yield Fact("cost", "{} a million tokens of input, {} of output".format(*price_texts))


def _figure(facts: Facts) -> Any:
    """Returns throughput against latency for each context, or the parts of a step's time against the batch."""
    from meshwright.report.figure import si_scale
    from meshwright.report.sweeps import curves_figure

    title = f"{facts['model'] or 'A model'} on {facts['cluster']}, weights in {facts['weights']}"
    if facts["contexts"]:
        curves = {
            f"{row['context']:,} positions": list(
                zip(row["points"]["time_s"] * 1e3, row["points"]["tokens_per_s_per_chip"], strict=True)
            )
            for row in facts["contexts"]
        }
        return curves_figure(curves, x_title="time per token (ms)", y_title="tokens/s per chip", title=title)
    rows = facts["steps"]
    scale, unit = si_scale(max(row["time_s"] for row in rows), "s")
    points_by_part = {
        part_text: [(row["batch"], row[name] / scale) for row in rows]
        for name, part_text in {**PARTS, "time_s": "whole step"}.items()
    }
    return curves_figure(points_by_part, x_title="batch (sequences)", y_title=f"time of a step ({unit})", title=title)
