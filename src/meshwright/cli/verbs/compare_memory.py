"""The memory views of `meshwright compare`: training states, ZeRO stages, chips that hold a run, activations."""

from collections.abc import Sequence
from typing import Any

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.core.units import counted, format_bytes, format_count, format_params
from meshwright.cost.formulas.accounting import (
    ZERO_SHARDS,
    StatePart,
    bytes_per_param,
    max_params,
    saved_bytes,
    saved_widths,
    zero_bytes,
)
from meshwright.cost.formulas.training_budget import min_chips
from meshwright.report.answer import Answer, Facts, Heading, Paragraph, Table, TableColumns
from meshwright.spec.chip import Chip
from meshwright.spec.chip import chips as catalogue_chips
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES, Strategy
from meshwright.spec.weights import num_params

PARTS: tuple[StatePart, ...] = ("weights", "gradients", "optimizer")
MEMORY_COLUMNS: Facts = {"chip": "chip", "memory": "memory_bytes"}
BYTES_COLUMNS: Facts = {
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
DEFAULT_STATE = Strategy(mesh={}).state
RECOMPUTES = {"none": "none", "selective": "selective", "full": "block"}
"""Recomputation of the closed form -> the remat policy that keeps the same."""
AVERAGE_BYTES = {"none": 0, "bf16": 2, "fp32": 4}
"""Bytes per parameter of a running average of the weights."""
RESULTS_PER_LAYER = 4
"""Results of the model's width that a layer keeps. How to Scale Your Model: section 6.3 four, exercise 5.2 three."""


def _chips(named_chips: Sequence[Chip]) -> Sequence[Chip]:
    all_chips = catalogue_chips().values()
    return named_chips or [c for c in all_chips if c.variant == "datasheet" and c.hbm_bytes is not None]


def bytes_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns bytes per parameter of every training state, by part and with averages of weights, and model bytes."""
    bytes_by_state = {
        state: {name: state_bytes_per_param(state, average=name) for name in AVERAGE_BYTES} for state in STATE_BYTES
    }
    state_rows = [
        {
            "state": state,
            **{part: bytes_per_param(state, part=part) for part in PARTS},
            "bytes_per_param": bytes_by_average,
            "model_bytes": {m.name: num_params(m) * bytes_by_average["none"] for m in models},
        }
        for state, bytes_by_average in bytes_by_state.items()
    ]
    largest_models = [
        {
            "chip": chip.name,
            "memory_bytes": known_memory(chip),
            "max_params": {state: max_params(known_memory(chip), state=state) for state in STATE_BYTES},
        }
        for chip in _chips(given.on)
    ]
    # States of equal bytes share a column.
    state_of = {bytes_per_param(state): state for state in reversed(STATE_BYTES)}
    tables = [
        Table.of(
            state_rows,
            {"state": "state", **BYTES_COLUMNS, **{m.name: (f"model_bytes/{m.name}", format_bytes) for m in models}},
            "Bytes a parameter of each training state: weights, gradients, optimizer, and the number it is known by",
        ),
        Table.of(
            largest_models,
            {
                **MEMORY_COLUMNS,
                **{f"{size:g} B": (f"max_params/{state_of[size]}", format_params) for size in sorted(state_of)},
            },
            "Largest model whose state alone fills a chip: memory / bytes a parameter",
        ),
    ]
    return Answer({"states": state_rows, "largest_models": largest_models}, tables)


def known_memory(unit: Chip) -> float:
    """Returns the memory of a chip in bytes. Raises InputError if it is unknown."""
    if unit.memory_bytes is None:
        raise InputError(f"the memory of {unit.name} is not known. Name a chip of meshwright show chips.")
    return unit.memory_bytes


def zero_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns bytes of one device under plain data parallelism and the ZeRO stages, for one state or for all."""
    if given.state is not None:
        bytes_per_param(given.state)
    average_bytes = AVERAGE_BYTES[given.average]
    model_facts: list[Facts] = []
    tables = []
    for m in models:
        bytes_by_state = {
            state: [
                zero_bytes(num_params(m), state=state, stage=stage, num_shards=given.shards)  # type: ignore[arg-type]
                + num_params(m) * average_bytes / (given.shards if stage else 1)
                for stage in ZERO_SHARDS
            ]
            for state in ([given.state] if given.state else STATE_BYTES)
        }
        model_facts.append({"name": m.name, "params": num_params(m), "bytes_per_device": bytes_by_state})
        headings = [Heading(name, format_bytes, f"bytes_per_device.{name}") for name in STAGES]
        title = f"{m.name}: training state of one of {given.shards:,} data-parallel devices"
        tables.append(Table(["state", *headings], [[state, *sizes] for state, sizes in bytes_by_state.items()], title))
    note = "ZeRO-1 splits the optimizer, ZeRO-2 gradients too, ZeRO-3 (FSDP) weights too; gradients counted"
    note += f"; a running average in {given.average} is split as the optimizer is" if average_bytes else ""
    return _noted({"shards": given.shards, "models": model_facts}, tables, note)


def _noted(facts: Facts, tables: Sequence[Table], note: str) -> Answer:
    return Answer({**facts, "note": note}, [*tables, Paragraph(note, 0)])


def hold_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns fewest chips of each kind for the state of each model, and for a step's kept activations.

    ``given.num_chips`` adds the bytes that one of that many chips holds, all shared evenly, and their share of it.
    """
    state, average, batch_tokens = given.state or DEFAULT_STATE, given.average, given.batch_tokens or 0
    param_bytes = state_bytes_per_param(state, average=average)
    bytes_by_model = {
        m.name: training_bytes(
            m, state=state, average=average, batch_tokens=batch_tokens, results_per_layer=given.results_per_layer
        )
        for m in models
    }
    chip_rows = [
        {
            "chip": chip.name,
            "memory_bytes": chip_bytes,
            "min_chips": {name: chip_bytes and min_chips(size, chip_bytes) for name, size in bytes_by_model.items()},
            "max_params_one_chip": chip_bytes and chip_bytes / param_bytes,
        }
        for chip, chip_bytes in ((chip, chip.memory_bytes) for chip in _chips(given.on))
    ]
    facts = {
        "state": state,
        "bytes_per_param": param_bytes,
        "batch_tokens": batch_tokens,
        "training_bytes": bytes_by_model,
        "chips": chip_rows,
    }
    columns = {**MEMORY_COLUMNS, **{name: f"min_chips/{name}" for name in bytes_by_model}}
    tables = [Table.of(chip_rows, columns, "Fewest chips by memory alone, all of it shared evenly")]
    if given.num_chips is not None:
        shares = {name: size / given.num_chips for name, size in bytes_by_model.items()}
        facts |= {"num_chips": given.num_chips, "bytes_per_chip": shares}
        rows = [
            {**row, "shares": (total := row["memory_bytes"]) and {name: size / total for name, size in shares.items()}}
            for row in chip_rows
        ]
        columns = {**MEMORY_COLUMNS, **{name: (f"shares/{name}", "{:.1%}".format) for name in shares}}
        title = f"One of {counted(given.num_chips, 'chip')} holds {_sizes_words(shares)}; of its memory:"
        tables.append(Table.of(rows, columns, title))
    text = f" and {given.results_per_layer:g} results of width D a layer of {format_count(batch_tokens)} tokens"
    note = f"{param_bytes:g} bytes a parameter ({state}){text if batch_tokens else ''}: {_sizes_words(bytes_by_model)}"
    return _noted(facts, tables, note)


def _sizes_words(bytes_by_name: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in bytes_by_name.items())


def training_bytes(
    model: Model,
    *,
    state: str,
    average: str = "none",
    batch_tokens: int = 0,
    results_per_layer: float = RESULTS_PER_LAYER,
) -> float:
    """Returns bytes of the training state and of a step's kept results: some of the model's width a layer, in bf16.

    Source: How to Scale Your Model, sections 5.1.1 and 6.3: 2 x 8192 x 80 x 4e6 x 4 for LLaMA-3 70B.
    """
    kept_bytes = saved_bytes(batch_tokens, num_layers=model.num_layers, width=results_per_layer * model.d_model)
    return float(num_params(model) * state_bytes_per_param(state, average=average) + kept_bytes)


def state_bytes_per_param(state: str, *, average: str = "none") -> float:
    """Returns the bytes per parameter of a training state, with a running average of the weights if one is kept."""
    return bytes_per_param(state) + AVERAGE_BYTES[average]


def activations_view(models: Sequence[Model], given: Any) -> Answer:
    """Returns bytes that a layer and all layers keep: s b h (34 + 5 a s / h) and its forms, and the derived count.

    The closed form counts one layer of a GPT: full heads, F = 4 D without a gate, dropout with one-byte masks, 16-bit
    results, scores in memory; gates, kv heads and the feed-forward width do not enter. The count is that of a plan.
    Source: Korthikanti et al., Reducing Activation Recomputation (2022), equations 1-4, table 2.
    """
    seq_len, num_seqs, tensor = given.seq_len, given.micro, given.tensor
    model_facts = []
    tables = []
    for m in models:
        if m.num_heads % tensor:
            raise InputError(f"--tensor {tensor} does not divide the {m.num_heads} heads of {m.name}. Use a divisor.")
        closed_rows, derived_bytes = [], []
        score_term = attention_term(m.num_heads, seq_len, m.d_model)
        for recompute, remat in RECOMPUTES.items():
            for is_split in (False, True)[: 1 + (tensor > 1)]:
                bytes_per_sbh = layer_units(score_term, tensor=tensor, sequence_parallel=is_split, recompute=recompute)
                closed_rows.append(
                    {
                        "recompute": recompute,
                        "tensor": tensor,
                        "sequence_parallel": is_split,
                        "num_bytes": bytes_per_sbh * seq_len * num_seqs * m.d_model,
                        "per_sbh": bytes_per_sbh,
                    }
                )
                # a mean over layers, if they differ
                width_of = saved_widths(m, remat, tensor=tensor, sequence_parallel=tensor == 1 or is_split)
                derived_bytes.append(float(saved_bytes(seq_len * num_seqs, num_layers=1, width=sum(width_of.values()))))
        model_facts.append({"name": m.name, "closed_form": closed_rows, "derived_bytes_per_layer": derived_bytes})
        columns: TableColumns = {
            "recompute": "recompute",
            "tensor": lambda row: f"{row['tensor']} + sequence" if row["sequence_parallel"] else f"{row['tensor']}",
            "s b h x": ("per_sbh", "{:.4g}".format),
            "a layer": "num_bytes",
            "all layers": ("all_layers", format_bytes, "num_bytes.all_layers"),
            "derived, a layer": "derived_bytes_per_layer",
        }
        rows = [
            {**row, "all_layers": row["num_bytes"] * m.num_layers, "derived_bytes_per_layer": layer_bytes}
            for row, layer_bytes in zip(closed_rows, derived_bytes, strict=True)
        ]
        sequences_text = f"{counted(num_seqs, 'sequence')} of {seq_len:,}"
        tables.append(Table.of(rows, columns, f"{m.name}: activations that a device keeps of {sequences_text}"))
    note = (
        "closed form: a GPT layer with full heads, F = 4 D, dropout, scores in memory (Korthikanti et al. 2022); "
        "derived here: this model's own program with that tensor parallelism, attention's scores on chip"
    )
    return _noted({"seq_len": seq_len, "recompute": list(RECOMPUTES), "models": model_facts}, tables, note)


def attention_term(num_heads: Number, seq_len: Number, d_model: Number) -> Number:
    """Returns 5 a s / h: scores, their softmax and its dropout, in units of s b h. 80 for GPT-3 at 2048 positions."""
    return 5 * num_heads * seq_len / d_model


def layer_units(
    attention: Number, *, tensor: Number = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> Number:
    """Returns bytes of a layer in units of s b h.

    none: 10 + 24/t + 5as/(ht), or (34 + 5as/h)/t with sequence parallelism, which splits the norms, dropouts and
    inputs (the 10) as well; selective drops attention's own term; full keeps the layer's input, 2.
    """
    if recompute == "full":
        return 2 / tensor if sequence_parallel else 2
    kept_bytes = 10 / tensor if sequence_parallel else 10
    score_bytes = attention / tensor if recompute == "none" else 0
    return kept_bytes + 24 / tensor + score_bytes
