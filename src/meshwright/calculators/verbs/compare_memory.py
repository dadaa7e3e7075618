"""The memory views of `meshwright compare`: training states, ZeRO stages, chips that hold a run, activations."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from meshwright.calculators.training.activation_formula import RECOMPUTES, LayerActivations, layer_activations
from meshwright.calculators.training.comparison import (
    AVERAGE_BYTES,
    fewest_chips,
    state_bytes_per_param,
    training_bytes,
)
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_count, format_params
from meshwright.cost.formulas.accounting import (
    ZERO_SHARDS,
    StatePart,
    bytes_per_param,
    max_params,
    saved_bytes,
    saved_widths,
    zero_bytes,
)
from meshwright.spec.chip import Chip, chip
from meshwright.spec.chip import chips as catalogue_chips
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES
from meshwright.spec.weights import num_params

Row = list[Any]


class MemoryTable(msgspec.Struct, frozen=True, kw_only=True):
    """Raw figures, and how a person reads those of every column: None for as they are."""

    title: str
    columns: list[str]
    rows: list[Row]
    shows: list[Callable[[Any], str] | None]

    def shown(self) -> list[Row]:
        """The rows as text of the terminal."""
        return [
            [
                value if show is None or value is None else show(value)
                for value, show in zip(row, self.shows, strict=True)
            ]
            for row in self.rows
        ]


View = tuple[dict[str, Any], list[MemoryTable]]
"""The figures for JSON, and the tables that a person reads."""

PARTS: tuple[StatePart, ...] = ("weights", "gradients", "optimizer")

DERIVED = {"none": "none", "selective": "selective", "full": "block"}
"""Recomputation of the closed form -> the remat policy here that keeps the like."""


def _chips(names: Sequence[str]) -> list[Chip]:
    if names:
        return [chip(name) for name in names]
    return [c for c in catalogue_chips().values() if c.variant == "datasheet" and c.hbm_bytes is not None]


def bytes_view(models: Sequence[Model], *, chips: Sequence[str]) -> View:
    """Every training state: bytes per parameter by part, with an average of the weights, and of each model."""
    facts: dict[str, Any] = {"states": [], "largest_models": []}
    rows: list[Row] = []
    for state in STATE_BYTES:
        parts: dict[str, float] = {part: bytes_per_param(state, part=part) for part in PARTS}
        averaged = {name: state_bytes_per_param(state, average=name) for name in AVERAGE_BYTES}
        sizes = {m.name: num_params(m) * averaged["none"] for m in models}
        figures: dict[str, Any] = {"bytes_per_param": averaged, "models": sizes}
        facts["states"].append({"state": state, **parts, **figures})
        rows.append([state, *parts.values(), *averaged.values(), *sizes.values()])
    states = MemoryTable(
        title="Bytes a parameter of each training state: weights, gradients, optimizer, and the number it is known by",
        columns=["state", "w", "g", "opt", "B/param", "+bf16 avg", "+fp32 avg", *(m.name for m in models)],
        rows=rows,
        shows=[None, *[_plain] * (len(PARTS) + len(AVERAGE_BYTES)), *[format_bytes] * len(models)],
    )
    return facts, [states, _largest(_chips(chips), facts)]


def _largest(units: Sequence[Chip], facts: dict[str, Any]) -> MemoryTable:
    """Parameters whose state alone fills a chip; states of as many bytes share a column."""
    by_bytes = {bytes_per_param(state): state for state in reversed(STATE_BYTES)}
    rows: list[Row] = []
    for unit in units:
        room = known_memory(unit)
        counts = {state: max_params(room, state=state) for state in STATE_BYTES}
        facts["largest_models"].append({"chip": unit.name, "memory_bytes": room, "max_params": counts})
        rows.append([unit.name, room, *(counts[by_bytes[each]] for each in sorted(by_bytes))])
    return MemoryTable(
        title="Largest model whose state alone fills a chip: memory / bytes a parameter",
        columns=["chip", "memory", *(f"{each:g} B" for each in sorted(by_bytes))],
        rows=rows,
        shows=[None, format_bytes, *[format_params] * len(by_bytes)],
    )


def known_memory(unit: Chip) -> float:
    """Bytes of a chip; an InputError where they are not known."""
    if unit.memory_bytes is None:
        raise InputError(f"the memory of {unit.name} is not known. Name a chip of meshwright show chips.")
    return unit.memory_bytes


def _plain(value: float) -> str:
    return f"{value:g}"


def zero_view(models: Sequence[Model], *, shards: int, state: str | None) -> View:
    """Bytes of one device under plain data parallelism and the ZeRO stages, for one state or for all."""
    if state is not None:
        bytes_per_param(state)
    facts: dict[str, Any] = {"shards": shards, "models": []}
    tables: list[MemoryTable] = []
    for m in models:
        count, states = num_params(m), [state] if state else list(STATE_BYTES)
        found: dict[str, list[float]] = {
            s: [zero_bytes(count, state=s, stage=stage, num_shards=shards) for stage in ZERO_SHARDS]  # type: ignore[arg-type]
            for s in states
        }
        facts["models"].append({"name": m.name, "params": count, "bytes_per_device": found})
        tables.append(
            MemoryTable(
                title=f"{m.name}: training state of one of {shards:,} data-parallel devices",
                columns=["state", "DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"],
                rows=[[s, *sizes] for s, sizes in found.items()],
                shows=[None, *[format_bytes] * len(ZERO_SHARDS)],
            )
        )
    facts["note"] = "ZeRO-1 splits the optimizer, ZeRO-2 gradients too, ZeRO-3 (FSDP) weights too; gradients counted"
    return facts, tables


def hold_view(
    models: Sequence[Model],
    *,
    chips: Sequence[str],
    state: str,
    average: str,
    batch_tokens: int,
    results_per_layer: float,
    num_chips: int | None = None,
) -> View:
    """Fewest chips of each kind for the state of each model, and for a step's kept activations.

    With ``num_chips`` also the bytes that one of them holds, all shared evenly, and their part of its memory.
    """
    each = state_bytes_per_param(state, average=average)
    needed = {
        m.name: training_bytes(
            m, state=state, average=average, batch_tokens=batch_tokens, results_per_layer=results_per_layer
        )
        for m in models
    }
    facts: dict[str, Any] = {
        "state": state,
        "bytes_per_param": each,
        "batch_tokens": batch_tokens,
        "training_bytes": needed,
        "chips": [],
    }
    rows: list[Row] = []
    for unit in _chips(chips):
        held = {name: fewest_chips(unit, size, state=state, average=average) for name, size in needed.items()}
        one = next(iter(held.values()))
        counts = {name: found.min_chips for name, found in held.items()}
        facts["chips"].append({**msgspec.structs.asdict(one), "min_chips": counts})
        rows.append([unit.name, one.memory_bytes, *counts.values()])
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in needed.items())
    tokens = f" and {results_per_layer:g} results of width D a layer of {format_count(batch_tokens)} tokens"
    facts["note"] = f"{each:g} bytes a parameter ({state}){tokens if batch_tokens else ''}: {sizes}"
    table = MemoryTable(
        title="Fewest chips by memory alone, all of it shared evenly",
        columns=["chip", "memory", *needed],
        rows=rows,
        shows=[None, format_bytes, *[None] * len(needed)],
    )
    return facts, [table, *([] if num_chips is None else [_one_of(num_chips, needed, _chips(chips), facts)])]


def _one_of(num_chips: int, needed: dict[str, float], units: Sequence[Chip], facts: dict[str, Any]) -> MemoryTable:
    """Bytes of one of so many chips, and the share of each kind's memory that they fill; None where it is unknown."""
    each = {name: size / num_chips for name, size in needed.items()}
    facts["num_chips"], facts["bytes_per_chip"] = num_chips, each
    rows: list[Row] = []
    for unit in units:
        room = unit.memory_bytes
        rows.append([unit.name, room, *(None if room is None else size / room for size in each.values())])
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in each.items())
    return MemoryTable(
        title=f"One of {num_chips:,} chips holds {sizes}; of its memory:",
        columns=["chip", "memory", *each],
        rows=rows,
        shows=[None, format_bytes, *[_percent] * len(each)],
    )


def _percent(share: float) -> str:
    return f"{share:.1%}"


def activations_view(models: Sequence[Model], *, seq_len: int, microbatch_seqs: int, tensor: int) -> View:
    """Bytes that a layer and all layers keep: s b h (34 + 5 a s / h) and its forms, and the derived count."""
    for name, size in (("--micro", microbatch_seqs), ("--tensor", tensor)):
        if size < 1:
            raise InputError(f"{name} {size} must be at least 1.")
    facts: dict[str, Any] = {"seq_len": seq_len, "recompute": list(RECOMPUTES), "models": []}
    tables: list[MemoryTable] = []
    for m in models:
        if m.num_heads % tensor:
            raise InputError(f"--tensor {tensor} does not divide the {m.num_heads} heads of {m.name}. Use a divisor.")
        closed = [
            layer_activations(
                m,
                seq_len=seq_len,
                microbatch_seqs=microbatch_seqs,
                tensor=tensor,
                sequence_parallel=split,
                recompute=how,
            )
            for how in RECOMPUTES
            for split in ((False, True) if tensor > 1 else (False,))
        ]
        derived = {how: _derived(m, DERIVED[how], seq_len * microbatch_seqs) for how in RECOMPUTES}
        facts["models"].append({"name": m.name, "closed_form": closed, "derived_bytes_per_layer_one_device": derived})
        many = "sequence" if microbatch_seqs == 1 else "sequences"
        tables.append(
            MemoryTable(
                title=f"{m.name}: activations kept of {microbatch_seqs} {many} of {seq_len:,}",
                columns=["recompute", "tensor", "s b h x", "a layer", "all layers", "derived, a layer"],
                rows=[_activation_row(m, one, derived[one.recompute]) for one in closed],
                shows=[None, None, lambda v: f"{v:.4g}", *[format_bytes] * 3],
            )
        )
    facts["note"] = (
        "closed form: a GPT layer with full heads, F = 4 D, dropout, scores in memory (Korthikanti et al. 2022); "
        "derived here: this model's own program on one device, attention's scores on chip"
    )
    return facts, tables


def _activation_row(m: Model, one: LayerActivations, derived: float) -> Row:
    how = f"{one.tensor} + sequence" if one.sequence_parallel else f"{one.tensor}"
    return [one.recompute, how, one.per_sbh, one.num_bytes, one.num_bytes * m.num_layers, derived]


def _derived(m: Model, remat: str, num_tokens: int) -> float:
    """Bytes that the derived steps of one layer keep on one device, a mean where layers differ."""
    return float(saved_bytes(num_tokens, num_layers=1, width=sum(saved_widths(m, remat).values())))
