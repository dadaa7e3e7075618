"""`meshwright serving`: what a replica of a model serves, in closed form: steps, batches, slices, requests, dollars."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict, replace

from meshwright.calculators.serving.replica import Replica
from meshwright.cli.fields import parse_fields, split_values, with_fields
from meshwright.cli.output import four_digits, three_digits
from meshwright.cli.shared import SET
from meshwright.cli.verb import Bytes, Count, Options, argument, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes, format_params, format_seconds, parse_count
from meshwright.cost.formulas import serving
from meshwright.cost.formulas.roofline import dtype_bytes
from meshwright.report.answer import Answer, Fact, Piece, Table
from meshwright.spec.catalogue import load_model
from meshwright.spec.chip import chip, peak
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.cluster_shapes import times
from meshwright.spec.slices import slice_shapes

POSITIVE, SHARE = click.FloatRange(0, min_open=True), click.FloatRange(0, 1)
MOST_BATCH = 8192
"""Largest batch of the points of --contexts."""
PARTS = {"weights_s": "weights", "kv_s": "KV cache", "flops_s": "FLOPs"}


class Given(Options):
    model_name: str | None = argument(metavar="[MODEL]", required=False)
    on: str = option("A cluster, such as v5e:4x4, or a chip: its smallest slice that holds weights and caches.")
    prompt: Count = option("Tokens of a prompt.", default="8192")
    output: Count = option("Tokens that a request generates.", default="512")
    batch: str | None = option("Sequences at once: 32, 1,8,64 or 1..256 [default: as many as fit].")
    context: Count | None = option("Positions of each cache [default: prompt + output].")
    weights: str = option("Dtype of stored weights: bf16, int8, int4, fp8.", default="bf16")
    kv: str = option("Dtype of the caches.", default="bf16")
    dtype: str = option("Dtype of the products: their peak is C.", default="bf16")
    params: Count | None = option("Parameters, such as 70B, in place of the model's.")
    kv_token_bytes: Bytes | None = option("Cache of a token, such as 100kB, in place of the model's.", "--kv-per-token")
    mfu: float = option("Share of the peak that prefill reaches.", type=click.FloatRange(0, 1, True), default=0.4)
    price: float | None = option("Dollars a chip-hour, instead of the catalogue's.", type=POSITIVE)
    fields: tuple[str, ...] = SET
    designs: bool = option("Designs of the cache beside the model's own: all heads, one head, shared layers, windows.")
    contexts: str | None = option("Latency against throughput at each context: 2048,8192 or 2Ki..64Ki.")
    accept: float | None = option("Speculation: the probability that a drafted token is right.", type=SHARE)
    draft_cost: float = option(
        "Time of a draft's step over one of the model.", default=0.05, needs={"speculates": "--accept"}
    )
    prefixes: Count | None = option("Prefix cache: how many prompts come again and again.")
    prefix_cache: Bytes | None = option(
        "Its size [default: what weights leave free].", "--cache", needs={"prefixes": "--prefixes"}
    )
    zipf: float = option("Their popularity: 1 / rank^Z.", default=0.0, needs={"prefixes": "--prefixes"})
    png: Path | None = option("Draw the time of a step by batch, or --contexts, to this file (.png or .svg).")

    @property
    def speculates(self) -> bool:
        """True if there is a draft model."""
        return self.accept is not None


@verb(Given)
def command(given: Given) -> Answer:
    """Show bounds on serving MODEL: time of a step by batch, what fits, requests a second and their cost.

    Without MODEL give --params and --kv-per-token. Times are rooflines: all chips share weights and caches evenly,
    nothing is sent, and programs need no memory of their own.
    """
    at = _replica(given)
    context = given.context or given.prompt + given.output
    kv_bytes = at.kv_bytes(context)
    largest = at.batch_that_fits(kv_bytes)
    batches = _batches(given.batch) or _doubling(largest)
    facts: dict[str, Any] = {
        **{name: getattr(given, name) for name in ("prompt", "output", "weights", "kv", "dtype", "mfu")},
        "model": at.model.name if at.model else None,
        "cluster": at.cluster.short_name,
        "num_chips": at.cluster.num_chips,
        "params": at.num_params,
        "active_params": at.active_params,
        "context": context,
        "kv_bytes_per_token": at.kv_bytes(1),
        "memory": _memory(at, kv_bytes, batches[-1]),
        "free_bytes": at.free_bytes,
        "largest_batch": largest,
        "critical_batch": at.critical_batch,
        "steps": [_step(at, batch, kv_bytes, largest) for batch in batches],
        "requests": _requests(at, given, batches[-1], kv_bytes),
        "slices": _slices(at, given, kv_bytes),
        "sharding": at.sharding(batches[-1]),
        "designs": at.designs(context) if given.designs else None,
        "contexts": [at.points(length, MOST_BATCH) for length in _contexts(given.contexts)],
        "speculation": _speculation(given, at.step(batches[-1], kv_bytes)) if given.accept is not None else None,
        "prefixes": _prefixes(at, given) if given.prefixes else None,
    }
    return Answer(facts, _text(facts), {given.png: lambda: _figure(facts)})


# -- what is given --------------------------------------------------------------------------------------


def _replica(given: Given) -> Replica:
    model = load_model(given.model_name) if given.model_name else None
    if model is None and (given.params is None or given.kv_token_bytes is None):
        raise InputError("there is no model. Name one, or give --params 30B and --kv-per-token 100kB.")
    if given.fields:
        if model is None:
            raise InputError("--set changes a field of a model. Name one.")
        model = with_fields(model, "model", parse_fields(given.fields, sections=("model",))["model"])
    whole = ":" in given.on or given.on.endswith(".toml")
    cluster = parse_cluster(given.on) if whole else serving.smallest_slice(chip(given.on), 1)
    at = Replica(
        cluster=cluster, model=model, params=given.params, kv_token_bytes=given.kv_token_bytes,
        weights=given.weights, kv=given.kv, peak_flops=peak(cluster.chip, given.dtype),
    )  # fmt: skip
    if whole:
        return at
    batch = max(_batches(given.batch), default=1)
    num_bytes = at.weight_bytes + batch * at.kv_bytes(given.context or given.prompt + given.output)
    return replace(at, cluster=serving.smallest_slice(cluster.chip, num_bytes))


def _batches(text: str | None) -> list[int]:
    found = split_values(f"B={text}", what="--batch", form="B") if text else ()
    counts = sorted(parse_count(one, what="--batch") for one in found)
    if counts and counts[0] < 1:
        raise InputError("--batch 0 generates nothing. Give at least 1.")
    return counts


def _doubling(largest: int) -> list[int]:
    return [*(1 << power for power in range(largest.bit_length()) if 1 << power < largest), largest]


def _contexts(text: str | None) -> list[int]:
    found = split_values(f"S={text}", what="--contexts", form="S") if text else ()
    return [max(1, parse_count(one, what="--contexts")) for one in found]


# -- facts ----------------------------------------------------------------------------------------------


def _memory(at: Replica, kv_bytes: float, batch: int) -> list[dict[str, Any]]:
    rows = {"weights": at.weight_bytes, "a cache": kv_bytes, f"{batch:,} caches": kv_bytes * batch,
            "weights and caches": at.weight_bytes + kv_bytes * batch}  # fmt: skip
    return [
        {"what": what, "bytes": size, "chips": serving.fractional_chips(size, at.memory_bytes),
         "smallest_slice": _smallest(at, size)}
        for what, size in rows.items()
    ]  # fmt: skip


def _smallest(at: Replica, num_bytes: float) -> str | None:
    try:
        return times(serving.smallest_slice(at.cluster.chip, num_bytes).shape)
    except CannotRunError:
        return None


def _step(at: Replica, batch: int, kv_bytes: float, largest: int) -> dict[str, Any]:
    step = at.step(batch, kv_bytes)
    names = ("weights_s", "kv_s", "flops_s", "time_s", "tokens_per_s", "tokens_per_s_per_chip", "longest")
    return {"batch": batch, **{name: getattr(step, name) for name in names}, "fits": batch <= largest}


def _requests(at: Replica, given: Given, batch: int, kv_bytes: float) -> dict[str, Any]:
    chips, unit = at.cluster.num_chips, at.cluster.chip
    stream = serving.RequestStream(
        batch_seqs=batch, step_s=at.step(batch, kv_bytes).time_s, prompt_len=given.prompt, output_len=given.output,
        num_chips=chips,
    )  # fmt: skip
    prefill = serving.prefill_s(
        given.prompt, at.active_params, num_chips=chips, peak_flops=at.peak_flops, mfu=given.mfu
    )
    price = unit.price_usd_per_hour if given.price is None else given.price
    rate = unit.dcn_bytes_per_s if unit.topology == "torus" else unit.nic_bytes_per_s
    cost = {"num_chips": chips, "price_usd_per_hour": price}
    return {
        "batch": batch,
        "ttft_s": prefill,
        "tpot_s": stream.step_s,
        "tpot_interleaved_s": stream.interleaved_step_s(prefill),
        "generation_s": stream.generation_s,
        "per_s": stream.per_s,
        "per_s_per_chip": stream.per_s_per_chip,
        "finished_per_step": stream.finished_per_step,
        "evicted_per_step": stream.evicted_per_step,
        "prefill_servers": stream.prefill_servers(prefill),
        "kv_transfer_s": rate
        and serving.kv_transfer_s(at.kv_bytes(given.prompt), num_links=chips, link_bytes_per_s=rate),
        "usd_per_million_input": price and serving.usd_per_million_tokens(given.prompt / prefill, **cost),
        "usd_per_million_output": price and serving.usd_per_million_tokens(batch / stream.step_s, **cost),
    }


def _slices(at: Replica, given: Given, kv_bytes: float) -> list[dict[str, Any]]:
    """Returns this cluster and twice its chips, each at the largest batch that fits."""
    clusters = [at.cluster, slice_shapes(at.cluster.chip, 2 * at.cluster.num_chips)[0]]
    found = []
    for one in (replace(at, cluster=cluster) for cluster in clusters):
        batch = one.batch_that_fits(kv_bytes)
        asked = _requests(one, given, batch, kv_bytes)
        names = ("tpot_s", "per_s", "per_s_per_chip", "usd_per_million_output")
        found.append({"cluster": one.cluster.short_name, "free_bytes": one.free_bytes, "largest_batch": batch}
                     | {name: asked[name] for name in names})  # fmt: skip
    return found


def _speculation(given: Given, step: serving.DecodeStep) -> dict[str, Any]:
    """Returns drafts, tokens and speed-up; a step that checks K + 1 tokens takes the FLOPs of as many."""
    checks = replace(step, active_params=step.active_params * (serving.DRAFTS + 1)).time_s / step.time_s
    best = serving.best_num_drafts(given.accept or 0.0, draft_cost=given.draft_cost, verify_cost=checks)
    tokens = serving.expected_tokens(given.accept, serving.DRAFTS)
    faster = serving.speculation_speedup(
        given.accept, serving.DRAFTS, draft_cost=given.draft_cost, verify_cost=checks
    )
    rows = [
        {"drafts": k, "tokens": tokens[k], "check_cost": checks[k], "speedup": faster[k]}
        for k in sorted({0, 1, 2, 3, 4, 6, 8, best})
    ]
    return {"best": best, "rows": rows, "tpot_s": step.time_s / faster[best]}


def _prefixes(at: Replica, given: Given) -> dict[str, Any]:
    size = at.free_bytes if given.prefix_cache is None else given.prefix_cache
    room = size / at.kv_bytes(given.prompt)
    hits = serving.lru_hit_share(room, [rank**-given.zipf for rank in range(1, (given.prefixes or 1) + 1)])
    left = serving.uncached_share(hits * given.prompt, given.prompt)
    return {"cache_bytes": size, "room": room, "hit_share": hits, "prefill_left": left}


# -- text -----------------------------------------------------------------------------------------------

WIDE = 16
STEPS: dict[str, Any] = {
    "batch": ("batch", "{:,}".format),
    **{words: (name, format_seconds) for name, words in PARTS.items()},
    "step": ("time_s", format_seconds),
    "tokens/s/chip": ("tokens_per_s_per_chip", four_digits),
    "longest": ("longest", lambda part: part.replace("_", " ")),
    "fits": ("fits", lambda fits: "yes" if fits else "no"),
}


def _dollars(value: float | None) -> str | None:
    return None if value is None else f"${value:.3g}"


def _text(facts: dict[str, Any]) -> Iterator[Piece]:
    yield (
        f"{facts['model'] or 'a model'} on {facts['cluster']} ({facts['num_chips']:,} chips): "
        f"{format_params(facts['params'])} parameters in {facts['weights']}, {format_bytes(facts['kv_bytes_per_token'])} "
        f"of cache a token in {facts['kv']}, products in {facts['dtype']}; prompts of {facts['prompt']:,}, "
        f"{facts['output']:,} generated"
    )
    sizes = {"memory": "what", "bytes": ("bytes", format_bytes), "chips": ("chips", "{:.3g}".format)}
    yield Table.of(facts["memory"], {**sizes, "smallest slice": "smallest_slice"})
    yield Fact(
        "fits", f"{facts['largest_batch']:,} caches of {facts['context']:,} in the "
        f"{format_bytes(facts['free_bytes'])} that weights leave", WIDE,
    )  # fmt: skip
    yield Table.of(facts["steps"], STEPS, "A step: caches, then weights or FLOPs, whichever takes longer")
    yield Fact("bound by FLOPs", f"products with weights, from {four_digits(facts['critical_batch'])} sequences", WIDE)
    yield from _requests_text(facts["requests"], facts)
    yield from _sharding_text(facts["sharding"])
    slices = {"largest batch": "cluster", "free": ("free_bytes", format_bytes), "batch": "largest_batch",
              "step": ("tpot_s", format_seconds), "requests/s": ("per_s", "{:.3g}".format),
              "a chip": ("per_s_per_chip", "{:.3g}".format), "$/M output": ("usd_per_million_output", _dollars)}  # fmt: skip
    yield Table.of(facts["slices"], slices)
    yield from _more_text(facts)


def _requests_text(at: dict[str, Any], facts: dict[str, Any]) -> Iterator[Piece]:
    yield Fact("TTFT", f"{format_seconds(at['ttft_s'])}: the prompt's FLOPs at {facts['mfu']:.0%} of the peak", WIDE)
    yield Fact(
        "TPOT", f"{format_seconds(at['tpot_s'])} at batch {at['batch']:,}, {format_seconds(at['generation_s'])} a "
        f"request; {format_seconds(at['tpot_interleaved_s'])} if the same chips prefill in between", WIDE,
    )  # fmt: skip
    yield Fact(
        "requests", f"{at['per_s']:.3g} a second, {at['per_s_per_chip']:.3g} a chip; each step "
        f"{at['finished_per_step']:.3g} finish and free {four_digits(at['evicted_per_step'])} cached tokens", WIDE,
    )  # fmt: skip
    moved = at["kv_transfer_s"] and f"; a cache is sent in {format_seconds(at['kv_transfer_s'])}"
    yield Fact("prefill", f"{at['prefill_servers']:.3g} such slices keep one generating slice busy{moved or ''}", WIDE)
    if at["usd_per_million_input"]:
        prices = (_dollars(at[f"usd_per_million_{side}"]) for side in ("input", "output"))
        yield Fact("cost", "{} a million tokens of input, {} of output".format(*prices), WIDE)


def _sharding_text(at: dict[str, Any] | None) -> Iterator[Piece]:
    if at is None:
        return
    two, product = at["two_dims"], at["product"]
    yield Fact(
        "tensor", f"up to {three_digits(at['prefill_max_tensor'])} in prefill (M F / alpha), "
        f"{three_digits(at['decode_max_tensor'])} in generation (F / (B beta), beta {at['beta']:.3g}); a product over "
        f"all chips: links {format_seconds(product['link_s'])}, memory {format_seconds(product['hbm_s'])}, FLOPs "
        f"{format_seconds(product['math_s'])}", WIDE,
    )  # fmt: skip
    yield Fact(
        "two dims", f"weights split over D and F send less from {three_digits(two['min_chips'])} chips: here "
        f"{format_seconds(two['comms_s'])} a layer with {two['best_x']:.3g} over D, "
        f"{format_seconds(two['tensor_comms_s'])} with tensor alone", WIDE,
    )  # fmt: skip
    yield Fact(
        "latency", f"binds gathers of less than {format_bytes(at['latency_bound_bytes'])} over all chips, and of this "
        f"batch over more than {three_digits(at['latency_bound_shards'])}", WIDE,
    )  # fmt: skip


def _more_text(facts: dict[str, Any]) -> Iterator[Piece]:
    if facts["designs"]:
        columns = {"cache": lambda row: f"{row['design']}{' *' * row['own']}", "bytes": ("kv_bytes", format_bytes),
                   "batch": "largest_batch", "step": ("step_s", lambda s: s and format_seconds(s)),
                   "tokens/s/chip": ("tokens_per_s_per_chip", lambda rate: rate and four_digits(rate))}  # fmt: skip
        yield Table.of(facts["designs"], columns, f"Designs of a cache of {facts['context']:,} (* the model's)")
    if facts["contexts"]:
        ends = {"fastest": ("time_s", 0), "largest batch": ("batch", -1), "its step": ("time_s", -1),
                "tokens/s/chip": ("tokens_per_s_per_chip", -1), "longest": ("longest", -1)}  # fmt: skip
        shows = {"time_s": format_seconds, "tokens_per_s_per_chip": four_digits, "longest": str, "batch": str}
        rows = [[f"{one['context']:,}", *(shows[name](one[name][end]) for name, end in ends.values())]
                for one in facts["contexts"]]  # fmt: skip
        yield Table(["context", *ends], rows, "Latency against throughput: batch 1, and the largest that fits")
    if spec := facts["speculation"]:
        columns = {"drafts": "drafts", "tokens a step": ("tokens", "{:.3g}".format),
                   "time of a check": ("check_cost", "{:.3g}x".format), "faster": ("speedup", "{:.3g}x".format)}  # fmt: skip
        yield Table.of(spec["rows"], columns, f"Speculation: best with {spec['best']}, TPOT {format_seconds(spec['tpot_s'])}")
    if kept := facts["prefixes"]:
        yield Fact(
            "prefix cache", f"{kept['hit_share']:.1%} of prompts found: {three_digits(kept['room'])} fit into "
            f"{format_bytes(kept['cache_bytes'])}; {kept['prefill_left']:.1%} of prefill is left", WIDE,
        )  # fmt: skip


def _figure(facts: dict[str, Any]) -> Any:
    """Returns throughput against latency for each context, or the parts of a step's time against the batch."""
    from meshwright.report.curves import curves_figure

    title = f"{facts['model'] or 'A model'} on {facts['cluster']}, weights in {facts['weights']}"
    if facts["contexts"]:
        curves = {
            f"{one['context']:,}": list(zip(one["time_s"] * 1e3, one["tokens_per_s_per_chip"], strict=True))
            for one in facts["contexts"]
        }
        return curves_figure(curves, x_title="ms a token", y_title="tokens/s/chip", title=title)
    rows = facts["steps"]
    parts = {words: [(row["batch"], row[name]) for row in rows] for name, words in {**PARTS, "time_s": "step"}.items()}
    return curves_figure(parts, x_title="batch", y_title="seconds", title=title)
