"""The answer of `meshwright show MODEL`: its weights, and its FLOPs and bytes before anything is split."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from meshwright.algebra.generation.stored import weight_bytes
from meshwright.cli.output import format_flop_count, four_digits
from meshwright.core.dims import DTYPE_BYTES, LETTERS
from meshwright.core.errors import InputError
from meshwright.core.extras import lacking
from meshwright.core.units import format_bytes, format_params
from meshwright.cost.formulas import accounting
from meshwright.cost.work.ops import token_flops
from meshwright.report.answer import Answer, Detail, Fact, Facts, Piece, PlainPiece, Symbols, Table, TableColumns
from meshwright.spec.catalogue import entry, load_model, models
from meshwright.spec.hf.gguf import is_gguf, stored_bytes
from meshwright.spec.hf.published import folder_weights
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES, Strategy
from meshwright.spec.weights import mtp_params, num_active_params, num_params, params_by_part, weight_table

PREFILL_POSITIONS = 4096
MIN_SHARE = 5e-4
"""Parts with a smaller share of the parameters are not shown: they would read 0.0%."""

MAX_WEIGHTS = 12
"""Weights that a text lists without --all."""
VOCABULARY = ("embedding", "unembedding")
RESULTS = {
    "x": "a layer's input", "h": "x, normed", "q": "queries", "k": "keys", "v": "values", "qr": "queries, rotated",
    "kr": "keys, rotated", "o": "attention's result", "lse": "log-sum-exp of scores", "a": "o, projected",
    "x1": "x + a", "h1": "x1, normed", "g": "gate of the MLP", "u": "its other product", "m": "its hidden values",
}  # fmt: skip
"""Results that a remat policy may keep -> their meaning."""
CACHE_POSITIONS = 32768
CACHE_DTYPES = ("bf16", "int8", "int4")
SHARED_LAYERS = 2
"""Neighbouring layers with one cache, in the design that shares across layers."""
ZERO_DEVICES = (8, 64, 1024)
DEFAULT_STATE = Strategy(mesh={}).state
REMATS = ("none", "selective", "matmuls", "block")
"""Policies that differ in what a layer keeps: "full" keeps what "block" does, "recompute-C" of one layer in C."""


def model_answer(m: Model, seq_len: int | None = None, folder: str = "") -> Answer:
    """Returns one model: its weight table, then totals, state and activations; FLOPs and traffic at a length. Of a
    ``folder`` with weights also how they are stored."""
    if seq_len is not None and m.encoder:
        raise InputError(f"{m.name} has two lengths, of its encoder and its decoder. Leave --seq out.")
    missing = lacking("run") if folder else ""
    facts = model_facts(m) | ({"folder": _folder_facts(m, Path(folder))} if folder and not missing else {})
    if seq_len is not None:
        traffic_of = accounting.layer_traffic(m, seq_len)
        columns = ("strategy", "forward", "forward_bytes", "backward", "backward_bytes")
        facts["flops"] = _flops(m, seq_len)
        facts["layer_traffic"] = [dict(zip(columns, (name, *row), strict=True)) for name, row in traffic_of.items()]
    row_tables = (
        facts["weights"],
        facts["kv_cache"],
        *((facts["flops"]["parts"], facts["layer_traffic"]) if seq_len else ()),
    )
    unread = [Fact("stored", f"reading weights needs {missing}: pip install 'meshwright[run]'")] if missing else []
    return Answer(facts, [*_text(m, facts), *unread], raw=[[facts], *row_tables])


def _text(m: Model, facts: Facts) -> Iterator[Piece]:
    yield f"{m.name} ({m.family}): {', '.join(f'{letter} {size:,}' for letter, size in facts['dims'].items())}"
    rows: list[list[Any]] = [
        [w.name, f"[{','.join(w.dims)}]", " x ".join(map(str, w.shape)), w.repeat,
         f"= {w.tied_to}" if w.tied_to else format_params(w.num_params)]
        for w in weight_table(m)
    ]  # fmt: skip
    yield Table(["weight", "dims", "shape", "layers", "params"], rows, first=MAX_WEIGHTS)
    yield from _totals_text(m, facts)
    if "flops" in facts:
        yield from _at_length_text(facts)
    yield Detail("attention's share", [*_attention_text(m, facts)])
    yield Detail("designs of the KV cache", [*_cache_text(m, facts["kv_cache"])])
    yield Detail("ZeRO", [*_zero_text(facts)])
    yield Detail("remat", [*_saved_text(m, facts["saved_bytes_per_token"]), Symbols(RESULTS)])
    yield Symbols({letter: LETTERS[letter] for letter in facts["dims"] if letter in LETTERS})


def model_facts(m: Model) -> Facts:
    """Returns the counts of a model."""
    published_facts = entry(m.name).published if m.name in models() and load_model(m.name) == m else None
    param_count = num_params(m)
    return {
        "name": m.name,
        "family": m.family,
        "runs_here": m.runs_here,
        "dims": {dim: size for dim, size in m.dims.items() if dim[-1] != "g" or (m.lora and m.lora.base)},
        "params": param_count,
        "active_params": num_active_params(m),
        "mtp_params": mtp_params(m),
        "params_by_part": params_by_part(m),
        "vocabulary_params": sum(params_by_part(m).get(part, 0) for part in VOCABULARY),
        "published_params": published_facts.params if published_facts else None,
        "train_flops_per_token": token_flops(m),
        "kv_cache_bytes_per_token": accounting.kv_cache_bytes(m, 1),
        "kv_cache": cache_designs(m),
        "attention_equal_len": accounting.attention_equal_len(m),
        "projection_equal_len": accounting.projection_equal_len(m),
        "attention_intensity": _attention_intensity(m),
        "state_bytes": {state: accounting.state_bytes(param_count, state=state) for state in STATE_BYTES},
        "zero_bytes": {
            "state": DEFAULT_STATE,
            "num_devices": list(ZERO_DEVICES),
            "stages": {
                str(stage): [
                    accounting.zero_bytes(param_count, state=DEFAULT_STATE, stage=stage, num_shards=n)  # type: ignore[arg-type]
                    for n in ZERO_DEVICES
                ]
                for stage in accounting.ZERO_SHARDS
            },
        },
        "saved_bytes_per_token": _saved(m),
        "weights": [
            {"name": w.name, "dims": list(w.dims), "shape": list(w.shape), "repeat": w.repeat, "tied_to": w.tied_to}
            for w in weight_table(m)
        ],
    }


def _folder_facts(m: Model, folder: Path) -> Facts:
    """Returns the bytes of a folder's tensors by dtype, those of the weights as served, and why refused, or ""."""
    bytes_by_dtype = stored_bytes(folder) if (is_from_gguf := is_gguf(folder)) else {}
    from meshwright.nn.hf.gguf import as_folder, open_files
    from meshwright.nn.hf.published import why_refused

    with open_files(as_folder(folder)) as tensors:
        for tensor in () if is_from_gguf else tensors.values():
            tensor_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
            bytes_by_dtype[tensor.dtype.name] = bytes_by_dtype.get(tensor.dtype.name, 0) + tensor_bytes
        weights = folder_weights(m, folder, tensors)
        refusal_text = why_refused(m, tensors, weights.quantisation)
    num_bytes = weight_bytes(replace(m, stored=weights.stored), "", width=int(DTYPE_BYTES[weights.dtype]))
    method = "GGUF" if is_from_gguf and bytes_by_dtype.keys() - {"F32", "F16", "BF16"} else None
    method = weights.quantisation.method if weights.quantisation else method
    return {"stored_bytes": bytes_by_dtype, "method": method, "served_dtype": weights.dtype, "served_bytes": num_bytes,
            "notes": list(weights.notes), "refused": refusal_text}  # fmt: skip


def _flops(m: Model, seq_len: int) -> Facts:
    """Returns FLOPs of one sequence of training by part, with and without the causal discount of scores."""
    full_flops, causal_flops = (accounting.forward_flops(m, seq_len, causal=is_causal) for is_causal in (False, True))
    shares = [{part: flops / sum(each.values()) for part, flops in each.items()} for each in (full_flops, causal_flops)]
    rows = [
        {"part": part, "forward_flops": flops, "backward_flops": 2 * flops, "total_flops": 3 * flops,
         "share": shares[0][part], "total_causal_flops": 3 * causal_flops[part], "share_causal": shares[1][part]}
        for part, flops in full_flops.items()
    ]  # fmt: skip
    return {"seq_len": seq_len, "parts": rows, "total_flops": 3 * sum(full_flops.values()),
            "causal_flops": 3 * sum(causal_flops.values())}  # fmt: skip


def _attention_intensity(m: Model) -> dict[str, float] | None:
    """Returns FLOPs per byte of a layer's attention in bf16; None with latent attention, whose keys are not stored."""
    if m.latent_attention:
        return None
    num_keys = min(PREFILL_POSITIONS, m.max_positions)
    work_sizes = {"heads": m.num_heads, "kv_heads": m.num_kv_heads, "head_dim": m.head_dim, "keys": num_keys}
    return {
        "positions": num_keys,
        "prefill": accounting.attention_work(queries=num_keys, **work_sizes).intensity,
        "generation": accounting.attention_work(queries=1, **work_sizes).intensity,
    }


def cache_designs(m: Model) -> list[Facts]:
    """Returns bytes that each design of the cache keeps of one token, and of a sequence; ``own`` marks the model's.

    Full heads (MHA), own groups or latent, one head (MQA), layers that share; no windows if the model has some; first
    the model's own if its layers differ in their heads, or share. A head keeps a key and a value, H + Hv. Sources: How
    to Scale Your Model, sections 4.5 and 7.2.
    """
    is_latent, num_heads, kv_heads = m.latent_attention, m.num_heads, m.num_kv_heads
    head_elements = m.head_dim + (m.v_head_dim if is_latent else m.head_dim)
    elements_of = {f"MHA, {num_heads} heads": num_heads * head_elements}
    if is_latent:
        elements_of[f"MLA, rank {m.kv_lora_rank}"] = m.kv_lora_rank + m.qk_rope_head_dim
    elif 1 < kv_heads < num_heads:
        elements_of[f"GQA, {kv_heads} heads"] = kv_heads * head_elements
    full_name, *narrower_names = elements_of
    elements_of["MQA, 1 head"] = head_elements
    model_design = narrower_names[0] if narrower_names else full_name if kv_heads == num_heads else "MQA, 1 head"
    windows: Facts = {"window": m.sliding_window, "num_local": len(m.sliding_layers)} if m.sliding_layers else {}
    designs = [(name, width, windows, 1) for name, width in elements_of.items()]
    designs.append((f"{model_design}, {SHARED_LAYERS} layers share", elements_of[model_design], windows, SHARED_LAYERS))
    if windows:
        designs.append((f"{model_design}, no windows", elements_of[model_design], {}, 1))
    elements = [
        tuple(
            accounting.cached_elements(
                positions, per_position=width, num_layers=m.num_layers, layers_per_cache=layers_per_cache, **window_args
            )
            for positions in (1, CACHE_POSITIONS)
        )
        for _, width, window_args, layers_per_cache in designs
    ]
    if m.num_shared_kv_layers or m.full_heads != (kv_heads, m.head_dim):
        model_design = f"own heads, {len(m.kv_layers)} of {m.num_layers} layers"
        own = tuple(accounting.kv_cache_bytes(m, n, element_bytes=1) for n in (1, CACHE_POSITIONS))
        designs, elements = [(model_design, own[0] / m.num_layers, {}, 1), *designs], [own, *elements]
    return [
        {
            "design": name,
            "own": name == model_design,
            "elements_per_layer": width,
            "layers_per_cache": layers_per_cache,
            "bytes_per_token": {dtype: token_elements * DTYPE_BYTES[dtype] for dtype in CACHE_DTYPES},
            "sequence": {"positions": CACHE_POSITIONS, "bytes": sequence_elements * DTYPE_BYTES[CACHE_DTYPES[0]]},
        }
        for (name, width, _, layers_per_cache), (token_elements, sequence_elements) in zip(
            designs, elements, strict=True
        )
    ]


def _saved(m: Model) -> Facts:
    """Returns by remat policy the elements that a layer keeps of a token, on average, and bytes of all layers."""
    widths_by_remat = {remat: accounting.saved_widths(m, remat) for remat in REMATS}
    return {
        remat: {
            "results": list(width_by_result),
            "elements_per_layer": sum(width_by_result.values()),
            "bytes": accounting.saved_bytes(1, num_layers=m.num_layers, width=sum(width_by_result.values())),
        }
        for remat, width_by_result in widths_by_remat.items()
    }


# -- text -----------------------------------------------------------------------------------------------


def _totals_text(m: Model, facts: Facts) -> Iterator[Piece]:
    published_text, active_params = facts["published_params"], facts["active_params"]
    if published_text and published_text.isdigit():
        published_text = f"{int(published_text):,}"
    suffix = f", published as {published_text}" if published_text else ""
    yield Fact("parameters", f"{facts['params']:,} ({format_params(facts['params'])}{suffix})")
    share_of = {part: count / facts["params"] for part, count in facts["params_by_part"].items()}
    share_texts = [f"{part.replace('_', ' ')} {share:.1%}" for part, share in share_of.items() if share >= MIN_SHARE]
    yield Fact("", f"{', '.join(share_texts)}; vocabulary {facts['vocabulary_params'] / facts['params']:.1%}")
    if active_params != facts["params"]:
        yield Fact("active per token", f"{active_params:,} ({format_params(active_params)})")
    if extra := facts["mtp_params"]:
        yield Fact("besides", f"{extra:,} ({format_params(extra)}) that predict the token after the next (mtp_weight)")
    token = "a token" if m.encoder is None else "a token of source and one of target"
    flops_text = format_flop_count(facts["train_flops_per_token"])
    yield Fact("training", f"{flops_text} {token}: 6 a parameter, without the look-up and attention's scores")
    both = ", and as much a token of source" * bool(m.encoder)
    yield Fact("KV cache", f"{format_bytes(facts['kv_cache_bytes_per_token'])} a token in bf16{both}")
    if folder := facts.get("folder"):
        dtypes_text = ", ".join(
            f"{dtype} {format_bytes(size)}" for dtype, size in sorted(folder["stored_bytes"].items())
        )
        total_bytes, method = sum(folder["stored_bytes"].values()), folder["method"]
        yield Fact(
            "stored", f"{format_bytes(total_bytes)}: {dtypes_text}" + (f"; quantised by {method}" if method else "")
        )
        yield Fact(
            "serving",
            f"{format_bytes(folder['served_bytes'])} of weights, in {folder['served_dtype']} where not kept narrow",
        )
        if folder["refused"]:
            yield Fact("refused", f"by generate, serve and train: {folder['refused']}")
        for note in folder["notes"]:
            yield Fact("", note)
        if method:
            yield Fact("training", "widens the weights to the dtypes of its state; the base of an adapter too")
    state_text = format_bytes(facts["state_bytes"][DEFAULT_STATE])
    yield Fact("training state", f"{state_text} in {DEFAULT_STATE}, without its short-lived gradients")
    if not (folder and folder["refused"]):
        yield Fact("here", f"counted and planned, not run: {m.missing_to_run}" if m.missing_to_run else "trains")


def _attention_text(m: Model, facts: Facts) -> Iterator[PlainPiece]:
    yield Fact(
        "attention",
        f"its scores take as many FLOPs as the layers' matmuls at {_positions(facts['attention_equal_len'])}, as its "
        f"projections at {_positions(facts['projection_equal_len'])}"
        + (f" ({_windows(m)})" if m.sliding_layers and m.sliding_window else ""),
    )
    if intensity := facts["attention_intensity"]:
        yield Fact(
            "",
            f"{four_digits(intensity['prefill'])} FLOPs/byte in bf16 in prefill and {intensity['generation']:.4g} in "
            f"generation, at {intensity['positions']:,} positions{' without a window' * bool(m.sliding_layers)}: "
            f"T S G / (T G + S)",
        )


def _positions(num_positions: float) -> str:
    return f"{num_positions:,.0f} positions" if math.isfinite(num_positions) else "no length"


def _windows(m: Model) -> str:
    near = "chunks of " * m.chunked_windows
    return f"{len(m.sliding_layers)} of {m.num_layers} layers see {near}{m.sliding_window:,} positions"


def _at_length_text(facts: Facts) -> Iterator[Piece]:
    flops = facts["flops"]
    columns: TableColumns = {
        "part": "part",
        **{name: (f"{name}_flops", format_flop_count) for name in ("forward", "backward", "total")},
        "share": ("share", "{:.1%}".format),
        "causal": ("total_causal_flops", format_flop_count),
        "share, causal": ("share_causal", "{:.1%}".format),
    }
    total, causal_text = (format_flop_count(flops[key]) for key in ("total_flops", "causal_flops"))
    yield Table.of(
        flops["parts"],
        columns,
        f"A sequence of {flops['seq_len']:,} tokens: {total}, {causal_text} with causal scores; N without the look-up",
    )
    yield Table.of(
        facts["layer_traffic"],
        {
            "strategy": "strategy",
            "forward": "forward",
            "bytes": "forward_bytes",
            "backward": "backward",
            "of both": (lambda row: format_bytes(row["forward_bytes"] + row["backward_bytes"])),
        },
        f"What a layer sends for B = {flops['seq_len']:,} tokens in bf16, whole arrays; P: weights of a layer",
    )


def _cache_text(m: Model, rows: list[Facts]) -> Iterator[PlainPiece]:
    windows_text = f"; {_windows(m)}" if m.sliding_layers and m.sliding_window else ""
    columns: TableColumns = {
        "heads": lambda row: f"{row['design']}{' *' if row['own'] else ''}",
        "elements": "elements_per_layer",
        **{dtype: f"bytes_per_token/{dtype}" for dtype in CACHE_DTYPES},
        f"{CACHE_POSITIONS:,} tokens": ("sequence/bytes", format_bytes),
    }
    yield Table.of(
        rows,
        columns,
        f"KV cache of a token: elements of a layer, bytes of all {m.num_layers}, and a sequence in bf16{windows_text} "
        f"(* as it is)",
    )


def _zero_text(facts: Facts) -> Iterator[PlainPiece]:
    states_text = ", ".join(f"{state} {format_bytes(num_bytes)}" for state, num_bytes in facts["state_bytes"].items())
    yield Fact("training state", f"{states_text} (bf16-adam without its short-lived gradients)")
    zero = facts["zero_bytes"]
    bytes_of_part = STATE_BYTES[zero["state"]]
    parts_text = ", ".join(f"{part} {bytes_of_part[part]:g}" for part in ("weights", "gradients", "optimizer"))
    rows = [
        [f"ZeRO-{stage}{' (FSDP)' if stage == '3' else ''}",
         ", ".join(accounting.ZERO_SHARDS[int(stage)]) or "nothing", *map(format_bytes, sizes)]
        for stage, sizes in zero["stages"].items()
    ]  # fmt: skip
    yield Table(
        ["", "split over the devices", *(f"{n:,} devices" for n in zero["num_devices"])],
        rows,
        f"Training state of a device, {zero['state']} (bytes a parameter: {parts_text}); a plan of one microbatch "
        f"scatters gradients as they are made: there ZeRO-1 holds as few as ZeRO-2",
    )


def _saved_text(m: Model, saved: Facts) -> Iterator[PlainPiece]:
    columns = {"remat": "remat", "elements": "elements_per_layer", "bytes": "bytes"}
    yield Table.of(
        ({"remat": remat, **row} for remat, row in saved.items()),
        {**columns, "results that are kept": ("results", " ".join)},
        f"Activations kept of a token{' and one of its source' * bool(m.encoder)}: elements of a layer, bytes in bf16 "
        f"of all {m.num_layers}",
    )
