"""The memory views of `meshwright compare`: training states, ZeRO stages, chips that hold a run, activations."""

from collections.abc import Sequence
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
from meshwright.report.answer import Answer, Heading, Paragraph, Table
from meshwright.spec.chip import Chip
from meshwright.spec.chip import chips as catalogue_chips
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES
from meshwright.spec.weights import num_params

PARTS: tuple[StatePart, ...] = ("weights", "gradients", "optimizer")
MEMORY_COLUMNS: dict[str, Any] = {"chip": "chip", "memory": ("memory_bytes", format_bytes)}
BYTES_COLUMNS: dict[str, Any] = {
    header: (field, "{:g}".format, f"bytes_per_param.{field.rpartition('/')[2]}")
    for header, field in {
        "w": "weights",
        "g": "gradients",
        "opt": "optimizer",
        "B/param": "bytes_per_param/none",
        "+bf16 avg": "bytes_per_param/bf16",
        "+fp32 avg": "bytes_per_param/fp32",
    }.items()
}
STAGES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
LAYERS = (
    Heading("a layer", format_bytes, "num_bytes"),
    Heading("all layers", format_bytes, "num_bytes.all_layers"),
    Heading("derived, a layer", format_bytes, "derived_bytes_per_layer"),
)
DERIVED = {"none": "none", "selective": "selective", "full": "block"}
"""Recomputation of the closed form -> the remat policy that keeps the same."""


def _chips(named: Sequence[Chip]) -> Sequence[Chip]:
    known = catalogue_chips().values()
    return named or [c for c in known if c.variant == "datasheet" and c.hbm_bytes is not None]


def bytes_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns bytes per parameter of every training state, by part and with averages of weights, and model bytes."""
    sizes = {
        state: {name: state_bytes_per_param(state, average=name) for name in AVERAGE_BYTES} for state in STATE_BYTES
    }
    states = [
        {
            "state": state,
            **{part: bytes_per_param(state, part=part) for part in PARTS},
            "bytes_per_param": averaged,
            "model_bytes": {m.name: num_params(m) * averaged["none"] for m in models},
        }
        for state, averaged in sizes.items()
    ]
    largest = [
        {
            "chip": unit.name,
            "memory_bytes": known_memory(unit),
            "max_params": {state: max_params(known_memory(unit), state=state) for state in STATE_BYTES},
        }
        for unit in _chips(given.on)
    ]
    # States of equal bytes share a column.
    by_bytes = {bytes_per_param(state): state for state in reversed(STATE_BYTES)}
    tables = [
        Table.of(
            states,
            {"state": "state", **BYTES_COLUMNS, **{m.name: (f"model_bytes/{m.name}", format_bytes) for m in models}},
            "Bytes a parameter of each training state: weights, gradients, optimizer, and the number it is known by",
        ),
        Table.of(
            largest,
            {
                **MEMORY_COLUMNS,
                **{f"{each:g} B": (f"max_params/{by_bytes[each]}", format_params) for each in sorted(by_bytes)},
            },
            "Largest model whose state alone fills a chip: memory / bytes a parameter",
        ),
    ]
    return Answer({"states": states, "largest_models": largest}, tables)


def known_memory(unit: Chip) -> float:
    """Returns the memory of a chip in bytes. Raises InputError if it is unknown."""
    if unit.memory_bytes is None:
        raise InputError(f"the memory of {unit.name} is not known. Name a chip of meshwright show chips.")
    return unit.memory_bytes


def zero_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns bytes of one device under plain data parallelism and the ZeRO stages, for one state or for all."""
    if given.state is not None:
        bytes_per_param(given.state)
    averages = AVERAGE_BYTES[given.average]
    facts: list[dict[str, Any]] = []
    tables = []
    for m in models:
        found = {
            state: [
                zero_bytes(num_params(m), state=state, stage=stage, num_shards=given.shards)  # type: ignore[arg-type]
                + num_params(m) * averages / (given.shards if stage else 1)
                for stage in ZERO_SHARDS
            ]
            for state in ([given.state] if given.state else STATE_BYTES)
        }
        facts.append({"name": m.name, "params": num_params(m), "bytes_per_device": found})
        columns = [Heading(name, format_bytes, f"bytes_per_device.{name}") for name in STAGES]
        title = f"{m.name}: training state of one of {given.shards:,} data-parallel devices"
        tables.append(Table(["state", *columns], [[state, *sizes] for state, sizes in found.items()], title))
    note = "ZeRO-1 splits the optimizer, ZeRO-2 gradients too, ZeRO-3 (FSDP) weights too; gradients counted"
    note += f"; a running average in {given.average} is split as the optimizer is" if averages else ""
    return _noted({"shards": given.shards, "models": facts}, tables, note)


def _noted(facts: dict[str, Any], tables: Sequence[Table], note: str) -> Answer:
    return Answer({**facts, "note": note}, [*tables, Paragraph(note, 0)])


def hold_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns fewest chips of each kind for the state of each model, and for a step's kept activations.

    ``given.num_chips`` adds the bytes that one of that many chips holds, all shared evenly, and their share of it.
    """
    state, average, batch_tokens = given.used_state, given.average, given.batch_tokens or 0
    each = state_bytes_per_param(state, average=average)
    needed = {
        m.name: training_bytes(
            m, state=state, average=average, batch_tokens=batch_tokens, results_per_layer=given.results_per_layer
        )
        for m in models
    }
    chips = []
    for unit in _chips(given.on):
        found = {name: fewest_chips(unit, size, state=state, average=average) for name, size in needed.items()}
        one = msgspec.structs.asdict(next(iter(found.values())))
        chips.append({**one, "min_chips": {name: held.min_chips for name, held in found.items()}})
    facts = {
        "state": state,
        "bytes_per_param": each,
        "batch_tokens": batch_tokens,
        "training_bytes": needed,
        "chips": chips,
    }
    columns = {**MEMORY_COLUMNS, **{name: f"min_chips/{name}" for name in needed}}
    tables = [Table.of(chips, columns, "Fewest chips by memory alone, all of it shared evenly")]
    if given.num_chips is not None:
        shares = {name: size / given.num_chips for name, size in needed.items()}
        facts |= {"num_chips": given.num_chips, "bytes_per_chip": shares}
        tables.append(_shares_of(given.num_chips, shares, chips))
    words = f" and {given.results_per_layer:g} results of width D a layer of {format_count(batch_tokens)} tokens"
    note = f"{each:g} bytes a parameter ({state}){words if batch_tokens else ''}: {_sizes_words(needed)}"
    return _noted(facts, tables, note)


def _sizes_words(sizes: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())


def _shares_of(num_chips: int, each: dict[str, float], chips: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the share of its memory that one of ``num_chips`` fills, by kind of chip."""
    rows = []
    for one in chips:
        room = one["memory_bytes"]
        rows.append({**one, "shares": room and {name: size / room for name, size in each.items()}})
    columns = {**MEMORY_COLUMNS, **{name: (f"shares/{name}", "{:.1%}".format) for name in each}}
    return Table.of(rows, columns, f"One of {num_chips:,} chips holds {_sizes_words(each)}; of its memory:")


def activations_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns bytes that a layer and all layers keep: s b h (34 + 5 a s / h) and its forms, and the derived count."""
    seq_len, seqs, tensor = given.seq_len, given.micro, given.tensor
    facts = []
    tables = []
    for m in models:
        if m.num_heads % tensor:
            raise InputError(f"--tensor {tensor} does not divide the {m.num_heads} heads of {m.name}. Use a divisor.")
        closed = [
            layer_activations(
                m,
                seq_len=seq_len,
                microbatch_seqs=seqs,
                tensor=tensor,
                sequence_parallel=split,
                recompute=how,
            )
            for how in RECOMPUTES
            for split in ((False, True) if tensor > 1 else (False,))
        ]
        derived = [_derived(m, one, seq_len * seqs) for one in closed]
        facts.append({"name": m.name, "closed_form": closed, "derived_bytes_per_layer": derived})
        tables.append(
            Table(
                ["recompute", "tensor", Heading("s b h x", "{:.4g}".format, "per_sbh"), *LAYERS],
                [_activation_row(m, one, size) for one, size in zip(closed, derived, strict=True)],
                f"{m.name}: activations that a device keeps of {seqs} sequence{'s' if seqs > 1 else ''} of {seq_len:,}",
            )
        )  # fmt: skip
    note = (
        "closed form: a GPT layer with full heads, F = 4 D, dropout, scores in memory (Korthikanti et al. 2022); "
        "derived here: this model's own program with that tensor parallelism, attention's scores on chip"
    )
    return _noted({"seq_len": seq_len, "recompute": list(RECOMPUTES), "models": facts}, tables, note)


def _activation_row(m: Model, one: LayerActivations, derived: float) -> list[Any]:
    how = f"{one.tensor} + sequence" if one.sequence_parallel else f"{one.tensor}"
    return [one.recompute, how, one.per_sbh, one.num_bytes, one.num_bytes * m.num_layers, derived]


def _derived(m: Model, like: LayerActivations, num_tokens: int) -> float:
    """Returns bytes that the derived steps of a layer keep on a device, split as ``like``; a mean if layers differ."""
    split = like.tensor == 1 or like.sequence_parallel
    widths = saved_widths(m, DERIVED[like.recompute], tensor=like.tensor, sequence_parallel=split)
    return float(saved_bytes(num_tokens, num_layers=1, width=sum(widths.values())))
